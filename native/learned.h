// Gradients of the terms added to the scores: dS, summed over all scores that read the same number.
//
//   relative   diagonals: each block of queries and keys is summed and added to the copy of its task and head
//   bias       with a number for each key: added in place, since no two tasks of a wave share an entry
//              broadcast over keys: a sum for each row and chunk of keys
//   sinks      a key whose value is 0: dS = p · (0 − δ)
//
// Copies and sums are added up in a fixed order, independent of threads; first the float32 sums of a block, so that
// long sums stay accurate.

constexpr int GRAD_ROWS = 96, GRAD_KEYS = 128;  // queries and keys of a block of the backward pass

struct Learned {
  const headwise_backward_call& call;
  const int64_t heads_a_group;
  bool by_key;                        // there is a bias, and it has a number for each key
  int64_t wave_batches, wave_kvs;     // batch entries and KV heads whose tasks run in parallel
  int64_t diagonals;                  // of a head, padded
  float* copies;                      // [groups of a wave, chunks, heads of a group][diagonals]
  float* row_sums;                    // [chunks, b, h, n]

  // The sums of one block.
  struct Block {
    float *scores, *diagonals, *keys;
  };
  static constexpr int STRIP = GRAD_ROWS + GRAD_KEYS + W;

  explicit Learned(const headwise_backward_call& call) : call(call), heads_a_group(call.h / call.h_kv) {
    by_key = call.grad_bias && (call.grad_bias_col || call.m == 1);
    wave_batches = by_key && !call.grad_bias_batch ? 1 : call.b;
    wave_kvs = by_key && !call.grad_bias_head ? 1 : call.h_kv;
    diagonals = padded(call.n + call.m - 1, W);
  }

  bool wanted() const { return call.grad_relative || call.grad_bias; }
  bool by_row() const { return call.grad_bias && !by_key; }
  int64_t copies_floats(int64_t chunks) const {
    return call.grad_relative ? wave_batches * wave_kvs * chunks * heads_a_group * diagonals : 0;
  }
  int64_t row_floats(int64_t chunks) const { return by_row() ? chunks * call.b * call.h * call.n : 0; }

  void lay_out(Arena& arena, Block& block) const {
    block.scores = arena.take<float>(wanted() ? GRAD_KEYS : 0);
    block.diagonals = arena.take<float>(call.grad_relative ? STRIP : 0);
    block.keys = arena.take<float>(by_key ? GRAD_KEYS : 0);
  }

  float* bias_at(int64_t batch, int64_t head, int64_t query) const {
    return call.grad_bias + batch * call.grad_bias_batch + head * call.grad_bias_head + query * call.grad_bias_row;
  }
  bool shares_rows() const { return by_key && !call.grad_bias_row && call.n > 1; }

  // x [count] += more; memory beyond is not accessed.
  static void add(float* x, const float* more, int64_t count) {
    for (int64_t i = 0; i < count; i += W) write(x + i, read(x + i, count - i) + read(more + i, count - i), count - i);
  }

  void begin(const Block& block) const {
    if (call.grad_relative) __builtin_memset(block.diagonals, 0, STRIP * 4);
    if (shares_rows()) __builtin_memset(block.keys, 0, GRAD_KEYS * 4);
  }

  // Adds dS of row r of the block, whose keys begin at `from`: block.scores [first, last).
  void row(int64_t batch, int64_t head, int64_t query, int r, int64_t chunk, int64_t from, int64_t first, int64_t last,
           const Block& block) const {
    const float* scores = block.scores;
    if (call.grad_relative) {
      float* to = block.diagonals + GRAD_ROWS - 1 - r;
      for (int64_t i = first; i < last; i += W) store(to + i, load(to + i) + load(scores + i));
    }
    if (shares_rows()) {
      for (int64_t i = first; i < last; i += W) store(block.keys + i, load(block.keys + i) + load(scores + i));
    } else if (by_key) {
      add(bias_at(batch, head, query) + from + first, scores + first, least(last, call.m - from) - first);
    } else if (call.grad_bias) {
      Floats total = all(0.0f);
      for (int64_t i = first; i < last; i += W) total += load(scores + i);
      row_sums[(chunk * call.b * call.h + batch * call.h + head) * call.n + query] += sum(total);
    }
  }

  // Adds the block's sums to those of its task; its queries begin at `query`.
  void end(int64_t batch, int64_t head, int64_t query, int64_t from, float* copy, const Block& block) const {
    if (call.grad_relative) {
      const int64_t at = from - query + call.n - GRAD_ROWS;  // index of the strip's first number
      const int64_t skip = most(0, -at), size = least(STRIP, call.n + call.m - 1 - at);
      add(copy + at + skip, block.diagonals + skip, size - skip);
    }
    if (shares_rows()) add(bias_at(batch, head, 0) + from, block.keys, least(GRAD_KEYS, call.m - from));
  }

  // The copy of a task of the wave and one of its heads.
  float* copy_of(int64_t group, int64_t chunk, int64_t chunks, int64_t g) const {
    if (!call.grad_relative) return nullptr;
    return copies + ((group * chunks + chunk) * heads_a_group + g) * diagonals;
  }

  void clear() const {
    if (call.grad_relative)
      for (int64_t head = 0; head < (call.grad_relative_head ? call.h : 1); head++)
        __builtin_memset(call.grad_relative + head * call.grad_relative_head, 0, (size_t)(call.n + call.m - 1) * 4);
    if (!call.grad_bias) return;
    const int64_t b = call.grad_bias_batch ? call.b : 1, h = call.grad_bias_head ? call.h : 1;
    const int64_t n = call.grad_bias_row ? call.n : 1, m = by_key ? call.m : 1;
    for (int64_t i = 0; i < b * h * n; i++) __builtin_memset(bias_at(i / n / h, i / n % h, i % n), 0, (size_t)m * 4);
  }

  // Adds up the copies of a wave whose first KV head is `kv`.
  void add_copies(int64_t kv, int64_t chunks) const {
    for (int64_t group = 0; group < wave_batches * wave_kvs; group++)
      for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t g = 0; g < heads_a_group; g++) {
          const int64_t head = (kv + group % wave_kvs) * heads_a_group + g;
          add(call.grad_relative + head * call.grad_relative_head, copy_of(group, chunk, chunks, g),
              call.n + call.m - 1);
        }
  }

  void add_rows(int64_t chunks) const {
    const int64_t heads = call.b * call.h;
    for (int64_t head = 0; head < heads; head++) {
      float whole = 0.0f;  // of a head whose queries share one number
      for (int64_t i = 0; i < call.n; i++) {
        float total = 0.0f;
        for (int64_t chunk = 0; chunk < chunks; chunk++) total += row_sums[(chunk * heads + head) * call.n + i];
        if (call.grad_bias_row) *bias_at(head / call.h, head % call.h, i) += total;
        whole += total;
      }
      if (!call.grad_bias_row) *bias_at(head / call.h, head % call.h, 0) += whole;
    }
  }

  void sinks() const {
    for (int64_t head = 0; head < call.h; head++) {
      const float sink = call.rule.sinks[head];
      float total = 0.0f;
      for (int64_t batch = 0; batch < call.b; batch++) {
        const int64_t at = (batch * call.h + head) * call.n;
        Floats taken = all(0.0f);
        for (int64_t i = 0; i < call.n; i += W) {
          // The sink has no weight in fully masked rows, and beyond the last row.
          Floats above = all(-NOTHING);  // the sink's logit less the log-sum-exp; infinite for rows that are masked or none
          for (int r = 0; r < least(W, call.n - i); r++) {
            const double lse = call.lse[at + i + r];
            if (lse != NOTHING) above[r] = (float)(sink - lse);
          }
          const Floats p = exp2(above * LOG2E);
          Floats delta = read(call.delta + at + i, call.n - i);
          if (call.shift) delta += read(call.shift + at + i, call.n - i);
          if (call.logs) delta += read(call.logs + at + i, call.n - i);
          taken += choose(above == -NOTHING, all(0.0f), p * delta);
        }
        total += sum(taken);
      }
      call.grad_sinks[head] = -total;
    }
  }
};
