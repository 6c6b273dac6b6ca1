// Sums and maxima over the queries of each head, of values that follow from the statistics of a row: measures of small calls,
// all in one call, since tensor operations for each of them would take longer than the attention.

template <int FORMULA> INLINE Floats value_of(Floats x, Floats lse) {
  if (FORMULA == HEADWISE_INVERSE) return 1.0f / x;
  if (FORMULA == HEADWISE_SHARE) return exp2(smaller(all(0.0f), x - lse) * LOG2E);
  if (FORMULA == HEADWISE_LOGIT) return x - lse + lse;  // NaN where a score is
  return FORMULA == HEADWISE_LOG_SUM ? lse : x;
}

// All ones in the lanes of rows [i, n).
INLINE Ints rows_from(int64_t i, int64_t n) { return ramp() < (float)least(W, n - i); }

INLINE Ints counted_from(const uint8_t* counted, int64_t i, int64_t n) {
  Bytes bytes = {};
  __builtin_memcpy(&bytes, counted + i, (size_t)least(W, n - i));
  return __builtin_convertvector(bytes, Ints) != 0;
}

struct Total {
  double total;
  int64_t count;
};

// Over the rows of one head. CHECK: not all rows count. Sums are of 8 vectors in float32, and of those in double.
template <int FORMULA, bool LARGEST, bool CHECK>
static Total total_of(const float* x, const float* lse, const uint8_t* counted, int64_t n) {
  Total result = {LARGEST ? -__builtin_inf() : 0.0, CHECK ? 0 : n};
  Ints broken = {};
  for (int64_t block = 0; block < n; block += 8 * W) {
    Floats part = LARGEST ? all(NOTHING) : all(0.0f);
    for (int64_t i = block; i < least(n, block + 8 * W); i += W) {
      const Floats log_sum = read(lse + i, n - i);
      Floats value = value_of<FORMULA>(FORMULA == HEADWISE_LOG_SUM ? log_sum : read(x + i, n - i), log_sum);
      if (CHECK || i + W > n) {
        Ints here = rows_from(i, n);
        if (CHECK) here &= counted ? counted_from(counted, i, n) : log_sum != NOTHING;
        if (CHECK) result.count += __builtin_popcount(bits(here));
        value = choose(here, value, LARGEST ? all(NOTHING) : all(0.0f));
      }
      if (LARGEST) broken |= value != value;
      part = LARGEST ? larger(value, part) : part + value;
    }
    if (!LARGEST) result.total += (double)sum(part);
    if (LARGEST) result.total = result.total > maximum(part) ? result.total : maximum(part);
  }
  if (LARGEST && any(broken)) result.total = __builtin_nan("");
  return result;
}

template <int FORMULA>
static Total total_of(const headwise_row_value& measure, const float* x, const float* lse, const uint8_t* counted, int64_t n,
                      bool every) {
  const bool check = counted || !every;
  if (measure.largest)
    return check ? total_of<FORMULA, true, true>(x, lse, counted, n)
                 : total_of<FORMULA, true, false>(x, lse, counted, n);
  return check ? total_of<FORMULA, false, true>(x, lse, counted, n)
               : total_of<FORMULA, false, false>(x, lse, counted, n);
}

static Total total_of(const headwise_row_value& measure, const float* x, const float* lse, const uint8_t* counted, int64_t n,
                      bool every) {
  switch (measure.formula) {
    case HEADWISE_INVERSE: return total_of<HEADWISE_INVERSE>(measure, x, lse, counted, n, every);
    case HEADWISE_SHARE: return total_of<HEADWISE_SHARE>(measure, x, lse, counted, n, every);
    case HEADWISE_LOGIT: return total_of<HEADWISE_LOGIT>(measure, x, lse, counted, n, every);
    case HEADWISE_LOG_SUM: return total_of<HEADWISE_LOG_SUM>(measure, x, lse, counted, n, every);
    default: return total_of<HEADWISE_SAME>(measure, x, lse, counted, n, every);
  }
}

static int rows(const headwise_rows_call& call) {
  const int64_t heads = call.b * call.h, n = call.n;
  for (int64_t head = 0; head < heads; head++) {
    const float* lse = call.lse + head * n;
    int64_t strange = 0;
    bool every = true;
    for (int64_t i = 0; i < n; i += W) {
      const Ints here = rows_from(i, n);
      const Floats log_sum = read(lse + i, n - i);
      strange += __builtin_popcount(bits(~(log_sum < -NOTHING) & here));
      every &= !any((log_sum == NOTHING) & here);
    }
    call.nonfinite[head] = strange;
    for (int i = 0; i < call.count; i++) {
      const headwise_row_value& measure = call.measures[i];
      const uint8_t* counted = measure.counted ? measure.counted + head / call.h * measure.counted_batch : nullptr;
      const Total found = total_of(measure, measure.x ? measure.x + head * n : lse, lse, counted, n, every);
      const int64_t at = i * heads + head;
      call.totals[at] = found.total;
      call.counts[at] = (double)found.count;
      const double mean = found.total / (double)most(found.count, 1);
      call.values[at] = measure.largest ? (found.count ? (float)found.total : 0.0f) : (float)mean;
    }
  }
  return HEADWISE_DONE;
}
