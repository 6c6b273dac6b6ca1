// Emulates the AVX-512 intrinsics of the kernels with AVX2, so that their targets run, slowly, on CPUs without them.
// native/emulate.sh builds and tests them. NaN, rounding and denormal numbers follow Intel's Software Developer's Manual,
// volume 2.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace emulated {

#define EMULATED static inline __attribute__((always_inline))

typedef float Sixteen __attribute__((vector_size(64)));
typedef int32_t Numbers __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

union Halves {
  __m512 whole;
  __m512i integers;
  __m256 half[2];
  __m256i integer_half[2];
};

EMULATED __m512 set1_ps(float x) {
  Halves v;
  v.half[0] = v.half[1] = _mm256_set1_ps(x);
  return v.whole;
}

// Returns the second operand if either is NaN.
EMULATED __m512 max_ps(__m512 a, __m512 b) {
  Halves x, y;
  x.whole = a, y.whole = b;
  x.half[0] = _mm256_max_ps(x.half[0], y.half[0]);
  x.half[1] = _mm256_max_ps(x.half[1], y.half[1]);
  return x.whole;
}

EMULATED __m512 min_ps(__m512 a, __m512 b) {
  Halves x, y;
  x.whole = a, y.whole = b;
  x.half[0] = _mm256_min_ps(x.half[0], y.half[0]);
  x.half[1] = _mm256_min_ps(x.half[1], y.half[1]);
  return x.whole;
}

// The reductions are not single instructions, but sequences that halve the vector.
EMULATED float reduce_add_ps(__m512 a) {
  Halves v;
  v.whole = a;
  const __m256 eight = _mm256_add_ps(v.half[1], v.half[0]);
  __m128 x = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

EMULATED float reduce_max_ps(__m512 a) {
  Halves v;
  v.whole = a;
  const __m256 eight = _mm256_max_ps(v.half[1], v.half[0]);
  __m128 x = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

EMULATED __mmask16 movepi32_mask(__m512i a) {
  Halves v;
  v.integers = a;
  return (__mmask16)(_mm256_movemask_ps(v.half[0]) | _mm256_movemask_ps(v.half[1]) << 8);
}

// Whether a is not less than b, or not less or equal; true if either is NaN.
template <int PREDICATE> EMULATED __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
  static_assert(PREDICATE == _CMP_NLT_UQ || PREDICATE == _CMP_NLE_UQ, "what the kernels use");
  const Sixteen x = (Sixteen)a, y = (Sixteen)b;
  return movepi32_mask((__m512i)(PREDICATE == _CMP_NLT_UQ ? ~(x < y) : ~(x <= y)));
}

EMULATED __m512i cvtepu16_epi32(__m256i a) {
  Halves v;
  v.integer_half[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(a));
  v.integer_half[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1));
  return v.integers;
}

EMULATED __m512i cvtepi8_epi32(__m128i a) {
  Halves v;
  v.integer_half[0] = _mm256_cvtepi8_epi32(a);
  v.integer_half[1] = _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8));
  return v.integers;
}

EMULATED __m512 cvtph_ps(__m256i a) {
  Halves v;
  v.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
  v.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return v.whole;
}

template <int ROUNDING> EMULATED __m256i cvtps_ph(__m512 a) {
  Halves v;
  v.whole = a;
  return _mm256_set_m128i(_mm256_cvtps_ph(v.half[1], ROUNDING), _mm256_cvtps_ph(v.half[0], ROUNDING));
}

// Flushes denormal numbers to zeros of the same sign, as AVX-512 BF16 does for inputs and outputs.
EMULATED Sixteen flushed(Sixteen x) {
  const Numbers normal = ((Bits)x & 0x7f800000u) != 0;
  return (Sixteen)((Bits)x & ((Bits)normal | 0x80000000u));
}

EMULATED Sixteen multiply_add(Sixteen a, Sixteen b, Sixteen c) {
  Halves x, y, z;
  x.whole = flushed(a), y.whole = flushed(b), z.whole = c;
  for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
  return flushed(z.whole);
}

// Two fused multiply-adds for each pair of bfloat16, first of the upper halves.
EMULATED __m512 dpbf16_ps(__m512 c, __m512bh a, __m512bh b) {
  const Bits x = (Bits)a, y = (Bits)b;
  const Sixteen upper = multiply_add((Sixteen)(x & 0xffff0000u), (Sixteen)(y & 0xffff0000u), flushed(c));
  return multiply_add((Sixteen)(x << 16), (Sixteen)(y << 16), upper);
}

// x - floor(x) (rounding mode 1, no fraction bits), and 0 for infinities.
template <int CONTROL> EMULATED __m512 reduce_ps(__m512 a) {
  static_assert(CONTROL == 1, "what the kernels use");
  Sixteen x = (Sixteen)a;
  for (int i = 0; i < 16; i++) x[i] = __builtin_isinf(x[i]) ? 0.0f : x[i] - __builtin_floorf(x[i]);
  return (__m512)x;
}

// x · 2^floor(y), rounded once.
EMULATED __m512 scalef_ps(__m512 a, __m512 b) {
  Sixteen x = (Sixteen)a;
  const Sixteen y = (Sixteen)b;
  for (int i = 0; i < 16; i++) {
    const float power = y[i] < -512.0f ? -512.0f : y[i] > 512.0f ? 512.0f : __builtin_floorf(y[i]);  // NaN is kept
    const uint64_t bits = (uint64_t)((power == power ? (int64_t)power : 0) + 1023) << 52;
    double scale;
    __builtin_memcpy(&scale, &bits, 8);
    x[i] = power == power ? (float)(x[i] * scale) : power;
  }
  return (__m512)x;
}

EMULATED __m512 maskz_scalef_ps(__mmask16 mask, __m512 a, __m512 b) {
  Sixteen x = (Sixteen)scalef_ps(a, b);
  for (int i = 0; i < 16; i++) x[i] = mask >> i & 1 ? x[i] : 0.0f;
  return (__m512)x;
}

EMULATED __m512 mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, __mmask16 mask) {
  const Sixteen x = (Sixteen)a, y = (Sixteen)b;
  Sixteen sum = (Sixteen)c;
  for (int i = 0; i < 16; i++) sum[i] = mask >> i & 1 ? __builtin_fmaf(x[i], y[i], sum[i]) : sum[i];
  return (__m512)sum;
}

// Rounds to nearest, ties to even; a NaN becomes quiet.
EMULATED __m256bh cvtneps_pbh(__m512 a) {
  const Bits bits = (Bits)flushed(a), nan = (Bits)((bits & 0x7fffffffu) > 0x7f800000u);
  const Bits rounded = bits + 0x7fffu + (bits >> 16 & 1), quiet = bits | 0x400000u;
  const Bits chosen = ((quiet & nan) | (rounded & ~nan)) >> 16;
  uint16_t upper[16];
  for (int i = 0; i < 16; i++) upper[i] = (uint16_t)chosen[i];
  __m256bh result;
  __builtin_memcpy(&result, upper, sizeof result);
  return result;
}

EMULATED __m512bh cvtne2ps_pbh(__m512 upper, __m512 lower) {
  const __m256bh halves[] = {cvtneps_pbh(lower), cvtneps_pbh(upper)};
  __m512bh result;
  __builtin_memcpy(&result, halves, sizeof result);
  return result;
}

}  // namespace emulated

// All other intrinsics are the compiler's and do not compile without AVX-512.
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph(x, rounding) emulated::cvtps_ph<(rounding)>(x)
#undef _mm512_reduce_ps
#define _mm512_reduce_ps(x, control) emulated::reduce_ps<(control)>(x)
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_maskz_scalef_ps emulated::maskz_scalef_ps
#define _mm512_mask3_fmadd_ps emulated::mask3_fmadd_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(x, y, predicate) emulated::cmp_ps_mask<(predicate)>(x, y)
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_reduce_add_ps emulated::reduce_add_ps
#define _mm512_reduce_max_ps emulated::reduce_max_ps
#define _mm512_movepi32_mask emulated::movepi32_mask
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtne2ps_pbh emulated::cvtne2ps_pbh
