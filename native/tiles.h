// Tiles (Intel AMX): eight registers of 16 rows of 64 bytes, and an instruction that multiplies two tiles of bfloat16 pairs
// and adds the product to a third one of float32.
//
// A product computes 16 rows of A and one panel of B at a time: four accumulators, one tile of A and three of B.
//
//                              B  ┌────┬────┬────┬────┐ 16 words of a panel: [word][PANEL], as packed
//                                 │ 5  │ 6  │ 7  │ 5  │
//        A  ┌────┐ 16 words →     ├────┼────┼────┼────┤
//   16 rows │ 4  │                │ 0  │ 1  │ 2  │ 3  │ C, 16 × PANEL
//           └────┘                └────┴────┴────┴────┘

#if HEADWISE_TILES
struct alignas(64) TileConfig {
  uint8_t palette, start_row, unused[14];
  uint16_t bytes_a_row[16];
  uint8_t rows[16];
};

// The intrinsics of GCC do not declare what tiles are loaded from: it would move and remove the stores that write it.
#if !HEADWISE_EMULATE_TILES
#undef _tile_loadd
#define _tile_loadd(tile, from, stride) \
  asm volatile("tileloadd\t(%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#endif

INLINE void configure_tiles() {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes_a_row[i] = 64, config.rows[i] = 16;
#if HEADWISE_EMULATE_TILES
  _tile_loadconfig(&config);
#else
  asm volatile("ldtilecfg\t%0" ::"m"(config));
#endif
}

// C [16 × 16·TILES] = or += A [16 × steps] · B [steps × PANEL]; steps is a multiple of 16.
template <int TILES, bool ADD>
INLINE void sixteen_rows(const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t steps) {
  if (ADD) {
    _tile_loadd(0, c, ldc * 4);
    if constexpr (TILES > 1) _tile_loadd(1, c + 16, ldc * 4);
    if constexpr (TILES > 2) _tile_loadd(2, c + 32, ldc * 4);
    if constexpr (TILES > 2) _tile_loadd(3, c + 48, ldc * 4);
  } else {
    _tile_zero(0);
    if constexpr (TILES > 1) _tile_zero(1);
    if constexpr (TILES > 2) _tile_zero(2);
    if constexpr (TILES > 2) _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; k += 16, b += 16 * PANEL) {
    _tile_loadd(4, a + k, lda * 4);
    _tile_loadd(5, b, PANEL * 4);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (TILES > 1) {
      _tile_loadd(6, b + 16, PANEL * 4);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (TILES > 2) {
      _tile_loadd(7, b + 32, PANEL * 4);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, b + 48, PANEL * 4);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, ldc * 4);
  if constexpr (TILES > 1) _tile_stored(1, c + 16, ldc * 4);
  if constexpr (TILES > 2) _tile_stored(2, c + 32, ldc * 4);
  if constexpr (TILES > 2) _tile_stored(3, c + 48, ldc * 4);
}

// The same for `rows` rows of C. All 16 rows of A are read: those beyond must be readable, but may have any content.
template <int TILES, bool ADD, bool FOLD>
static void tile_product(int rows, const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t steps,
                         Floats* top) {
  static_assert(PANEL == 64 && W == 16, "a vector is a row of a tile");
  constexpr int WIDTH = 16 * TILES;
  if (rows == 16) {
    sixteen_rows<TILES, ADD>(a, lda, b, c, ldc, steps);
  } else {
    alignas(64) float some[16 * WIDTH];
    for (int r = 0; r < rows && ADD; r++) __builtin_memcpy(some + r * WIDTH, c + r * ldc, WIDTH * 4);
    if (ADD) __builtin_memset(some + rows * WIDTH, 0, (size_t)(16 - rows) * WIDTH * 4);
    sixteen_rows<TILES, ADD>(a, lda, b, some, WIDTH, steps);
    for (int r = 0; r < rows; r++) __builtin_memcpy(c + r * ldc, some + r * WIDTH, WIDTH * 4);
  }
  if (FOLD)
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < WIDTH; v += W) top[r] = larger(top[r], load(c + r * ldc + v));
}

// The same for the first 1, 2 or 4 vectors of a panel.
template <bool ADD, bool FOLD>
INLINE void tile_product(int rows, int vectors, const float* a, int64_t lda, const float* b, float* c, int64_t ldc,
                         int64_t steps, Floats* top) {
  if (vectors == 1) return tile_product<1, ADD, FOLD>(rows, a, lda, b, c, ldc, steps, top);
  if (vectors == 2) return tile_product<2, ADD, FOLD>(rows, a, lda, b, c, ldc, steps, top);
  tile_product<4, ADD, FOLD>(rows, a, lda, b, c, ldc, steps, top);
}
#endif

// Configures a thread's tiles while it computes products of DOT; other threads and other code have their own.
template <bool DOT> struct Tiles {
#if HEADWISE_TILES
  Tiles() {
    if (DOT) configure_tiles();
  }
  ~Tiles() {
    if (DOT) _tile_release();
  }
#else
  Tiles() {}
#endif
};
