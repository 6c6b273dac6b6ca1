// The C interface of headwise's compiled attention kernels: plain pointers and sizes, independent of PyTorch.
//
// Shapes: q [b, h, n, d], k [b, h_kv, m, d], v [b, h_kv, m, d_v], out [b, h, n, d_v]; the last axis is contiguous,
// the others have strides in elements. Query head i reads KV head i / (h / h_kv). Query i has position i + rule.shift on
// the key axis; the shift is usually m - n. Python mirrors the structures in src/headwise/kernels/cpu/binding.py;
// HEADWISE_ABI changes whenever one of them does.
#pragma once
#include <stdint.h>

#define HEADWISE_ABI 13

#if defined(_WIN32)
#define HEADWISE_EXPORT __declspec(dllexport)
#else
#define HEADWISE_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { HEADWISE_FLOAT32 = 0, HEADWISE_BFLOAT16 = 1, HEADWISE_FLOAT16 = 2 };

// Status codes of a call.
enum {
  HEADWISE_DONE = 0,
  HEADWISE_NO_MEMORY = 1,
  HEADWISE_NOT_FINITE = 2,  // a key or value that is masked for some query is NaN or infinite: nothing was computed
  HEADWISE_TOO_MANY_QUERIES = 3,  // quantized keys, and over 48 queries per KV head or statistics that decoding lacks
  HEADWISE_FINITE = 4,  // done, and every key and value is finite; HEADWISE_DONE does not imply this
  HEADWISE_MASKED = 5,  // headwise_again_backward: a query is fully masked: nothing was computed
};

typedef struct {
  void* data;
  int64_t batch, head, row;  // strides in elements
} headwise_tensor;

// An argument of a statistic that has a value for each key [b or 1, m], or each query [b or 1, n].
typedef struct {
  const void* data;        // contiguous
  int64_t batch;           // stride in elements; 0 if all batch entries share it
} headwise_argument;

// One statistic requested from a forward call: a function in headwise_statistics(), whose signature defines which of these
// arguments it has and its result.

typedef struct {
  int32_t code;            // its index in headwise_statistics()
  int32_t count;
  void* result;            // contiguous
  int64_t numbers[3];
  headwise_argument keys, queries;
} headwise_wanted;

// The definition of a score: scale * q.k, then the soft cap, then relative and bias, then the mask.
typedef struct {
  int64_t shift;           // position of query 0 on the key axis
  float scale, soft_cap;   // soft_cap 0: none; else cap * tanh(score / cap)
  const int32_t* spans;    // [b or 1, n, span_count, 2]: half-open ranges of keys, sorted, disjoint; empty ones last
  int64_t span_batch;      // stride in int32; 0 if all batch entries share them
  int32_t span_count;
  const uint8_t* dense;    // NULL, or a boolean mask in addition to the spans; last axis contiguous
  int64_t dense_batch, dense_head, dense_row;
  const float* relative;   // NULL, or [h or 1, n + m - 1]: added to score (i, j) at index j - i + n - 1
  int64_t relative_head;
  const float* bias;       // NULL, or added to score (i, j)
  int64_t bias_batch, bias_head, bias_row, bias_col;
  const float* sinks;      // NULL, or [h]: one more logit in the denominator of every row
} headwise_rule;

typedef struct {
  int32_t dtype;           // of q, k, v and out
  int32_t threads;
  int64_t b, h, h_kv, n, m, d, d_v;
  headwise_tensor q, k, v, out;  // v and out are not accessed if d_v is 0
  headwise_rule rule;
  float dropout;           // probability of dropping a weight; statistics are of the weights before dropout
  uint64_t seed;
  float* lse;              // [b, h, n]: natural log, -inf for fully masked queries; NULL if not requested
  int32_t wanted_count;
  const headwise_wanted* wanted;  // sorted by code
  // Not NULL: k and v are int8, and their values are those times these scales, float32 [b, h_kv, m].
  headwise_tensor key_scales, value_scales;
} headwise_forward_call;

// A part of the gradient of the weights: `factor` of the row times a number of each key, 1 or 0 if `keys` is NULL.
typedef struct {
  const float* factor;     // [b, h, n]
  headwise_argument keys;  // float32 [b or 1, m]
  int64_t start, stop;     // the keys with 1, [start, stop)
  int32_t relative;        // 1: these are counted from the query's position
} headwise_mass_gradient;

// The gradients of q, k and v from that of out; all of them have type `dtype` and strides. With grad_q.data NULL only that
// of v, which is the transposed weights times grad_out; v, out and delta are then not accessed.
typedef struct {
  int32_t dtype;
  int32_t threads;
  int64_t b, h, h_kv, n, m, d, d_v;
  headwise_tensor q, k, v, out, grad_out, grad_q, grad_k, grad_v;
  headwise_rule rule;
  float dropout;
  uint64_t seed;
  const double* lse;       // [b, h, n]: of the forward call
  int32_t single;          // 1: no product is of parts of float32 in lower precision, so that logits do not depend on shapes
  float* delta;            // [b, h, n]: sum(grad_out * out), also a head's importance (Michel et al. 2019) when summed
  // The gradients of the rule's terms, float32; NULL if not requested. Strides are 0 along broadcast axes.
  float* grad_relative;    // [h or 1, n + m - 1], contiguous
  int64_t grad_relative_head;
  float* grad_bias;        // [b or 1, h or 1, n or 1, m or 1], the last axis contiguous
  int64_t grad_bias_batch, grad_bias_head, grad_bias_row, grad_bias_col;
  float* grad_sinks;       // [h]
  // Gradients of statistics of the rows, and of the log-sum-exp, in the same pass: to those of the weights before dropout
  //   dP_ij += logs_i ln p_ij + distance_i |position - key| + sum of masses
  // are added. All are [b, h, n]; shift NULL: there are none; logs or distance NULL: 0.
  const float* shift;      // added to delta; with logs also that of a learned sink
  const float *logs, *distance;
  int32_t mass_count;
  const headwise_mass_gradient* masses;
} headwise_backward_call;

#define HEADWISE_STRIPE 1024

// Weights pooled over squares of cell × cell, smaller ones at the lower and right edge; fully masked squares are 0.
typedef struct {
  int32_t dtype;
  int32_t threads;
  int64_t b, h, h_kv, n, m, d;
  headwise_tensor q, k;
  headwise_rule rule;
  const double* lse;       // [b, h, n]
  int32_t single;          // as in headwise_backward_call
  // 1, with cell 1: of each row and HEADWISE_STRIPE keys, largest = max_j z_j and mean = Σ_j 2^(z_j - largest), where z is
  // log2 of a weight, above 0 where the log-sum-exp is too small; both are [b, h, n, ceil(m / HEADWISE_STRIPE)].
  int32_t logs;
  int64_t cell;
  float *mean, *largest;   // [b, h, ceil(n / cell), ceil(m / cell)], or NULL; the mean is over the unmasked pairs
  int64_t* allowed;        // likewise: the number of unmasked pairs
} headwise_pool_call;

// Sums of the weights along diagonals.
typedef struct {
  int32_t dtype;
  int32_t threads;
  int64_t b, h, h_kv, n, m, d;
  headwise_tensor q, k;
  headwise_rule rule;
  const double* lse;       // [b, h, n]
  int32_t single;          // as in headwise_backward_call
  float* mass;             // [b, h, n + m - 1]; query i and key j are on diagonal j - i + n - 1
} headwise_diagonals_call;

// How the value of a row follows from one of its statistics x and its log-sum-exp.
enum {
  HEADWISE_SAME = 0,     // x
  HEADWISE_INVERSE = 1,  // 1 / x
  HEADWISE_SHARE = 2,    // min(exp(x - lse), 1)
  HEADWISE_LOGIT = 3,    // x, or NaN if lse is not finite
  HEADWISE_LOG_SUM = 4,  // lse
};

// A measure of rows.
typedef struct {
  const float* x;          // [b, h, n]; NULL for HEADWISE_LOG_SUM, and in headwise_again_measured
  const uint8_t* counted;  // [b or 1, n]: the rows that count; NULL: those that are not fully masked
  int64_t counted_batch;   // stride; 0 if all batch entries share it
  int32_t formula;
  int32_t largest;         // 0: the mean of the rows that count, else the largest of them; 0 if no row counts
  int32_t place;           // in headwise_again_measured: x is the result of wanted[place]
} headwise_row_value;

// Measures of the rows of each head.
typedef struct {
  int64_t b, h, n;
  const float* lse;        // [b, h, n]
  int32_t count;
  const headwise_row_value* measures;
  float* values;           // [count, b, h]
  double *totals, *counts; // [count, b, h]: the sum or the largest (-inf if no row counts), and the number of rows that count
  int64_t* nonfinite;      // [b, h]: rows whose log-sum-exp is NaN or inf
} headwise_rows_call;

// Output, log-sum-exp and statistics.
HEADWISE_EXPORT int headwise_forward(const headwise_forward_call* call);

// A call with the shapes, strides and rule of `like`, these tensors, and no result but out and the log-sum-exp; NULL: not wanted.
HEADWISE_EXPORT int headwise_again(const headwise_forward_call* like, int threads, void* q, void* k, void* v, void* out,
                                   float* lse);

// The same, and the log-sum-exp, statistics of rows to results [wanted_count, b, h, n], and measures of them. The other
// pointers of `measures` are not read; both have at most HEADWISE_MOST_KEPT statistics and measures.
#define HEADWISE_MOST_KEPT 64
HEADWISE_EXPORT int headwise_again_measured(const headwise_forward_call* like, const headwise_rows_call* measures, int threads,
                                            void* q, void* k, void* v, void* out, float* lse, float* results, float* values,
                                            double* totals, int64_t* nonfinite);

// Measures of rows.
HEADWISE_EXPORT int headwise_rows(const headwise_rows_call* call);

// The gradients; the same bits for any number of threads.
HEADWISE_EXPORT int headwise_backward(const headwise_backward_call* call);

// The same for a call with the shapes, strides and rule of `like`, and these tensors; lse is that of the forward call.
HEADWISE_EXPORT int headwise_again_backward(const headwise_backward_call* like, int threads, void* q, void* k, void* v,
                                            void* out, void* grad_out, void* grad_q, void* grad_k, void* grad_v,
                                            const float* lse);

// The pooled weights, or with cell 1 the weights.
HEADWISE_EXPORT int headwise_pool(const headwise_pool_call* call);

// The sum of the weights on each diagonal.
HEADWISE_EXPORT int headwise_diagonals(const headwise_diagonals_call* call);

// The version of this interface, the target in use ("amx", "avx512bf16", "avx512", "avx2", "portable"), and all compiled
// targets, comma-separated, in order of preference. The environment variable HEADWISE_TARGET selects another one.
HEADWISE_EXPORT int headwise_abi_version(void);
HEADWISE_EXPORT const char* headwise_target_name(void);
HEADWISE_EXPORT const char* headwise_targets(void);
// The reason why a compiled target does not run here, or "" if it does; NULL if it was not compiled.
HEADWISE_EXPORT const char* headwise_refusal(const char* name);
// The signatures of the statistics that headwise_forward supports, in the order of their codes, ending with NULL: such as
// "key_weights(float32[m]): float32[b, h, n]" or "top_keys(count): int64[b, h, n, count]"; `int` is one of `numbers`.
HEADWISE_EXPORT const char* const* headwise_statistics(void);
// Returns 0, or 1 if the CPU cannot run the target or it was not compiled.
HEADWISE_EXPORT int headwise_set_target(const char* name);

// Run parallel regions on an OpenMP runtime that is already loaded (GOMP_parallel of PyTorch's library), so that two
// thread pools do not compete for the cores; NULL: on threads of our own.
HEADWISE_EXPORT void headwise_set_openmp(void (*gomp_parallel)(void (*)(void*), void*, unsigned, unsigned));

// Python's PyEval_SaveThread, PyEval_RestoreThread and PyErr_CheckSignals, and the identity of its main thread. Calls release
// its lock, which their caller must hold, and in that thread look for signals while they compute. If a signal's handler raises,
// the call ends, its results are undefined, and the exception is set.
HEADWISE_EXPORT void headwise_set_python(void* (*release)(void), void (*acquire)(void*), int (*check)(void),
                                         unsigned long main_thread);

// Peak performance of this machine: operations per second for a dtype (a multiply-add counts as two), bytes read from
// memory per second.
HEADWISE_EXPORT double headwise_peak(int dtype, int threads);
HEADWISE_EXPORT double headwise_bandwidth(int threads);

#ifdef __cplusplus
}
#endif
