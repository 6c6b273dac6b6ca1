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
// With tiles, step 2 of a panel of keys is computed beside steps 1 and 3 of the panels next to it: panels.h.
//
// Column sums require no second QKᵀ: the strip stores p of all blocks for these rows, each block with the top that it
// was computed with. When the rows are finished their scales are known, and one weighted sum over the strip's rows adds
// them to the columns. Each chunk of query blocks has its own columns, and chunks are added up in order, so the bits
// do not depend on the number of threads.

template <Operand OF, bool SPREAD, bool REACH> struct Panels;

template <Operand OF, bool SPREAD, bool REACH> struct Forward {
  static constexpr bool DOT = OF == PAIRS;  // p and the scores' factor are rounded to bfloat16
  static constexpr int ROWS = GROUP<OF>;    // per product
  static constexpr int KEYS = KEYS_AT_ONCE<OF>;
  static constexpr int GROUPS = (BLOCK_ROWS + ROWS - 1) / ROWS;
  static constexpr int64_t BLOCK = KEYS_A_BLOCK<OF>;
  static constexpr int BLOCKS_AT_ONCE = 8;  // on the first level of sums

  const headwise_forward_call& call;
  const Dtype<OF> dtype;
  const Wanted wanted;
  const Shape shape;
  const Scaling scaling;
  Flag& refused;  // with PARTS: numbers do not fit (parts.h), or a result is not finite, as that of float32 may be
  Queue& queue;
  // How often it is fetched ahead during the queries of one head.
  int64_t fetches() const {
    const int64_t keys = keys_of_a_query(call);
    if (TILED<OF>) return call.n * blocks(keys, KEYS_A_BLOCK<OF>) / 4;
    return blocks(call.n, ROWS) * (padded(keys, PANEL) + shape.width) / PANEL;
  }

  // Whether weights are only multiplied by values.
  const bool plain = !SPREAD && !REACH && !wanted.masses() && !wanted.longest && !shape.strip && call.dropout == 0;

  void pack(int64_t group, int64_t panel, char* keys, char* values, Finite<OF>& check) const {
    const int64_t batch = group / call.h_kv, head = group % call.h_kv, from = panel * PANEL;
    dtype.pack_keys(dtype.row(call.k, batch, head, from), call.k.row, call.m - from, call.d,
                    (float*)keys + from * shape.words, check);
    if (!call.d_v) return;
    const int64_t to = least(from + PANEL, padded(call.m, KEYS));
    dtype.pack_values(dtype.row(call.v, batch, head, 0), call.v.row, call.m, call.d_v, from, to, shape.height, (float*)values,
                      check);
  }

  // One block of queries of one head.
  void block(int64_t batch, int64_t head, int64_t index, const float* keys, const float* values, Scratch& t) const {
    const int64_t query = index * BLOCK_ROWS;
    const int count = (int)least(BLOCK_ROWS, call.n - query);
    dtype.load_queries(dtype.row(call.q, batch, head, query), call.q.row, count, call.d, scaling, shape.words, t.queries,
                       t.rows.broken, refused);
    if (refused.value) return;
    clear_rows<SPREAD, REACH>(t.rows, count, wanted.masses());
    t.best.clear(count);
    const Hull seen = hull(call, batch, query, count, 0, call.m);
    if constexpr (TILED<OF>) {
      Panels<OF, SPREAD, REACH>{*this, batch, head, query, count, keys, values, t}.go(seen);
    } else {
      blocks_of_keys(batch, head, query, count, seen, keys, values, t);
    }
    float scale[BLOCK_ROWS];
    finish(batch, head, query, count, t, scale);
    if (shape.strip) columns(batch, query, count, seen, scale, t);
  }

 private:
  template <Operand, bool, bool> friend struct Panels;

  void blocks_of_keys(int64_t batch, int64_t head, int64_t query, int count, const Hull& seen, const float* keys,
                      const float* values, Scratch& t) const {
    const Levels<SPREAD, REACH> levels = {t, ROWS, count, shape.width};
    levels.begin();
    bool begun[GROUPS] = {};  // whether p V of a group has been stored
    int done = 0;
    for (int64_t from = seen.first / BLOCK * BLOCK; from < seen.last && queue.going(); from += BLOCK) {
      Hull parts[GROUPS];
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
      for (int r = 0; r < count; r += W)
        softmax(batch, head, query, r, (int)least(W, count - r), from, parts, weights, stride, t);
      mix(from, count, parts, weights, stride, values, begun, t);
      if (++done % BLOCKS_AT_ONCE == 0 && from + BLOCK < seen.last) levels.gather(begun);
    }
    levels.finish(begun);
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
        t.ahead.fetch();
        product<OF, false, true>((int)least(ROWS, count - g * ROWS), padded(parts[g].last - p, KEYS),
                                 t.queries + g * ROWS * shape.words, shape.words, keys + p * shape.words,
                                 t.logits + g * ROWS * STRIDE + (p - from), STRIDE, shape.words, t.fold + g * ROWS);
      }
  }

  // 2. The softmax of W rows, or fewer, from `begin` on: their tops are found together.
  void softmax(int64_t batch, int64_t head, int64_t query, int begin, int count, int64_t from, const Hull* parts,
               float* weights, int64_t stride, Scratch& t) const {
    Hull spans[W];  // of the keys, counted from the block's first
    Floats lanes[W];
    const bool whole = !scaling.adjusted && all_see(batch, query + begin, count, from);
    for (int i = 0; i < W && whole; i++) lanes[i] = t.fold[begin + (i < count ? i : 0)];
    for (int i = 0; i < W && !whole; i++) {
      const int r = begin + (i < count ? i : 0);
      const Hull& part = parts[r / ROWS];
      spans[i] = {(part.first - from) / KEYS * KEYS, padded(part.last - from, KEYS)};
      lanes[i] = all(NOTHING);
      if (i < count && part.first < part.last)
        lanes[i] = defined(batch, head, query + r, part, stretch(query, r, from, spans[i], t), t.fold[r]);
    }
    const Floats highest = maxima(lanes), top = scaling.adjusted ? highest : highest * scaling.factor;
    const unsigned rise = bits(rises(t.rows, begin, top));
    const unsigned rounded = DOT ? bits(~(Ints)(magnitude(top) <= FUSED) & (Ints)(top != NOTHING)) : 0;
    Seen seen[W];
    for (int i = 0; i < count; i++) {
      const int r = begin + i;
      const Stretch s = stretch(query, r, from, whole ? Hull{0, least(BLOCK, call.m - from)} : spans[i], t);
      if (s.from == s.to) {
        if (shape.strip) t.tops[r * shape.key_blocks + from / BLOCK] = NOTHING;
        seen[i] = {s, 1.0f, 0.0f, nullptr, batch, query + r, call.m};
        continue;
      }
      float factor = scaling.adjusted ? 1.0f : scaling.factor;
      if (wanted.longest) t.best.take(r, s, highest[i]);
      const bool round = rounded >> i & 1;
      if (round) {
        for (int64_t j = s.from; j < s.to; j += W) store(s.logits + j, load(s.logits + j) * factor);
        factor = 1.0f;
      }
      if (rise >> i & 1) {
        const float centre = REACH ? distance_of(s, round ? top[i] : highest[i]) : 0.0f;
        raise<SPREAD, REACH>(t.rows, r, top[i], centre, wanted.masses(), t.out + r * shape.width, shape.width);
        if (t.gathered) raise<SPREAD, REACH>(t.past, r, top[i], centre, 0, t.before + r * shape.width, shape.width);
      }
      if (plain)
        weigh<DOT, false, false, false, false>(t.rows, r, s, factor, weights + r * stride, {0, 0}, nullptr);
      else
        seen[i] = {s, factor, t.rows.top[r] == NOTHING ? 0.0f : t.rows.top[r], nullptr, batch, query + r, call.m};
    }
    if (!plain) sum_up(batch, head, query, begin, count, seen, weights, stride, t);
  }

  Stretch stretch(int64_t query, int r, int64_t from, const Hull& span, Scratch& t) const {
    return {t.logits + r * STRIDE, span.first, span.last, from, query + r + call.rule.shift};
  }

  // Whether the queries attend to all keys of the block that begins at `from`, and products of no others are computed.
  bool all_see(int64_t batch, int64_t query, int count, int64_t from) const {
    const int64_t to = least(from + BLOCK, call.m), rest = (to - from) % PANEL;
    if (rest && rest != vectors_for<OF>(rest) * W) return false;
    for (int r = 0; r < count; r++)
      if (!sees_all(call, batch, query + r, from, to)) return false;
    return true;
  }

  // The logits of a row as the call defines them, -inf where masked; returns their maximum per lane, which is `fold` if the
  // products are.
  Floats defined(int64_t batch, int64_t head, int64_t query, const Hull& part, const Stretch& s, Floats fold) const {
    const int64_t panel = (part.last - s.key - 1) / PANEL * PANEL, begin = s.from / PANEL * PANEL;
    const int64_t end = panel + vectors_for<OF>(padded(part.last - s.key - panel, KEYS)) * W;
    if (scaling.adjusted) adjust(call, batch, head, query, s, scaling.factor);
    if (!scaling.adjusted && sees_all(call, batch, query, s.key + begin, s.key + end)) return fold;
    if (!sees_all(call, batch, query, s.key + s.from, s.key + s.to)) hide(call, batch, head, query, s);
    return largest(s.logits, s.from, s.to);
  }

  // The weights and sums of `count` rows from `begin` on.
  void sum_up(int64_t batch, int64_t head, int64_t query, int begin, int count, Seen* seen, float* weights, int64_t stride,
              Scratch& t) const {
    const bool exact = !DOT && call.dropout == 0;
    wanted.add_before(seen, count, exact, t.rows, begin);
    for (int i = 0; i < count; i++) {
      const int r = begin + i;
      const Stretch& s = seen[i].row;
      if (s.from == s.to) continue;
      seen[i].weights = weights + r * stride;
      if (shape.strip) t.tops[r * shape.key_blocks + s.key / BLOCK] = t.rows.top[r];
      Dropout dropout = {0, 0};
      if (call.dropout > 0) dropout = dropout_of(call, batch, head, query + r);
      float* kept = shape.strip && DOT ? t.strip + r * shape.strip + s.key : nullptr;
      weigh<DOT, SPREAD, REACH>(t.rows, r, s, seen[i].factor, weights + r * stride, dropout, kept);
    }
    wanted.add_after(seen, count, exact, t.rows, begin);
  }

  // 3. O += p V; O = p V for the first keys of a group of queries.
  void mix(int64_t from, int count, const Hull* parts, const float* weights, int64_t stride, const float* values,
           bool* begun, Scratch& t) const {
    const int64_t height = words_of<OF>(shape.height);
    for (int64_t step = 0; step < words_of<OF>(BLOCK); step += VALUE_WORDS) {
      Hull here[GROUPS];
      for (int g = 0; g * ROWS < count; g++) {
        here[g] = {most(step, words_of<OF>((parts[g].first - from) / KEYS * KEYS)),
                   least(step + VALUE_WORDS, words_of<OF>(padded(parts[g].last - from, KEYS)))};
        if (parts[g].first == parts[g].last) here[g] = {0, 0};
      }
      for (int64_t c = 0; c < shape.width; c += PANEL)
        for (int g = 0; g * ROWS < count; g++) {
          const auto [first, last] = here[g];
          if (first >= last) continue;
          t.ahead.fetch();
          const float *a = weights + g * ROWS * stride + first, *b = values + c * height + (words_of<OF>(from) + first) * PANEL;
          float* to = t.out + g * ROWS * shape.width + c;
          const int rows = (int)least(ROWS, count - g * ROWS);
          if (begun[g])
            product<OF, true, false>(rows, call.d_v - c, a, stride, b, to, shape.width, last - first, nullptr);
          else
            product<OF, false, false>(rows, call.d_v - c, a, stride, b, to, shape.width, last - first, nullptr);
        }
      for (int g = 0; g * ROWS < count; g++) begun[g] |= here[g].first < here[g].last;
    }
  }

  // The rows' results; scale[r] turns an unnormalized p of the last top into a weight.
  void finish(int64_t batch, int64_t head, int64_t query, int count, Scratch& t, float* scale) const {
    const float keep = 1.0f / (1.0f - call.dropout);
    for (int begin = 0; begin < count; begin += W) {
      const int rows = (int)least(W, count - begin);
      const int64_t at = (batch * call.h + head) * call.n + query + begin;
      Finished done;
      sums_of<SPREAD, REACH>(t.rows, begin, rows, done);
      finish_rows<REACH>(call, head, SPREAD || call.lse || wanted.longest, done);
      if (OF == PARTS && any((done.whole != done.whole) & ~done.broken)) refused.raise();
      store(scale + begin, done.inverse);
      if (call.lse) write(call.lse + at, done.log_sum, rows);
      if (wanted.longest) best(done, begin, rows, at, t);
      wanted.finish(done, rows, t.rows.masses + begin, MOST_ROWS, at);
    }
    if (!call.d_v) return;
    dtype.write_rows(dtype.row(call.out, batch, head, query), call.out.row, count, t.out, shape.width, scale, keep, call.d_v);
  }

  void best(const Finished& done, int begin, int rows, int64_t at, Scratch& t) const {
    const float factor = scaling.adjusted ? 1.0f : scaling.factor;
    for (int i = 0; i < rows; i++) {
      const float top = done.top[i] == NOTHING ? 0.0f : done.top[i];
      wanted.finish(t.best.finish(begin + i, factor, top, done.inverse[i], done.log_sum[i] != done.log_sum[i]), at + i);
    }
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
          // A query with an infinity has weights of NaN, and 0 for masked keys: these must not be multiplied by NaN.
          const bool counts = r < rows && then != NOTHING && !t.rows.broken[at];
          factors[r] = counts ? exp2(all(then - t.rows.top[at])) * scale[at] : all(0.0f);
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
