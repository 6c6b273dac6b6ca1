// Float32 as the sum of three bfloat16 (PARTS of operand.h).

// Whether numbers fit: their parts are finite and normal (tiles take denormal numbers for 0), or they are 0. add() and then fit().
struct Magnitudes {
  Words largest = {}, smallest = ~Words{};  // bits without the sign, of all and of those that are not 0; smallest: minus one
  __attribute__((always_inline)) void add(Floats x) {
    const Words size = (Words)x & 0x7fffffffu, less = size - 1u;
    largest = size > largest ? size : largest;
    smallest = less < smallest ? less : smallest;
  }
  bool finite() const { return !any((Ints)(largest > 0x7f7fffffu)); }
  bool fit() const { return !any((Ints)(largest >= 0x7f7f8000u)) && !any((Ints)(smallest < 0x0c000000u - 1u)); }  // 2^-103
};

// Stores the words of 16 numbers and the next 16: those of each part, `stride` floats apart. The first two parts are rounded;
// the third is exact.
INLINE void split(Floats low, Floats high, float* to, int64_t stride) {
  for (int i = 0; i < 2; i++) {
    const Words a = ((Words)low + 0x8000u) & 0xffff0000u, b = ((Words)high + 0x8000u) & 0xffff0000u;
    store(to + i * stride, (Floats)(a >> 16 | b));
    low -= (Floats)a;
    high -= (Floats)b;
  }
  store(to + 2 * stride, (Floats)((Words)low >> 16 | ((Words)high & 0xffff0000u)));
}

// The words of a row of `size` numbers, multiplied by `scale`, for A.
template <typename T> INLINE Magnitudes split_row(const T* from, int64_t size, float scale, float* to) {
  Magnitudes met;
  for (int64_t c = 0; c < size; c += 2 * W, to += 3 * W) {
    const Floats low = read(from + c, size - c) * scale, high = read(from + c + W, size - c - W) * scale;
    split(low, high, to, W);
    met.add(low);
    met.add(high);
  }
  return met;
}

// pack_keys and pack_values of pack.h.
template <typename T>
static void pack_keys_in_parts(const T* keys, int64_t stride, int64_t rows, int64_t d, float* panel, Finite<PARTS>& check) {
  Magnitudes met;
  const int64_t width = vectors_for<PARTS>(padded(rows, KEYS_AT_ONCE<PARTS>)) * W;
  for (int64_t j = 0; j < width; j += W)
    for (int64_t c = 0; c < d; c += 2 * W) {
      Floats low[W], high[W];
      const T* from = keys + j * stride + c;
      if (j + W <= rows && c + 2 * W <= d) {
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) low[r] = read(from + r * stride, W), high[r] = read(from + r * stride + W, W);
      } else {
        for (int r = 0; r < W; r++) {
          const int64_t left = j + r < rows ? d - c : 0;
          low[r] = read(from + r * stride, left);
          high[r] = read(from + r * stride + W, left - W);
        }
      }
      transpose(low);
      transpose(high);
      float* to = panel + words_of<PARTS>(c) * PANEL + j;
      for (int r = 0; r < W; r++) {
        split(low[r], high[r], to + r * PANEL, W * PANEL);
        met.add(low[r]);
        met.add(high[r]);
      }
    }
  if (!met.fit()) check.fail();
}

template <typename T>
static void pack_values_in_parts(const T* values, int64_t stride, int64_t m, int64_t d, int64_t from, int64_t to,
                                 int64_t height, float* panels, Finite<PARTS>& check) {
  Magnitudes met;
  for (int64_t j = from; j < to; j += 2 * W)
    for (int64_t p = 0; p < d; p += PANEL) {
      const int64_t width = vectors_for<PARTS>(d - p) * W;
      float* panel = panels + p * words_of<PARTS>(height) + words_of<PARTS>(j) * PANEL;
      for (int64_t k = j; k < j + W; k++, panel += PANEL)
        for (int64_t v = 0; v < width; v += W) {
          const T* here = values + k * stride + p + v;
          const int64_t left = d - p - v;
          const Floats low = read(here, k < m ? left : 0), high = read(here + W * stride, k + W < m ? left : 0);
          split(low, high, panel + v, W * PANEL);
          met.add(low);
          met.add(high);
        }
    }
  if (!met.fit()) check.fail();
}
