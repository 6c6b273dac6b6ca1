// Weights pooled over squares of cell × cell: a picture of the matrix or of a rectangle of it, or with cell 1 the weights.
//
// A task (a rectangle of weights.h) is some rows of squares times some columns of squares. The weights of a few queries in a
// row of squares are summed over the queries first, into one number per key, then over the keys of each square; likewise
// the maximum. The sums of squares are float64: a square may have 10^9 weights.

template <typename T> struct Pool {
  typedef Weights<headwise_pool_call, T> Source;

  const headwise_pool_call& call;
  const int64_t height, width;         // in squares
  const int64_t task_rows, task_cols;  // in squares
  const int64_t rows_at_once;          // rows of squares in one block of queries
  const Source source;
  int64_t scratch_bytes;
  char* scratch;
  Queue queue;
  Flag refused;

  struct Memory {
    typename Source::Memory source;
    float *line, *peaks;  // sums and maxima over a few queries, one number per key
    double* sums;         // [rows_at_once][task_cols], as are the next two
    float* tops;
    int64_t* allowed;
  };

  explicit Pool(const headwise_pool_call& call)
      : call(call), height(blocks(call.n, call.cell)), width(blocks(call.m, call.cell)),
        task_rows(squares(least(2048, most(256, call.n / 16)), height)), task_cols(squares(HEADWISE_STRIPE, width)),
        rows_at_once(squares(BLOCK_ROWS, height)),
        source(call, least(task_cols * call.cell, call.m), call.logs, refused, queue), queue{}, refused{0} {}

  // The number of squares that span about `cells` queries or keys, at least one and at most all.
  int64_t squares(int64_t cells, int64_t all) const { return least(most(1, cells / call.cell), most(1, all)); }

  int64_t lay_out(char* memory, Memory* m) const {
    Arena arena = {memory};
    source.lay_out(arena, m->source);
    m->line = arena.take<float>(STRIDE);
    m->peaks = arena.take<float>(STRIDE);
    m->sums = arena.take<double>(rows_at_once * task_cols);
    m->tops = arena.take<float>(rows_at_once * task_cols);
    m->allowed = arena.take<int64_t>(rows_at_once * task_cols);
    return arena.next - memory;
  }

  void work(int worker) {
    const Tiles<TILED<Source::OF>> tiles;
    Memory m;
    lay_out(scratch + worker * scratch_bytes, &m);
    const int64_t high = blocks(height, task_rows), wide = blocks(width, task_cols);
    for (int64_t task; !refused.value && (task = queue.take()) < call.b * call.h * high * wide;) {
      // The last rows first, since under a causal mask they have the most keys.
      const int64_t row = (high - 1 - task / wide % high) * task_rows, col = task % wide * task_cols;
      source.turn_to(m.source, task / (high * wide), col * call.cell, least(call.m, (col + task_cols) * call.cell));
      const int64_t last = least(height, row + task_rows);
      if (call.logs) {
        for (int64_t i = row; i < last; i += BLOCK_ROWS) log_sums(i, (int)least(BLOCK_ROWS, last - i), task % wide, wide, m);
      } else if (call.cell == 1 && !call.largest && !call.allowed) {
        for (int64_t i = row; i < last; i += BLOCK_ROWS) copy(i, (int)least(BLOCK_ROWS, last - i), m);
      } else {
        for (int64_t i = row; i < last; i += rows_at_once)
          rows_of_squares(i, least(rows_at_once, last - i), col, least(task_cols, width - col), m);
      }
    }
  }

  // Squares of one weight: cell 1.
  void copy(int64_t query, int count, Memory& m) const {
    const int64_t begin = m.source.begin, end = m.source.end;
    float* to = call.mean + (m.source.head * call.n + query) * call.m;
    for (int r = 0; r < count; r++) __builtin_memset(to + r * call.m + begin, 0, (size_t)(end - begin) * 4);
    source.block(m.source, query, count, begin, end, [&](int r, int rows, int64_t key, const float* p, int64_t keys) {
      for (int i = 0; i < rows; i++) __builtin_memcpy(to + (r + i) * call.m + key, p + i * STRIDE, (size_t)keys * 4);
    });
  }

  // Of each row the largest z = log2 of a weight in a stripe of keys, and Σ 2^(z - largest).
  void log_sums(int64_t query, int count, int64_t stripe, int64_t stripes, Memory& m) const {
    float tops[BLOCK_ROWS], sums[BLOCK_ROWS];
    for (int r = 0; r < count; r++) tops[r] = NOTHING, sums[r] = 0.0f;
    source.block(m.source, query, count, m.source.begin, m.source.end,
                 [&](int r, int rows, int64_t, const float* z, int64_t keys) {
                   for (int i = 0; i < rows; i++) add_logs(z + i * STRIDE, keys, tops[r + i], sums[r + i]);
                 });
    for (int r = 0; r < count; r++) {
      const int64_t at = (m.source.head * call.n + query + r) * stripes + stripe;
      call.largest[at] = tops[r], call.mean[at] = sums[r];
    }
  }
  static void add_logs(const float* z, int64_t keys, float& top, float& total) {
    Floats highest = all(top), part = all(0.0f);
    const auto read = [&](int64_t i) { return choose(ramp() < (float)(keys - i), load(z + i), all(NOTHING)); };
    for (int64_t i = 0; i < keys; i += W) highest = larger(highest, read(i));
    const float now = maximum(highest);
    if (now == NOTHING) return;
    for (int64_t i = 0; i < keys; i += W) part += exp2(read(i) - now);
    total = total * exp2(all(top - now))[0] + sum(part);
    top = now;
  }

  void rows_of_squares(int64_t row, int64_t rows, int64_t col, int64_t cols, Memory& m) const {
    for (int64_t i = 0; i < rows * task_cols; i++) m.sums[i] = 0.0, m.tops[i] = 0.0f, m.allowed[i] = 0;
    const int64_t last = least(call.n, (row + rows) * call.cell), step = least(BLOCK_ROWS, rows * call.cell);
    for (int64_t query = row * call.cell; query < last; query += step) {
      const auto take = [&](int r, int some, int64_t key, const float* p, int64_t keys) {
        for (int i = 0, next; i < some; i = next) {
          const int64_t square = (query + r + i) / call.cell;
          next = (int)least(some, (square + 1) * call.cell - query - r);
          add(p + i * STRIDE, next - i, key, keys, (square - row) * task_cols - col, m);
        }
      };
      source.block(m.source, query, (int)least(step, last - query), m.source.begin, m.source.end, take);
    }
    if (call.mean || call.allowed)
      for (int64_t i = 0; i < rows; i++) count(row + i, col, cols, m.allowed + i * task_cols, m);
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < cols; j++) {
        const int64_t at = (m.source.head * height + row + i) * width + col + j, cells = m.allowed[i * task_cols + j];
        const double sum = m.sums[i * task_cols + j];
        if (call.mean) call.mean[at] = cells ? (float)(sum / (double)cells) : 0.0f;
        if (call.largest) call.largest[at] = sum == sum ? m.tops[i * task_cols + j] : (float)sum;  // NaN where a weight is
        if (call.allowed) call.allowed[at] = cells;
      }
  }

  static float largest_of(float a, float b) { return b > a ? b : a; }

  // The weights of a few queries in one row of squares; a square is stored `offset` places later.
  void add(const float* p, int rows, int64_t key, int64_t keys, int64_t offset, Memory& m) const {
    for (int64_t i = 0; i < keys; i += W) {
      Floats sum = load(p + i), top = sum;
      for (int r = 1; r < rows; r++) {
        const Floats x = load(p + r * STRIDE + i);
        sum += x;
        top = larger(top, x);
      }
      store(m.line + i, sum);
      store(m.peaks + i, top);
    }
    int64_t square = key / call.cell;
    for (int64_t i = 0; i < keys; square++) {
      const int64_t stop = least(keys, (square + 1) * call.cell - key);
      float found = 0.0f, top = m.tops[offset + square];
      if (stop - i >= 2 * W) {
        Floats sums = load(m.line + i), peaks = load(m.peaks + i);
        for (i += W; i + W <= stop; i += W) {
          sums += load(m.line + i);
          peaks = larger(peaks, load(m.peaks + i));
        }
        found = sum(sums);
        top = largest_of(top, maximum(peaks));
      }
      for (; i < stop; i++) {
        found += m.line[i];
        top = largest_of(top, m.peaks[i]);
      }
      m.sums[offset + square] += (double)found;
      m.tops[offset + square] = top;
    }
  }

  // Adds the number of unmasked pairs to a row of squares from column `col` on.
  void count(int64_t row, int64_t col, int64_t cols, int64_t* allowed, Memory& m) const {
    const headwise_rule& rule = call.rule;
    const int64_t batch = m.source.head / call.h, begin = m.source.begin, end = m.source.end;
    int64_t whole = 0;  // queries that attend to all of the keys
    for (int64_t query = row * call.cell; query < least(call.n, (row + 1) * call.cell); query++) {
      if (sees_all(call, batch, query, begin, end)) {
        whole++;
        continue;
      }
      const uint8_t* dense = rule.dense ? rule.dense + batch * rule.dense_batch + m.source.head % call.h * rule.dense_head +
                                              query * rule.dense_row
                                        : nullptr;
      const int32_t* span = spans_of(call, batch, query);
      for (int i = 0; i < rule.span_count; i++, span += 2) {
        const int64_t last = least(span[1], end);
        int64_t key = most(span[0], begin);
        for (int64_t square = key / call.cell; key < last; square++) {
          const int64_t stop = least(last, (square + 1) * call.cell);
          allowed[square - col] += stop - key;
          for (; dense && key < stop; key++) allowed[square - col] -= !dense[key];
          key = stop;
        }
      }
    }
    for (int64_t i = 0; i < cols && whole; i++) allowed[i] += whole * (least(end, begin + (i + 1) * call.cell) - begin - i * call.cell);
  }

  int go() { return do_all(*this, call.b * call.h * blocks(height, task_rows) * blocks(width, task_cols)); }
};

static int pool(const headwise_pool_call& call) { return read_map<Pool>(call); }
