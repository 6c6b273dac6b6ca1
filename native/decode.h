// Few queries, many keys: decoding. Each key is read only once, so keys and values are not packed. The queries of all heads
// that share them are the rows of one small block, and the keys are split into chunks, whose softmaxes are merged in
// order. The number of chunks depends only on the shape, so the bits do not depend on the number of threads.
//
// Keys and values may be int8 with a scale per vector: k = s·x with integers |x| <= 127. They are never dequantized in
// memory: q·k = s·(q·x) and p·v = (p·s)·x, so that a scale costs one multiplication per key and row instead of one per
// entry.

constexpr int FEW_ROWS = 16;    // queries of a KV head, over all its query heads
constexpr int FEW_KEYS = 64;    // keys of a block: a multiple of STRIP
constexpr int AHEAD = 32;       // keys to prefetch ahead
constexpr int FEW_AT_ONCE = 4;  // rows whose sums stay in registers

static bool few_queries(const headwise_forward_call& call) {
  return call.n * (call.h / call.h_kv) <= FEW_ROWS && call.n <= 4;
}

// Quantized keys allow as many queries as the buffers hold, because other paths require dequantizing them first.
static bool fits_eight(const headwise_forward_call& call) {
  return call.n * (call.h / call.h_kv) <= MOST_ROWS;
}

struct Eight { int8_t steps; };

INLINE Floats read(const Eight* x, int64_t count) {
  Ints v = (Ints)all(0.0f);
  if (count >= W) {
#if HEADWISE_AVX512
    v = (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x));
#elif HEADWISE_TARGET_AVX2
    v = (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x));
#else
    for (int i = 0; i < W; i++) v[i] = x[i].steps;
#endif
  } else {
    for (int i = 0; i < count; i++) v[i] = x[i].steps;
  }
  return __builtin_convertvector(v, Floats);
}

template <typename K> constexpr bool IS_EIGHT = false;
template <> constexpr bool IS_EIGHT<Eight> = true;

// One of two consecutive vectors. Those of bfloat16 are SPLIT: one operation unpacks the numbers with even places, and one those
// with odd places. So queries, and sums of values, are kept in this order, but for the last columns, less than two vectors.
template <typename T> constexpr bool SPLIT = false;
template <> constexpr bool SPLIT<Brain> = true;
template <int HALF, typename T> INLINE Floats half(const T* x) { return read(x + HALF * W, W); }
template <int HALF> INLINE Floats half(const Brain* x) {
  const Words both = (Words)load((const float*)x);
  return (Floats)(HALF ? both & 0xffff0000u : both << 16);
}
template <bool BACK, int... I> INLINE void split(float* x, int64_t d, Indices<I...>) {
  for (; d >= 2 * W; d -= 2 * W, x += 2 * W) {
    const Floats a = load(x), b = load(x + W);
    store(x, __builtin_shufflevector(a, b, (BACK ? I / 2 + I % 2 * W : 2 * I)...));
    store(x + W, __builtin_shufflevector(a, b, (BACK ? I / 2 + I % 2 * W + W / 2 : 2 * I + 1)...));
  }
}

// How many keys, or vectors of columns, R rows are multiplied with at once: enough sums in registers to hide the latency of a
// multiply-add. Sums of the lanes are added up for STRIP keys together, as the multiply-adds would wait for each.
template <int R> constexpr int KEYS_OF = (W > 8 ? W : 8) / (R == 3 ? 4 : R);
template <int R> constexpr int VECTORS_OF = 8 / (R == 3 ? 4 : R);
constexpr int STRIP = 16;

// Dot products, per lane, of R queries with KEYS_OF keys, the last of `left` keys in place of those beyond.
template <int R, typename T>
INLINE void dots(const float* queries, int64_t size, const T* keys, int64_t row, int64_t left, int64_t d, Floats* to) {
  constexpr int KEYS = KEYS_OF<R>;
  const T* key[KEYS];
  Floats total[R][KEYS];
#pragma GCC unroll 16
  for (int i = 0; i < R * KEYS; i++) total[i / KEYS][i % KEYS] = all(0.0f);
#pragma GCC unroll 16
  for (int i = 0; i < KEYS; i++) key[i] = keys + least(i, left - 1) * row;
  const auto add = [&](int64_t c, auto part) __attribute__((always_inline)) {
    Floats x[KEYS];
#pragma GCC unroll 16
    for (int i = 0; i < KEYS; i++) x[i] = kept(part(key[i] + c));
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Floats q = kept(load(queries + r * size + c));
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; i++) total[r][i] = kept(total[r][i] + q * x[i]);
    }
  };
  int64_t c = 0;
  for (; c + 2 * W <= d; c += 2 * W) {
    add(c, [](const T* x) __attribute__((always_inline)) { return half<0>(x); });
    add(c + W, [](const T* x) __attribute__((always_inline)) { return half<1>(x - W); });
  }
  for (; c < d; c += W) add(c, [&](const T* x) __attribute__((always_inline)) { return read(x, d - c); });
#pragma GCC unroll 16
  for (int i = 0; i < R * KEYS; i++) to[i / KEYS * STRIP + i % KEYS] = total[i / KEYS][i % KEYS];
}

// out [R rows] += weights [R × count] · values, V vectors of columns. The sum over these keys is separate, to round less than
// adding each key to the sum over all keys before.
template <int R, int V, bool WHOLE, typename T>
static __attribute__((noinline)) void mixed(const float* weights, const T* values, int64_t row, int64_t count, int64_t d,
                                            float* out, int64_t width) {
  Floats total[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R * V; i++) total[i / V][i % V] = all(0.0f);
  for (int64_t j = 0; j < count; j++, values += row) {
    Floats x[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; i++)
      x[i] = !WHOLE ? read(values + i * W, d - i * W) : i % 2 ? half<1>(values + (i - 1) * W) : half<0>(values + i * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const Floats p = kept(all(weights[r * FEW_KEYS + j]));
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) total[r][i] += p * x[i];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R * V; i++) {
    float* place = out + i / V * width + i % V * W;
    store(place, load(place) + total[i / V][i % V]);
  }
}
template <int R, typename T>
static void mixed(const float* weights, const T* values, int64_t row, int64_t count, int64_t d, float* out, int64_t width) {
  constexpr int V = VECTORS_OF<R>;
  int64_t c = 0;
  for (; c + V * W <= d; c += V * W) mixed<R, V, true>(weights, values + c, row, count, d - c, out + c, width);
  for (; c + 2 * W <= d; c += 2 * W) mixed<R, 2, true>(weights, values + c, row, count, d - c, out + c, width);
  if (c < d) mixed<R, 2, false>(weights, values + c, row, count, d - c, out + c, width);
}

// T: type of q and out. K: type of keys and values, T or Eight.
template <typename T, typename K, bool SPREAD, bool REACH> struct Decode {
  const headwise_forward_call& call;
  const Wanted& wanted;
  const Scaling scaling;
  const int64_t heads_a_group, size, width;  // size of a query, padded width of an output row
  const int rows;
  int64_t chunk_keys, chunks, part_size;
  char* scratch;
  int64_t scratch_bytes;
  float* parts;  // [b, h_kv, chunks, rows][part_size]: sums, ranges, classes and output of a row
  Queue queue;
  Flag broken;
  Flag strange;  // a logit or a sum of values is not finite, so that a key or a value may not be
  bool all_finite_needed;

  struct Memory {
    Rows rows;
    float *queries, *logits, *out, *key_scales, *value_scales;
  };

  explicit Decode(const headwise_forward_call& call, const Wanted& wanted)
      : call(call), wanted(wanted), scaling(scaling_of<SINGLES>(call.rule)), heads_a_group(call.h / call.h_kv),
        size(padded(call.d, W)), width(padded(call.d_v, 2 * W)), rows((int)(heads_a_group * call.n)), queue{}, broken{0}, strange{0} {
    const int64_t aim = most(1, 32 / most(1, call.b * call.h_kv));
    chunk_keys = most(512, padded(blocks(call.m, aim), FEW_KEYS));
    chunks = blocks(call.m, chunk_keys);
    part_size = padded((int64_t)(sizeof(Sums) / 4) + wanted.masses(), W) + width;
  }

  int64_t lay_out(char* memory, Memory** out) const {
    Arena arena = {memory};
    *out = arena.take<Memory>(1);
    Memory sizes;
    Memory& m = memory ? **out : sizes;
    m.queries = arena.take<float>(rows * size);
    m.logits = arena.take<float>(rows * FEW_KEYS);
    m.out = arena.take<float>(rows * width);
    m.key_scales = arena.take<float>(IS_EIGHT<K> ? FEW_KEYS : 0);
    m.value_scales = arena.take<float>(IS_EIGHT<K> ? FEW_KEYS : 0);
    m.rows.masses = arena.take<float>(wanted.masses() * MOST_ROWS);
    return arena.next - memory;
  }

  float* part(int64_t group, int64_t chunk, int r) const { return parts + ((group * chunks + chunk) * rows + r) * part_size; }

  void attend_chunks(int worker) {
    Memory* m;
    lay_out(scratch + worker * scratch_bytes, &m);
    for (int64_t task; (task = queue.take()) < call.b * call.h_kv * chunks;) chunk(task / chunks, task % chunks, *m);
  }

  void chunk(int64_t group, int64_t index, Memory& m) {
    const int64_t batch = group / call.h_kv, kv = group % call.h_kv;
    Flag unused = {0};
    __builtin_memset(m.queries, 0, (size_t)(rows * size) * 4);
    for (int r = 0; r < rows; r++) {
      const T* q = (const T*)call.q.data + batch * call.q.batch + (kv * heads_a_group + r / call.n) * call.q.head +
                   r % call.n * call.q.row;
      load_queries<SINGLES>(q, 0, 1, call.d, scaling, call.d, m.queries + r * size, m.rows.broken + r, unused);
      if (SPLIT<K>) split<false>(m.queries + r * size, call.d, Count<W>::list());
    }
    clear_rows<SPREAD, REACH>(m.rows, rows, wanted.masses());
    __builtin_memset(m.out, 0, (size_t)(rows * width) * 4);
    const int64_t end = least(call.m, (index + 1) * chunk_keys);
    for (int64_t from = index * chunk_keys; from < end; from += FEW_KEYS) {
      const Hull seen = hull(call, batch, 0, (int)call.n, from, least(from + FEW_KEYS, end));
      if (seen.first < seen.last) block(batch, kv, from, seen, m);
    }
    for (int r = 0; r < rows; r++) {
      float* to = part(group, index, r);
      Sums sums;
      sums_of<SPREAD, REACH>(m.rows, r, sums);
      __builtin_memcpy(to, &sums, sizeof sums);
      to += sizeof(Sums) / 4;
      for (int i = 0; i < wanted.masses(); i++) *to++ = m.rows.masses[i * MOST_ROWS + r];
      __builtin_memcpy(part(group, index, r) + part_size - width, m.out + r * width, (size_t)width * 4);
    }
  }

  // Logits of R rows. Prefetches the values of the same keys, which are read next, and the keys AHEAD positions later.
  template <int R> __attribute__((noinline)) void score(const K* keys, const K* values, int64_t count, int r, Memory& m) {
    Floats lanes[R][STRIP];
    for (int64_t from = 0; from < count; from += STRIP) {
      const int64_t end = least(count, from + STRIP);
      for (int64_t j = from; j < end; j += KEYS_OF<R>) {
        for (int64_t i = j; i < j + KEYS_OF<R> && r == 0; i++) {
          ask_for(keys + (i + AHEAD) * call.k.row, call.d);
          ask_for(values + i * call.v.row, call.d_v);
        }
        dots<R>(m.queries + r * size, size, keys + j * call.k.row, call.k.row, end - j, call.d, &lanes[0][j - from]);
      }
      for (int i = 0; i < R; i++)
        for (int64_t j = from; j < end; j += W) store(m.logits + (r + i) * FEW_KEYS + j, sums(&lanes[i][j - from]));
    }
  }

  void block(int64_t batch, int64_t kv, int64_t from, const Hull& seen, Memory& m) {
    const int64_t count = seen.last - from;
    const K* keys = (const K*)call.k.data + batch * call.k.batch + kv * call.k.head + from * call.k.row;
    const K* values = (const K*)call.v.data + batch * call.v.batch + kv * call.v.head + from * call.v.row;
    for (int r = 0; r < rows; r += FEW_AT_ONCE) switch (rows - r) {
        case 1: score<1>(keys, values, count, r, m); break;
        case 2: score<2>(keys, values, count, r, m); break;
        case 3: score<3>(keys, values, count, r, m); break;
        default: score<4>(keys, values, count, r, m);
      }
    const int64_t filled = padded(count, W);
    if (IS_EIGHT<K>) {
      load_scales(call.key_scales, batch, kv, from, count, m.key_scales);
      load_scales(call.value_scales, batch, kv, from, count, m.value_scales);
    }
    for (int r = 0; r < rows; r++) {
      if (IS_EIGHT<K>) multiply(m.logits + r * FEW_KEYS, m.key_scales, filled);
      if (r == 0 && !finite(m.logits, count)) strange.raise();
      fill(m.logits + r * FEW_KEYS, count, filled);
      row(batch, kv * heads_a_group + r / call.n, r % call.n, r, from, filled, m);
    }
    if (!call.d_v) return;
    for (int r = 0; r < rows && IS_EIGHT<K>; r++) multiply(m.logits + r * FEW_KEYS, m.value_scales, filled);
    for (int r = 0; r < rows; r += FEW_AT_ONCE) {
      const float* weights = m.logits + r * FEW_KEYS;
      float* out = m.out + r * width;
      switch (rows - r) {
        case 1: mixed<1>(weights, values, call.v.row, count, call.d_v, out, width); break;
        case 2: mixed<2>(weights, values, call.v.row, count, call.d_v, out, width); break;
        case 3: mixed<3>(weights, values, call.v.row, count, call.d_v, out, width); break;
        default: mixed<4>(weights, values, call.v.row, count, call.d_v, out, width);
      }
    }
    if (!all_finite_needed) return;
    Finite<SINGLES> check;
    for (int64_t j = 0; j < count; j++) {
      for (int64_t c = 0; c < call.d; c += W) check.add(read(keys + j * call.k.row + c, call.d - c));
      for (int64_t c = 0; c < call.d_v; c += W) check.add(read(values + j * call.v.row + c, call.d_v - c));
    }
    for (int64_t j = 0; j < filled && IS_EIGHT<K>; j += W)
      check.add(load(m.key_scales + j)), check.add(load(m.value_scales + j));
    if (!check.all()) broken.raise();
  }

  // The scales of `count` vectors; zeros up to the next full vector.
  static void load_scales(const headwise_tensor& scales, int64_t batch, int64_t kv, int64_t from, int64_t count, float* to) {
    const float* x = (const float*)scales.data + batch * scales.batch + kv * scales.head + from * scales.row;
    for (int64_t j = 0; j < count; j++) to[j] = x[j * scales.row];
    for (int64_t j = count; j % W; j++) to[j] = 0.0f;
  }
  static void multiply(float* x, const float* by, int64_t filled) {
    for (int64_t j = 0; j < filled; j += W) store(x + j, load(x + j) * load(by + j));
  }

  static bool finite(const float* x, int64_t count) {
    Finite<SINGLES> check;
    for (int64_t j = 0; j < count; j += W) check.add(read(x + j, count - j));
    return check.all();
  }

  void row(int64_t batch, int64_t head, int64_t query, int r, int64_t from, int64_t filled, Memory& m) {
    Stretch s = {m.logits + r * FEW_KEYS, 0, filled, from, query + call.rule.shift};
    if (scaling.adjusted) adjust(call, batch, head, query, s, 1.0f);
    if (!sees_all(call, batch, query, from, from + filled)) hide(call, batch, head, query, s);
    float top = maximum(largest(s.logits, 0, filled));
    if (rises(m.rows, r, top))
      raise<SPREAD, REACH>(m.rows, r, top, REACH ? distance_of(s, top) : 0.0f, wanted.masses(), m.out + r * width, width);
    top = m.rows.top[r] == NOTHING ? 0.0f : m.rows.top[r];
    Dropout dropout = {0, 0};
    if (call.dropout > 0) dropout = dropout_of(call, batch, head, query);
    const bool exact = call.dropout == 0;
    Seen seen = {s, 1.0f, top, nullptr, batch, query, call.m};
    wanted.add_before(&seen, 1, exact, m.rows, r);
    weigh<false, SPREAD, REACH>(m.rows, r, s, 1.0f, s.logits, dropout);
    seen.weights = s.logits;
    wanted.add_after(&seen, 1, exact, m.rows, r);
  }

  // Merges the chunks of one row in order and computes its results.
  void merge(int64_t group, int r) {
    const int64_t batch = group / call.h_kv, head = group % call.h_kv * heads_a_group + r / call.n, query = r % call.n;
    const int64_t masses = wanted.masses(), begin = sizeof(Sums) / 4;
    float* whole = part(group, 0, r);
    Sums sums;
    __builtin_memcpy(&sums, whole, sizeof sums);
    for (int64_t chunk = 1; chunk < chunks; chunk++) {
      float* other = part(group, chunk, r);
      Sums more;
      __builtin_memcpy(&more, other, sizeof more);
      if (more.top == NOTHING && more.total == 0.0f) continue;
      if (sums.top == NOTHING && sums.total == 0.0f) {
        sums = more;
        __builtin_memcpy(whole + begin, other + begin, (size_t)(part_size - begin) * 4);
        continue;
      }
      // Both are rescaled to the higher top, and moments are shifted to its centre.
      const float top = sums.top > more.top ? sums.top : more.top;
      const float centre = sums.top > more.top ? sums.centre : more.centre;
      const float a = move(sums, top, centre), b = move(more, top, centre);
      sums.largest = sums.largest > more.largest ? sums.largest : more.largest;
      sums.total += more.total;
      sums.entropy += more.entropy;
      sums.squares += more.squares;
      sums.first += more.first;
      sums.second += more.second;
      for (int64_t i = 0; i < masses; i++) whole[begin + i] = whole[begin + i] * a + other[begin + i] * b;
      for (int64_t c = part_size - width; c < part_size; c += W) store(whole + c, load(whole + c) * a + load(other + c) * b);
    }
    bool bad;
    const T* q = (const T*)call.q.data + batch * call.q.batch + head * call.q.head + query * call.q.row;
    Finite<SINGLES> check;
    for (int64_t c = 0; c < call.d; c += W) check.add(read(q + c, call.d - c));
    bad = !check.all();
    const int64_t at = (batch * call.h + head) * call.n + query;
    Finished row;
    sums_of(sums, bad, row);
    finish_rows<REACH>(call, head, SPREAD || call.lse, row);
    if (call.lse) call.lse[at] = row.log_sum[0];
    wanted.finish(row, 1, whole + begin, 1, at);
    if (!call.d_v) return;
    if (r == 0 && !finite(whole + part_size - width, call.d_v)) strange.raise();
    T* out = (T*)call.out.data + batch * call.out.batch + head * call.out.head + query * call.out.row;
    if (SPLIT<K>) split<true>(whole + part_size - width, call.d_v, Count<W>::list());
    write_row(out, whole + part_size - width, row.inverse[0] / (1.0f - call.dropout), call.d_v);
  }

  static float move(Sums& sums, float top, float centre) {
    const float scale = exp2(all(sums.top - top))[0], shift = sums.centre - centre;
    sums.second = (sums.second + 2.0f * shift * sums.first + shift * shift * sums.total) * scale;
    sums.first = (sums.first + shift * sums.total) * scale;
    sums.entropy = (sums.entropy + (sums.top - top) * sums.total) * scale;
    sums.squares *= scale * scale;
    sums.total *= scale;
    sums.top = top;
    sums.centre = centre;
    return scale;
  }

  int go() {
    const int64_t groups = call.b * call.h_kv;
    const int threads = (int)least(call.threads, most(1, groups * chunks));
    Memory* unused;
    scratch_bytes = padded(lay_out(nullptr, &unused), 4096);
    char* memory = borrow((size_t)(threads * scratch_bytes + groups * chunks * rows * part_size * 4));
    if (!memory) return HEADWISE_NO_MEMORY;
    scratch = memory;
    parts = (float*)(memory + threads * scratch_bytes);
    all_finite_needed = !everything_is_seen(call);
    on_all<&Decode::attend_chunks>(this, threads);
    if (!broken.value && !queue.ended.value)
      for (int64_t group = 0; group < groups; group++)
        for (int r = 0; r < rows; r++) merge(group, r);
    give_back(memory);
    if (broken.value) return HEADWISE_NOT_FINITE;
    // Every key has a logit, and every value is in a sum, with a weight that may be 0: 0 times infinity is NaN.
    return all_finite_needed || strange.value ? HEADWISE_DONE : HEADWISE_FINITE;
  }
};
