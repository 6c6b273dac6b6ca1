// Copies of keys and values in the order in which the products read them, converted to the operands of the arithmetic.
//
//   keys:    panels of PANEL keys, each [word][PANEL]: one row of a panel is the same word of all its keys
//   values:  panels of PANEL columns, each [word][PANEL]
//
// Keys and values are padded with zeros to full panels, vectors and steps, so that no product has a remainder.

// Words of one row from word `c` on: numbers converted to float32, or pairs of bfloat16 as stored.
template <Operand OF, typename T> INLINE Floats words(const T* row, int64_t c, int64_t size) {
  if (OF != PAIRS) return read(row + c, size - c);
  const int64_t left = size - 2 * c;
  if (left >= 2 * W) return load((const float*)(row + 2 * c));
  uint16_t pad[2 * W] = {};
  for (int64_t i = 0; i < left; i++) __builtin_memcpy(pad + i, row + 2 * c + i, 2);
  return load((const float*)pad);
}

// The same for full vectors, and the number of words of a row in full vectors.
template <Operand OF, typename T> INLINE Floats whole_word(const T* row, int64_t c) {
  return OF == PAIRS ? load((const float*)(row + 2 * c)) : read(row + c, W);
}
template <Operand OF> INLINE int64_t whole_words(int64_t size) { return (OF == PAIRS ? size / 2 : size) / W * W; }

// W words of up to W keys, at the edges of a panel.
template <Operand OF, typename T>
static __attribute__((noinline)) void pack_edge(const T* from, int64_t stride, int64_t rows, int64_t c, int64_t d, float* to,
                                                Finite<OF>& check) {
  Floats tile[W];
  for (int r = 0; r < W; r++) {
    tile[r] = r < rows ? words<OF>(from + r * stride, c, d) : all(0.0f);
    check.add(tile[r]);
  }
  transpose(tile);
  for (int64_t r = 0; r < least(W, words_of<OF>(d) - c); r++) store(to + r * PANEL, tile[r]);
}

// One panel of keys, [word][PANEL], from `rows` rows; the others are zeros, in the vectors that a product reads. With PARTS,
// `check` also fails if the numbers do not fit (parts.h).
template <Operand OF, typename T>
static void pack_keys(const T* keys, int64_t stride, int64_t rows, int64_t d, float* panel, Finite<OF>& check) {
  if constexpr (OF == PARTS) return pack_keys_in_parts(keys, stride, rows, d, panel, check);
  const int64_t size = words_of<OF>(d), whole = whole_words<OF>(d);
  const int64_t width = vectors_for<OF>(padded(rows, KEYS_AT_ONCE<OF>)) * W;
  Finite<OF> met = check;
  for (int64_t j = 0; j < width; j += W) {
    const T* from = keys + j * stride;
    int64_t c = 0;
    for (; c < whole && j + W <= rows; c += W) {
      Floats tile[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) met.add(tile[r] = whole_word<OF>(from + r * stride, c));
      transpose(tile);
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) store(panel + (c + r) * PANEL + j, tile[r]);
    }
    for (; c < size; c += W) pack_edge<OF>(from, stride, rows - j, c, d, panel + c * PANEL + j, met);
  }
  check = met;
}

// Rows [from, to) of values into all panels of columns; `height` is the padded number of keys. Rows at and beyond m are
// zeros, and so are columns beyond d in `vectors_for` vectors.
template <Operand OF, typename T>
static void pack_values(const T* values, int64_t stride, int64_t m, int64_t d, int64_t from, int64_t to, int64_t height,
                        float* panels, Finite<OF>& check) {
  if constexpr (OF == PARTS) return pack_values_in_parts(values, stride, m, d, from, to, height, panels, check);
  constexpr int AT_ONCE = OF == PAIRS ? 2 : 1;
  Finite<OF> met = check;
  for (int64_t p = 0; p < d; p += PANEL) {
    float* panel = panels + p * height / AT_ONCE;
    const int64_t width = vectors_for<OF>(d - p) * W;
    for (int64_t j = from; j < to; j += AT_ONCE)
      for (int64_t v = 0; v < width; v += W) {
        const T* here = values + j * stride + p + v;
        const int64_t left = d - p - v, first = j < m ? left : 0;
        Floats word = read(here, first);
        if constexpr (OF == PAIRS)
          word = (Floats)((Words)word >> 16 | (Words)read(here + stride, j + 1 < m ? left : 0));
        met.add(word);
        store(panel + j / AT_ONCE * PANEL + v, word);
      }
  }
  check = met;
}
