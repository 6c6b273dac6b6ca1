// The keys of one block of queries with tiles: while these multiply for two panels of keys, the vector units compute the
// weights of the panel between them.
//
//            panel   i − 1         i            i + 1
//   tiles            O += p V      then         QKᵀ → S
//   vectors                        2^(S−top)               a few instructions after each product of tiles
//
// A product of tiles takes 16 cycles. The CPU computes other instructions meanwhile, but only those close behind it: the
// weights are computed in units of two vectors, the instructions of which are placed between the products. The L1 cache holds
// little more than what all of this reads and writes, so that p takes the place of S, and there are two such buffers: S of the
// panel i + 1 replaces p of i − 1, which was multiplied before.

#if HEADWISE_TILES
template <Operand OF, bool SPREAD, bool REACH> struct Panels {
  static constexpr int KEYS = KEYS_AT_ONCE<OF>, PANELS_AT_ONCE = 16;
  static constexpr int LINE = LOGITS_STRIDE<OF>, WORDS = WEIGHTS_STRIDE<OF>;  // row lengths
  typedef TwoVectors<OF, SPREAD, REACH> Two;

  const Forward<OF, SPREAD, REACH>& f;
  const int64_t batch, head, query;
  const int count;  // of queries
  const float *keys, *values;
  Scratch& t;
  const float factor = f.scaling.adjusted ? 1.0f : f.scaling.factor;  // from products, once they are adjusted, to logits

  // A panel, and its keys that any of the queries attends to: none at the end.
  struct Panel {
    int64_t from;
    int buffer;
    Hull part;
    bool plain;  // every query attends to all of its keys
    bool quiet;  // it adds nothing to the masses of the queries
    bool apart;  // p does not take the place of S, which is needed longer
    bool any() const { return part.first < part.last; }
    int64_t first() const { return (part.first - from) / KEYS * KEYS; }
    int64_t last() const { return padded(part.last - from, KEYS); }
  };

  void go(const Hull& seen) const {
    begin();
    const Hull everyone = seen_by_all();
    Alone alone;
    Panel before = {}, now = next(seen.first / PANEL * PANEL, 0, seen, everyone);
    int panels = 0;
    if (now.any()) logits(now, alone);
    while (now.any() && f.queue.going()) {
      const Panel after = next(now.from + PANEL, 1 - now.buffer, seen, everyone);
      prepare(now);
      if ((now.quiet || !f.wanted.count[MASS_OF_LOGITS]) && !beside_logits()) {
        if (now.apart)
          overlap<true>(before, now, after), masses(now);
        else
          overlap<false>(before, now, after);
      } else {
        if (before.any()) mix(before, alone);
        if (after.any()) logits(after, alone);
        for (int r = 0; r < count; r++) weigh_row(now, r);
      }
      rescale();
      if (++panels % PANELS_AT_ONCE == 0 && after.any()) levels().gather(&t.summed);
      before = now;
      now = after;
    }
    if (before.any()) mix(before, alone), levels().finish(&t.summed);
    if (OF == PARTS && t.summed) check();
    for (int r = 0; r < count; r += W) {
      Floats lanes[W];
      for (int i = 0; i < W; i++) lanes[i] = t.fold[r + i];
      store(t.rows.largest + r, maxima(lanes) * factor);
    }
    for (int r = 0; r < count; r++)
      if (t.rows.broken[r]) t.rows.largest[r] = NOTHING;
  }

 private:
  float* logits_of(const Panel& panel, int r) const { return t.logits + (panel.buffer * BLOCK_ROWS + r) * LINE; }
  float* words_of_row(const Panel& panel, int r) const {
    return panel.apart ? t.weights + (panel.buffer * BLOCK_ROWS + r) * WORDS : logits_of(panel, r);
  }
  // Whether the weights that are summed, of all panels, are not those that are multiplied.
  bool beside_logits() const { return f.shape.strip || f.call.dropout != 0; }
  int64_t position(int r) const { return query + r + f.call.rule.shift; }
  Stretch stretch(const Panel& panel, int r) const { return {logits_of(panel, r), 0, PANEL, panel.from, position(r)}; }
  Seen seen_in(const Panel& panel, int r, const float* weights) const {
    return {stretch(panel, r), t.factors[r], t.bases[r], weights, batch, query + r, f.call.m};
  }

  void begin() const {
    levels().begin();
    for (int r = 0; r < count; r++) {
      t.fold[r] = all(NOTHING), t.limits[r] = __builtin_nanf(""), t.changes[r] = 1.0f;
      if (REACH) centre(r);
    }
    t.changed = t.summed = false;
  }

  // What the distances of a row's keys from its centre have in common (Units).
  void centre(int r) const {
    t.offsets[BEFORE][r] = (float)r - t.rows.centre[r];
    t.offsets[AFTER][r] = (float)-r - t.rows.centre[r];
  }

  // The next panel from `from` on.
  Panel next(int64_t from, int buffer, const Hull& seen, const Hull& everyone) const {
    for (; from < seen.last; from += PANEL) {
      const bool plain = everyone.first <= from && from + PANEL <= everyone.last;
      Hull part = {from, from + PANEL};
      if (!plain) part = hull(f.call, batch, query, count, from, least(from + PANEL, f.call.m));
      if (part.first < part.last) {
        const bool quiet = f.wanted.passes_over(position(0), position(count - 1), from, from + PANEL);
        return {from, buffer, part, plain, quiet, !quiet || beside_logits()};
      }
      for (int r = 0; r < count && f.shape.strip; r++) t.tops[r * f.shape.key_blocks + from / PANEL] = NOTHING;
    }
    return {};
  }

  // A range of keys that all of the queries attend to.
  Hull seen_by_all() const {
    Hull all = {0, f.call.rule.dense || f.call.rule.span_count != 1 ? 0 : f.call.m};
    for (int r = 0; r < count && all.last; r++) {
      const int32_t* span = spans_of(f.call, batch, query + r);
      all.first = most(all.first, span[0]);
      all.last = least(all.last, span[1]);
    }
    return all;
  }

  // Products of more than 16 queries are computed by 32 rows of tiles: all buffers have so many, and what they hold beyond
  // `count` does not matter.
  static_assert(BLOCK_ROWS == 32, "rows of a product of tiles");
  template <typename Beside> void logits(const Panel& panel, Beside& beside) const {
    const float* from = keys + panel.from * f.shape.words;
    float* to = logits_of(panel, 0);
    if (count <= 16)
      return product<OF, false, false>(count, panel.last(), t.queries, f.shape.words, from, to, LINE, f.shape.words, nullptr);
    for (int64_t j = 0; j < panel.last(); j += 32)
      thirty_two_rows<OF>(false, t.queries, f.shape.words, from + j, to + j, LINE, f.shape.words, beside);
  }
  template <typename Beside> void mix(const Panel& panel, Beside& beside) const {
    const int64_t first = words_of<OF>(panel.first()), size = words_of<OF>(panel.last()) - first;
    const float* p = words_of_row(panel, 0) + first;
    const int64_t line = panel.apart ? WORDS : LINE;
    for (int64_t c = 0; c < f.call.d_v; c += PANEL) {
      const float* from = values + c * words_of<OF>(f.shape.height) + (words_of<OF>(panel.from) + first) * PANEL;
      float* to = t.out + c;
      if (count <= 16) {
        if (t.summed)
          product<OF, true, false>(count, f.call.d_v - c, p, line, from, to, f.shape.width, size, nullptr);
        else
          product<OF, false, false>(count, f.call.d_v - c, p, line, from, to, f.shape.width, size, nullptr);
        continue;
      }
      for (int64_t v = 0; v < least(PANEL, f.call.d_v - c); v += 32)
        thirty_two_rows<OF>(t.summed, p, line, from + v, to + v, f.shape.width, size, beside);
    }
    t.summed = true;
  }

  // The logits of a panel as the call defines them, -inf where masked; the tops that they exceed are raised.
  void prepare(const Panel& panel) const {
    const bool defined = panel.plain && !f.scaling.adjusted;
    for (int r = 0; r < count && !defined; r++) define(panel, r);
    for (int begin = 0; begin < count; begin += W) {
      const float *x = logits_of(panel, begin), *limits = t.limits + begin;
      Floats* fold = t.fold + begin;
      bool exceeded = f.wanted.longest;
      for (int r = 0; r < least(W, count - begin); r++, x += LINE) {
        const Floats most = maxima_of(x);
        fold[r] = larger(fold[r], most);
        exceeded |= any_above(most * factor, limits[r]);
      }
      if (exceeded) exceed(panel, begin, (int)least(W, count - begin));
    }
  }
  static __attribute__((always_inline)) Floats maxima_of(const float* x) {
    return larger(larger(load(x), load(x + W)), larger(load(x + 2 * W), load(x + 3 * W)));
  }
  void define(const Panel& panel, int r) const {
    const Stretch s = stretch(panel, r);
    if (f.scaling.adjusted)
      adjust(f.call, batch, head, query + r, {s.logits, panel.first(), panel.last(), s.key, s.position}, f.scaling.factor);
    if (!panel.plain && !sees_all(f.call, batch, query + r, panel.from, panel.from + PANEL))
      hide(f.call, batch, head, query + r, s);
  }

  // Up to W rows, some of which exceed their limits. A limit of NaN is always exceeded: there is no top yet, or so large a one
  // that products are rounded to logits (FUSED).
  __attribute__((noinline)) void exceed(const Panel& panel, int begin, int rows) const {
    Floats lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = maxima_of(logits_of(panel, begin + (i < rows ? i : 0)));
    const Floats products = maxima(lanes), highest = products * factor, before = load(t.rows.top + begin);
    const Ints rising = rises(t.rows, begin, highest);
    const unsigned rise = bits(rising);
    // Of tops, not of this panel's largest logits: the factors are kept for the next panels, which may exceed no limit.
    unsigned round = 0;
    if (OF == PAIRS && factor != 1.0f)
      round = bits(~(Ints)(magnitude(choose(rising, highest, before)) <= FUSED) & (Ints)(highest != NOTHING));
    for (int i = 0; i < rows; i++) {
      const int r = begin + i;
      const Stretch s = stretch(panel, r);
      const bool rounded = round >> i & 1;
      if (f.wanted.longest) t.best.take(r, s, products[i]);
      for (int64_t j = s.from; j < s.to && rounded; j += W) store(s.logits + j, load(s.logits + j) * factor);
      t.factors[r] = rounded ? 1.0f : factor;
      if (rise >> i & 1) raise_row(s, r, highest[i], rounded ? highest[i] : products[i]);
    }
    const Floats top = load(t.rows.top + begin);
    store(t.bases + begin, choose(top == NOTHING, all(0.0f), top));
    store(t.limits + begin, choose(magnitude(top) <= FUSED, top + ABOVE, all(__builtin_nanf(""))));
  }

  // Raises a row's top to `largest`, which is stored as `logit`.
  void raise_row(const Stretch& s, int r, float largest, float logit) const {
    const float centre = REACH ? distance_of(s, logit) : 0.0f;
    const float change = raise<SPREAD, REACH>(t.rows, r, largest, centre, f.wanted.masses(), nullptr, 0);
    if (t.gathered) raise<SPREAD, REACH>(t.past, r, largest, centre, 0, nullptr, 0);
    if (change != 1.0f) t.changes[r] = change, t.changed = true;
    if (REACH) this->centre(r);
  }

  // The weights of a panel beside the products of the panels before and after it. KEEP: the weights replace the logits, too.
  template <bool KEEP> void overlap(const Panel& before, const Panel& now, const Panel& after) const {
    if constexpr (REACH) {
      if (now.from + PANEL <= position(0) + 1) return overlap<KEEP, false>(before, now, after, BEFORE);
      if (now.from > position(count - 1)) return overlap<KEEP, false>(before, now, after, AFTER);
    }
    overlap<KEEP, REACH>(before, now, after, AROUND);
  }
  template <bool KEEP, bool MIXED>
  void overlap(const Panel& before, const Panel& now, const Panel& after, Side side) const {
    Units<OF, SPREAD, REACH, KEEP, MIXED> units(t, logits_of(now, 0), words_of_row(now, 0), count, position(0) - now.from, side,
                                                pace(before, after));
    if (before.any()) mix(before, units);
    if (after.any()) logits(after, units);
    units.finish();
  }
  // Spreads the units over all products.
  int pace(const Panel& before, const Panel& after) const {
    int64_t products = 0;
    if (after.any()) products += PANEL / 32 * (f.shape.words / STEP<OF>);
    if (before.any()) products += blocks(f.call.d_v, 32) * (PANEL / NUMBERS<OF>);
    return (int)most(1, products * 4 / BLOCK_ROWS);
  }

  // Adds a panel's weights, which replaced its logits, to the masses.
  void masses(const Panel& panel) const {
    Seen each[BLOCK_ROWS];
    for (int r = 0; r < count; r++) each[r] = seen_in(panel, r, logits_of(panel, r));
    f.wanted.add_after(each, count, true, t.rows, 0);
  }

  // The weights of a row, whatever the call asks for.
  __attribute__((noinline)) void weigh_row(const Panel& panel, int r) const {
    Seen one = seen_in(panel, r, nullptr);
    const Stretch& s = one.row;
    if (f.shape.strip) t.tops[r * f.shape.key_blocks + panel.from / PANEL] = t.rows.top[r];
    const bool exact = f.call.dropout == 0;
    if (!panel.quiet) f.wanted.add_before(&one, 1, exact, t.rows, r);
    float* kept = f.shape.strip ? t.strip + r * f.shape.strip + panel.from : s.logits;
    const Dropout dropout = exact ? Dropout{0, 0} : dropout_of(f.call, batch, head, query + r);
    typename Two::Part part;
    for (int half = 0; half < 2; half++) {
      const int64_t i = Two::side_of(half) * 2 * W;
      Floats p[2] = {load(s.logits + i), load(s.logits + i + W)}, far[2];
      for (int v = 0; v < 2; v++)
        far[v] = magnitude((float)(s.position - panel.from - i - v * W) - ramp()) - t.rows.centre[r];
      Two::weigh(p, part, half == 0, t.factors[r], t.bases[r], far);
      store(kept + i, p[0]);
      store(kept + i + W, p[1]);
      for (int v = 0; v < 2 && dropout.threshold; v++)
        p[v] = choose(noise(dropout.seed, panel.from + i + v * W) >= dropout.threshold, p[v], all(0.0f));
      Two::store_words(p, words_of_row(panel, r) + words_of<OF>(i));
    }
    Two::add(part, t.rows, r);
    one.weights = kept;
    if (!panel.quiet) f.wanted.add_after(&one, 1, exact, t.rows, r);
  }

  Levels<SPREAD, REACH> levels() const { return {t, BLOCK_ROWS, count, f.shape.width}; }

  // Refuses sums of parts that are not finite: those of float32 may be.
  void check() const {
    for (int r = 0; r < count; r++) {
      Ints strange = {};
      for (int64_t c = 0; c < f.call.d_v; c += W) strange |= not_finite(load(t.out + r * f.shape.width + c));
      if (any(strange) && !t.rows.broken[r]) f.refused.raise();
    }
  }

  // Rescales the rows of O whose top was raised for the panel that is added next.
  void rescale() const {
    if (!t.changed) return;
    t.changed = false;
    for (int r = 0; r < count; r++) {
      if (t.changes[r] == 1.0f) continue;
      float *out = t.out + r * f.shape.width, *before = t.before + r * f.shape.width;
      for (int64_t c = 0; c < f.call.d_v; c += W) {
        if (t.summed) store(out + c, load(out + c) * t.changes[r]);
        if (t.gathered) store(before + c, load(before + c) * t.changes[r]);
      }
      t.changes[r] = 1.0f;
    }
  }
};
#endif
