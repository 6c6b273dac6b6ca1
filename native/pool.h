// The matrix as a small picture: weights made again from q, k and the log-sum-exp, and pooled in squares of cell × cell.
//
// A task is one row of squares: its queries against all keys they see, block by block. A block's weights are added up (or their
// largest taken) over the queries first, into one number a key, then over the keys of each square.

template <typename T> struct Pool {
  const headwise_pool_call& call;
  const Scaling scaling;
  const int64_t height, width, packed_bytes;
  int64_t scratch_bytes, head;  // counted through batch entries and heads
  char *packed, *scratch;
  Queue queue;

  struct Memory {
    float *queries, *logits, *keys, *sums;
    double* counts;
    bool* broken;
  };

  explicit Pool(const headwise_pool_call& call)
      : call(call), scaling(scaling_of<false>(call.rule)), height(blocks(call.n, call.cell)),
        width(blocks(call.m, call.cell)),
        packed_bytes(padded(padded(call.m, PANEL) * call.d * 4, 64)), queue{0} {}

  int64_t lay_out(char* memory, Memory* m) const {
    Arena arena = {memory};
    m->queries = arena.take<float>(BLOCK_ROWS * call.d);
    m->logits = arena.take<float>(BLOCK_ROWS * STRIDE);
    m->keys = arena.take<float>(padded(call.m, BLOCK_KEYS));
    m->sums = arena.take<float>(width);
    m->counts = arena.take<double>(width + 1);
    m->broken = arena.take<bool>(BLOCK_ROWS);
    return arena.next - memory;
  }

  const T* at(const headwise_tensor& x, int64_t index, int64_t row) const {
    return (const T*)x.data + head / call.h * x.batch + index * x.head + row * x.row;
  }

  void pack(int) {
    const int64_t index = head % call.h / (call.h / call.h_kv), panels = blocks(call.m, PANEL), share = 16;
    Ints unused = {};
    for (int64_t task; (task = queue.take()) < blocks(panels, share);)
      for (int64_t p = task * share; p < least(panels, (task + 1) * share); p++)
        pack_keys<false>(at(call.k, index, p * PANEL), call.k.row, call.m - p * PANEL, call.d,
                         (float*)packed + p * PANEL * call.d, unused);
  }

  void squares(int worker) {
    Memory m;
    lay_out(scratch + worker * scratch_bytes, &m);
    for (int64_t task; (task = queue.take()) < height;) {
      const int64_t cell_row = height - 1 - task, begin = cell_row * call.cell, end = least(call.n, begin + call.cell);
      __builtin_memset(m.keys, 0, (size_t)padded(call.m, BLOCK_KEYS) * 4);
      for (int64_t query = begin; query < end; query += BLOCK_ROWS) queries(query, (int)least(BLOCK_ROWS, end - query), m);
      row_of_squares(begin, end, call.pooled + (head * height + cell_row) * width, m);
    }
  }

  void queries(int64_t query, int count, Memory& m) {
    const int64_t batch = head / call.h;
    load_queries<false>(at(call.q, head % call.h, query), call.q.row, count, call.d, scaling, call.d, m.queries, m.broken);
    const Hull seen = hull(call, batch, query, count, 0, call.m);
    for (int64_t from = seen.first / BLOCK_KEYS * BLOCK_KEYS; from < seen.last; from += BLOCK_KEYS)
      for (int g = 0; g < count; g += ROWS) {
        const int rows = (int)least(ROWS, count - g);
        const Hull part = hull(call, batch, query + g, rows, from, least(from + BLOCK_KEYS, call.m));
        if (part.first == part.last) continue;
        for (int64_t p = (part.first - from) / PANEL * PANEL; p < part.last - from; p += PANEL)
          product<false, false, false>(rows, m.queries + g * call.d, call.d, (const float*)packed + (from + p) * call.d,
                                       m.logits + g * STRIDE + p, STRIDE, call.d, nullptr);
        for (int r = g; r < g + rows; r++) row(batch, query, r, from, part, m);
      }
  }

  void row(int64_t batch, int64_t query, int r, int64_t from, const Hull& part, Memory& m) {
    Stretch s = {m.logits + r * STRIDE, (part.first - from) / W * W, padded(part.last - from, W), from,
                 query + r + call.rule.shift};
    if (scaling.adjusted) adjust(call, batch, head % call.h, query + r, s, 1.0f);
    if (!sees_all(call, batch, query + r, from + s.from, from + s.to)) hide(call, batch, head % call.h, query + r, s);
    const float lse = call.lse[head * call.n + query + r];
    const float base = lse == NOTHING ? -NOTHING : lse * LOG2E;
    float* keys = m.keys + from;
    for (int64_t i = s.from; i < s.to; i += W) {
      const Floats p = exp2(load(s.logits + i) - base);
      store(keys + i, call.largest ? larger(load(keys + i), p) : load(keys + i) + p);
    }
  }

  void row_of_squares(int64_t begin, int64_t end, float* pooled, Memory& m) {
    for (int64_t j = 0; j < width; j++) {
      const int64_t first = j * call.cell, last = least(call.m, first + call.cell);
      float found = 0.0f;
      for (int64_t i = first; i < last; i++) found = call.largest ? (m.keys[i] <= found ? found : m.keys[i]) : found + m.keys[i];
      pooled[j] = found;
    }
    if (call.largest) return;
    // Cells that are allowed: whole squares of a span are counted by where they begin and end.
    for (int64_t j = 0; j <= width; j++) m.counts[j] = 0.0;
    for (int64_t j = 0; j < width; j++) m.sums[j] = 0.0f;
    for (int64_t i = begin; i < end; i++) {
      const int32_t* span = spans_of(call, head / call.h, i);
      for (int k = 0; k < call.rule.span_count; k++, span += 2) {
        if (span[0] >= span[1]) continue;
        const int64_t low = span[0] / call.cell, high = (span[1] - 1) / call.cell;
        m.sums[low] -= (float)(span[0] - low * call.cell);
        m.sums[high] -= (float)(least(call.m, (high + 1) * call.cell) - span[1]);
        m.counts[low] += 1.0;
        m.counts[high + 1] -= 1.0;
      }
    }
    double rows = 0.0;
    for (int64_t j = 0; j < width; j++) {
      rows += m.counts[j];
      const double cells = rows * (double)(least(call.m, (j + 1) * call.cell) - j * call.cell) + m.sums[j];
      pooled[j] = cells > 0.0 ? (float)(pooled[j] / cells) : 0.0f;
    }
  }

  int go() {
    const int threads = (int)least(call.threads, most(1, height));
    Memory unused;
    scratch_bytes = padded(lay_out(nullptr, &unused), 4096);
    char* memory = borrow((size_t)(packed_bytes + threads * scratch_bytes));
    if (!memory) return HEADWISE_NO_MEMORY;
    packed = memory;
    scratch = memory + packed_bytes;
    for (head = 0; head < call.b * call.h; head++) {
      if (head % call.h % (call.h / call.h_kv) == 0) on_all<&Pool::pack>(this, threads);
      on_all<&Pool::squares>(this, threads);
    }
    give_back(memory);
    return HEADWISE_DONE;
  }
};

static int pool(const headwise_pool_call& call) {
  if (call.dtype == HEADWISE_BFLOAT16) return Pool<Brain>(call).go();
  if (call.dtype == HEADWISE_FLOAT16) return Pool<Half>(call).go();
  return Pool<float>(call).go();
}
