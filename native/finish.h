// A row's sums made into its results.

struct Sums {
  float top, largest, centre, total, entropy, squares, first, second;
};

template <bool SPREAD, bool REACH> INLINE Sums sums_of(const Rows& rows, int r) {
  Sums sums = {rows.top[r], rows.largest[r], rows.centre[r], sum(rows.total[r]), 0.0f, 0.0f, 0.0f, 0.0f};
  if (SPREAD) sums.entropy = sum(rows.entropy[r]), sums.squares = sum(rows.squares[r]);
  if (REACH) sums.first = sum(rows.first[r]), sums.second = sum(rows.second[r]);
  return sums;
}

// Writes log-sum-exp and statistics of the row `at` ([b, h, n] counted through), and returns what turns an unnormalised p into
// a weight: 0 if the row sees nothing, NaN if its query is not finite. The sums of ranges and classes are `stride` apart.
template <bool SPREAD, bool REACH>
static float finish_row(const headwise_forward_call& call, int64_t head, int64_t at, const Sums& sums,
                        const float* ranges, const float* classes, int64_t stride, bool broken) {
  const int64_t all_rows = call.b * call.h * call.n;
  const float top = sums.top, keys = sums.total;
  float whole = keys, inverse = 0.0f, log_sum = NOTHING, log_inverse = 0.0f;
  if (top != NOTHING || keys != 0.0f) {
    float shrink = 1.0f, highest = top;
    if (call.rule.sinks) {
      const float sink = call.rule.sinks[head] * LOG2E;
      highest = sink > top ? sink : top;
      shrink = exp2(all(top - highest))[0];
      whole = keys * shrink + exp2(all(sink - highest))[0];
    }
    inverse = shrink / whole;
    const float log_whole = SPREAD || call.lse ? __builtin_logf(whole) : 0.0f;
    log_sum = (float)(highest * LN2 + log_whole);
    log_inverse = (float)((top - highest) * LN2) - log_whole;
    if (broken) inverse = log_sum = __builtin_nanf("");
  }
  if (call.lse) call.lse[at] = log_sum;
  if (call.largest) call.largest[at] = (float)(sums.largest * LN2);
  if (SPREAD) {
    // -ln p = -ln 2 · (z - top) - ln(inverse)
    const float entropy = inverse * (float)(-LN2 * sums.entropy) - (inverse == 0.0f ? 0.0f : keys * inverse * log_inverse);
    if (call.entropy) call.entropy[at] = entropy < 0.0f ? 0.0f : entropy;
    if (call.squares) call.squares[at] = sums.squares * inverse * inverse;
    if (call.concentration) {
      // Of the unnormalised p: beside a sink that takes almost all, those of the weights would be lost.
      const float even = keys == 0.0f ? 0.0f : sums.squares / (keys * keys);
      call.concentration[at] = broken ? __builtin_nanf("") : even;
    }
  }
  if (REACH) {
    const float even = keys == 0.0f ? 1.0f : 1.0f / keys;
    const float first = sums.first * even, variance = sums.second * even - first * first;
    if (call.distance) call.distance[at] = (sums.centre + first) * keys * inverse;
    if (call.variance) call.variance[at] = variance < 0.0f ? 0.0f : variance;
  }
  for (int i = 0; i < call.range_count; i++) call.range_mass[i * all_rows + at] = ranges[i * stride] * inverse;
  for (int i = 0; i < call.class_count; i++) call.class_mass[i * all_rows + at] = classes[i * stride] * inverse;
  classes += call.class_count * stride;
  for (int i = 0; i < call.match_count; i++) call.match_mass[i * all_rows + at] = classes[i * stride] * inverse;
  return inverse;
}

// A row that sees nothing (scale 0) is 0, even if NaN values were multiplied with its zeros.
template <typename T> INLINE void write_row(T* out, const float* sums, float scale, int64_t width) {
  const int64_t whole = width / W * W;
  if (scale == 0.0f) {
    for (int64_t c = 0; c < width; c += W) write(out + c, all(0.0f), width - c);
    return;
  }
  for (int64_t c = 0; c < whole; c += W) write(out + c, load(sums + c) * scale, W);
  if (whole < width) write(out + whole, load(sums + whole) * scale, width - whole);
}
