// The definition of a score, row by row: soft cap, biases and mask, as in src/headwise/rule/__init__.py.

// Call is headwise_forward_call or headwise_backward_call, whose common members have the same names.
template <typename Call> INLINE const int32_t* spans_of(const Call& call, int64_t batch, int64_t query) {
  return call.rule.spans + batch * call.rule.span_batch + query * call.rule.span_count * 2;
}

// The range [first, last) within [from, to) of keys that any of `count` queries attends to; first = last if empty.
struct Hull {
  int64_t first, last;
};
template <typename Call> static Hull hull(const Call& call, int64_t batch, int64_t query, int count, int64_t from, int64_t to) {
  Hull h = {to, from};
  for (int r = 0; r < count; r++) {
    const int32_t* span = spans_of(call, batch, query + r);
    for (int i = 0; i < call.rule.span_count; i++, span += 2) {
      const int64_t first = most(span[0], from), last = least(span[1], to);
      if (first >= last) continue;
      h.first = least(h.first, first);
      h.last = most(h.last, last);
    }
  }
  if (h.first >= h.last) h.first = h.last = from;
  return h;
}

// Whether the query attends to every key of [from, to).
template <typename Call> INLINE bool sees_all(const Call& call, int64_t batch, int64_t query, int64_t from, int64_t to) {
  if (call.rule.dense) return false;
  const int32_t* span = spans_of(call, batch, query);
  for (int i = 0; i < call.rule.span_count; i++, span += 2)
    if (span[0] <= from && to <= span[1]) return true;
  return false;
}

// Whether a query attends to one key.
template <typename Call> static bool sees(const Call& call, int64_t batch, int64_t head, int64_t query, int64_t key) {
  const headwise_rule& rule = call.rule;
  if (rule.dense && key < call.m && !rule.dense[batch * rule.dense_batch + head * rule.dense_head + query * rule.dense_row + key])
    return false;
  const int32_t* span = spans_of(call, batch, query);
  for (int i = 0; i < rule.span_count; i++, span += 2)
    if (span[0] <= key && key < span[1]) return true;
  return false;
}

INLINE void fill(float* s, int64_t from, int64_t to) {
  for (; from < to && from % W; from++) s[from] = NOTHING;
  for (; from + W <= to; from += W) store(s + from, all(NOTHING));
  for (; from < to; from++) s[from] = NOTHING;
}

// Sets the logits of masked keys to -inf.
template <typename Call> static void hide(const Call& call, int64_t batch, int64_t head, int64_t query, const Stretch& row) {
  int64_t open = row.from;
  const int32_t* span = spans_of(call, batch, query);
  for (int i = 0; i < call.rule.span_count; i++, span += 2) {
    const int64_t first = most(span[0] - row.key, row.from), last = least(span[1] - row.key, row.to);
    if (first >= last) continue;
    fill(row.logits, open, first);
    open = last;
  }
  fill(row.logits, open, row.to);
  if (!call.rule.dense) return;
  const uint8_t* may = call.rule.dense + batch * call.rule.dense_batch + head * call.rule.dense_head +
                       query * call.rule.dense_row + row.key;
  const int64_t end = least(row.to, call.m - row.key);
  for (int64_t i = row.from; i < end; i++) row.logits[i] = may[i] ? row.logits[i] : NOTHING;
}

// Soft cap and biases; converts logits from scale · q·k / factor to units of ln 2.
template <typename Call> static void adjust(const Call& call, int64_t batch, int64_t head, int64_t query, const Stretch& row,
                   float factor) {
  const headwise_rule& rule = call.rule;
  const float* relative =
      rule.relative ? rule.relative + head * rule.relative_head + (row.key - query + call.n - 1) : nullptr;
  const float* bias = rule.bias ? rule.bias + batch * rule.bias_batch + head * rule.bias_head + query * rule.bias_row
                                : nullptr;
  for (int64_t i = row.from; i < row.to; i += W) {
    const int64_t left = call.m - (row.key + i);
    Floats s = load(row.logits + i) * factor;
    if (rule.soft_cap > 0) s = rule.soft_cap * tanh(s * (1.0f / rule.soft_cap));
    if (relative) s += read(relative + i, left);
    if (bias && rule.bias_col == 1) s += read(bias + row.key + i, left);
    if (bias && rule.bias_col != 1) {
      Floats more = all(0.0f);
      for (int lane = 0; lane < W && lane < left; lane++) more[lane] = bias[(row.key + i + lane) * rule.bias_col];
      s += more;
    }
    store(row.logits + i, s * LOG2E);
  }
}

// The number of keys that a query attends to, on average, without regard to a dense mask and to spans that differ among batch
// entries: what is chosen by it must not change with other entries.
template <typename Call> static int64_t keys_of_a_query(const Call& call) {
  if (call.rule.span_batch) return call.m;
  int64_t total = 0;
  for (int64_t i = 0; i < call.n; i++) {
    const int32_t* span = spans_of(call, 0, i);
    for (int s = 0; s < call.rule.span_count; s++, span += 2) total += most(0, span[1] - span[0]);
  }
  return total / most(1, call.n);
}

// Whether parts are faster than float32: packing takes longer, and the first and the last panel have nothing beside them.
// Measured on an Intel Xeon with 2 MB of L2 cache per core, for some 40 shapes. The same for the forward pass and reads of its
// map, so that weights have the rounding errors of their log-sum-exp.
template <typename Call> static bool parts_pay(const Call& call) {
#if HEADWISE_ALWAYS_PARTS
  return true;  // for tests
#endif
  return call.n >= 32 && call.m >= 128 && call.d >= 32 && keys_of_a_query(call) * call.d * call.d >= 96 << 12;
}

// The dropout pattern of a row, the same in both passes.
template <typename Call> static Dropout dropout_of(const Call& call, int64_t batch, int64_t head, int64_t query) {
  return {row_seed(call.seed, batch * call.h + head, query), (uint32_t)(call.dropout * 4294967296.0)};
}

// Whether every query attends to every key.
template <typename Call> static bool everything_is_seen(const Call& call) {
  if (call.rule.dense) return false;
  const int64_t batches = call.rule.span_batch ? call.b : 1;
  for (int64_t batch = 0; batch < batches; batch++)
    for (int64_t i = 0; i < call.n; i++)
      if (!sees_all(call, batch, i, 0, call.m)) return false;
  return true;
}
