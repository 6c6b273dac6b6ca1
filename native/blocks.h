// What a block of queries is computed with: its sizes, its buffers, and its queries.

// Words per step of p·V, so that a panel of values stays in L1.
constexpr int VALUE_WORDS = 4096 / PANEL;
// Keys of a block of logits, and the row lengths of logits and, with tiles, of weights, which may take the place of logits.
template <Operand OF> constexpr int KEYS_A_BLOCK = TILED<OF> ? PANEL : BLOCK_KEYS;
template <Operand OF> constexpr int WEIGHTS_STRIDE = TILED<OF> ? PANEL / NUMBERS<OF> * STEP<OF> : 0;
template <Operand OF> constexpr int LOGITS_STRIDE = OF == PARTS ? WEIGHTS_STRIDE<OF> : TILED<OF> ? PANEL + 16 : STRIDE;

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

template <Operand OF> static Shape shape_of(const headwise_forward_call& call, const Wanted& wanted) {
  Shape s;
  s.words = words_of<OF>(call.d);
  s.width = padded(call.d_v, PANEL);
  s.height = padded(call.m, PANEL);
  s.key_bytes = padded(s.height * s.words * 4, 64);
  s.value_bytes = padded(s.width * words_of<OF>(s.height) * 4, 64);
  s.query_blocks = blocks(call.n, BLOCK_ROWS);
  s.key_blocks = blocks(call.m, KEYS_A_BLOCK<OF>);
  s.chunks = wanted.count[COLUMNS] ? most(1, least(s.query_blocks, 64 / most(1, call.b * call.h))) : s.query_blocks;
  s.strip = wanted.count[COLUMNS] ? s.key_blocks * KEYS_A_BLOCK<OF> + 16 : 0;
  return s;
}

// Buffers of one thread.
struct Scratch {
  Ahead ahead;
  Rows rows;
  Floats fold[BLOCK_ROWS];  // maxima of logits
  float *queries, *out, *logits, *strip, *tops, *columns;
  Best best;

  // On two levels (levels.h):
  Rows past;                    // sums of the blocks before
  float* before;                // and their p V
  bool gathered;                // whether there are any

  // With tiles (panels.h):
  float* weights;               // p, as words
  float bases[BLOCK_ROWS];      // tops, 0 if there is none
  float factors[BLOCK_ROWS];    // from products to logits
  float limits[BLOCK_ROWS];     // logits above them raise the top
  float changes[BLOCK_ROWS];    // factors of the rows of p V
  float offsets[2][BLOCK_ROWS]; // row − centre; −row − centre
  bool changed;                 // whether any is not 1
  bool summed;                  // whether there is a sum of p V
};

struct Arena {
  char* next;
  template <typename T> T* take(int64_t count) {
    T* here = (T*)next;
    next += padded(count * (int64_t)sizeof(T), 64);
    return here;
  }
};

template <Operand OF> static int64_t lay_out(const Wanted& wanted, const Shape& s, char* memory, Scratch** out) {
  Arena arena = {memory};
  Scratch* t = arena.take<Scratch>(1);
  Scratch sizes;
  Scratch& it = memory ? *t : sizes;
  it.ahead.begin(0);
  it.queries = arena.take<float>(BLOCK_ROWS * s.words);
  it.out = arena.take<float>(BLOCK_ROWS * s.width);
  it.before = arena.take<float>(BLOCK_ROWS * s.width);
  it.logits = arena.take<float>((TILED<OF> ? 2 : 1) * BLOCK_ROWS * LOGITS_STRIDE<OF>);
  it.weights = arena.take<float>(2 * BLOCK_ROWS * WEIGHTS_STRIDE<OF>);
  it.strip = arena.take<float>(BLOCK_ROWS * s.strip);
  it.tops = arena.take<float>(s.strip ? BLOCK_ROWS * s.key_blocks : 0);
  it.columns = arena.take<float>(s.strip ? s.key_blocks * KEYS_A_BLOCK<OF> : 0);
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
template <Operand OF> static Scaling scaling_of(const headwise_rule& rule) {
  Scaling s;
  s.adjusted = rule.soft_cap > 0 || rule.relative || rule.bias;
  const float scale = s.adjusted ? rule.scale : rule.scale * LOG2E;
  s.flip = OF == PAIRS && scale < 0;
  s.query = OF == PAIRS ? (scale == 0.0f ? 0.0f : 1.0f) : scale;  // a factor of 0 would turn a masked -inf into NaN
  s.factor = OF == PAIRS && scale != 0.0f ? (s.flip ? -scale : scale) : 1.0f;
  return s;
}

template <Operand OF> INLINE Floats scaled(Floats x, const Scaling& scaling) {
  if (OF != PAIRS) return x * scaling.query;
  if (scaling.flip) x = (Floats)((Words)x ^ 0x80008000u);
  return scaling.query == 0.0f ? all(0.0f) : x;
}

template <Operand OF, typename T>
static void load_queries(const T* q, int64_t stride, int rows, int64_t d, const Scaling& scaling, int64_t size,
                         float* queries, bool* broken, Flag& refused) {
  if constexpr (OF == PARTS) {
    for (int r = 0; r < rows; r++) {
      const Magnitudes met = split_row(q + r * stride, d, scaling.query, queries + r * size);
      Magnitudes unscaled;
      for (int64_t c = 0; c < d && !met.finite(); c += W) unscaled.add(read(q + r * stride + c, d - c));
      broken[r] = !unscaled.finite();
      if (!broken[r] && !met.fit()) refused.raise();
    }
    return;
  }
  const int64_t whole = whole_words<OF>(d);
  for (int r = 0; r < rows; r++) {
    const T* from = q + r * stride;
    float* to = queries + r * size;
    Finite<OF> check;
    for (int64_t c = 0; c < whole; c += W) {
      const Floats x = whole_word<OF>(from, c);
      check.add(x);
      store(to + c, scaled<OF>(x, scaling));
    }
    if (whole < size) {
      const Floats x = words<OF>(from, whole, d);
      check.add(x);
      write(to + whole, scaled<OF>(x, scaling), size - whole);
    }
    broken[r] = !check.all();
  }
}
