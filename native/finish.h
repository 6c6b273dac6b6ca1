// Computes the results of rows from their sums, W rows at a time.

template <bool SPREAD, bool REACH> INLINE void sums_of(const Rows& rows, int r, Sums& sums) {
  sums.top = rows.top[r];
  sums.largest = rows.largest[r];
  sums.centre = rows.centre[r];
  sums.total = sum(rows.total[r]);
  sums.entropy = sums.squares = sums.first = sums.second = 0.0f;
  if (SPREAD) sums.entropy = sum(rows.entropy[r]), sums.squares = sum(rows.squares[r]);
  if (REACH) sums.first = sum(rows.first[r]), sums.second = sum(rows.second[r]);
}

// The sums of `count` rows from r on. Those beyond, up to a vector, are like fully masked ones, with any numbers elsewhere,
// and any bytes in place of bools.
template <bool SPREAD, bool REACH> INLINE void sums_of(const Rows& rows, int r, int count, Finished& to) {
  const Ints here = ramp() < (float)count;
  to.top = choose(here, load(rows.top + r), all(NOTHING));
  to.total = choose(here, sums(rows.total + r), all(0.0f));
  to.largest = load(rows.largest + r);
  to.centre = load(rows.centre + r);
  to.entropy = to.squares = to.first = to.second = all(0.0f);
  if (SPREAD) to.entropy = sums(rows.entropy + r), to.squares = sums(rows.squares + r);
  if (REACH) to.first = sums(rows.first + r), to.second = sums(rows.second + r);
  Bytes broken;
  __builtin_memcpy(&broken, rows.broken + r, sizeof broken);
  to.broken = __builtin_convertvector(broken, Ints) != 0;
}
INLINE void sums_of(const Sums& sums, bool broken, Finished& to) {
  to.top = all(sums.top);
  to.largest = all(sums.largest);
  to.centre = all(sums.centre);
  to.total = all(sums.total);
  to.entropy = all(sums.entropy), to.squares = all(sums.squares);
  to.first = all(sums.first), to.second = all(sums.second);
  to.broken = (Ints)all(0.0f) - (int)broken;
}

// The rest of rows of a head, from their sums over all keys. LOGS: also what follows from the logarithm of their `whole`.
template <bool REACH> INLINE void finish_rows(const headwise_forward_call& call, int64_t head, bool logs, Finished& rows) {
  const Floats nan = all(__builtin_nanf(""));
  const Ints none = (rows.top == NOTHING) & (rows.total == 0.0f);  // fully masked
  rows.highest = rows.top;
  rows.whole = rows.total;
  Floats shrink = all(1.0f);
  if (call.rule.sinks) {
    const Floats sink = all(call.rule.sinks[head] * LOG2E);
    rows.highest = larger(sink, rows.top);
    shrink = exp2(rows.top - rows.highest);
    rows.whole = rows.total * shrink + exp2(sink - rows.highest);
  }
  rows.whole = choose(none, all(1.0f), rows.whole);
  rows.inverse = choose(none, all(0.0f), choose(rows.broken, nan, shrink / rows.whole));
  if (REACH) {
    const Floats even = choose(rows.total == 0.0f, all(1.0f), 1.0f / rows.total);
    rows.offset = rows.first * even;
    rows.square = rows.second * even;
  }
  if (!logs) return;
  const Floats log_whole = ln(rows.whole);
  const Doubles log_sum = natural_in_double(rows.highest) + __builtin_convertvector(log_whole, Doubles);
  rows.log_sum = choose(none, all(NOTHING), choose(rows.broken, nan, __builtin_convertvector(log_sum, Floats)));
  rows.log_inverse = choose(none, all(0.0f), natural(rows.top - rows.highest) - log_whole);
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
