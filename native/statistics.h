// The statistics that a forward pass computes in addition to its output. Each is a struct here and a line of `Statistics`
// below. Its KIND has the signature by which a class in src/headwise/stats requests it, and its sort:
//
//   FORMULA           of(rows): a formula of the sums that the pass computes for every row
//   MASS_OF_WEIGHTS   an additional sum for each row, Σ p over some keys: add(…) adds the shares of stretches of keys to as
//                     many rows. It reads the weights p if exact ones are available, which is faster than recomputing
//                     them. meets(…): whether some keys can have a share at all
//   MASS_OF_LOGITS    Σ p·w, computed from the logits: of(…) is the share of a stretch. With KEEPS_LARGEST the largest share
//                     counts, not their sum
//   COLUMNS           Σ p over the queries, for each key
//   BEST              of(row, i): a property of the i-th largest weight of a row

enum Sort { FORMULA, MASS_OF_WEIGHTS, MASS_OF_LOGITS, COLUMNS, BEST, SORTS };

// The sums that a statistic requires besides Σ p: Σ p·log p and Σ p²; the moments of the distance. NEEDS_BLOCKS: it is
// computed for blocks of queries, but not in decoding, which adds up the masses of ranges of keys.
enum { NEEDS_SPREAD = 1, NEEDS_REACH = 2, NEEDS_BLOCKS = 4, KEEPS_LARGEST = 8 };

struct Kind {
  const char* signature;
  Sort sort;
  int needs;
};

// The sums of a row over all its keys.
struct Sums {
  float top, largest, centre, total, entropy, squares, first, second;
};

// Finished rows, W at a time: a lane is a row.
struct Finished {
  Floats top, largest, centre, total, entropy, squares, first, second;  // Sums
  Floats highest;      // the largest logit, in units of ln 2, and the sink; whole: Σ p and that of the sink, relative to it
  Floats whole;
  Floats inverse;      // factor from an unnormalized p to a weight: 0 for a fully masked query, NaN if the query is not finite
  Floats log_inverse;  // its natural logarithm
  Floats log_sum;      // the row's log-sum-exp
  Floats offset;       // the mean distance from the centre; square: the mean of its square
  Floats square;
  Ints broken;         // the query is not finite
};

// A stretch of keys of a query: log2 of p is its logits times `factor` minus `top`; `weights` are p, or NULL if they are
// rounded, dropped, or not computed yet.
struct Seen {
  Stretch row;
  float factor, top;
  const float* weights;
  int64_t batch, query, keys;

  Floats p(int64_t i) const { return exp2(load(row.logits + i) * factor - top); }
};

// A logarithm to base 2 as a natural one: multiplied in double, since the logarithm of a large number is one.
typedef double Doubles __attribute__((vector_size(8 * W)));
INLINE Doubles natural_in_double(Floats x) { return __builtin_convertvector(x, Doubles) * LN2; }
INLINE Floats natural(Floats x) { return __builtin_convertvector(natural_in_double(x), Floats); }

template <typename T> INLINE const T* of_batch(const headwise_argument& x, int64_t batch) {
  return (const T*)x.data + batch * x.batch;
}

// The largest score of a row.
struct Largest {
  static constexpr Kind KIND = {"largest(): float32[b, h, n]", FORMULA, 0};
  INLINE Floats of(const Finished& rows) { return natural(rows.largest); }
};

// -Σ p ln p, where -ln p = -ln 2 · (z - top) - ln(inverse).
struct Entropy {
  static constexpr Kind KIND = {"entropy(): float32[b, h, n]", FORMULA, NEEDS_SPREAD};
  INLINE Floats of(const Finished& rows) {
    const Floats of_total = rows.total * rows.inverse * rows.log_inverse;
    const Floats entropy =
        rows.inverse * natural(-rows.entropy) - choose(rows.inverse == 0.0f, all(0.0f), of_total);
    return choose(entropy < 0.0f, all(0.0f), entropy);
  }
};

// Σ p².
struct Squares {
  static constexpr Kind KIND = {"squares(): float32[b, h, n]", FORMULA, NEEDS_SPREAD};
  INLINE Floats of(const Finished& rows) { return rows.squares * rows.inverse * rows.inverse; }
};

// Σ p² / (Σ p)², of the unnormalized p: with a sink that takes almost all the weight, the weights would underflow.
struct Concentration {
  static constexpr Kind KIND = {"concentration(): float32[b, h, n]", FORMULA, NEEDS_SPREAD};
  INLINE Floats of(const Finished& rows) {
    const Floats even = choose(rows.total == 0.0f, all(0.0f), rows.squares / (rows.total * rows.total));
    return choose(rows.broken, all(__builtin_nanf("")), even);
  }
};

// Σ p·|position - key|.
struct Distance {
  static constexpr Kind KIND = {"distance(): float32[b, h, n]", FORMULA, NEEDS_REACH};
  INLINE Floats of(const Finished& rows) { return (rows.centre + rows.offset) * rows.total * rows.inverse; }
};

// The variance of the distance over the keys, without the sink.
struct Variance {
  static constexpr Kind KIND = {"variance(): float32[b, h, n]", FORMULA, NEEDS_REACH};
  INLINE Floats of(const Finished& rows) {
    const Floats variance = rows.square - rows.offset * rows.offset;
    return choose(variance < 0.0f, all(0.0f), variance);
  }
};

// Σ p over the keys [start, stop), counted from the query's position or from key 0. Arguments: start, stop,
// whether from the query.
struct RangeMass {
  static constexpr Kind KIND = {"range_mass(int, int, int): float32[b, h, n]", MASS_OF_WEIGHTS, 0};
  static void add(const headwise_wanted& wanted, const Seen* seen, int count, float* sums) {
    float single[MOST_ROWS];  // log2 of p where it is that of one key and not known: computed for all rows together
    bool any_single = false;
    for (int r = 0; r < count; r++) {
      const Stretch& row = seen[r].row;
      const int64_t base = row.key - (wanted.numbers[2] ? row.position : 0);
      const int64_t start = most(wanted.numbers[0] - base, row.from), stop = least(wanted.numbers[1] - base, row.to);
      single[r] = NOTHING;
      if (start >= stop) continue;
      if (seen[r].weights) {
        sums[r] += of_weights(seen[r].weights, start, stop);
      } else if (stop - start == 1) {
        single[r] = row.logits[start] * seen[r].factor - seen[r].top, any_single = true;
      } else {
        sums[r] += of_logits(seen[r], start, stop);
      }
    }
    for (int begin = 0; begin < count && any_single; begin += W) {
      const Floats p = exp2(read(single + begin, count - begin));
      for (int r = begin; r < least(begin + W, count); r++) sums[r] += p[r - begin];
    }
  }
  // Whether the keys [from, to) can be in the range of a query whose position is in [first, last].
  static bool meets(const headwise_wanted& wanted, int64_t first, int64_t last, int64_t from, int64_t to) {
    const bool relative = wanted.numbers[2];
    return wanted.numbers[0] + (relative ? first : 0) < to && wanted.numbers[1] + (relative ? last : 0) > from;
  }

 private:
  INLINE float of_logits(const Seen& seen, int64_t start, int64_t stop) {
    Floats found = all(0.0f);
    const Floats lane = ramp();
    for (int64_t i = start / W * W; i < stop; i += W) {
      const Ints inside = (lane >= (float)(start - i)) & (lane < (float)(stop - i));
      found += choose(inside, seen.p(i), all(0.0f));
    }
    return sum(found);
  }
  static float of_weights(const float* weights, int64_t start, int64_t stop) {
    if (stop - start == 1) return weights[start];
    Floats found = all(0.0f);
    const Floats lane = ramp();
    for (int64_t i = start / W * W; i < stop; i += W) {
      const Ints inside = (lane >= (float)(start - i)) & (lane < (float)(stop - i));
      found += (Floats)((Ints)load(weights + i) & inside);
    }
    return sum(found);
  }
};

// Σ p·w. Argument: w.
struct KeyWeights {
  static constexpr Kind KIND = {"key_weights(float32[m]): float32[b, h, n]", MASS_OF_LOGITS, 0};
  INLINE float of(const headwise_wanted& wanted, const Seen& seen) {
    const Stretch& row = seen.row;
    const float* weights = of_batch<float>(wanted.keys, seen.batch) + row.key;
    Floats found = all(0.0f);
    for (int64_t i = row.from; i < row.to; i += W) found += seen.p(i) * read(weights + i, seen.keys - row.key - i);
    return sum(found);
  }
};

// Σ p over the keys before position + ahead that have the query's label; -1: no label. Arguments: ahead, the labels.
struct SameLabel {
  static constexpr Kind KIND = {"same_label(int, int32[m], int32[n]): float32[b, h, n]", MASS_OF_LOGITS, NEEDS_BLOCKS};
  INLINE float of(const headwise_wanted& wanted, const Seen& seen) {
    const Stretch& row = seen.row;
    const int32_t label = of_batch<int32_t>(wanted.queries, seen.batch)[seen.query];
    if (label < 0) return 0.0f;
    const int32_t* labels = of_batch<int32_t>(wanted.keys, seen.batch) + row.key;
    const int64_t stop = least(least(row.to, seen.keys - row.key), row.position + wanted.numbers[0] - row.key);
    Floats found = all(0.0f);
    for (int64_t j = row.from; j < stop; j += W) {
      Ints here = (Ints)all(0.0f) - 1;
      if (j + W <= stop) {
        __builtin_memcpy(&here, labels + j, sizeof here);
      } else {
        for (int lane = 0; lane < W && j + lane < stop; lane++) here[lane] = labels[j + lane];
      }
      const Ints same = here == label;
      if (any(same)) found += choose(same, seen.p(j), all(0.0f));
    }
    return sum(found);
  }
};

// The largest p over the keys with w > 0 other than the query's own position. Argument: w.
struct LargestOther {
  static constexpr Kind KIND = {"largest_other(float32[m]): float32[b, h, n]", MASS_OF_LOGITS, NEEDS_BLOCKS | KEEPS_LARGEST};
  INLINE float of(const headwise_wanted& wanted, const Seen& seen) {
    const Stretch& row = seen.row;
    const float* weights = of_batch<float>(wanted.keys, seen.batch) + row.key;
    const int64_t own = row.position - row.key;
    const Floats lane = ramp();
    Floats best = all(NOTHING);
    for (int64_t i = row.from; i < row.to; i += W) {
      const Ints counts = (read(weights + i, seen.keys - row.key - i) > 0.0f) & (lane != (float)(own - i));
      best = larger(choose(counts, load(row.logits + i), all(NOTHING)), best);
    }
    return exp2(all(maximum(best)) * seen.factor - seen.top)[0];
  }
};

// Σ p over the queries.
struct ColumnMass {
  static constexpr Kind KIND = {"column_mass(): float32[b, h, m]", COLUMNS, NEEDS_BLOCKS};
};

// The `count` largest weights of a row, largest first, padded with 0 if it has fewer keys.
struct TopWeights {
  static constexpr Kind KIND = {"top_weights(count): float32[b, h, n, count]", BEST, NEEDS_BLOCKS};
  static float of(const BestRow& row, int64_t i) {
    if (row.broken) return __builtin_nanf("");
    if (i >= row.found) return 0.0f;
    const float logit = logit_of(row.list[i]);
    volatile float rounded = logit * row.factor;
    // The same as for weights: in double the product is exact, as in a fused multiply-subtract.
    const float depth =
        __builtin_fabsf(row.top) > FUSED ? rounded - row.top : (float)((double)logit * row.factor - row.top);
    return exp2(all(depth))[0] * row.inverse;
  }
};

// Their keys, int64, of equal weights the lower key first; padded with -1.
struct TopKeys {
  static constexpr Kind KIND = {"top_keys(count): int64[b, h, n, count]", BEST, NEEDS_BLOCKS};
  static int64_t of(const BestRow& row, int64_t i) { return i < row.found && !row.broken ? key_of(row.list[i]) : -1; }
};

template <typename... All> struct List {
  static constexpr Kind KINDS[] = {All::KIND...};
  static constexpr const char* SIGNATURES[] = {All::KIND.signature..., nullptr};

  // Calls each(One()) for the statistic with this code.
  template <typename Each> INLINE void find(int code, const Each& each) {
    int at = 0;
    (void)((at++ == code && (each(All()), true)) || ...);
  }

  static constexpr bool sorted() {
    for (int i = 1; KINDS + i < KINDS + sizeof...(All); i++)
      if (KINDS[i].sort < KINDS[i - 1].sort) return false;
    return true;
  }
};

// A statistic's code is its index here.
typedef List<
    Largest,
    Entropy,
    Squares,
    Concentration,
    Distance,
    Variance,
    RangeMass,
    KeyWeights,
    SameLabel,
    LargestOther,
    ColumnMass,
    TopWeights,
    TopKeys>
    Statistics;
static_assert(Statistics::sorted(), "those of a sort lie together");

// The statistics that a call requests, by sort, resolved once for all rows.
struct Wanted {
  const headwise_wanted* of[SORTS];
  int count[SORTS];
  int needs;
  int64_t longest;   // list of BEST

  explicit Wanted(const headwise_forward_call& call) : of{}, count{}, needs(0), longest(0) {
    for (int i = 0; i < call.wanted_count; i++) {
      const headwise_wanted& wanted = call.wanted[i];
      const Kind& kind = Statistics::KINDS[wanted.code];
      if (!count[kind.sort]++) of[kind.sort] = &wanted;
      needs |= kind.needs;
      if (kind.sort == BEST) longest = most(longest, wanted.count);
    }
  }

  // Whether the keys [from, to) add nothing to any mass of queries whose positions are [first, last].
  bool passes_over(int64_t first, int64_t last, int64_t from, int64_t to) const {
    if (count[MASS_OF_LOGITS]) return false;
    bool meets = false;
    for (int i = 0; i < count[MASS_OF_WEIGHTS]; i++)
      Statistics::find(of[MASS_OF_WEIGHTS][i].code, [&](auto one) __attribute__((always_inline)) {
        if constexpr (decltype(one)::KIND.sort == MASS_OF_WEIGHTS)
          meets |= decltype(one)::meets(of[MASS_OF_WEIGHTS][i], first, last, from, to);
      });
    return !meets;
  }

  // Masses are contiguous, those of weights first.
  int masses() const { return count[MASS_OF_WEIGHTS] + count[MASS_OF_LOGITS]; }

  // Add stretches to the masses of as many rows from r on, before their logits become weights, and after that if these are
  // `exact`.
  void add_before(const Seen* seen, int row_count, bool exact, Rows& rows, int r) const {
    const int of_weights = count[MASS_OF_WEIGHTS];
    if (count[MASS_OF_LOGITS]) add<MASS_OF_LOGITS>(seen, row_count, rows.masses + of_weights * MOST_ROWS + r);
    if (of_weights && !exact) add<MASS_OF_WEIGHTS>(seen, row_count, rows.masses + r);
  }
  void add_after(const Seen* seen, int row_count, bool exact, Rows& rows, int r) const {
    if (exact && count[MASS_OF_WEIGHTS]) add<MASS_OF_WEIGHTS>(seen, row_count, rows.masses + r);
  }

  // Writes the results of the first `row_count` of finished rows to row `at` of [b, h, n] and the next ones; the masses of a
  // row are `stride` apart.
  __attribute__((noinline)) void finish(const Finished& rows, int row_count, const float* masses, int64_t stride,
                                        int64_t at) const {
    for (int i = 0; i < count[FORMULA]; i++)
      Statistics::find(of[FORMULA][i].code, [&](auto one) __attribute__((always_inline)) {
        if constexpr (decltype(one)::KIND.sort == FORMULA)
          write((float*)of[FORMULA][i].result + at, decltype(one)::of(rows), row_count);
      });
    for (int sort = MASS_OF_WEIGHTS; sort <= MASS_OF_LOGITS; sort++)
      for (int i = 0; i < count[sort]; i++, masses += stride)
        write((float*)of[sort][i].result + at, read(masses, row_count) * rows.inverse, row_count);
  }

  void finish(const BestRow& row, int64_t at) const {
    for (int i = 0; i < count[BEST]; i++)
      Statistics::find(of[BEST][i].code, [&](auto one) __attribute__((always_inline)) {
        const headwise_wanted& wanted = of[BEST][i];
        if constexpr (decltype(one)::KIND.sort == BEST) {
          auto* to = (decltype(decltype(one)::of(row, 0))*)wanted.result + at * wanted.count;
          for (int64_t j = 0; j < wanted.count; j++) to[j] = decltype(one)::of(row, j);
        }
      });
  }

 private:
  template <Sort SORT> __attribute__((noinline)) void add(const Seen* seen, int row_count, float* sums) const {
    for (int i = 0; i < count[SORT]; i++)
      Statistics::find(of[SORT][i].code, [&](auto one) __attribute__((always_inline)) {
        typedef decltype(one) One;
        float* to = sums + i * MOST_ROWS;
        if constexpr (One::KIND.sort == SORT && SORT == MASS_OF_WEIGHTS)
          One::add(of[SORT][i], seen, row_count, to);
        else if constexpr (One::KIND.sort == SORT)
          for (int r = 0; r < row_count; r++) {
            const float share = One::of(of[SORT][i], seen[r]);
            if constexpr ((One::KIND.needs & KEEPS_LARGEST) != 0)
              to[r] = share > to[r] ? share : to[r];
            else
              to[r] += share;
          }
      });
  }
};
