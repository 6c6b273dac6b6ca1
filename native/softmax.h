// The online softmax of a few rows over successive blocks of keys (Milakov & Gimelshein 2018), and the sums for statistics
// that it accumulates.
//
// For each row, `top` is the largest logit so far, or slightly less, and `total` the sum of p = 2^(z - top), where z are
// logits in units of ln 2. Sums are per lane and added up at the end; when the top rises, they are rescaled. The others:
//
//   entropy              Σ p·(z - top)
//   effective keys       Σ p², and Σ p
//   distance, variance   Σ p·w and Σ p·w², w = |position - key| - centre, where the centre is the distance of the key
//                        whose logit became the top, so that the variance is accurate for a head that attends 50,000 keys
//                        back with a spread of two
//   mass on ranges       Σ p over a few keys, computed in the blocks that contain them

constexpr int MOST_ROWS = 48;                         // queries whose sums are kept at once
// Queries of a block of logits: with tiles, those of one product.
constexpr int BLOCK_ROWS = HEADWISE_TILES ? GROUP<PAIRS> : MOST_ROWS;
constexpr int BLOCK_KEYS = W == 16 ? 512 : 256;       // keys of a block of logits: BLOCK_ROWS rows of them stay in L2
// Row length in memory: a power of two would map all rows to the same few sets of the L1 cache.
constexpr int STRIDE = BLOCK_KEYS + 16;
constexpr float LOG2E = 1.44269504088896340736f;
constexpr double LN2 = 0.69314718055994530942;
#define NOTHING (-__builtin_inff())
// Up to this size the top of a row may be rounded although its logits, computed by fused multiply-subtract, are not: they
// differ by at most 2. Beyond it weights would overflow, so that logits are rounded first, like the top.
constexpr float FUSED = 67108864.0f;

struct Rows {
  float top[MOST_ROWS], largest[MOST_ROWS], centre[MOST_ROWS];
  Floats total[MOST_ROWS], entropy[MOST_ROWS], squares[MOST_ROWS], first[MOST_ROWS], second[MOST_ROWS];
  float* masses;           // [count][MOST_ROWS], of the call's statistics
  bool broken[MOST_ROWS];  // the query has a NaN or an infinity
};

template <bool SPREAD, bool REACH> static void clear_sums(Rows& rows, int r) {
  rows.total[r] = all(0.0f);
  if (SPREAD) rows.entropy[r] = rows.squares[r] = all(0.0f);
  if (REACH) rows.first[r] = rows.second[r] = all(0.0f);
}
template <bool SPREAD, bool REACH> static void clear_rows(Rows& rows, int count, int mass_count) {
  for (int r = 0; r < count; r++) {
    rows.top[r] = rows.largest[r] = NOTHING;
    rows.centre[r] = 0.0f;
    clear_sums<SPREAD, REACH>(rows, r);
  }
  __builtin_memset(rows.masses, 0, (size_t)mass_count * MOST_ROWS * 4);
}

// One row's part of a block: logits s[from, to), where from and to are multiples of W, counted from the block's first key.
struct Stretch {
  float* logits;
  int64_t from, to;
  int64_t key;       // of logits[0]
  int64_t position;  // of the query
};

// tanh to float32 precision.
INLINE Floats tanh(Floats x) {
  const Floats size = magnitude(x);
  const Floats t = exp2(size * (-2.0f * LOG2E));
  const Floats far = (1.0f - t) / (1.0f + t);
  const Floats y = x * x;
  const Floats near =
      size * polynomial(y, -1382.0f / 155925.0f, 62.0f / 2835.0f, -17.0f / 315.0f, 2.0f / 15.0f, -1.0f / 3.0f, 1.0f);
  const Floats value = choose(size < 0.3f, near, far);
  return (Floats)((Words)value | ((Words)x & 0x80000000u));
}

// 32 random bits for each of the W keys starting at `key`: the finalizer of MurmurHash3 on a counter.
INLINE Words noise(uint32_t row_seed, int64_t key) {
  Words x;
  for (int i = 0; i < W; i++) x[i] = (uint32_t)i;
  x = (x + (uint32_t)key) * 0x9e3779b1u ^ row_seed;
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}
static uint32_t row_seed(uint64_t seed, int64_t head, int64_t row) {
  uint64_t x = seed + 0x9e3779b97f4a7c15ull * (uint64_t)(head + 1) + 0xd1342543de82ef95ull * (uint64_t)(row + 1);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return (uint32_t)(x >> 32 ^ x);
}

struct Dropout {
  uint32_t seed, threshold;  // dropped where noise < threshold; 0: none
};

// The maximum per lane.
INLINE Floats largest(const float* s, int64_t from, int64_t to) {
  Floats a = all(NOTHING), b = a;
  int64_t i = from;
  for (; i + W < to; i += 2 * W) {
    a = larger(a, load(s + i));
    b = larger(b, load(s + i + W));
  }
  if (i < to) a = larger(a, load(s + i));
  return larger(a, b);
}

// The distance |position - key| of the first key whose logit is `value`. All keys are compared, 32 at a time: stopping at
// the first match would be an unpredictable branch.
INLINE float distance_of(const Stretch& row, float value) {
  constexpr int AT_ONCE = 32;
  const Floats wanted = all(value);
  int64_t place = -1, i = row.to - W;
  for (; (i + W - row.from) % AT_ONCE; i -= W) place = any(load(row.logits + i) >= wanted) ? i : place;
  for (i -= AT_ONCE - W; i >= row.from; i -= AT_ONCE) {
    Floats best = load(row.logits + i);
    for (int part = W; part < AT_ONCE; part += W) best = larger(best, load(row.logits + i + part));
    place = any(best >= wanted) ? i : place;
  }
  if (place < 0) return 0.0f;
  uint32_t found = 0;
  for (int part = AT_ONCE - W; part >= 0; part -= W)
    found = found << W | bits(load(row.logits + least(place + part, row.to - W)) >= wanted);
  const int64_t far = row.position - (row.key + place + __builtin_ctz(found));
  return (float)(far < 0 ? -far : far);
}

// Whether the top of row r must be raised for a stretch whose largest logit is `value`. Logits may exceed the top slightly:
// some p are then above 1, and no sum needs rescaling. A larger excess would leave the centre behind.
constexpr float ABOVE = 4.0f;
INLINE bool rises(Rows& rows, int r, float value) {
  if (!(value > rows.largest[r])) return false;
  rows.largest[r] = value;
  return value > rows.top[r] + ABOVE;
}
// The same for W rows from `begin` on: all ones in the lanes of those that rise.
INLINE Ints rises(Rows& rows, int begin, Floats values) {
  const Floats largest = load(rows.largest + begin);
  store(rows.largest + begin, choose(values > largest, values, largest));
  return (Ints)(values > largest) & (Ints)(values > load(rows.top + begin) + ABOVE);
}

// Raises the top of row r to `value` and rescales its sums and the row of `out` (width floats). Returns the factor.
template <bool SPREAD, bool REACH>
static float raise(Rows& rows, int r, float value, float centre, int mass_count, float* out, int64_t width) {
  const float before = rows.top[r];
  rows.top[r] = value;
  if (before == NOTHING) {  // nothing has been summed
    rows.centre[r] = centre;
    return 1.0f;
  }
  const Floats scale = exp2(all(before - value));
  if (REACH) {
    const Floats farther = all(rows.centre[r] - centre), &total = rows.total[r];
    rows.second[r] = (rows.second[r] + (2.0f * farther) * rows.first[r] + (farther * farther) * total) * scale;
    rows.first[r] = (rows.first[r] + farther * total) * scale;
    rows.centre[r] = centre;
  }
  if (SPREAD) {
    rows.entropy[r] = (rows.entropy[r] + (before - value) * rows.total[r]) * scale;
    rows.squares[r] *= scale * scale;
  }
  rows.total[r] *= scale;
  for (int i = 0; i < mass_count; i++) rows.masses[i * MOST_ROWS + r] *= scale[0];
  for (int64_t c = 0; c < width; c += W) store(out + c, load(out + c) * scale);
  return scale[0];
}

enum Side { BEFORE, AFTER, AROUND };  // the position of a stretch's keys relative to the query

// Adds a stretch to the sums of row r other than the total: from its p, and z if SPREAD. Two vectors at a time with separate
// sums, since the latency of an addition is four cycles.
template <bool SPREAD, bool REACH, int SIDE>
static void add_up(Rows& rows, int r, const Stretch& row, const float* p, const Floats* z) {
  Floats entropy[2], squares[2], first[2], second[2];
  for (int v = 0; v < 2; v++) entropy[v] = squares[v] = first[v] = second[v] = all(0.0f);
  const Floats centre = all(rows.centre[r]);
  const float step = SIDE == AFTER ? (float)W : -(float)W;
  const Floats ahead = (float)(row.position - row.key - row.from) - ramp();  // position - key
  Floats away = SIDE == AROUND ? ahead : (SIDE == AFTER ? -ahead : ahead) - centre;
  const auto add = [&](int v, Floats weight, Floats depth, Floats far) __attribute__((always_inline)) {
    if (SPREAD) {
      entropy[v] += weight * depth;
      squares[v] += weight * weight;
    }
    if (REACH) {
      if (SIDE == AROUND) far = magnitude(far) - centre;
      const Floats moment = weight * far;
      first[v] += moment;
      second[v] += moment * far;
    }
  };
  const Floats none = all(0.0f);
  const int64_t vectors = (row.to - row.from) / W;
  int64_t i = 0;
  for (; i + 2 <= vectors; i += 2) {
    add(0, load(p + i * W), SPREAD ? z[i] : none, away);
    add(1, load(p + i * W + W), SPREAD ? z[i + 1] : none, away + step);
    away += 2 * step;
  }
  if (i < vectors) add(0, load(p + i * W), SPREAD ? z[i] : none, away);
  if (SPREAD) rows.entropy[r] += entropy[0] + entropy[1], rows.squares[r] += squares[0] + squares[1];
  if (REACH) rows.first[r] += first[0] + first[1], rows.second[r] += second[0] + second[1];
}

// Computes the weights of one stretch: p (0 where dropped) to `weights`, float32, or bfloat16 for DOT; and the sums of row r.
// The other sums are computed in a separate loop: next to the exponentials they would wait for them in the scheduler and
// fill it. KEEP: stores p before rounding and dropout in `kept`.
template <bool DOT, bool SPREAD, bool REACH, bool DROP, bool KEEP>
static void weigh(Rows& rows, int r, const Stretch& row, float factor, void* weights, Dropout dropout, float* kept) {
  constexpr bool EXACT = !DOT && !DROP;
  constexpr bool APART = !EXACT && !KEEP && (SPREAD || REACH);  // p is used below and not stored elsewhere
  constexpr int VECTORS_OF_ALL = BLOCK_KEYS / W;
  Floats depths[SPREAD ? VECTORS_OF_ALL : 1], exact[APART ? VECTORS_OF_ALL : 1];
  const Floats top = all(rows.top[r] == NOTHING ? 0.0f : rows.top[r]);
  // The stretch has a separate sum: rounding errors of adding to a long sum thousands of times would accumulate.
  Floats total = all(0.0f);
  // Copies, since the compiler must assume that the stores below alias them.
  const float* logits = row.logits;
  const int64_t key = row.key, from = row.from, to = row.to;
#pragma GCC unroll 2
  for (int64_t i = from; i < to; i += W) {
    const Floats s = load(logits + i);
    const Floats depth = (DOT ? s * factor : s) - top;  // without DOT the factor is 1
    const Floats z = SPREAD ? not_below(depth) : depth;
    Floats p = DOT ? exp2_scaled(depth) : exp2(z, SPREAD);
    total += p;
    if (SPREAD) depths[(i - from) / W] = z;  // finite, as it is multiplied by p, which is 0 for -inf
    if (APART) exact[(i - from) / W] = p;
    if (KEEP) store(kept + i, p);
    if (DROP) p = choose(noise(dropout.seed, key + i) >= dropout.threshold, p, all(0.0f));
    if (DOT) {
      write((Brain*)weights + i, p, W);
    } else {
      store((float*)weights + i, p);
    }
  }
  rows.total[r] += total;
  if (!SPREAD && !REACH) return;
  const float* p = EXACT ? (const float*)weights + from : KEEP ? kept + from : (const float*)exact;
  if (!REACH || key + from > row.position) return add_up<SPREAD, REACH, AFTER>(rows, r, row, p, depths);
  if (key + to <= row.position + 1) return add_up<SPREAD, REACH, BEFORE>(rows, r, row, p, depths);
  add_up<SPREAD, REACH, AROUND>(rows, r, row, p, depths);
}

// `kept`: NULL, or the output for p before rounding: only with DOT and without dropout.
template <bool DOT, bool SPREAD, bool REACH>
INLINE void weigh(Rows& rows, int r, const Stretch& row, float factor, void* weights, Dropout dropout,
                  float* kept = nullptr) {
  if (dropout.threshold) return weigh<DOT, SPREAD, REACH, true, false>(rows, r, row, factor, weights, dropout, kept);
  if (DOT && kept) return weigh<DOT, SPREAD, REACH, false, DOT>(rows, r, row, factor, weights, dropout, kept);
  weigh<DOT, SPREAD, REACH, false, false>(rows, r, row, factor, weights, dropout, kept);
}
