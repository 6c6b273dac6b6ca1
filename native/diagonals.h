// The mass of each diagonal, Σ p over the pairs of query and key at one distance.
//
// A task is a stripe of diagonals of one head. It processes some queries and the keys on those diagonals at a time (a
// rectangle of weights.h). Tasks have separate results. A block of queries is summed in a strip of float32, and strips in
// float64.

template <typename T> struct Diagonals {
  typedef Weights<headwise_diagonals_call, T> Source;
  static constexpr int64_t STEP = 512;  // queries per rectangle

  const headwise_diagonals_call& call;
  const int64_t all, stripe;  // diagonals; the first is that of the last query and key 0
  const Source source;
  int64_t scratch_bytes;
  char* scratch;
  Queue queue;
  Flag refused;

  struct Memory {
    typename Source::Memory source;
    float* strip;
    double* sums;
  };

  explicit Diagonals(const headwise_diagonals_call& call)
      : call(call), all(call.n + call.m - 1), stripe(least(1024, most(256, padded(all / 32, W)))),
        source(call, least(call.m, stripe + STEP), false, refused, queue), queue{}, refused{0} {}

  int64_t lay_out(char* memory, Memory* m) const {
    Arena arena = {memory};
    source.lay_out(arena, m->source);
    m->strip = arena.take<float>(stripe);
    m->sums = arena.take<double>(stripe);
    return arena.next - memory;
  }

  void work(int worker) {
    const Tiles<TILED<Source::OF>> tiles;
    Memory m;
    lay_out(scratch + worker * scratch_bytes, &m);
    const int64_t stripes = blocks(all, stripe);
    for (int64_t task; !refused.value && (task = queue.take()) < call.b * call.h * stripes;) {
      const int64_t head = task / stripes, first = task % stripes * stripe, count = least(stripe, all - first);
      for (int64_t i = 0; i < count; i++) m.sums[i] = 0.0;
      // Query i is on the first diagonal at key i + first - (n - 1).
      for (int64_t query = 0; query < call.n; query += STEP) {
        const int64_t last = least(call.n, query + STEP), base = first - (call.n - 1);
        const int64_t begin = most(0, query + base), end = least(call.m, last - 1 + base + count);
        if (begin < end) rectangle(head, query, last, base, count, begin, end, m);
      }
      float* to = call.mass + head * all + first;
      for (int64_t i = 0; i < count; i++) to[i] = (float)m.sums[i];
    }
  }

  void rectangle(int64_t head, int64_t query, int64_t last, int64_t base, int64_t count, int64_t begin, int64_t end,
                 Memory& m) const {
    source.turn_to(m.source, head, begin, end);
    for (; query < last; query += BLOCK_ROWS) {
      const int rows = (int)least(BLOCK_ROWS, last - query);
      const int64_t low = most(begin, query + base), high = least(end, query + rows - 1 + base + count);
      if (low >= high) continue;
      for (int64_t i = 0; i < count; i++) m.strip[i] = 0.0f;
      source.block(m.source, query, rows, low, high, [&](int r, int some, int64_t key, const float* p, int64_t keys) {
        for (int i = 0; i < some; i++) {
          const int64_t from = query + r + i + base;  // the key of this query on the stripe's first diagonal
          const int64_t start = most(key, from), stop = least(key + keys, from + count);
          if (start < stop) add(m.strip + (start - from), p + i * STRIDE + (start - key), stop - start);
        }
      });
      for (int64_t i = 0; i < count; i++) m.sums[i] += (double)m.strip[i];
    }
  }

  static void add(float* to, const float* x, int64_t count) {
    for (; count >= W; count -= W, to += W, x += W) store(to, load(to) + load(x));
    for (; count > 0; count--) *to++ += *x++;
  }

  int go() { return do_all(*this, call.b * call.h * blocks(all, stripe)); }
};

static int diagonals(const headwise_diagonals_call& call) { return read_map<Diagonals>(call); }
