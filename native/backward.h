// Gradients (Dao et al. 2022, algorithm 4), with weights recomputed from q, k and the log-sum-exp:
//
//   P = exp(S − lse)    dP = dO Vᵀ    dS = P ∘ (dP − δ),  δ = rowsum(dO ∘ O)
//   dV = Pᵀ dO          dK = scale · dSᵀ Q                dQ = scale · dS K
//
//                 GRAD_KEYS keys: K, V, dK, dV stay in the L2 cache
//              ┌────────┬────────┬──────
//   GRAD_ROWS  │ S, dP  │        │          1. two products, weights from them, and dS
//    queries   ├────────┤ after  │          2. dV += Pᵀ dO, dK += dSᵀ Q: complete at the end of the stripe
//      ↓       │        │        │          3. dQ += dS K: a part of it, summed in one copy per chunk of stripes
//
// A task is a chunk of the keys of one KV head: every chunks-th stripe. For each stripe it processes the queries of all heads
// that share the keys; the copies of dQ are added up in order at the end, or, if the task has all keys (ALONE), written by it.
// The number of chunks depends only on the shape, so the bits do not depend on the number of threads. Tasks run in parallel,
// except that those which would add to the same entry of a bias's gradient run in successive waves (learned.h).

// The gradient of the log-sum-exp and of statistics of the rows that are sums over the weights (headwise.h) joins dP and δ.
//
// With PAIRS all five products are of bfloat16 with float32 sums, as in the forward pass, with P and dS
// rounded as in FlashAttention (Dao 2023). P, dS and the gradients of the score terms are computed in float32.

template <typename T> struct Backward {
  static constexpr Operand OF = OPERAND<T>;
  static constexpr bool CONVERTED = OF != SINGLES;  // P and dS are converted to words
  static constexpr int ROWS = GROUP<OF>, KEYS = KEYS_AT_ONCE<OF>;
  static constexpr int KEY_WORDS = GRAD_KEY_WORDS<OF>, ROW_WORDS = GRAD_ROW_WORDS<OF>;

  const headwise_backward_call& call;
  Scaling scaling;
  int64_t width, value_width;  // d and d_v, padded to panels
  int64_t words, value_words;  // d and d_v, in words of the first two products
  int64_t heads_a_group, chunks, key_blocks, scratch_bytes;
  Learned learned;
  int64_t groups, first_batch, first_kv;  // of a wave
  int64_t group_floats;        // of dQ
  int threads;
  int64_t lines_ahead;         // fetched at once (ahead.h)
  float* partial;              // [chunks, heads of a wave, n, width]; ALONE: [threads, heads of a group, n, width]
  char* scratch;
  Queue queue;
  bool all_finite_needed, values_only, alone;
  Flag broken, refused;  // refused: see Forward

  struct Memory {
    Ahead ahead;
    float *keys_for_scores, *values_for_scores, *keys, *grad_keys, *grad_values;
    float *queries, *query_panels, *grads, *grad_panels, *scores, *slopes, *bend;
    float *slope_words, *turned;  // if converted
    Learned::Block learned;
    bool rows_broken[GRAD_ROWS];
  };

  explicit Backward(const headwise_backward_call& call)
      : call(call), scaling(scaling_of<OF>(call.rule)), width(padded(call.d, PANEL)),
        value_width(padded(call.d_v, PANEL)), words(words_of<OF>(call.d)),
        value_words(words_of<OF>(call.d_v)), heads_a_group(call.h / call.h_kv),
        key_blocks(blocks(call.m, GRAD_KEYS)), learned(call), queue{}, broken{0}, refused{0} {
    values_only = !call.grad_q.data;
    groups = learned.wave_batches * learned.wave_kvs;
    chunks = most(1, least(key_blocks, 8 / most(1, groups)));
    alone = chunks == 1;
    group_floats = values_only ? 0 : heads_a_group * call.n * width;
    lines_ahead = lines_at_once();
  }

  int64_t lay_out(char* memory, Memory* m) const {
    Arena arena = {memory};
    m->keys_for_scores = arena.take<float>(GRAD_KEYS * words);
    m->values_for_scores = arena.take<float>(GRAD_KEYS * value_words);
    m->keys = arena.take<float>(words_of<OF>(GRAD_KEYS) * width);
    m->grad_keys = arena.take<float>(GRAD_KEYS * width);
    m->grad_values = arena.take<float>(GRAD_KEYS * value_width);
    m->queries = arena.take<float>(GRAD_ROWS * words);
    m->query_panels = arena.take<float>(words_of<OF>(GRAD_ROWS) * width);
    m->grads = arena.take<float>(GRAD_ROWS * value_words);
    m->grad_panels = arena.take<float>(words_of<OF>(GRAD_ROWS) * value_width);
    m->scores = arena.take<float>(GRAD_ROWS * GRAD_STRIDE);
    m->slopes = arena.take<float>(GRAD_ROWS * GRAD_STRIDE);
    m->slope_words = arena.take<float>(CONVERTED ? GRAD_ROWS * KEY_WORDS : 0);
    m->turned = arena.take<float>(CONVERTED ? GRAD_KEYS * ROW_WORDS : 0);
    m->bend = arena.take<float>(call.rule.soft_cap > 0 ? GRAD_KEYS : 0);
    learned.lay_out(arena, m->learned);
    return arena.next - memory;
  }

  const T* at(const headwise_tensor& x, int64_t batch, int64_t head, int64_t row) const {
    return (const T*)x.data + batch * x.batch + head * x.head + row * x.row;
  }

  // δ of all rows.
  void deltas(int) {
    for (int64_t head; (head = queue.take()) < call.b * call.h;) deltas_of(head / call.h, head % call.h);
  }
  void deltas_of(int64_t batch, int64_t head) {
    for (int64_t i = 0; i < call.n; i++) {
      const T *out = at(call.out, batch, head, i), *grad = at(call.grad_out, batch, head, i);
      Floats total = all(0.0f);
      for (int64_t c = 0; c < call.d_v; c += W) total += read(out + c, call.d_v - c) * read(grad + c, call.d_v - c);
      call.delta[(batch * call.h + head) * call.n + i] = sum(total);
    }
  }

  void chunk_of_keys(int worker) {
    const Tiles<TILED<OF>> tiles;
    Memory m;
    lay_out(scratch + worker * scratch_bytes, &m);
    for (int64_t task = queue.take(), next; task < groups * chunks; task = next < 0 ? queue.take() : next) {
      next = lines_ahead ? queue.reserve(groups, threads) : -1;
      const int64_t group = task / chunks, chunk = task % chunks;
      float* grad_queries = partial + (alone ? worker : chunk * groups + group) * group_floats;
      if (alone) begin_alone(group, grad_queries);
      look_ahead(group, next, m.ahead);
      for (int64_t block = chunk; block < key_blocks && !refused.value && queue.going(); block += chunks)
        keys(group, chunk, block * GRAD_KEYS, grad_queries, m);
      if (alone && !values_only) put_queries(group, 0, heads_a_group * call.n, grad_queries);
    }
  }

  void begin_alone(int64_t group, float* grad_queries) {
    __builtin_memset(grad_queries, 0, (size_t)group_floats * 4);
    for (int64_t g = 0; g < heads_a_group && !values_only; g++)
      deltas_of(batch_of(group), kv_of(group) * heads_a_group + g);
  }

  void look_ahead(int64_t group, int64_t next, Ahead& ahead) const {
    ahead.begin(lines_ahead);
    if (!lines_ahead) return;
    const auto heads = [&](const headwise_tensor& x, int64_t of, int64_t size)
        { ahead.add(x, sizeof(T), batch_of(of), kv_of(of) * heads_a_group, heads_a_group, size, call.n); };
    const auto keys = [&](const headwise_tensor& x, int64_t of, int64_t size)
        { ahead.add(x, sizeof(T), batch_of(of), kv_of(of), 1, size, call.m); };
    keys(call.grad_v, group, call.d_v);
    keys(call.grad_k, group, call.d);
    heads(call.grad_q, group, call.d);
    if (next < 0 || next >= groups) return;
    heads(call.out, next, call.d_v);
    heads(call.grad_out, next, call.d_v);
    keys(call.k, next, call.d);
    keys(call.v, next, call.d_v);
    heads(call.q, next, call.d);
  }

  int64_t lines_at_once() const {
    const int64_t rows = heads_a_group * call.n;
    const int64_t bytes = 2 * (rows + call.m) * (call.d + call.d_v) * (int64_t)sizeof(T);
    const int64_t panels = padded(least(keys_of_a_query(call), call.m), PANEL) / PANEL;
    const int64_t fetches = heads_a_group * blocks(call.n, ROWS) * (panels + width / PANEL * key_blocks);
    return alone && !values_only ? lines_ahead_of(bytes, 0, groups, fetches) : 0;
  }

  // Batch entry and KV head of a group of the wave.
  int64_t batch_of(int64_t group) const { return first_batch + group / learned.wave_kvs; }
  int64_t kv_of(int64_t group) const { return first_kv + group % learned.wave_kvs; }

  // One block of keys with all queries.
  void keys(int64_t group, int64_t chunk, int64_t from, float* grad_queries, Memory& m) {
    const int64_t batch = batch_of(group), kv = kv_of(group);
    const int64_t to = least(from + GRAD_KEYS, call.m), count = to - from;
    Finite<OF> check;
    for (int64_t j = 0; j < count; j += PANEL) {
      pack_keys<OF>(at(call.k, batch, kv, from + j), call.k.row, count - j, call.d, m.keys_for_scores + j * words, check);
      if (!values_only)
        pack_keys<OF>(at(call.v, batch, kv, from + j), call.v.row, count - j, call.d_v,
                      m.values_for_scores + j * value_words, check);
    }
    if (!values_only)
      pack_values<OF>(at(call.k, batch, kv, from), call.k.row, count, call.d, 0, GRAD_KEYS, GRAD_KEYS, m.keys, check);
    if (OF == PARTS && !check.all()) return refused.raise();
    if (all_finite_needed && !check.all()) broken.raise();
    __builtin_memset(m.grad_keys, 0, (size_t)(GRAD_KEYS * width) * 4);
    __builtin_memset(m.grad_values, 0, (size_t)(GRAD_KEYS * value_width) * 4);
    for (int64_t g = 0; g < heads_a_group; g++) {
      const int64_t head = kv * heads_a_group + g;
      float* copy = learned.copy_of(group, chunk, chunks, g);
      for (int64_t query = 0; query < call.n && queue.going(); query += GRAD_ROWS)
        queries(batch, head, query, chunk, from, to, grad_queries + (g * call.n + query) * width, copy, m);
    }
    for (int64_t j = 0; j < count; j++) {
      T* grad_v = (T*)at(call.grad_v, batch, kv, from + j);
      for (int64_t c = 0; c < call.d_v; c += W)
        put(grad_v + c, load(m.grad_values + j * value_width + c), call.d_v - c);
      if (values_only) continue;
      T* grad_k = (T*)at(call.grad_k, batch, kv, from + j);
      for (int64_t c = 0; c < call.d; c += W)
        put(grad_k + c, load(m.grad_keys + j * width + c) * call.rule.scale, call.d - c);
    }
  }

  void queries(int64_t batch, int64_t head, int64_t query, int64_t chunk, int64_t from, int64_t to, float* grad_queries,
               float* copy, Memory& m) {
    const int count = (int)least(GRAD_ROWS, call.n - query);
    Hull parts[(GRAD_ROWS + ROWS - 1) / ROWS], whole = {to, from};
    for (int g = 0; g * ROWS < count; g++) {
      parts[g] = hull(call, batch, query + g * ROWS, (int)least(ROWS, count - g * ROWS), from, to);
      if (parts[g].first == parts[g].last) continue;
      whole.first = least(whole.first, parts[g].first);
      whole.last = most(whole.last, parts[g].last);
    }
    if (whole.first >= whole.last) return;
    const T* q = at(call.q, batch, head, query);
    const T* grad = at(call.grad_out, batch, head, query);
    Finite<OF> check;
    const Scaling plain = {1.0f, 1.0f, false, false};
    load_queries<OF>(q, call.q.row, count, call.d, scaling, words, m.queries, m.rows_broken, refused);
    load_queries<OF>(grad, call.grad_out.row, count, call.d_v, plain, value_words, m.grads, m.rows_broken, refused);
    if (refused.value) return;
    const int64_t packed = padded(count, NUMBERS<OF>);
    if (!values_only) pack_values<OF>(q, call.q.row, count, call.d, 0, packed, GRAD_ROWS, m.query_panels, check);
    pack_values<OF>(grad, call.grad_out.row, count, call.d_v, 0, packed, GRAD_ROWS, m.grad_panels, check);
    if (OF == PARTS && !check.all()) return refused.raise();
    const int64_t low = (whole.first - from) / PANEL * PANEL, high = padded(whole.last - from, PANEL);
    for (int64_t p = low; p < high; p += PANEL)
      for (int g = 0; g * ROWS < count; g++) {
        if (parts[g].last <= from + p || parts[g].first >= from + p + PANEL) continue;
        const int rows = (int)least(ROWS, count - g * ROWS);
        m.ahead.fetch();
        const int64_t place = g * ROWS * GRAD_STRIDE + p, columns = padded(parts[g].last - from, W) - p;
        product<OF, false, false>(rows, columns, m.queries + g * ROWS * words, words, m.keys_for_scores + p * words,
                                  m.scores + place, GRAD_STRIDE, words, nullptr);
        if (values_only) continue;
        product<OF, false, false>(rows, columns, m.grads + g * ROWS * value_words, value_words,
                                  m.values_for_scores + p * value_words, m.slopes + place, GRAD_STRIDE, value_words,
                                  nullptr);
      }
    learned.begin(m.learned);
    for (int r = 0; r < count; r++) row(batch, head, query, r, chunk, from, low, high, parts[r / ROWS], m);
    learned.end(batch, head, query, from, copy, m.learned);
    high_by_low(m.scores, m.turned, m.grad_panels, call.d_v, m.grad_values, low, high, least(high, to - from), count);
    if (values_only) return;
    for (int g = 0; g * ROWS < count; g++) {
      if (parts[g].first == parts[g].last) continue;
      const int64_t first = words_of<OF>((parts[g].first - from) / KEYS * KEYS), last = words_of<OF>(parts[g].last - from);
      const float* slopes = CONVERTED ? m.slope_words : m.slopes;
      const int64_t stride = CONVERTED ? KEY_WORDS : GRAD_STRIDE;
      for (int64_t c = 0; c < width; c += PANEL) {
        m.ahead.fetch();
        product<OF, true, false>((int)least(ROWS, count - g * ROWS), call.d - c, slopes + g * ROWS * stride + first, stride,
                                 m.keys + c * words_of<OF>(GRAD_KEYS) + first * PANEL,
                                 grad_queries + g * ROWS * width + c, width, last - first, nullptr);
      }
    }
    high_by_low(m.slopes, m.turned, m.query_panels, call.d, m.grad_keys, low, high, least(high, to - from), count);
  }

  // grad [keys × size, padded to panels] += weightsᵀ · rows, for the keys [low, last) of the weights' [low, high). `turned` is a
  // buffer.
  static void high_by_low(const float* weights, float* turned, const float* panels, int64_t size, float* grad, int64_t low,
                          int64_t high, int64_t last, int count) {
    if constexpr (CONVERTED) turn<OF>(weights, low, high, count, turned);
    const float* from = CONVERTED ? turned : weights;
    const int64_t width = padded(size, PANEL);
    for (int64_t c = 0; c < size; c += PANEL)
      for (int64_t j = low; j < last; j += ROWS)
        product<OF, true, false, !TILED<OF>>((int)least(ROWS, last - j), size - c,
                                             TILED<OF> ? from + j * ROW_WORDS : from + j,
                                             TILED<OF> ? ROW_WORDS : GRAD_STRIDE, panels + c * words_of<OF>(GRAD_ROWS),
                                             grad + j * width + c, width, words_of<OF>(count), nullptr);
  }

  // Writes gradients.
  void put(T* to, Floats x, int64_t count) {
    if (OF == PARTS && any(not_finite(x))) refused.raise();
    write(to, x, count);
  }

  // Scores become weights, and dP becomes dS; both 0 for fully masked queries.
  void row(int64_t batch, int64_t head, int64_t query, int r, int64_t chunk, int64_t from, int64_t low, int64_t high,
           const Hull& part, Memory& m) {
    float *scores = m.scores + r * GRAD_STRIDE, *slopes = m.slopes + r * GRAD_STRIDE;
    const int64_t first = part.first == part.last ? low : (part.first - from) / W * W;
    const int64_t last = part.first == part.last ? low : padded(part.last - from, W);
    float* slope_words = m.slope_words + r * KEY_WORDS;
    const auto keep_row = [&](int64_t i, Floats weight, Floats slope) __attribute__((always_inline)) {
      store(scores + i, weight);
      store(slopes + i, slope);
      if (OF == PAIRS) write((Brain*)slope_words + i, slope, W);
    };
    for (int64_t i = low; i < first; i += W) keep_row(i, all(0.0f), all(0.0f));
    for (int64_t i = last; i < high; i += W) keep_row(i, all(0.0f), all(0.0f));
    if (first == last) return;
    Stretch s = {scores, first, last, from, query + r + call.rule.shift};
    const float cap = call.rule.soft_cap;
    float factor = scaling.factor;
    if (cap > 0)
      for (int64_t i = first; i < last; i += W) {
        const Floats t = tanh(load(scores + i) * factor * (1.0f / cap));
        store(m.bend + i, 1.0f - t * t);
      }
    if (scaling.adjusted) {
      adjust(call, batch, head, query + r, s, factor);
      factor = 1.0f;
    }
    if (!sees_all(call, batch, query + r, from + first, from + last)) hide(call, batch, head, query + r, s);
    const int64_t at = (batch * call.h + head) * call.n + query + r;
    const LogSum lse(call.lse[at]);
    const bool broken = lse.most != lse.most;  // all weights are NaN, but those of masked keys 0
    const bool joint = call.shift;
    const float delta = values_only ? 0.0f : call.delta[at] + (joint ? call.shift[at] : 0.0f);
    const float keep = 1.0f / (1.0f - call.dropout);
    Dropout dropout = {0, 0};
    if (call.dropout > 0) dropout = dropout_of(call, batch, head, query + r);
    if (joint) join(batch, at, s, factor, lse, dropout, keep, slopes);
    for (int64_t i = first; i < last; i += W) {
      const Floats logits = load(scores + i);
      Floats p = weight_of(logits * factor, lse);
      if (broken) p = choose(logits == NOTHING, all(0.0f), p);
      Floats kept = p, slope = load(slopes + i);
      if (dropout.threshold) {
        const Ints stays = noise(dropout.seed, from + i) >= dropout.threshold;
        kept = choose(stays, p * keep, all(0.0f));
        if (!joint) slope = choose(stays, slope * keep, all(0.0f));
      }
      // A weight of 0 has gradient 0, even if the value's gradient is not finite.
      const Ints nothing = p == 0.0f;
      slope = p * (slope - delta);
      if (learned.wanted()) store(m.learned.scores + i, choose(nothing, all(0.0f), slope));
      if (cap > 0) slope *= load(m.bend + i);
      keep_row(i, kept, choose(nothing, all(0.0f), slope));
    }
    if (OF == PARTS && !values_only) split_row(slopes + low, high - low, 1.0f, slope_words + words_of<OF>(low));
    if (learned.wanted()) learned.row(batch, head, query + r, r, chunk, from, first, last, m.learned);
  }

  // dP of a stretch, from that of the weights that dropout keeps, and what statistics of rows add to it (headwise.h). Apart from
  // the weights: in one loop, the chain of each exponential would keep these operations waiting.
  __attribute__((noinline)) void join(int64_t batch, int64_t at, const Stretch& s, float factor, const LogSum& lse,
                                      Dropout dropout, float keep, float* slopes) const {
    const float* logits = s.logits;
    const float by_halvings = call.logs ? call.logs[at] * (float)LN2 : 0.0f;  // logits are in units of ln 2
    const float distance = call.distance ? call.distance[at] : 0.0f;
    const LogSum base = lse;  // a copy, which no store below changes
    Floats ahead = (float)(s.position - s.key - s.from) - ramp();
    for (int64_t i = s.from; i < s.to; i += W, ahead -= (float)W) {
      Floats slope = load(slopes + i);
      if (dropout.threshold)
        slope = choose(noise(dropout.seed, s.key + i) >= dropout.threshold, slope * keep, all(0.0f));
      slope += by_halvings * smaller(all(0.0f), load(logits + i) * factor - base.most - base.rest);
      store(slopes + i, slope + distance * magnitude(ahead));
    }
    for (int f = 0; f < call.mass_count; f++) {
      const headwise_mass_gradient& mass = call.masses[f];
      const float by = mass.factor[at];
      if (mass.keys.data) {
        const float* keys = of_batch<float>(mass.keys, batch) + s.key;
        for (int64_t i = s.from; i < s.to; i += W)
          store(slopes + i, load(slopes + i) + by * read(keys + i, call.m - s.key - i));
        continue;
      }
      const int64_t zero = (mass.relative ? s.position : 0) - s.key;
      const int64_t start = most(s.from, zero + mass.start), stop = least(s.to, zero + mass.stop);
      for (int64_t i = start; i < stop; i++) slopes[i] += by;
    }
  }

  void add_queries(int) {
    const int64_t rows = heads_a_group * call.n, shares = blocks(rows, 256);
    for (int64_t task; (task = queue.take()) < groups * shares;) {
      const int64_t group = task / shares, first = task % shares * 256;
      put_queries(group, first, least(rows, first + 256), partial + group * group_floats);
    }
  }

  // Writes the gradients of some rows of a group's queries, summed over the chunks, of which the first is `from`.
  void put_queries(int64_t group, int64_t first, int64_t last, const float* from) {
    for (int64_t row = first; row < last; row++) {
      T* to = (T*)at(call.grad_q, batch_of(group), kv_of(group) * heads_a_group + row / call.n, row % call.n);
      for (int64_t c = 0; c < call.d; c += W) {
        const float* x = from + row * width + c;
        Floats total = load(x);
        for (int64_t chunk = 1; chunk < chunks; chunk++) total += load(x + chunk * groups * group_floats);
        put(to + c, total * call.rule.scale, call.d - c);
      }
    }
  }

  int go() {
    threads = (int)least(call.threads, most(1, groups * chunks));
    Memory unused;
    scratch_bytes = padded(lay_out(nullptr, &unused), 4096);
    const int64_t floats = (alone ? threads : chunks * groups) * group_floats;
    const int64_t copies = learned.copies_floats(chunks), sums = learned.row_floats(chunks);
    char* memory = borrow((size_t)(threads * scratch_bytes + (floats + copies + sums) * 4));
    if (!memory) return HEADWISE_NO_MEMORY;
    scratch = memory;
    partial = (float*)(memory + threads * scratch_bytes);
    learned.copies = partial + floats;
    learned.row_sums = learned.copies + copies;
    __builtin_memset(learned.row_sums, 0, (size_t)sums * 4);
    learned.clear();
    all_finite_needed = !everything_is_seen(call);
    if (!values_only && !alone) on_all<&Backward::deltas>(this, threads);
    for (first_batch = 0; first_batch < call.b && !queue.ended.value; first_batch += learned.wave_batches)
      for (first_kv = 0; first_kv < call.h_kv; first_kv += learned.wave_kvs) {
        if (!alone) __builtin_memset(partial, 0, (size_t)floats * 4);
        __builtin_memset(learned.copies, 0, (size_t)copies * 4);
        on_all<&Backward::chunk_of_keys>(this, threads);
        if (!values_only && !alone) on_all<&Backward::add_queries>(this, threads);
        if (call.grad_relative) learned.add_copies(first_kv, chunks);
      }
    if (learned.by_row()) learned.add_rows(chunks);
    if (call.grad_sinks) learned.sinks();
    give_back(memory);
    if (refused.value) return REFUSED;
    return broken.value ? HEADWISE_NOT_FINITE : HEADWISE_DONE;
  }
};

static int backward(const headwise_backward_call& call) {
#if HEADWISE_TILES
  // With fewer, parts (operand.h) are slower than float32.
  const bool few = !HEADWISE_ALWAYS_PARTS && call.n * call.m < 1 << 13;
  if (call.dtype != HEADWISE_BFLOAT16 && (call.single || few)) return REFUSED;
#endif
  return by_dtype<Backward>(call);
}
