// The tiles of AMX in C, so that the target `amx` runs, slowly, on a CPU without them. The order and the rounding follow
// Intel's Software Developer's Manual, volume 2, TDPBF16PS: products of even and of odd elements are summed separately from
// zero, by fused multiply-adds that flush denormal inputs and outputs, and then both sums are added to C. As on hardware,
// using tiles that are not configured terminates the program.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace emulated {

#define TILE static inline __attribute__((always_inline))

typedef float TileRow __attribute__((vector_size(64)));
typedef uint32_t TileBits __attribute__((vector_size(64)));
typedef int32_t TileInts __attribute__((vector_size(64)));

struct TileState {
  alignas(64) TileRow row[8][16];
  bool configured;
};
static thread_local TileState tiles;

// Of a configuration, only the palette counts: 0 without tiles.
TILE void tile_loadconfig(const void* config) {
  tiles = TileState();
  tiles.configured = *(const uint8_t*)config;
}
TILE void tile_storeconfig(void* config) { *(uint8_t*)config = tiles.configured; }
TILE void tile_release() { tiles.configured = false; }

TILE TileRow* rows_of(int tile) {
  if (!tiles.configured) __builtin_trap();
  return tiles.row[tile];
}
TILE void tile_zero(int tile) {
  TileRow* to = rows_of(tile);
  for (int r = 0; r < 16; r++) to[r] = TileRow{};
}
TILE void tile_loadd(int tile, const void* from, int64_t stride) {
  TileRow* to = rows_of(tile);
  for (int r = 0; r < 16; r++) __builtin_memcpy(&to[r], (const char*)from + r * stride, 64);
}
TILE void tile_stored(int tile, void* to, int64_t stride) {
  const TileRow* from = rows_of(tile);
  for (int r = 0; r < 16; r++) __builtin_memcpy((char*)to + r * stride, &from[r], 64);
}

TILE TileRow no_denormals(TileRow x) {
  const TileInts normal = ((TileBits)x & 0x7f800000u) != 0;
  return (TileRow)((TileBits)x & ((TileBits)normal | 0x80000000u));
}
// The first or the second element of each of 16 pairs of bfloat16.
TILE TileRow even(TileBits pairs) { return no_denormals((TileRow)(pairs << 16)); }
TILE TileRow odd(TileBits pairs) { return no_denormals((TileRow)(pairs & 0xffff0000u)); }

static void tile_dpbf16ps(int sum, int a, int b) {
  TileRow* c = rows_of(sum);
  const TileRow *x = rows_of(a), *y = rows_of(b);
  for (int r = 0; r < 16; r++) {
    TileRow evens = {}, odds = {};
    for (int k = 0; k < 16; k++) {
      const TileBits pair = (TileBits{} + ((TileBits)x[r])[k]);
      evens = no_denormals(even(pair) * even((TileBits)y[k]) + evens);
      odds = no_denormals(odd(pair) * odd((TileBits)y[k]) + odds);
    }
    c[r] = no_denormals(no_denormals(c[r]) + no_denormals(evens + odds));
  }
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::tile_loadconfig
#define _tile_storeconfig emulated::tile_storeconfig
#define _tile_release emulated::tile_release
#define _tile_zero emulated::tile_zero
#define _tile_loadd emulated::tile_loadd
#define _tile_stream_loadd emulated::tile_loadd
#define _tile_stored emulated::tile_stored
#define _tile_dpbf16ps emulated::tile_dpbf16ps
