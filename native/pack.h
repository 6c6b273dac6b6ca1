// Copies of keys and values in the order in which the products read them, converted to the dtype of the arithmetic.
//
//   keys:    panels of PANEL keys, each [word][PANEL]: one row of a panel is the same word of all its keys
//   values:  panels of PANEL columns, each [key][PANEL]
//
// A word is 4 bytes: a float32, or, if the CPU multiplies bfloat16 (DOT), two bfloat16 that are neighbours along the axis
// that a product sums over: two features of a key, or the same feature of two keys. Keys and values are padded with zeros
// to full panels and vectors, so that no product has a remainder.

// W numbers as float32; only the first `count` are read, the others are 0.
INLINE Floats read(const float* x, int64_t count) {
  if (count >= W) return load(x);
  Floats v = all(0.0f);
  for (int i = 0; i < count; i++) v[i] = x[i];
  return v;
}

struct Brain { uint16_t bits; };
struct Half { uint16_t bits; };

// Whether products of a dtype use pairs of its numbers without conversion.
template <typename T> constexpr bool DOTS = false;
#if HEADWISE_DOT
template <> constexpr bool DOTS<Brain> = true;
#endif

INLINE Floats read(const Brain* x, int64_t count) {
  Words v = (Words)all(0.0f);
  if (count >= W) {
#if HEADWISE_AVX512
    v = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
#elif HEADWISE_TARGET_AVX2
    v = (Words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x));
#else
    for (int i = 0; i < W; i++) v[i] = x[i].bits;
#endif
  } else {
    for (int i = 0; i < count; i++) v[i] = x[i].bits;
  }
  return (Floats)(v << 16);
}

static float widen_half(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  float v;
  if (exponent == 0) {
    v = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
    uint32_t u;
    __builtin_memcpy(&u, &v, 4);
    u |= sign;
    __builtin_memcpy(&v, &u, 4);
    return v;
  }
  const uint32_t u = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13;
  __builtin_memcpy(&v, &u, 4);
  return v;
}

static uint16_t narrow_half(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  const uint32_t size = u & 0x7fffffffu;
  if (size > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (size >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (size < 0x38800000u) {  // a subnormal half: adding 1/2 puts its last bit at the end of the fraction
    float v;
    __builtin_memcpy(&v, &size, 4);
    v += 0.5f;
    __builtin_memcpy(&u, &v, 4);
    return (uint16_t)(sign | (u - 0x3f000000u));
  }
  return (uint16_t)(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13);
}

INLINE Floats read(const Half* x, int64_t count) {
#if HEADWISE_AVX512
  if (count >= W) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif HEADWISE_TARGET_AVX2
  if (count >= W) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#endif
  Floats v = all(0.0f);
  for (int i = 0; i < W && i < count; i++) v[i] = widen_half(x[i].bits);
  return v;
}

// The first `count` lanes, converted back.
INLINE void write(float* x, Floats v, int64_t count) {
  if (count >= W) return store(x, v);
  for (int i = 0; i < count; i++) x[i] = v[i];
}
INLINE void write(Brain* x, Floats v, int64_t count) {
#if HEADWISE_DOT
  if (count >= W) {
    const __m256bh low = _mm512_cvtneps_pbh(v);
    __builtin_memcpy(x, &low, sizeof low);
    return;
  }
#endif
  for (int i = 0; i < W && i < count; i++) x[i].bits = narrow(v[i]);
}
#if HEADWISE_DOT
// Each number as bfloat16, in the lower half of its lane.
INLINE Words narrowed(Floats v) {
  const __m256bh low = _mm512_cvtneps_pbh(v);
  __m256i bits;
  __builtin_memcpy(&bits, &low, sizeof bits);
  return (Words)_mm512_cvtepu16_epi32(bits);
}
#else
INLINE Words narrowed(Floats v) { return (Words)v >> 16; }  // compiled, but never runs
#endif
INLINE void write(Half* x, Floats v, int64_t count) {
#if HEADWISE_AVX512
  if (count >= W) return _mm256_storeu_si256((__m256i*)x, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif HEADWISE_TARGET_AVX2
  if (count >= W) return _mm_storeu_si128((__m128i*)x, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#endif
  for (int i = 0; i < W && i < count; i++) x[i].bits = narrow_half(v[i]);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }
INLINE int64_t padded(int64_t size, int64_t block) { return blocks(size, block) * block; }

// Sizes of a product of two blocks: rows of A, words per step of the axis that it sums over, and keys in those words. The
// words are padded with zeros to whole steps.
template <bool DOT> constexpr bool TILED = DOT && HEADWISE_TILES;
template <bool DOT> constexpr int GROUP = TILED<DOT> ? 32 : ROWS;
template <bool DOT> constexpr int STEP = TILED<DOT> ? 16 : 1;
template <bool DOT> constexpr int KEYS_A_WORD = DOT ? 2 : 1;
template <bool DOT> constexpr int KEYS_AT_ONCE = TILED<DOT> ? STEP<DOT> * KEYS_A_WORD<DOT> : W;

// Words of a vector of `size` numbers.
template <bool DOT> INLINE int64_t words_of(int64_t size) { return padded(blocks(size, KEYS_A_WORD<DOT>), STEP<DOT>); }

// Vectors of a panel that are computed where its first `columns` are needed: 1, 2 or all. Others of it are neither packed
// nor read, so that a few keys, or values of a few features, do not take the time of a whole panel.
INLINE int vectors_for(int64_t columns) { return columns <= W ? 1 : columns <= 2 * W ? 2 : VECTORS; }

// a0 b0 a1 b1 …: the lower or upper halves of two vectors, interleaved.
template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> list; };
template <int FROM, int... I> INLINE Floats interleave(Floats a, Floats b, Indices<I...>) {
  return __builtin_shufflevector(a, b, (FROM + I / 2 + (I % 2) * W)...);
}

// Transposes in place. Each round interleaves row i with row i + W/2; log2(W) rounds transpose.
INLINE void transpose(Floats (&rows)[W]) {
  typedef typename Count<W>::list List;
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
    Floats next[W];
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; i++) {
      next[2 * i] = interleave<0>(rows[i], rows[i + W / 2], List());
      next[2 * i + 1] = interleave<W / 2>(rows[i], rows[i + W / 2], List());
    }
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) rows[i] = next[i];
  }
}

// Words of one row from word `c` on: numbers converted to float32, or pairs of bfloat16 as stored.
template <bool DOT, typename T> INLINE Floats words(const T* row, int64_t c, int64_t size) {
  if (!DOT) return read(row + c, size - c);
  const int64_t left = size - 2 * c;
  if (left >= 2 * W) return load((const float*)(row + 2 * c));
  uint16_t pad[2 * W] = {};
  for (int64_t i = 0; i < left; i++) __builtin_memcpy(pad + i, row + 2 * c + i, 2);
  return load((const float*)pad);
}

// The same for full vectors, and the number of words of a row in full vectors.
template <bool DOT, typename T> INLINE Floats whole_word(const T* row, int64_t c) {
  return DOT ? load((const float*)(row + 2 * c)) : read(row + c, W);
}
template <bool DOT> INLINE int64_t whole_words(int64_t size) { return (DOT ? size / 2 : size) / W * W; }

template <bool DOT> INLINE Ints not_finite_words(Floats x) {
  if (!DOT) return not_finite(x);
  return not_finite((Floats)((Words)x << 16)) | not_finite((Floats)((Words)x & 0xffff0000u));
}

// One panel of keys, [word][PANEL], from `rows` rows; the others are zeros, in the vectors that a product reads. Sets the
// lanes of `check` in which a NaN or an infinity occurs.
template <bool DOT, typename T>
static void pack_keys(const T* keys, int64_t stride, int64_t rows, int64_t d, float* panel, Ints& check) {
  const int64_t size = words_of<DOT>(d), whole = whole_words<DOT>(d);
  Ints met = check;
  const int64_t width = vectors_for(padded(rows, KEYS_AT_ONCE<DOT>)) * W;
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
        for (int r = 0; r < W; r++) tile[r] = whole_word<DOT>(from + r * stride, c);
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) tile[r] = j + r < rows ? words<DOT>(from + r * stride, c, d) : all(0.0f);
      }
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) met |= not_finite_words<DOT>(tile[r]);
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
template <bool DOT, typename T>
static void pack_values(const T* values, int64_t stride, int64_t m, int64_t d, int64_t from, int64_t to, int64_t height,
                        float* panels, Ints& check) {
  constexpr int AT_ONCE = DOT ? 2 : 1;
  Ints met = check;
  for (int64_t p = 0; p * PANEL < d; p++) {
    float* panel = panels + p * PANEL * height / AT_ONCE;
    const bool whole = (p + 1) * PANEL <= d;
    const int64_t width = vectors_for(d - p * PANEL) * W;
    for (int64_t j = from; j < to; j += AT_ONCE) {
      const T* here = values + j * stride + p * PANEL;
      float* row = panel + j / AT_ONCE * PANEL;
      for (int64_t v = 0; v < width; v += W) {
        const int64_t left = whole ? W : d - p * PANEL - v;
        const Floats upper = j < m && left > 0 ? read(here + v, left) : all(0.0f);
        met |= not_finite(upper);
        if (!DOT) {
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
