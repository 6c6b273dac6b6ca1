// Tiles (Intel AMX): eight registers of 16 rows of 64 bytes, and an instruction that multiplies two tiles of bfloat16 pairs
// and adds the product to a third one of float32.
//
// A product computes 32 rows of A and half a panel of B at a time: four accumulators, two tiles of A and two of B. Each tile
// of B, which mostly comes from the L2 cache, is loaded for two products; loading takes longer than multiplying.
//
//                              B  ┌────┬────┐ 16 words of a panel: [word][PANEL], as packed
//                                 │ 6  │ 7  │
//        A  ┌────┐ 16 words →     ├────┼────┤
//   32 rows │ 4  │                │ 0  │ 1  │ C, 32 × 32
//           ├────┤                ├────┼────┤
//           │ 5  │                │ 2  │ 3  │
//           └────┘                └────┴────┘
//
// Fewer rows are computed 16 at a time: four accumulators, one tile of A and three of B.

#if HEADWISE_TILES
struct alignas(64) TileConfig {
  uint8_t palette, start_row, unused[14];
  uint16_t bytes_a_row[16];
  uint8_t rows[16];
};

// The intrinsics of GCC do not declare what tiles and their configuration are loaded from: it would move and remove the stores
// that write it.
#if !HEADWISE_EMULATE_TILES
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stream_loadd
#define LOAD_TILE(how, tile, from, stride) \
  asm volatile("tileload" how "\t(%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#undef _tile_storeconfig
#define _tile_storeconfig(config) asm volatile("sttilecfg\t%0" : "=m"(*(config)))
#define _tile_loadconfig(config) asm volatile("ldtilecfg\t%0" ::"m"(*(config)))
#define _tile_loadd(tile, from, stride) LOAD_TILE("d", tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) LOAD_TILE("dt1", tile, from, stride)
#endif

INLINE void configure_tiles() {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes_a_row[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
}

// The first TILES (2 or 4) of four accumulators: they begin with C if `add`, otherwise with 0, and are stored to C.
template <int TILES>
INLINE void begin_sums(bool add, const float* c0, const float* c1, const float* c2, const float* c3, int64_t ldc) {
  if (add) {
    _tile_loadd(0, c0, ldc * 4);
    _tile_loadd(1, c1, ldc * 4);
    if constexpr (TILES > 2) _tile_loadd(2, c2, ldc * 4);
    if constexpr (TILES > 2) _tile_loadd(3, c3, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TILES > 2) _tile_zero(2);
    if constexpr (TILES > 2) _tile_zero(3);
  }
}
template <int TILES> INLINE void store_sums(float* c0, float* c1, float* c2, float* c3, int64_t ldc) {
  _tile_stored(0, c0, ldc * 4);
  _tile_stored(1, c1, ldc * 4);
  if constexpr (TILES > 2) _tile_stored(2, c2, ldc * 4);
  if constexpr (TILES > 2) _tile_stored(3, c3, ldc * 4);
}

// One step of 16 words: the first TILES of C [16 × 64] += A [16 × 16] · B [16 × PANEL].
template <int TILES> INLINE void sixteen_rows_step(const float* a, int64_t lda, const float* b) {
  _tile_loadd(4, a, lda * 4);
  _tile_loadd(5, b, PANEL * 4);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(6, b + 16, PANEL * 4);
  _tile_dpbf16ps(1, 4, 6);
  if constexpr (TILES > 2) {
    _tile_loadd(7, b + 32, PANEL * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, b + 48, PANEL * 4);
    _tile_dpbf16ps(3, 4, 5);
  }
}

// The same for C [32 × 32], where A and B are loaded or are those of the step before. B is loaded as data that is not read
// again soon, so that it does not replace A and C in the L1 cache. AT is the number of products before it.
template <int AT, bool LOAD_A, bool LOAD_B, typename Beside>
INLINE void thirty_two_rows_step(const float* a, int64_t lda, const float* b, Beside& beside, typename Beside::Part& part) {
  if constexpr (LOAD_A) _tile_loadd(4, a, lda * 4);
  if constexpr (LOAD_B) _tile_stream_loadd(6, b, PANEL * 4);
  _tile_dpbf16ps(0, 4, 6);
  beside.template after<AT>(part);
  if constexpr (LOAD_B) _tile_stream_loadd(7, b + 16, PANEL * 4);
  _tile_dpbf16ps(1, 4, 7);
  beside.template after<AT + 1>(part);
  if constexpr (LOAD_A) _tile_loadd(5, a + 16 * lda, lda * 4);
  _tile_dpbf16ps(2, 5, 6);
  beside.template after<AT + 2>(part);
  _tile_dpbf16ps(3, 5, 7);
  beside.template after<AT + 3>(part);
}

// 32 numbers of the axis that is summed over: PRODUCTS products of tiles.
template <Operand OF> constexpr int PRODUCTS = OF == PARTS ? 24 : 4;
template <Operand OF, typename Beside>
INLINE void thirty_two_numbers(const float* a, int64_t lda, const float* b, Beside& beside) {
  typename Beside::Part part;
  if constexpr (OF == PAIRS) return thirty_two_rows_step<0, true, true>(a, lda, b, beside, part);
  const float *b2 = b + 16 * PANEL, *b3 = b2 + 16 * PANEL;  // in the order that loads the fewest tiles
  thirty_two_rows_step<0, true, true>(a, lda, b3, beside, part);
  thirty_two_rows_step<4, false, true>(a, lda, b2, beside, part);
  thirty_two_rows_step<8, true, false>(a + 16, lda, b2, beside, part);
  thirty_two_rows_step<12, false, true>(a + 16, lda, b, beside, part);
  thirty_two_rows_step<16, true, false>(a + 32, lda, b, beside, part);
  thirty_two_rows_step<20, true, false>(a, lda, b, beside, part);
}

// Where nothing runs beside the products.
struct Alone {
  struct Part {};
  static bool begin() { return false; }
  template <int AT> static void after(Part&) {}
  static void end() {}
};

// C [16 × 16·TILES] = or += A [16 × words] · B [words × PANEL]; `words` are whole steps.
template <int TILES, Operand OF, bool ADD>
INLINE void sixteen_rows(const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t words) {
  begin_sums<TILES>(ADD, c, c + 16, c + 32, c + 48, ldc);
  for (int64_t k = 0; k < words; k += STEP<OF>) {
    const float *x = a + k, *y = b + k * PANEL, *y2 = y + 16 * PANEL, *y3 = y2 + 16 * PANEL;
    sixteen_rows_step<TILES>(x, lda, y);
    if constexpr (OF == PARTS) {
      sixteen_rows_step<TILES>(x, lda, y2);
      sixteen_rows_step<TILES>(x, lda, y3);
      sixteen_rows_step<TILES>(x + 16, lda, y);
      sixteen_rows_step<TILES>(x + 16, lda, y2);
      sixteen_rows_step<TILES>(x + 32, lda, y);
    }
  }
  store_sums<TILES>(c, c + 16, c + 32, c + 48, ldc);
}

// C [32 × 32] = or, if `add`, += A [32 × words] · B [words × 32 columns of a panel]. Among the products of 32 numbers, if
// beside.begin(), beside.after<i>(part) runs after product i, and beside.end() after the last; `part` is what the first of them
// leave to the others.
template <Operand OF, typename Beside>
INLINE void thirty_two_rows(bool add, const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t words,
                            Beside& beside) {
  float* lower = c + 16 * ldc;
  Alone alone;
  begin_sums<4>(add, c, c + 16, lower, lower + 16, ldc);
  for (int64_t k = 0; k < words; k += STEP<OF>) {
    if (beside.begin()) {
      thirty_two_numbers<OF>(a + k, lda, b + k * PANEL, beside);
      beside.end();
    } else {
      thirty_two_numbers<OF>(a + k, lda, b + k * PANEL, alone);
    }
  }
  store_sums<4>(c, c + 16, lower, lower + 16, ldc);
}

// The same for up to 16 rows of C. All 16 rows of A are read: those beyond must be readable, but may have any content.
template <int TILES, Operand OF, bool ADD>
static void some_rows(int rows, const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t words) {
  static_assert(PANEL == 64 && W == 16, "a vector is a row of a tile");
  constexpr int WIDTH = 16 * TILES;
  if (rows == 16) return sixteen_rows<TILES, OF, ADD>(a, lda, b, c, ldc, words);
  alignas(64) float some[16 * WIDTH];
  for (int r = 0; r < rows && ADD; r++) __builtin_memcpy(some + r * WIDTH, c + r * ldc, WIDTH * 4);
  if (ADD) __builtin_memset(some + rows * WIDTH, 0, (size_t)(16 - rows) * WIDTH * 4);
  sixteen_rows<TILES, OF, ADD>(a, lda, b, some, WIDTH, words);
  for (int r = 0; r < rows; r++) __builtin_memcpy(c + r * ldc, some + r * WIDTH, WIDTH * 4);
}

// The same for up to 32 rows and the first 2 or 4 vectors of a panel.
template <int TILES, Operand OF, bool ADD>
static void tile_product(int rows, const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t words) {
  Alone alone;
  if (rows == 32) {
    for (int v = 0; v < 16 * TILES; v += 32) thirty_two_rows<OF>(ADD, a, lda, b + v, c + v, ldc, words, alone);
  } else {
    for (int r = 0; r < rows; r += 16)
      some_rows<TILES, OF, ADD>((int)least(16, rows - r), a + r * lda, lda, b, c + r * ldc, ldc, words);
  }
}
template <Operand OF, bool ADD>
INLINE void tile_product(int rows, int vectors, const float* a, int64_t lda, const float* b, float* c, int64_t ldc,
                         int64_t words) {
  if (vectors == 2) return tile_product<2, OF, ADD>(rows, a, lda, b, c, ldc, words);
  tile_product<4, OF, ADD>(rows, a, lda, b, c, ldc, words);
}
#endif

// Configures a thread's tiles while it computes with them (USED); other threads and other code have their own.
template <bool USED> struct Tiles {
#if HEADWISE_TILES
  Tiles() {
    if (USED) configure_tiles();
  }
  ~Tiles() {
    if (USED) _tile_release();
  }
#else
  Tiles() {}
#endif
};

// Keeps the configuration while other code runs in this thread, which may use tiles of its own.
struct TilesKept {
#if HEADWISE_TILES
  TileConfig config = {};
  TilesKept() { _tile_storeconfig(&config); }
  ~TilesKept() { _tile_loadconfig(&config); }
#else
  TilesKept() {}
#endif
};
