// The dtypes of tensors in memory, read as vectors of float32 and written back.

// W numbers as float32; only the first `count` are read, the others are 0.
INLINE Floats read(const float* x, int64_t count) {
  if (count >= W) return load(x);
  Floats v = all(0.0f);
  for (int i = 0; i < count; i++) v[i] = x[i];
  return v;
}

struct Brain { uint16_t bits; };
struct Half { uint16_t bits; };

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
INLINE void write(Brain* x, Floats v, Floats next) {
  const __m512bh both = _mm512_cvtne2ps_pbh(next, v);
  __builtin_memcpy(x, &both, sizeof both);
}
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
