// Attention forward: for each block of BLOCK_ROWS queries, over the keys BLOCK_KEYS at a time,
//
//                     keys →
//              ┌──────────┬──────────┬──────────┐
//   queries    │ QKᵀ → S  │          │ (skipped │   S [BLOCK_ROWS × BLOCK_KEYS] stays in the L2 cache:
// BLOCK_ROWS → │ 2^(S−top)│          │ if fully │   1. logits: panels of keys against ROWS queries in registers
//              │ O += p V │   next   │ masked)  │   2. the rows' softmax and statistics, p over S
//              │          │          │          │   3. p times the panels of values, added to O
//              └──────────┴──────────┴──────────┘
//
// A mask costs time only at its boundaries: ROWS queries skip the keys that are masked for all of them, and -inf is only
// written in rows that are partially masked in a block.
//
// float32 in parts is computed by panels.h, between step 1 of a panel and step 3 of another.
//
// Column sums require no second QKᵀ: the strip stores p of all blocks for these rows, each block with the top that it
// was computed with. When the rows are finished their scales are known, and one weighted sum over the strip's rows adds
// them to the columns. Each chunk of query blocks has its own columns, and chunks are added up in order, so the bits
// do not depend on the number of threads.

template <typename T, bool SPREAD, bool REACH> struct Panels;

template <Operand OF, typename T, bool SPREAD, bool REACH> struct Forward {
  static constexpr bool DOT = OF == PAIRS;  // p and the scores' factor are rounded to bfloat16
  static constexpr int ROWS = GROUP<OF>;    // per product
  static constexpr int KEYS = KEYS_AT_ONCE<OF>;
  static constexpr int64_t BLOCK = KEYS_A_BLOCK<OF>;

  const headwise_forward_call& call;
  const Wanted wanted;
  const Shape shape;
  const Scaling scaling;
  Flag& refused;  // with PARTS: numbers do not fit (parts.h), or a result is not finite, as that of float32 may be

  void pack(int64_t group, int64_t panel, char* keys, char* values, Ints& check) const {
    const int64_t batch = group / call.h_kv, head = group % call.h_kv, from = panel * PANEL;
    const T* k = (const T*)call.k.data + batch * call.k.batch + head * call.k.head;
    pack_keys<OF>(k + from * call.k.row, call.k.row, call.m - from, call.d, (float*)keys + from * shape.words, check);
    if (!call.d_v) return;
    const T* v = (const T*)call.v.data + batch * call.v.batch + head * call.v.head;
    const int64_t to = least(from + PANEL, padded(call.m, KEYS));
    pack_values<OF>(v, call.v.row, call.m, call.d_v, from, to, shape.height, (float*)values, check);
  }

  // One block of queries of one head.
  void block(int64_t batch, int64_t head, int64_t index, const float* keys, const float* values, Scratch& t) const {
    const int64_t query = index * BLOCK_ROWS;
    const int count = (int)least(BLOCK_ROWS, call.n - query);
    const T* q = (const T*)call.q.data + batch * call.q.batch + head * call.q.head + query * call.q.row;
    load_queries<OF>(q, call.q.row, count, call.d, scaling, shape.words, t.queries, t.rows.broken, refused);
    if (refused.value) return;
    clear_rows<SPREAD, REACH>(t.rows, count, wanted.masses());
    t.best.clear(count);
    __builtin_memset(t.out, 0, (size_t)(count * shape.width) * 4);
    const Hull seen = hull(call, batch, query, count, 0, call.m);
    if constexpr (OF == PARTS) {
      Panels<T, SPREAD, REACH>{*this, batch, head, query, count, keys, values, t}.go(seen);
    } else {
      blocks_of_keys(batch, head, query, count, seen, keys, values, t);
    }
    float scale[BLOCK_ROWS];
    finish(batch, head, query, count, t, scale);
    if (shape.strip) columns(batch, query, count, seen, scale, t);
  }

 private:
  template <typename, bool, bool> friend struct Panels;

  void blocks_of_keys(int64_t batch, int64_t head, int64_t query, int count, const Hull& seen, const float* keys,
                      const float* values, Scratch& t) const {
    for (int64_t from = seen.first / BLOCK * BLOCK; from < seen.last; from += BLOCK) {
      Hull parts[(BLOCK_ROWS + ROWS - 1) / ROWS];
      bool empty = true;
      for (int g = 0; g * ROWS < count; g++) {
        const int rows = (int)least(ROWS, count - g * ROWS);
        parts[g] = hull(call, batch, query + g * ROWS, rows, from, least(from + BLOCK, call.m));
        empty &= parts[g].first == parts[g].last;
      }
      if (empty) {
        for (int r = 0; r < count && shape.strip; r++) t.tops[r * shape.key_blocks + from / BLOCK] = NOTHING;
        continue;
      }
      logits(from, count, parts, keys, t);
      // Columns are sums of p in float32; with DOT, the bfloat16 p for the product overwrite the logits.
      float* weights = shape.strip && !DOT ? t.strip + from : t.logits;
      const int64_t stride = shape.strip && !DOT ? shape.strip : STRIDE;
      for (int r = 0; r < count; r++) {
        float* kept = shape.strip && DOT ? t.strip + r * shape.strip + from : nullptr;
        row(batch, head, query, r, from, parts[r / ROWS], weights + r * stride, kept, t);
      }
      mix(from, count, parts, weights, stride, values, t);
    }
  }

  // 1. S = QKᵀ, and the maximum of each row per lane.
  void logits(int64_t from, int count, const Hull* parts, const float* keys, Scratch& t) const {
    for (int r = 0; r < count; r++) t.fold[r] = all(NOTHING);
    Hull whole = parts[0];
    for (int g = 1; g * ROWS < count; g++) {
      if (parts[g].first == parts[g].last) continue;
      whole.first = whole.first == whole.last ? parts[g].first : least(whole.first, parts[g].first);
      whole.last = most(whole.last, parts[g].last);
    }
    for (int64_t p = whole.first / PANEL * PANEL; p < whole.last; p += PANEL)
      for (int g = 0; g * ROWS < count; g++) {
        if (parts[g].last <= p || parts[g].first >= p + PANEL) continue;
        product<OF, false, true>((int)least(ROWS, count - g * ROWS), padded(parts[g].last - p, KEYS),
                                 t.queries + g * ROWS * shape.words, shape.words, keys + p * shape.words,
                                 t.logits + g * ROWS * STRIDE + (p - from), STRIDE, shape.words, t.fold + g * ROWS);
      }
  }

  // 2. The softmax of one row.
  void row(int64_t batch, int64_t head, int64_t query, int r, int64_t from, const Hull& part, float* weights, float* kept,
           Scratch& t) const {
    if (shape.strip) t.tops[r * shape.key_blocks + from / BLOCK] = NOTHING;
    if (part.first == part.last) return;
    const int64_t first = part.first - from, last = part.last - from;
    Stretch s = {t.logits + r * STRIDE, first / KEYS * KEYS, padded(last, KEYS), from, query + r + call.rule.shift};
    float factor = scaling.factor, top;
    const int64_t begin = from + first / PANEL * PANEL, end = from + padded(last, PANEL);
    if (scaling.adjusted) {
      adjust(call, batch, head, query + r, s, factor);
      factor = 1.0f;
    }
    if (scaling.adjusted || !sees_all(call, batch, query + r, begin, end)) {
      if (!sees_all(call, batch, query + r, from + s.from, from + s.to)) hide(call, batch, head, query + r, s);
      top = largest(s.logits, s.from, s.to);
    } else {
      top = maximum(t.fold[r]);
    }
    if (wanted.longest) t.best.take(r, s, top);
    float highest = top;
    top *= factor;
    if (DOT && top != NOTHING && !(__builtin_fabsf(top) <= FUSED)) {
      for (int64_t i = s.from; i < s.to; i += W) store(s.logits + i, load(s.logits + i) * factor);
      highest = top;
      factor = 1.0f;
    }
    if (rises(t.rows, r, top)) {
      const float centre = REACH ? distance_of(s, highest) : 0.0f;
      raise<SPREAD, REACH>(t.rows, r, top, centre, wanted.masses(), t.out + r * shape.width, shape.width);
    }
    if (shape.strip) t.tops[r * shape.key_blocks + from / BLOCK] = t.rows.top[r];
    top = t.rows.top[r] == NOTHING ? 0.0f : t.rows.top[r];
    Dropout dropout = {0, 0};
    if (call.dropout > 0) dropout = dropout_of(call, batch, head, query + r);
    const bool exact = !DOT && call.dropout == 0;
    wanted.add_before({s, factor, top, nullptr, batch, query + r, call.m}, exact, t.rows, r);
    weigh<DOT, SPREAD, REACH>(t.rows, r, s, factor, weights, dropout, kept);
    wanted.add_after({s, factor, top, weights, batch, query + r, call.m}, exact, t.rows, r);
  }

  // 3. O += p V.
  void mix(int64_t from, int count, const Hull* parts, const float* weights, int64_t stride, const float* values,
           Scratch& t) const {
    const int64_t height = words_of<OF>(shape.height);
    for (int64_t step = 0; step < words_of<OF>(BLOCK); step += VALUE_WORDS)
      for (int64_t c = 0; c < shape.width; c += PANEL)
        for (int g = 0; g * ROWS < count; g++) {
          if (parts[g].first == parts[g].last) continue;
          const int64_t first = most(step, words_of<OF>((parts[g].first - from) / KEYS * KEYS));
          const int64_t last = least(step + VALUE_WORDS, words_of<OF>(padded(parts[g].last - from, KEYS)));
          if (first >= last) continue;
          product<OF, true, false>((int)least(ROWS, count - g * ROWS), call.d_v - c, weights + g * ROWS * stride + first,
                                   stride, values + c * height + (words_of<OF>(from) + first) * PANEL,
                                   t.out + g * ROWS * shape.width + c, shape.width, last - first, nullptr);
        }
  }

  // The rows' results; scale[r] turns an unnormalized p of the last top into a weight.
  void finish(int64_t batch, int64_t head, int64_t query, int count, Scratch& t, float* scale) const {
    const float keep = 1.0f / (1.0f - call.dropout);
    const int64_t at = (batch * call.h + head) * call.n + query;
    Row rows[BLOCK_ROWS];
    float logs[BLOCK_ROWS];
    for (int r = 0; r < count; r++) {
      sums_of<SPREAD, REACH>(t.rows, r, rows[r]);
      begin_row<REACH>(call, head, t.rows.broken[r], rows[r]);
      logs[r] = rows[r].whole;
      if (OF == PARTS && logs[r] != logs[r] && !t.rows.broken[r]) refused.raise();
    }
    for (int r = count; r < BLOCK_ROWS; r++) logs[r] = 1.0f;
    if (SPREAD || call.lse)
      for (int r = 0; r < count; r += W) store(logs + r, ln(load(logs + r)));
    for (int r = 0; r < count; r++) {
      Row& row = rows[r];
      if (wanted.count[FORMULA] || call.lse) finish_row(row, logs[r]);
      scale[r] = row.inverse;
      if (call.lse) call.lse[at + r] = row.log_sum;
      if (wanted.longest) {
        const float top = row.top == NOTHING ? 0.0f : row.top, factor = scaling.adjusted ? 1.0f : scaling.factor;
        wanted.finish(t.best.finish(r, factor, top, row.inverse, row.log_sum != row.log_sum), at + r);
      }
      if (!call.d_v) continue;
      T* out = (T*)call.out.data + batch * call.out.batch + head * call.out.head + (query + r) * call.out.row;
      write_row(out, t.out + r * shape.width, scale[r] * keep, call.d_v);
    }
    wanted.finish(rows, scale, count, t.rows.masses, MOST_ROWS, at);
  }

  // Adds the weights in the rows of the strip to the columns.
  void columns(int64_t batch, int64_t query, int count, const Hull& seen, const float* scale, Scratch& t) const {
    for (int64_t from = seen.first / BLOCK * BLOCK; from < seen.last; from += BLOCK) {
      const int64_t to = least(from + BLOCK, call.m);
      for (int g = 0; g * ROWS < count; g++) {
        const int rows = (int)least(ROWS, count - g * ROWS);
        const Hull part = hull(call, batch, query + g * ROWS, rows, from, to);
        if (part.first == part.last) continue;
        Floats factors[ROWS];
        for (int r = 0; r < ROWS; r++) {
          const int at = g * ROWS + (r < rows ? r : 0);
          const float then = t.tops[at * shape.key_blocks + from / BLOCK];
          factors[r] = r < rows && then != NOTHING ? exp2(all(then - t.rows.top[at])) * scale[at] : all(0.0f);
        }
        for (int64_t c = part.first / W * W; c < part.last; c += W) {
          Floats received = all(0.0f);  // a few rows first: short partial sums lose less to rounding
          for (int r = 0; r < rows; r++) {
            const float* row = t.strip + (g * ROWS + r) * shape.strip;
            received += factors[r] * load(row + c);
          }
          store(t.columns + c, load(t.columns + c) + received);
        }
      }
    }
  }
};
