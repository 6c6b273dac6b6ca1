// The two products of attention, in blocks that stay in registers.
//
// C [R × PANEL] = or += A [R × steps] · B [steps × PANEL]. The R · VECTORS accumulators stay in registers for all steps;
// each step loads VECTORS vectors of B and broadcasts R numbers of A:
//
//                    B  ┌────┬────┐ one row: PANEL floats
//                       └────┴────┘
//              A ┌─┐ →  ┌────┬────┐
//        R rows  │ │    │ acc│ acc│  R × VECTORS vectors
//                └─┘    └────┴────┘
//
// 6 × 2 (AVX2) or 6 × 4 (AVX-512) accumulators are enough to hide the latency of a multiply-add, with few enough loads
// not to be limited by them. Where only the first columns are needed, fewer vectors are computed.

template <bool DOT> INLINE Floats multiply_add(Floats c, Floats a, Floats b) {
#if HEADWISE_DOT
  if (DOT) return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#endif
  return c + a * b;
}

// ADD: add to C. FOLD: top[row] = max(top[row], new numbers), per lane. TURNED: A is stored by columns (transposed).
template <bool DOT, int R, int V, bool ADD, bool FOLD, bool TURNED>
static void register_block(const float* __restrict a, int64_t lda, const float* __restrict b, float* __restrict c,
                           int64_t ldc, int64_t steps, Floats* __restrict top) {
  Floats acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) acc[r][v] = all(0.0f);
#pragma GCC unroll 2
  for (int64_t k = 0; k < steps; k++) {
    Floats row[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) row[v] = load(b + k * PANEL + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats one = all(TURNED ? a[k * lda + r] : a[r * lda + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) acc[r][v] = multiply_add<DOT>(acc[r][v], one, row[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      float* place = c + r * ldc + v * W;
      if (ADD) acc[r][v] += load(place);
      if (FOLD) top[r] = larger(top[r], acc[r][v]);
      store(place, acc[r][v]);
    }
  }
}

template <bool DOT, int V, bool ADD, bool FOLD, bool TURNED>
static void rows_of_block(int rows, const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t steps,
                          Floats* top) {
  switch (rows) {
    case 1: return register_block<DOT, 1, V, ADD, FOLD, TURNED>(a, lda, b, c, ldc, steps, top);
    case 2: return register_block<DOT, 2, V, ADD, FOLD, TURNED>(a, lda, b, c, ldc, steps, top);
    case 3: return register_block<DOT, 3, V, ADD, FOLD, TURNED>(a, lda, b, c, ldc, steps, top);
    case 4: return register_block<DOT, 4, V, ADD, FOLD, TURNED>(a, lda, b, c, ldc, steps, top);
    case 5: return register_block<DOT, 5, V, ADD, FOLD, TURNED>(a, lda, b, c, ldc, steps, top);
    default: return register_block<DOT, ROWS, V, ADD, FOLD, TURNED>(a, lda, b, c, ldc, steps, top);
  }
}

// At least the first `columns` columns of C.
template <Operand OF, bool ADD, bool FOLD, bool TURNED = false>
INLINE void product(int rows, int64_t columns, const float* a, int64_t lda, const float* b, float* c, int64_t ldc,
                    int64_t steps, Floats* top) {
  const int vectors = vectors_for<OF>(columns);
#if HEADWISE_TILES
  if constexpr (TILED<OF>) {
    static_assert(!FOLD, "maxima are found in panels.h");
    return tile_product<OF, ADD>(rows, vectors, a, lda, b, c, ldc, steps);
  }
#endif
  constexpr bool DOT = OF == PAIRS;
  if (vectors == 1) return rows_of_block<DOT, 1, ADD, FOLD, TURNED>(rows, a, lda, b, c, ldc, steps, top);
  if (vectors < VECTORS) return rows_of_block<DOT, 2, ADD, FOLD, TURNED>(rows, a, lda, b, c, ldc, steps, top);
  rows_of_block<DOT, VECTORS, ADD, FOLD, TURNED>(rows, a, lda, b, c, ldc, steps, top);
}
