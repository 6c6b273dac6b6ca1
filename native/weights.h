// Weights recomputed from q, k and the log-sum-exp: p = 2^(z - lse), where z are logits in units of ln 2. Pictures, tiles
// and sums along diagonals are computed from them.
//
// The matrix is divided into independent rectangles, so threads never wait and the bits do not depend on their number. A
// rectangle packs its own keys when it first reads them:
//
//                 a stripe of keys →                 about 1,000 packed keys, which stay in the L2 cache
//              ┌────────┬────────┬──────
//   queries    │ QKᵀ, p │        │            BLOCK_ROWS × BLOCK_KEYS weights at a time, passed row by row to
//      ↓       ├────────┼────────┼──────      the callback
//              │        │        │
//
// Packing a key takes as long as about ten queries; a rectangle has hundreds.

template <typename Call, typename T> struct Weights {
  static constexpr Operand OF = OPERAND<T>;
  static constexpr int ROWS = GROUP<OF>;

  const Call& call;
  const Scaling scaling;
  const int64_t stripe;  // the most keys of a rectangle
  const int64_t words;   // of a query or key
  const bool logs;       // z - lse takes the place of p, above 0 too
  Flag& refused;         // with PARTS: numbers do not fit (parts.h), or a weight is NaN
  Queue& queue;

  struct Memory {
    float *queries, *logits, *keys;
    bool *packed;  // for each block of keys
    bool *broken;
    int64_t head, begin, end;  // of the stripe; heads are numbered across batch entries
  };

  Weights(const Call& call, int64_t stripe, bool logs, Flag& refused, Queue& queue)
      : call(call), scaling(scaling_of<OF>(call.rule)), stripe(stripe), words(words_of<OF>(call.d)), logs(logs),
        refused(refused), queue(queue) {}

  void lay_out(Arena& arena, Memory& m) const {
    m.queries = arena.take<float>(BLOCK_ROWS * words);
    m.logits = arena.take<float>(BLOCK_ROWS * STRIDE);
    m.keys = arena.take<float>(padded(stripe, BLOCK_KEYS) * words);
    m.packed = arena.take<bool>(blocks(stripe, BLOCK_KEYS));
    m.broken = arena.take<bool>(BLOCK_ROWS);
  }

  // Begins a rectangle over the keys [begin, end) of a head.
  void turn_to(Memory& m, int64_t head, int64_t begin, int64_t end) const {
    m.head = head;
    m.begin = begin;
    m.end = end;
    __builtin_memset(m.packed, 0, (size_t)blocks(end - begin, BLOCK_KEYS));
  }

  // The weights of queries on the keys [low, high) of the stripe: each(r, rows, key, p, keys) for the rows from r on, `keys`
  // weights each from that key on, STRIDE apart; weights without a call are 0.
  template <typename Each>
  void block(Memory& m, int64_t query, int count, int64_t low, int64_t high, const Each& each) const {
    const int64_t batch = m.head / call.h;
    const Hull seen = hull(call, batch, query, count, low, high);
    if (seen.first == seen.last) return;
    const T* q = (const T*)call.q.data + batch * call.q.batch + m.head % call.h * call.q.head + query * call.q.row;
    load_queries<OF>(q, call.q.row, count, call.d, scaling, words, m.queries, m.broken, refused);
    for (int64_t from = seen.first - (seen.first - m.begin) % BLOCK_KEYS; from < seen.last && queue.going(); from += BLOCK_KEYS)
      for (int g = 0; g < count; g += ROWS) {
        const int rows = (int)least(ROWS, count - g);
        const Hull part = hull(call, batch, query + g, rows, most(from, low), least(from + BLOCK_KEYS, high));
        if (part.first == part.last) continue;
        const float* keys = packed(m, from);
        for (int64_t p = (part.first - from) / PANEL * PANEL; p < part.last - from; p += PANEL)
          product<OF, false, false>(rows, padded(part.last - from, W) - p, m.queries + g * words, words, keys + p * words,
                                    m.logits + g * STRIDE + p, STRIDE, words, nullptr);
        for (int r = g; r < g + rows; r++) weigh(m, batch, query, r, from, part);
        each(g, rows, part.first, m.logits + g * STRIDE + (part.first - from), part.last - part.first);
      }
  }

 private:
  const float* packed(Memory& m, int64_t from) const {
    const int64_t index = (from - m.begin) / BLOCK_KEYS;
    float* keys = m.keys + (from - m.begin) * words;
    if (m.packed[index]) return keys;
    m.packed[index] = true;
    Finite<OF> check;
    const T* k = (const T*)call.k.data + m.head / call.h * call.k.batch + m.head % call.h / (call.h / call.h_kv) * call.k.head;
    for (int64_t p = 0; p < least(BLOCK_KEYS, m.end - from); p += PANEL)
      pack_keys<OF>(k + (from + p) * call.k.row, call.k.row, call.m - from - p, call.d, keys + p * words, check);
    if (OF == PARTS && !check.all()) refused.raise();
    return keys;
  }

  // Logits of one row become weights.
  void weigh(Memory& m, int64_t batch, int64_t query, int r, int64_t from, const Hull& part) const {
    const int64_t head = m.head % call.h;
    Stretch s = {m.logits + r * STRIDE, (part.first - from) / W * W, padded(part.last - from, W), from,
                 query + r + call.rule.shift};
    float factor = scaling.factor;
    if (scaling.adjusted) {
      adjust(call, batch, head, query + r, s, factor);
      factor = 1.0f;
    }
    if (!sees_all(call, batch, query + r, from + s.from, from + s.to)) hide(call, batch, head, query + r, s);
    const double lse = call.lse[m.head * call.n + query + r];
    const LogSum base(lse);
    Ints strange = {};
    for (int64_t i = s.from; i < s.to; i += W) {
      const Floats z = load(s.logits + i) * factor, p = logs ? z - base.most - base.rest : weight_of(z, base);
      if (OF == PARTS) strange |= p != p;
      store(s.logits + i, p);
    }
    if (OF == PARTS && any(strange) && lse == lse) refused.raise();
    if (lse != lse)  // masked weights are 0 in such a row too
      for (int64_t i = s.from; i < s.to; i++)
        if (!sees(call, batch, head, query + r, from + i)) s.logits[i] = 0.0f;
  }
};
