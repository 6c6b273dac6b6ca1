// Computes a row's results from its sums.

// Rows are written in place: a copy of numbers that were just stored one by one waits until they are in the cache.
template <bool SPREAD, bool REACH> INLINE void sums_of(const Rows& rows, int r, Sums& sums) {
  sums.top = rows.top[r];
  sums.largest = rows.largest[r];
  sums.centre = rows.centre[r];
  sums.total = sum(rows.total[r]);
  sums.entropy = sums.squares = sums.first = sums.second = 0.0f;
  if (SPREAD) sums.entropy = sum(rows.entropy[r]), sums.squares = sum(rows.squares[r]);
  if (REACH) sums.first = sum(rows.first[r]), sums.second = sum(rows.second[r]);
}

// The rest of a row of a head, from its sums over all keys; all but what follows from the logarithm of its `whole`.
template <bool REACH> INLINE void begin_row(const headwise_forward_call& call, int64_t head, bool broken, Row& row) {
  row.broken = broken;
  row.inverse = row.log_inverse = row.offset = row.square = 0.0f;
  row.whole = 1.0f;
  row.log_sum = row.highest = NOTHING;
  const float top = row.top, keys = row.total;
  if (top != NOTHING || keys != 0.0f) {
    float shrink = 1.0f;
    row.highest = top;
    row.whole = keys;
    if (call.rule.sinks) {
      const float sink = call.rule.sinks[head] * LOG2E;
      row.highest = sink > top ? sink : top;
      shrink = exp2(all(top - row.highest))[0];
      row.whole = keys * shrink + exp2(all(sink - row.highest))[0];
    }
    row.inverse = broken ? __builtin_nanf("") : shrink / row.whole;
  }
  if (REACH) {
    const float even = keys == 0.0f ? 1.0f : 1.0f / keys;
    row.offset = row.first * even;
    row.square = row.second * even;
  }
}

INLINE void finish_row(Row& row, float log_whole) {
  if (row.top == NOTHING && row.total == 0.0f) return;  // fully masked
  row.log_sum = row.broken ? __builtin_nanf("") : (float)(row.highest * LN2 + log_whole);
  row.log_inverse = (float)((row.top - row.highest) * LN2) - log_whole;
}

template <bool SPREAD, bool REACH>
static Row row_of(const headwise_forward_call& call, int64_t head, const Sums& sums, bool broken) {
  Row row;
  (Sums&)row = sums;
  begin_row<REACH>(call, head, broken, row);
  finish_row(row, SPREAD || call.lse ? ln(all(row.whole))[0] : 0.0f);
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
