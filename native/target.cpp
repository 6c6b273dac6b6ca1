// The kernels, compiled once for each level of instructions; HEADWISE_TARGET_<NAME> says which. Nothing here may use inline
// functions of the standard library: the linker keeps one copy of those, and it could be one that this CPU cannot run.
#include <stdint.h>
#if HEADWISE_EMULATE
#include "emulate.h"  // AVX-512 made of AVX2, for tests
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

#include "headwise.h"
#include "target.h"

namespace headwise {
namespace HEADWISE_TARGET {

#include "simd.h"
#include "pack.h"
#include "product.h"
#include "softmax.h"
#include "rule.h"
#include "top.h"
#include "statistics.h"
#include "finish.h"
#include "forward.h"
#include "queue.h"
#include "decode.h"
#include "run.h"
#include "job.h"
#include "learned.h"
#include "backward.h"
#include "weights.h"
#include "pool.h"
#include "diagonals.h"
#include "peak.h"

}  // namespace HEADWISE_TARGET

extern const Target HEADWISE_TARGET_OBJECT;
const Target HEADWISE_TARGET_OBJECT = {
    HEADWISE_TARGET_TEXT,      HEADWISE_TARGET::Statistics::SIGNATURES,
    HEADWISE_TARGET::forward,  HEADWISE_TARGET::backward,
    HEADWISE_TARGET::pool,     HEADWISE_TARGET::diagonals,
    HEADWISE_TARGET::peak,     HEADWISE_TARGET::bandwidth};

}  // namespace headwise
