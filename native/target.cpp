// The kernels, compiled once for each target; HEADWISE_TARGET_<NAME> selects it. Code here must not use inline functions of
// the standard library: the linker keeps one copy of each, which could be compiled for instructions this CPU does not have.
#include <stdint.h>
#if HEADWISE_EMULATE
#include "emulate.h"  // AVX-512 emulated with AVX2, for tests
#elif defined(__x86_64__)
#include <immintrin.h>
#endif
#if HEADWISE_EMULATE_TILES
#include "emulate_tiles.h"  // AMX emulated in C, likewise
#endif

#include "headwise.h"
#include "target.h"

namespace headwise {

extern const Target target_avx512;

namespace HEADWISE_TARGET {

#include "simd.h"
#include "numbers.h"
#include "operand.h"
#include "parts.h"
#include "pack.h"
#include "tiles.h"
#include "product.h"
#include "softmax.h"
#include "rule.h"
#include "top.h"
#include "statistics.h"
#include "finish.h"
#include "queue.h"
#include "ahead.h"
#include "blocks.h"
#include "levels.h"
#include "dtype.h"
#include "forward.h"
#include "units.h"
#include "panels.h"
#include "decode.h"
#include "run.h"
#include "job.h"
#include "learned.h"
#include "turned.h"
#include "backward.h"
#include "weights.h"
#include "pool.h"
#include "diagonals.h"
#include "rows.h"
#include "peak.h"

#if HEADWISE_DOT
// Without tiles, code for other dtypes than bfloat16 has the same instructions as in avx512, so it is compiled only there. With
// tiles, numbers that have no finite parts are computed there.
template <auto HERE, auto THERE, typename Call> static int of_dtype(const Call& call) {
  const int status = HEADWISE_TILES || call.dtype == HEADWISE_BFLOAT16 ? HERE(call) : REFUSED;
  return status == REFUSED ? (target_avx512.*THERE)(call) : status;
}
#define HEADWISE_STEP(step) HEADWISE_TARGET::of_dtype<HEADWISE_TARGET::step, &Target::step>
#else
#define HEADWISE_STEP(step) HEADWISE_TARGET::step
#endif

}  // namespace HEADWISE_TARGET

extern const Target HEADWISE_TARGET_OBJECT;
const Target HEADWISE_TARGET_OBJECT = {
    HEADWISE_TARGET_TEXT,    HEADWISE_TARGET::Statistics::SIGNATURES,
    HEADWISE_STEP(forward),  HEADWISE_STEP(backward),
    HEADWISE_STEP(pool),     HEADWISE_STEP(diagonals),
    HEADWISE_TARGET::rows,   HEADWISE_TARGET::peak,
    HEADWISE_TARGET::bandwidth};

}  // namespace headwise
