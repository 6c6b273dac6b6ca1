// The C interface: selects the target, and provides threads and memory. Compiled for the platform's baseline.
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#include <time.h>
#include <unistd.h>

#include "target.h"

namespace headwise {

extern const Target target_portable;
#if HEADWISE_HAS_AVX2
extern const Target target_avx2;
#endif
#if HEADWISE_HAS_AVX512
extern const Target target_avx512;
#endif
#if HEADWISE_HAS_AVX512BF16
extern const Target target_avx512bf16;
#endif
#if HEADWISE_HAS_AMX
extern const Target target_amx;
#endif

namespace {

struct Candidate {
  const Target* target;
  const char* refusal;  // the reason why it does not run here, or NULL
};

#if HEADWISE_EMULATE_TILES
const bool EMULATED = true;
#else
const bool EMULATED = false;
#endif

#if defined(__x86_64__)
// Whether the operating system lets this process use tiles. Linux requires a request, once for all threads that start later,
// since every thread switch saves their state of 8 KB. It fails in some containers, on old kernels, and if the alternate
// signal stack is too small.
const char* tiles_refused() {
#if HEADWISE_EMULATE_TILES
  return nullptr;
#elif defined(__linux__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const unsigned TILE = 1u << 24, BF16 = 1u << 22, OSXSAVE = 1u << 27;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILE | BF16)) != (TILE | BF16)) return "this CPU lacks its instructions";
  __get_cpuid(1, &a, &b, &c, &d);
  if (!(c & OSXSAVE)) return "the operating system does not save tiles";
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return "the operating system does not save tiles";
  const long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  if (!syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return nullptr;
  return errno == ENOSPC ? "a thread's signal stack is too small for tiles" : "Linux does not permit tiles to this process";
#else
  return "tiles are used on Linux alone";
#endif
}
#endif

// In order of preference: by the speed they reach, not by the newest instruction. On Intel's CPUs vdpbf16ps runs at half the rate
// of float32, so without tiles bfloat16 is converted; on AMD's it runs at twice that rate.
const Candidate* candidates() {
  static Candidate list[6];
  if (list[0].target) return list;
  int i = 0;
#if defined(__x86_64__)
  const char* const LACKS = "this CPU lacks its instructions";
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  (void)avx2, (void)bf16, (void)tiles_refused, (void)LACKS, (void)EMULATED;  // unused if fewer targets are compiled
#if HEADWISE_HAS_AMX
  const Candidate tiles = {&target_amx, bf16 ? tiles_refused() : LACKS};
  if (!EMULATED) list[i++] = tiles;
#endif
#if HEADWISE_HAS_AVX512BF16
  const Candidate pairs = {&target_avx512bf16, bf16 ? nullptr : LACKS};
  const bool pairs_first = !__builtin_cpu_is("intel");
  if (pairs_first) list[i++] = pairs;
#endif
#if HEADWISE_HAS_AVX512
  list[i++] = {&target_avx512, avx512 ? nullptr : LACKS};
#endif
#if HEADWISE_HAS_AVX512BF16
  if (!pairs_first) list[i++] = pairs;
#endif
#if HEADWISE_HAS_AVX2
  list[i++] = {&target_avx2, avx2 ? nullptr : LACKS};
#endif
#endif
  list[i++] = {&target_portable, nullptr};
#if HEADWISE_HAS_AMX
  if (EMULATED) list[i++] = tiles;  // last, as it is slow and only for tests
#endif
  list[i] = {nullptr, nullptr};
  return list;
}

const Target* chosen = nullptr;

const Target* find(const char* name) {
  for (const Candidate* c = candidates(); c->target; c++)
    if (!c->refusal && (!name || !strcmp(name, c->target->name))) return c->target;
  return nullptr;
}

const Target& target() {
  const Target* now = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
  if (now) return *now;
  const char* wanted = getenv("HEADWISE_TARGET");
  now = wanted ? find(wanted) : nullptr;
  if (!now) now = find(nullptr);
  __atomic_store_n(&chosen, now, __ATOMIC_RELEASE);
  return *now;
}

void (*openmp)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
pid_t openmp_process = 0;

struct Team {
  Work work;
  void* context;
  int next;
};

void member(void* data) {
  Team* team = (Team*)data;
  team->work(team->context, __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED));
}

void* thread_member(void* data) {
  member(data);
  return nullptr;
}

}  // namespace

void parallel(int threads, Work work, void* context) {
  // After a fork the workers of the parent's pool do not exist, and waiting for them would never end.
  const bool pooled = openmp && getpid() == openmp_process;
  Team team = {work, context, 0};
  if (threads <= 1 || (openmp && !pooled)) {
    for (int i = 0; i < threads; i++) member(&team);
    return;
  }
  if (pooled) {
    openmp(member, &team, (unsigned)threads, 0);
    // The runtime may start fewer threads than requested; the remaining work runs here.
    while (__atomic_load_n(&team.next, __ATOMIC_RELAXED) < threads) member(&team);
    return;
  }
  pthread_t others[64];
  int started = 0;
  while (started < threads - 1 && started < 64 && !pthread_create(&others[started], nullptr, thread_member, &team)) started++;
  member(&team);
  for (int i = 0; i < started; i++) pthread_join(others[i], nullptr);
  while (team.next < threads) member(&team);
}

// One block of memory is reused between calls: allocating pages takes longer than the arithmetic of a small call.
namespace {
struct Header {
  size_t bytes;
};
const size_t HEADER = 64, KEPT = (size_t)256 << 20;
char* spare = nullptr;
}  // namespace

char* borrow(size_t bytes) {
  char* memory = __atomic_exchange_n(&spare, (char*)nullptr, __ATOMIC_ACQ_REL);
  if (memory && ((Header*)memory)->bytes >= bytes) return memory + HEADER;
  free(memory);
  void* fresh = nullptr;
  if (posix_memalign(&fresh, 4096, bytes + HEADER)) return nullptr;
  ((Header*)fresh)->bytes = bytes;
  return (char*)fresh + HEADER;
}

void give_back(char* memory) {
  memory -= HEADER;
  if (((Header*)memory)->bytes <= KEPT) memory = __atomic_exchange_n(&spare, memory, __ATOMIC_ACQ_REL);
  free(memory);
}

static headwise_forward_call another(const headwise_forward_call& like, int threads, void* q, void* k, void* v, void* out,
                                     float* lse) {
  headwise_forward_call call = like;
  call.threads = threads;
  call.q.data = q;
  call.k.data = k;
  call.v.data = v;
  call.out.data = out;
  call.lse = lse;
  return call;
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

namespace {
const double LOOK = 0.1;  // seconds between two looks for signals
const unsigned BETWEEN = 8;  // one in so many reads the clock, which takes long beside a small block

struct Python {
  void* (*release)(void);
  void (*acquire)(void*);
  int (*check)(void);
  unsigned long main_thread;
};
Python python = {};

// A call from Python, without its lock. Handlers of signals, which run within the call in the main thread, may begin another.
struct Outside {
  static thread_local Outside* here;  // null in threads to which Python gives no signals
  Outside* const before;
  void* state;
  double next;  // time of the next look; 0: there has been none
  unsigned asked;
  bool raised;

  Outside() : before(here), state(python.release ? python.release() : nullptr), next(0.0), asked(0), raised(false) {
    here = python.check && (unsigned long)pthread_self() == python.main_thread ? this : nullptr;
  }
  ~Outside() {
    here = before;
    if (python.acquire) python.acquire(state);
  }
};
thread_local Outside* Outside::here = nullptr;
}  // namespace

bool signals_due() {
  Outside* call = Outside::here;
  if (!call || call->raised) return call;
  if (++call->asked % BETWEEN) return false;
  const double now = seconds();
  if (call->next == 0.0) call->next = now + LOOK;
  return now >= call->next;
}

bool answer_signals() {
  Outside& call = *Outside::here;
  if (call.raised) return true;  // what begins later ends at once
  python.acquire(call.state);
  call.raised = python.check() != 0;
  call.state = python.release();
  call.next = seconds() + LOOK;
  return call.raised;
}

}  // namespace headwise

using namespace headwise;

extern "C" {

int headwise_abi_version(void) { return HEADWISE_ABI; }
const char* headwise_target_name(void) { return target().name; }
const char* const* headwise_statistics(void) { return target().statistics; }

const char* headwise_targets(void) {
  static char names[128];
  if (!names[0]) {
    char text[128] = "";
    for (const Candidate* c = candidates(); c->target; c++) {
      if (text[0]) strcat(text, ",");
      strcat(text, c->target->name);
    }
    memcpy(names, text, sizeof names);
  }
  return names;
}

const char* headwise_refusal(const char* name) {
  for (const Candidate* c = candidates(); c->target; c++)
    if (!strcmp(name, c->target->name)) return c->refusal ? c->refusal : "";
  return nullptr;
}

// Runs when the library is loaded, before two threads could fill in the same lists.
__attribute__((constructor)) static void headwise_look_around(void) { headwise_targets(); }

int headwise_set_target(const char* name) {
  const Target* wanted = find(name);
  if (wanted) __atomic_store_n(&chosen, wanted, __ATOMIC_RELEASE);
  return wanted ? 0 : 1;
}

void headwise_set_openmp(void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned)) {
  openmp_process = getpid();
  openmp = gomp_parallel;
}

void headwise_set_python(void* (*release)(void), void (*acquire)(void*), int (*check)(void), unsigned long main_thread) {
  python = {release, acquire, check, main_thread};
}

int headwise_forward(const headwise_forward_call* call) {
  const Outside outside;
  return target().forward(*call);
}
int headwise_again(const headwise_forward_call* like, int threads, void* q, void* k, void* v, void* out, float* lse) {
  const Outside outside;
  return target().forward(another(*like, threads, q, k, v, out, lse));
}
int headwise_again_measured(const headwise_forward_call* like, const headwise_rows_call* measures, int threads, void* q, void* k,
                            void* v, void* out, float* lse, float* results, float* values, double* totals,
                            int64_t* nonfinite) {
  const Outside outside;
  headwise_wanted wanted[HEADWISE_MOST_KEPT];
  headwise_row_value kept[HEADWISE_MOST_KEPT];
  headwise_forward_call call = another(*like, threads, q, k, v, out, lse);
  headwise_rows_call rows = *measures;
  const int64_t size = call.b * call.h * call.n, heads = call.b * call.h;
  for (int i = 0; i < call.wanted_count; i++) {
    wanted[i] = call.wanted[i];
    wanted[i].result = results + i * size;
  }
  call.wanted = wanted;
  const int status = target().forward(call);
  if (status != HEADWISE_DONE && status != HEADWISE_FINITE) return status;
  for (int i = 0; i < rows.count; i++) {
    kept[i] = rows.measures[i];
    kept[i].x = kept[i].formula == HEADWISE_LOG_SUM ? nullptr : results + kept[i].place * size;
  }
  rows.lse = lse;
  rows.measures = kept;
  rows.values = values;
  rows.totals = totals;
  rows.counts = totals + rows.count * heads;
  rows.nonfinite = nonfinite;
  target().rows(rows);
  return status;
}
int headwise_rows(const headwise_rows_call* call) {
  const Outside outside;
  return target().rows(*call);
}
int headwise_backward(const headwise_backward_call* call) {
  const Outside outside;
  return target().backward(*call);
}
int headwise_again_backward(const headwise_backward_call* like, int threads, void* q, void* k, void* v, void* out,
                            void* grad_out, void* grad_q, void* grad_k, void* grad_v, const float* lse) {
  const Outside outside;
  const int64_t rows = like->b * like->h * like->n;
  double* wide = (double*)malloc((size_t)rows * (sizeof(double) + sizeof(float)));
  if (!wide) return HEADWISE_NO_MEMORY;
  bool masked = false;
  for (int64_t i = 0; i < rows; i++) {
    wide[i] = lse[i];
    masked |= lse[i] == -__builtin_inff();
  }
  headwise_backward_call call = *like;
  call.threads = threads;
  call.q.data = q;
  call.k.data = k;
  call.v.data = v;
  call.out.data = out;
  call.grad_out.data = grad_out;
  call.grad_q.data = grad_q;
  call.grad_k.data = grad_k;
  call.grad_v.data = grad_v;
  call.lse = wide;
  call.delta = (float*)(wide + rows);
  const int status = masked ? (int)HEADWISE_MASKED : target().backward(call);
  free(wide);
  return status;
}
int headwise_pool(const headwise_pool_call* call) {
  const Outside outside;
  return target().pool(*call);
}
int headwise_diagonals(const headwise_diagonals_call* call) {
  const Outside outside;
  return target().diagonals(*call);
}
double headwise_peak(int dtype, int threads) {
  const Outside outside;
  return target().peak(dtype, threads);
}
double headwise_bandwidth(int threads) {
  const Outside outside;
  return target().bandwidth(threads);
}
}
