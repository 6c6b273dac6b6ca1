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

template <Operand OF> INLINE Ints not_finite_words(Floats x) {
  if (OF != PAIRS) return not_finite(x);
  return not_finite((Floats)((Words)x << 16)) | not_finite((Floats)((Words)x & 0xffff0000u));
}

// One panel of keys, [word][PANEL], from `rows` rows; the others are zeros, in the vectors that a product reads. Sets the
// lanes of `check` in which a NaN or an infinity occurs; with PARTS, all lanes if the numbers do not fit (parts.h).
template <Operand OF, typename T>
static void pack_keys(const T* keys, int64_t stride, int64_t rows, int64_t d, float* panel, Ints& check) {
  if constexpr (OF == PARTS) return pack_keys_in_parts(keys, stride, rows, d, panel, check);
  const int64_t size = words_of<OF>(d), whole = whole_words<OF>(d);
  Ints met = check;
  const int64_t width = vectors_for<OF>(padded(rows, KEYS_AT_ONCE<OF>)) * W;
  for (int64_t j = 0; j < width; j += W) {
    if (j >= rows) {
      for (int64_t c = 0; c < size; c++) store(panel + c * PANEL + j, all(0.0f));
      continue;
    }
    const T* from = keys + j * stride;
    for (int64_t c = 0; c < size; c += W) {
      Floats tile[W];
      if (c < whole && j + W <= rows) {
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) tile[r] = whole_word<OF>(from + r * stride, c);
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) tile[r] = j + r < rows ? words<OF>(from + r * stride, c, d) : all(0.0f);
      }
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) met |= not_finite_words<OF>(tile[r]);
      transpose(tile);
      float* to = panel + c * PANEL + j;
      if (c < whole) {
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) store(to + r * PANEL, tile[r]);
      } else {
        for (int64_t r = 0; r < size - c; r++) store(to + r * PANEL, tile[r]);
      }
    }
  }
  check = met;
}

// Rows [from, to) of values into all panels of columns; `height` is the padded number of keys. Rows at and beyond m are
// zeros, and so are columns beyond d in `vectors_for` vectors.
template <Operand OF, typename T>
static void pack_values(const T* values, int64_t stride, int64_t m, int64_t d, int64_t from, int64_t to, int64_t height,
                        float* panels, Ints& check) {
  if constexpr (OF == PARTS) return pack_values_in_parts(values, stride, m, d, from, to, height, panels, check);
  constexpr int AT_ONCE = OF == PAIRS ? 2 : 1;
  Ints met = check;
  for (int64_t p = 0; p * PANEL < d; p++) {
    float* panel = panels + p * PANEL * height / AT_ONCE;
    const bool whole = (p + 1) * PANEL <= d;
    const int64_t width = vectors_for<OF>(d - p * PANEL) * W;
    for (int64_t j = from; j < to; j += AT_ONCE) {
      const T* here = values + j * stride + p * PANEL;
      float* row = panel + j / AT_ONCE * PANEL;
      for (int64_t v = 0; v < width; v += W) {
        const int64_t left = whole ? W : d - p * PANEL - v;
        const Floats upper = j < m && left > 0 ? read(here + v, left) : all(0.0f);
        met |= not_finite(upper);
        if (OF != PAIRS) {
          store(row + v, upper);
          continue;
        }
        const Floats lower = j + 1 < m && left > 0 ? read(here + stride + v, left) : all(0.0f);
        met |= not_finite(lower);
        store(row + v, (Floats)(((Words)upper >> 16) | ((Words)lower & 0xffff0000u)));
      }
    }
  }
  check = met;
}
