// Vectors of float32 of the target's width, and the few operations that need its intrinsics.
//
// Arithmetic uses the compiler's vector extensions (a * b + c becomes a fused multiply-add), so the code is the same for
// every target, including NEON.

#if HEADWISE_AVX512
constexpr int W = 16;        // lanes
constexpr int ROWS = 6;      // a register block of a product is ROWS × (PANEL) floats:
constexpr int VECTORS = 4;   //   24 accumulators, 4 of B and one of A in 32 registers
#elif HEADWISE_TARGET_AVX2
constexpr int W = 8;
constexpr int ROWS = 6;      // 12 accumulators, 2 of B and one of A in 16 registers
constexpr int VECTORS = 2;
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int ROWS = 6;      // 32 registers
constexpr int VECTORS = 4;
#else
constexpr int W = 4;
constexpr int ROWS = 4;      // 16 registers and no fused multiply-add: 8 accumulators
constexpr int VECTORS = 2;
#endif
constexpr int PANEL = W * VECTORS;  // columns of B that are stored together

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));

#define INLINE static inline __attribute__((always_inline))

INLINE Floats load(const float* x) {
  Floats v;
  __builtin_memcpy(&v, x, sizeof v);
  return v;
}
INLINE void store(float* x, Floats v) { __builtin_memcpy(x, &v, sizeof v); }

INLINE Floats all(float x) {
#if HEADWISE_AVX512
  return _mm512_set1_ps(x);
#elif HEADWISE_TARGET_AVX2
  return _mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}

// 0, 1, 2 … in the lanes.
INLINE Floats ramp() {
  Floats v;
  for (int i = 0; i < W; i++) v[i] = (float)i;
  return v;
}

// The same number, of which the compiler does not know where it is from. So it stays in a register, where each of several
// multiply-adds would load it again, and is not computed at another time.
INLINE Floats kept(Floats x) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(x));
#elif HEADWISE_EMULATE
  asm volatile("" : "+m"(x));
#else
  asm volatile("" : "+v"(x));
#endif
  return x;
}

// The maximum; `b` if either is NaN.
INLINE Floats larger(Floats a, Floats b) {
#if HEADWISE_AVX512
  return _mm512_max_ps(a, b);
#elif HEADWISE_TARGET_AVX2
  return _mm256_max_ps(a, b);
#elif defined(__SSE__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// The minimum; `b` if either is NaN.
INLINE Floats smaller(Floats a, Floats b) {
#if HEADWISE_AVX512
  return _mm512_min_ps(a, b);
#elif HEADWISE_TARGET_AVX2
  return _mm256_min_ps(a, b);
#elif defined(__SSE__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

INLINE Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

// All ones in the lanes that are NaN or infinite.
INLINE Ints not_finite(Floats x) { return ((Ints)x & 0x7fffffff) > 0x7f7fffff; }

// `x` where the mask (all ones or zeros) is set, else `y`.
INLINE Floats choose(Ints mask, Floats x, Floats y) { return (Floats)(((Ints)x & mask) | ((Ints)y & ~mask)); }

// Sums and maxima over the lanes, halving the vector: the order of additions does not depend on the compiler.
INLINE float sum(Floats v) {
#if HEADWISE_AVX512
  return _mm512_reduce_add_ps(v);
#elif HEADWISE_TARGET_AVX2
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}
INLINE float maximum(Floats v) {
#if HEADWISE_AVX512
  return _mm512_reduce_max_ps(v);
#elif HEADWISE_TARGET_AVX2
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
#else
  float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
#endif
}

// One bit for each lane that is set.
INLINE unsigned bits(Ints mask) {
#if HEADWISE_AVX512
  return _mm512_movepi32_mask((__m512i)mask);
#elif HEADWISE_TARGET_AVX2
  return (unsigned)_mm256_movemask_ps((__m256)mask);
#else
  return (mask[0] & 1u) | (mask[1] & 2u) | (mask[2] & 4u) | (mask[3] & 8u);
#endif
}
INLINE bool any(Ints mask) { return bits(mask) != 0; }

// Whether any lane of x is above the limit or not comparable to it.
INLINE bool any_above(Floats x, float limit) {
#if HEADWISE_AVX512
  return _mm512_cmp_ps_mask(x, all(limit), _CMP_NLE_UQ) != 0;
#else
  return any(~(x <= limit));
#endif
}

// c0·x^k + c1·x^(k − 1) + …, from the coefficients.
template <typename... C> INLINE Floats polynomial(Floats x, float first, C... rest) {
  Floats p = all(first);
  ((p = p * x + rest), ...);
  return p;
}

// 2^x for x <= 0, with a relative error of at most 1.7e-7: exactly 0 below -127 (in AVX-512, -126) and for -inf, NaN for NaN.
// The polynomial for the fraction is exactly 1 at 0. In AVX-512 one instruction splits off the exponent and one restores it,
// and the polynomial is exactly 2 at 1, so that 2^x is 1 just below 0, too. Elsewhere the exponent is added to the bits: at
// -127, the bits of 1.0 minus 127 exponents are those of 0.
INLINE Floats not_below(Floats x) { return larger(all(-127.0f), x); }
#if HEADWISE_AVX512
INLINE __mmask16 not_underflowing(Floats x) { return _mm512_cmp_ps_mask(x, all(-126.0f), _CMP_NLT_UQ); }
#endif
INLINE Floats exp2(Floats x, [[maybe_unused]] bool clamped = false) {
#if HEADWISE_AVX512
  const Floats f = _mm512_reduce_ps(x, 1);  // x - floor(x)
  const Floats p = polynomial(f, 0.0018793188f, 0.0089909947f, 0.055818677f, 0.24015923f, 0.69315177f, 1.0f);
  return _mm512_maskz_scalef_ps(not_underflowing(x), p, x);
#else
  if (!clamped) x = not_below(x);
  const Floats magic = all(12582912.0f);  // 1.5 · 2^23: the sum is rounded to an integer
  const Floats t = x + magic, f = x - (t - magic);
  const Floats p = polynomial(f, 0.0013264720f, 0.009671513f, 0.055507340f, 0.24022242f, 0.6931470f, 1.0f);
  return (Floats)((Words)p + ((Words)t << 23));
#endif
}

// The same with relative error 3e-6 in fewer operations. Below -126 the result is denormal, and 0 below -149.
#if HEADWISE_DOT
INLINE Floats exp2_scaled(Floats x) {
  const Floats f = _mm512_reduce_ps(x, 1);  // x - floor(x)
  return _mm512_scalef_ps(polynomial(f, 0.013425155f, 0.052245375f, 0.24127856f, 0.69304514f, 1.0f), x);
}
#else
INLINE Floats exp2_scaled(Floats x) { return exp2(x); }  // compiled, but never runs
#endif

// The natural logarithm of positive, normal numbers: the polynomial of Cephes, exactly 0 for 1. NaN for NaN.
INLINE Floats ln(Floats x) {
  const Ints exponent = ((Ints)x - 0x3f3504f3) >> 23;  // of a fraction in [√½, √2)
  const Floats f = (Floats)((Ints)x - (exponent << 23)) - 1.0f, e = __builtin_convertvector(exponent, Floats);
  const Floats square = f * f;
  Floats p = polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                        -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
  p = p * f * square - 2.12194440e-4f * e - 0.5f * square;
  return f + p + 0.693359375f * e + (x - x);  // NaN for NaN and infinity
}

// A row's log-sum-exp in units of ln 2, as a float and the rest: of a large one, the rest changes weights.
struct LogSum {
  float most, rest;
  explicit LogSum(double natural) {
    const double whole = natural * 1.44269504088896340736;
    most = (float)whole;
    rest = (float)(whole - (double)most);
    if (!(most - most == 0.0f)) rest = 0.0f;      // infinite or NaN
    if (most == -__builtin_inff()) most = -most;  // a fully masked query has weights 0
  }
};

// Recomputes a weight from its logit in units of ln 2 and its row's log-sum-exp. It is clamped to 1, which logits
// computed in another order could exceed if they are so large that their rounding errors are.
INLINE Floats weight_of(Floats logits, LogSum lse) { return exp2(smaller(all(0.0f), logits - lse.most - lse.rest)); }

// Brain floats are the upper half of a float32; rounding is to nearest even, and NaN is kept.
INLINE float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}
INLINE uint16_t narrow(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

template <int... I> struct Indices {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Indices<I...> list; };

// Lanes of two vectors, in ways that are one instruction. ALTERNATE: a0 b0 a1 b1, and so on for every four lanes; or the upper
// two of them, a2 b2 a3 b3. Else the fours of lanes with an even number, or an odd one: those of a, then those of b.
template <bool ALTERNATE, int UPPER, int... I> INLINE Floats joined(Floats a, Floats b, Indices<I...>) {
  if constexpr (ALTERNATE) return __builtin_shufflevector(a, b, (I / 4 * 4 + UPPER * 2 + I % 4 / 2 + I % 2 * W)...);
  else return __builtin_shufflevector(a, b, (I % (W / 2) / 4 * 8 + UPPER * 4 + I % 4 + I / (W / 2) * W)...);
}
template <bool ALTERNATE, int APART> INLINE void exchange(Floats (&rows)[W]) {
  typedef typename Count<W>::list List;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & APART) continue;
    const Floats a = rows[i], b = rows[i + APART];
    rows[i] = joined<ALTERNATE, 0>(a, b, List());
    rows[i + APART] = joined<ALTERNATE, 1>(a, b, List());
  }
}

// Transposes in place: each four lanes of four rows, and then the fours.
INLINE void transpose(Floats (&rows)[W]) {
  exchange<true, 2>(rows);
  exchange<true, 1>(rows);
  if constexpr (W > 4) exchange<false, 4>(rows);
  if constexpr (W > 8) exchange<false, 8>(rows);
}

// Lane i: vector i, folded to one number in the order of sum() and maximum(), of which `join` is the operation. Each step joins
// halves of two vectors, and leaves half as many: as far as possible by one blend and one other instruction.
template <int APART, int UPPER, int... I> INLINE Floats halves(Floats a, Floats b, Indices<I...>) {
#if HEADWISE_TARGET_AVX2
  if constexpr (APART > 1 && !UPPER) return _mm256_blend_ps(a, b, APART == 4 ? 0xf0 : 0xcc);
#endif
  if constexpr (APART == 1) return __builtin_shufflevector(a, b, (I / 4 * 4 + I % 2 * 2 + UPPER + I % 4 / 2 * W)...);
  else return __builtin_shufflevector(a, b, ((I ^ UPPER * APART) + (I & APART ? W : 0))...);
}
template <int APART, int NEXT, typename Join> INLINE void fold(Floats (&rows)[W], const Join& join) {
  typedef typename Count<W>::list List;
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
    if (!(i & NEXT))
      rows[i] = join(halves<APART, 0>(rows[i], rows[i + NEXT], List()), halves<APART, 1>(rows[i], rows[i + NEXT], List()));
}
template <typename Join> INLINE Floats folded(Floats (&rows)[W], const Join& join) {
  if constexpr (W > 8) fold<8, 8>(rows, join);
  if constexpr (W > 4) fold<4, 4>(rows, join);
  fold<2, 1>(rows, join);
  fold<1, 2>(rows, join);
  return rows[0];
}
INLINE Floats maxima(Floats (&rows)[W]) { return folded(rows, larger); }
INLINE Floats sums(const Floats* x) {
  Floats rows[W];
  for (int i = 0; i < W; i++) rows[i] = x[i];
  return folded(rows, [](Floats a, Floats b) __attribute__((always_inline)) { return a + b; });
}
