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
// Column sums require no second QKᵀ: the strip stores p of all blocks for these rows, each block with the top that it
// was computed with. When the rows are finished their scales are known, and one weighted sum over the strip's rows adds
// them to the columns. Each chunk of query blocks has its own columns, and chunks are added up in order, so the bits
// do not depend on the number of threads.

// Keys per step of p·V, so that a panel of values stays in L1.
constexpr int VALUE_STEPS = 16384 / (4 * PANEL);

// Sizes common to all blocks of a call.
struct Shape {
  int64_t words;     // of a query or key
  int64_t width;     // d_v, padded to panels
  int64_t height;    // m, padded to panels: packed keys
  int64_t key_bytes, value_bytes;  // of one KV head, packed
  int64_t query_blocks, key_blocks;
  int64_t chunks;    // into which the query blocks of a head are divided when columns are summed
  int64_t strip;     // row length of the strip, 0 without columns
};

template <bool DOT> static Shape shape_of(const headwise_forward_call& call, const Wanted& wanted) {
  Shape s;
  s.words = words_of<DOT>(call.d);
  s.width = padded(call.d_v, PANEL);
  s.height = padded(call.m, PANEL);
  s.key_bytes = padded(s.height * s.words * 4, 64);
  s.value_bytes = padded(s.width * s.height * (DOT ? 2 : 4), 64);
  s.query_blocks = blocks(call.n, BLOCK_ROWS);
  s.key_blocks = blocks(call.m, BLOCK_KEYS);
  s.chunks = wanted.count[COLUMNS] ? most(1, least(s.query_blocks, 64 / most(1, call.b * call.h))) : s.query_blocks;
  s.strip = wanted.count[COLUMNS] ? s.key_blocks * BLOCK_KEYS + 16 : 0;
  return s;
}

// Buffers of one thread.
struct Scratch {
  Rows rows;
  Floats fold[BLOCK_ROWS];
  float *queries, *out, *logits, *strip, *tops, *columns;
  Best best;
};

struct Arena {
  char* next;
  template <typename T> T* take(int64_t count) {
    T* here = (T*)next;
    next += padded(count * (int64_t)sizeof(T), 64);
    return here;
  }
};

static int64_t lay_out(const Wanted& wanted, const Shape& s, char* memory, Scratch** out) {
  Arena arena = {memory};
  Scratch* t = arena.take<Scratch>(1);
  Scratch sizes;
  Scratch& it = memory ? *t : sizes;
  it.queries = arena.take<float>(BLOCK_ROWS * s.words);
  it.out = arena.take<float>(BLOCK_ROWS * s.width);
  it.logits = arena.take<float>(BLOCK_ROWS * STRIDE);
  it.strip = arena.take<float>(BLOCK_ROWS * s.strip);
  it.tops = arena.take<float>(s.strip ? BLOCK_ROWS * s.key_blocks : 0);
  it.columns = arena.take<float>(s.strip ? s.key_blocks * BLOCK_KEYS : 0);
  it.rows.masses = arena.take<float>(wanted.masses() * MOST_ROWS);
  it.best.wanted = wanted.longest;
  it.best.room = Best::room_for(wanted.longest);
  it.best.list = arena.take<Ranked>(it.best.room * BLOCK_ROWS);
  *out = t;
  return arena.next - memory;
}

// The factors from products to logits: `query` multiplies queries when they are loaded, `factor` the products.
struct Scaling {
  float query, factor;
  bool flip;     // bfloat16 queries are not multiplied, but may be negated
  bool adjusted; // there is a soft cap or a bias
};
template <bool DOT> static Scaling scaling_of(const headwise_rule& rule) {
  Scaling s;
  s.adjusted = rule.soft_cap > 0 || rule.relative || rule.bias;
  const float scale = s.adjusted ? rule.scale : rule.scale * LOG2E;
  s.flip = DOT && scale < 0;
  s.query = DOT ? (scale == 0.0f ? 0.0f : 1.0f) : scale;  // a factor of 0 would turn a masked -inf into NaN
  s.factor = DOT && scale != 0.0f ? (s.flip ? -scale : scale) : 1.0f;
  return s;
}

template <bool DOT> INLINE Floats scaled(Floats x, const Scaling& scaling) {
  if (!DOT) return x * scaling.query;
  if (scaling.flip) x = (Floats)((Words)x ^ 0x80008000u);
  return scaling.query == 0.0f ? all(0.0f) : x;
}

template <bool DOT, typename T>
static void load_queries(const T* q, int64_t stride, int rows, int64_t d, const Scaling& scaling, int64_t size,
                         float* queries, bool* broken) {
  const int64_t whole = whole_words<DOT>(d);
  for (int r = 0; r < rows; r++) {
    const T* from = q + r * stride;
    float* to = queries + r * size;
    Ints check = {};
    for (int64_t c = 0; c < whole; c += W) {
      const Floats x = whole_word<DOT>(from, c);
      check |= not_finite_words<DOT>(x);
      store(to + c, scaled<DOT>(x, scaling));
    }
    if (whole < size) {
      const Floats x = words<DOT>(from, whole, d);
      check |= not_finite_words<DOT>(x);
      write(to + whole, scaled<DOT>(x, scaling), size - whole);
    }
    broken[r] = any(check);
  }
}

template <bool DOT, typename T, bool SPREAD, bool REACH> struct Forward {
  static constexpr int ROWS = GROUP<DOT>;  // per product
  static constexpr int KEYS = KEYS_AT_ONCE<DOT>;

  const headwise_forward_call& call;
  const Wanted wanted;
  const Shape shape;
  const Scaling scaling;

  void pack(int64_t group, int64_t panel, char* keys, char* values, Ints& check) const {
    const int64_t batch = group / call.h_kv, head = group % call.h_kv, from = panel * PANEL;
    const T* k = (const T*)call.k.data + batch * call.k.batch + head * call.k.head;
    pack_keys<DOT>(k + from * call.k.row, call.k.row, call.m - from, call.d, (float*)keys + from * shape.words, check);
    if (!call.d_v) return;
    const T* v = (const T*)call.v.data + batch * call.v.batch + head * call.v.head;
    const int64_t to = least(from + PANEL, padded(call.m, KEYS));
    pack_values<DOT>(v, call.v.row, call.m, call.d_v, from, to, shape.height, (float*)values, check);
  }

  // One block of queries of one head.
  void block(int64_t batch, int64_t head, int64_t index, const float* keys, const float* values, Scratch& t) const {
    const int64_t query = index * BLOCK_ROWS;
    const int count = (int)least(BLOCK_ROWS, call.n - query);
    const T* q = (const T*)call.q.data + batch * call.q.batch + head * call.q.head + query * call.q.row;
    load_queries<DOT>(q, call.q.row, count, call.d, scaling, shape.words, t.queries, t.rows.broken);
    clear_rows(t.rows, count, wanted.masses());
    t.best.clear(count);
    __builtin_memset(t.out, 0, (size_t)(count * shape.width) * 4);
    const Hull seen = hull(call, batch, query, count, 0, call.m);
    for (int64_t from = seen.first / BLOCK_KEYS * BLOCK_KEYS; from < seen.last; from += BLOCK_KEYS) {
      Hull parts[(BLOCK_ROWS + ROWS - 1) / ROWS];
      bool empty = true;
      for (int g = 0; g * ROWS < count; g++) {
        const int rows = (int)least(ROWS, count - g * ROWS);
        parts[g] = hull(call, batch, query + g * ROWS, rows, from, least(from + BLOCK_KEYS, call.m));
        empty &= parts[g].first == parts[g].last;
      }
      if (empty) {
        for (int r = 0; r < count && shape.strip; r++) t.tops[r * shape.key_blocks + from / BLOCK_KEYS] = NOTHING;
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
    float scale[BLOCK_ROWS];
    finish(batch, head, query, count, t, scale);
    if (shape.strip) columns(batch, query, count, seen, scale, t);
  }

 private:
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
        product<DOT, false, true>((int)least(ROWS, count - g * ROWS), padded(parts[g].last - p, KEYS),
                                  t.queries + g * ROWS * shape.words, shape.words, keys + p * shape.words,
                                  t.logits + g * ROWS * STRIDE + (p - from), STRIDE, shape.words, t.fold + g * ROWS);
      }
  }

  // 2. The softmax of one row.
  void row(int64_t batch, int64_t head, int64_t query, int r, int64_t from, const Hull& part, float* weights,
           float* kept, Scratch& t) const {
    if (shape.strip) t.tops[r * shape.key_blocks + from / BLOCK_KEYS] = NOTHING;
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
    if (shape.strip) t.tops[r * shape.key_blocks + from / BLOCK_KEYS] = t.rows.top[r];
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
    constexpr int A_WORD = KEYS_A_WORD<DOT>;
    const int64_t height = shape.height / A_WORD;
    for (int64_t step = 0; step < BLOCK_KEYS / A_WORD; step += VALUE_STEPS)
      for (int64_t c = 0; c < shape.width; c += PANEL)
        for (int g = 0; g * ROWS < count; g++) {
          if (parts[g].first == parts[g].last) continue;
          const int64_t first = most(step, (parts[g].first - from) / KEYS * KEYS / A_WORD);
          const int64_t last = least(step + VALUE_STEPS, padded(parts[g].last - from, KEYS) / A_WORD);
          if (first >= last) continue;
          product<DOT, true, false>((int)least(ROWS, count - g * ROWS), call.d_v - c,
                                    weights + g * ROWS * stride + first, stride,
                                    values + c * height + (from / A_WORD + first) * PANEL,
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
    for (int64_t from = seen.first / BLOCK_KEYS * BLOCK_KEYS; from < seen.last; from += BLOCK_KEYS) {
      const int64_t to = least(from + BLOCK_KEYS, call.m);
      for (int g = 0; g * ROWS < count; g++) {
        const int rows = (int)least(ROWS, count - g * ROWS);
        const Hull part = hull(call, batch, query + g * ROWS, rows, from, to);
        if (part.first == part.last) continue;
        Floats factors[ROWS];
        for (int r = 0; r < ROWS; r++) {
          const int at = g * ROWS + (r < rows ? r : 0);
          const float then = t.tops[at * shape.key_blocks + from / BLOCK_KEYS];
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
