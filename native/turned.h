// Weights and their gradients, [queries][keys] in float32, as operands of the products that sum over queries: Pᵀ dO and dSᵀ Q.

constexpr int GRAD_STRIDE = GRAD_KEYS + 16;
// Row lengths of dS in words of keys, and of Pᵀ and dSᵀ in words of queries.
template <Operand OF> constexpr int GRAD_KEY_WORDS = GRAD_KEYS / NUMBERS<OF> * STEP<OF> + 16;
template <Operand OF> constexpr int GRAD_ROW_WORDS = GRAD_ROWS / NUMBERS<OF> * STEP<OF> + 16;

// As pairs of two rows: [pair][key], or transposed for tiles, [key][pair].
template <Operand OF> static void turn_pairs(const float* weights, int64_t low, int64_t high, int count, float* turned) {
  const auto word = [&](int64_t at, int64_t key) __attribute__((always_inline)) {
    const float* row = weights + 2 * at * GRAD_STRIDE + key;
    if (2 * at >= count) return all(0.0f);
    const Words lower = narrowed(load(row));
    return (Floats)(2 * at + 1 < count ? lower | narrowed(load(row + GRAD_STRIDE)) << 16 : lower);
  };
  if (!TILED<OF>) {
    for (int64_t at = 0; 2 * at < count; at++)
      for (int64_t key = low; key < high; key += W) store(turned + at * GRAD_STRIDE + key, word(at, key));
    return;
  }
  for (int64_t at = 0; 2 * at < count; at += W)
    for (int64_t key = low; key < high; key += W) {
      Floats block[W];
      for (int i = 0; i < W; i++) block[i] = word(at + i, key);
      transpose(block);
      for (int i = 0; i < W; i++) store(turned + (key + i) * GRAD_ROW_WORDS<OF> + at, block[i]);
    }
}

// In parts and transposed: [key][words of queries].
static void turn_parts(const float* weights, int64_t low, int64_t high, int count, float* turned) {
  for (int64_t at = 0; at < count; at += 2 * W)
    for (int64_t key = low; key < high; key += W) {
      Floats blocks[2][W];
      for (int half = 0; half < 2; half++) {
        for (int i = 0; i < W; i++) {
          const int64_t row = at + half * W + i;
          blocks[half][i] = row < count ? load(weights + row * GRAD_STRIDE + key) : all(0.0f);
        }
        transpose(blocks[half]);
      }
      for (int i = 0; i < W; i++)
        split(blocks[0][i], blocks[1][i], turned + (key + i) * GRAD_ROW_WORDS<PARTS> + words_of<PARTS>(at), W);
    }
}

// The weights of `count` rows and the keys [low, high). Rows beyond them that a step of tiles reads are zeros.
template <Operand OF> static void turn(const float* weights, int64_t low, int64_t high, int count, float* turned) {
  if constexpr (OF == PARTS) return turn_parts(weights, low, high, count, turned);
  turn_pairs<OF>(weights, low, high, count, turned);
}
