// The interface between a target (one compilation of target.cpp) and dispatch.cpp.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "headwise.h"

// Features of a target: vectors of AVX-512, products of bfloat16 (DOT), and tiles for them.
#if HEADWISE_TARGET_AMX
#define HEADWISE_TILES 1
#else
#define HEADWISE_TILES 0
#endif
#ifndef HEADWISE_ALWAYS_PARTS
#define HEADWISE_ALWAYS_PARTS 0  // 1, for tests: parts of float32 (operand.h) are used where they are slower, too
#endif
#if HEADWISE_TARGET_AVX512BF16 || HEADWISE_TILES
#define HEADWISE_DOT 1
#else
#define HEADWISE_DOT 0
#endif
#if HEADWISE_TARGET_AVX512 || HEADWISE_DOT
#define HEADWISE_AVX512 1
#else
#define HEADWISE_AVX512 0
#endif

#if HEADWISE_TARGET_AMX
#define HEADWISE_TARGET amx
#define HEADWISE_TARGET_TEXT "amx"
#define HEADWISE_TARGET_OBJECT target_amx
#elif HEADWISE_TARGET_AVX512BF16
#define HEADWISE_TARGET avx512bf16
#define HEADWISE_TARGET_TEXT "avx512bf16"
#define HEADWISE_TARGET_OBJECT target_avx512bf16
#elif HEADWISE_TARGET_AVX512
#define HEADWISE_TARGET avx512
#define HEADWISE_TARGET_TEXT "avx512"
#define HEADWISE_TARGET_OBJECT target_avx512
#elif HEADWISE_TARGET_AVX2
#define HEADWISE_TARGET avx2
#define HEADWISE_TARGET_TEXT "avx2"
#define HEADWISE_TARGET_OBJECT target_avx2
#elif HEADWISE_TARGET_PORTABLE
#define HEADWISE_TARGET portable
#define HEADWISE_TARGET_TEXT "portable"
#define HEADWISE_TARGET_OBJECT target_portable
#endif

namespace headwise {

// The status of a call that a target does not compute, besides those of headwise.h: another target computes it.
constexpr int REFUSED = -1;

struct Target {
  const char* name;
  const char* const* statistics;  // their signatures, NULL at the end; the same for all targets
  int (*forward)(const headwise_forward_call&);
  int (*backward)(const headwise_backward_call&);
  int (*pool)(const headwise_pool_call&);
  int (*diagonals)(const headwise_diagonals_call&);
  int (*rows)(const headwise_rows_call&);
  double (*peak)(int dtype, int threads);
  double (*bandwidth)(int threads);
};

// Runs work(context, worker) on workers 0 … threads - 1 in parallel, and waits for all.
typedef void (*Work)(void* context, int worker);
void parallel(int threads, Work work, void* context);

// Memory aligned to 64 bytes, reused by the next call; null if out of memory.
char* borrow(size_t bytes);
void give_back(char* memory);

double seconds();

// Whether this thread should look for signals now. It may then do so: returns whether the call has to end.
bool signals_due();
bool answer_signals();

}  // namespace headwise
