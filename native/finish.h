// Computes a row's results from its sums.

template <bool SPREAD, bool REACH> INLINE Sums sums_of(const Rows& rows, int r) {
  Sums sums = {rows.top[r], rows.largest[r], rows.centre[r], sum(rows.total[r]), 0.0f, 0.0f, 0.0f, 0.0f};
  if (SPREAD) sums.entropy = sum(rows.entropy[r]), sums.squares = sum(rows.squares[r]);
  if (REACH) sums.first = sum(rows.first[r]), sums.second = sum(rows.second[r]);
  return sums;
}

// The finished row of a head, from the sums over all its keys.
template <bool SPREAD, bool REACH>
static Row row_of(const headwise_forward_call& call, int64_t head, const Sums& sums, bool broken) {
  Row row;
  (Sums&)row = sums;
  row.broken = broken;
  row.inverse = row.log_inverse = row.offset = row.square = 0.0f;
  row.log_sum = NOTHING;
  const float top = sums.top, keys = sums.total;
  if (top != NOTHING || keys != 0.0f) {
    float shrink = 1.0f, highest = top, whole = keys;
    if (call.rule.sinks) {
      const float sink = call.rule.sinks[head] * LOG2E;
      highest = sink > top ? sink : top;
      shrink = exp2(all(top - highest))[0];
      whole = keys * shrink + exp2(all(sink - highest))[0];
    }
    row.inverse = shrink / whole;
    const float log_whole = SPREAD || call.lse ? __builtin_logf(whole) : 0.0f;
    row.log_sum = (float)(highest * LN2 + log_whole);
    row.log_inverse = (float)((top - highest) * LN2) - log_whole;
    if (broken) row.inverse = row.log_sum = __builtin_nanf("");
  }
  if (REACH) {
    const float even = keys == 0.0f ? 1.0f : 1.0f / keys;
    row.offset = sums.first * even;
    row.square = sums.second * even;
  }
  return row;
}

// The row of a fully masked query (scale 0) is 0, even if NaN values were multiplied by its zeros.
template <typename T> INLINE void write_row(T* out, const float* sums, float scale, int64_t width) {
  const int64_t whole = width / W * W;
  if (scale == 0.0f) {
    for (int64_t c = 0; c < width; c += W) write(out + c, all(0.0f), width - c);
    return;
  }
  for (int64_t c = 0; c < whole; c += W) write(out + c, load(sums + c) * scale, W);
  if (whole < width) write(out + whole, load(sums + whole) * scale, width - whole);
}
