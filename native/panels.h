// The keys of one block of queries where float32 is multiplied in parts (operand.h): while tiles multiply for two panels of
// keys, the vector units compute the weights of the panel between them.
//
//            panel   i + 1         i            i − 1
//   tiles            QKᵀ → S       then         O += p V
//   vectors                        2^(S−top)               a few instructions after each product of tiles
//
// A product of tiles takes 16 cycles. The CPU computes other instructions meanwhile, but only those close behind it: the
// weights are computed in units of two vectors, the instructions of which are placed between the products. S and p have two
// buffers, used in turn.
//
// Sums over PANELS_AT_ONCE panels are added to those of the panels before: rounding errors of adding to one long sum many
// times would accumulate.

#if HEADWISE_TILES
template <typename T, bool SPREAD, bool REACH> struct Panels {
  static constexpr int KEYS = KEYS_AT_ONCE<PARTS>, PANELS_AT_ONCE = 16;
  static constexpr int LINE = LOGITS_STRIDE<PARTS>, WORDS = WEIGHTS_STRIDE<PARTS>;  // row lengths

  const Forward<PARTS, T, SPREAD, REACH>& f;
  const int64_t batch, head, query;
  const int count;  // of queries
  const float *keys, *values;
  Scratch& t;

  // A panel, and its keys that any of the queries attends to: none at the end.
  struct Panel {
    int64_t from;
    int buffer;
    Hull part;
    bool plain;  // every query attends to all of its keys
    bool quiet;  // it adds nothing to the masses of the queries
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
    while (now.any()) {
      const Panel after = next(now.from + PANEL, 1 - now.buffer, seen, everyone);
      for (int r = 0; r < count; r++) prepare(now, r);
      if ((now.quiet || !f.wanted.count[MASS_OF_LOGITS]) && !f.shape.strip && f.call.dropout == 0) {
        if (now.quiet)
          overlap<false>(before, now, after);
        else
          overlap<true>(before, now, after), masses(now);
      } else {
        if (after.any()) logits(after, alone);
        if (before.any()) mix(before, alone);
        for (int r = 0; r < count; r++) weigh_row(now, r);
      }
      rescale();
      if (++panels % PANELS_AT_ONCE == 0 && after.any()) gather(false);
      before = now;
      now = after;
    }
    if (before.any()) mix(before, alone);
    gather(true);
    for (int r = 0; r < count; r++) t.rows.largest[r] = t.rows.broken[r] ? NOTHING : maximum(t.fold[r]);
  }

 private:
  float* logits_of(const Panel& panel, int r) const { return t.logits + (panel.buffer * BLOCK_ROWS + r) * LINE; }
  float* words_of_row(const Panel& panel, int r) const { return t.weights + (panel.buffer * BLOCK_ROWS + r) * WORDS; }
  int64_t position(int r) const { return query + r + f.call.rule.shift; }
  Stretch stretch(const Panel& panel, int r) const { return {logits_of(panel, r), 0, PANEL, panel.from, position(r)}; }
  Seen seen_in(const Panel& panel, int r, const float* weights) const {
    return {stretch(panel, r), 1.0f, t.bases[r], weights, batch, query + r, f.call.m};
  }

  void begin() const {
    t.past.masses = t.rows.masses;
    __builtin_memset(t.sums, 0, (size_t)(count * f.shape.width) * 4);
    for (int r = 0; r < count; r++) {
      t.fold[r] = all(NOTHING), t.limits[r] = __builtin_nanf(""), t.changes[r] = 1.0f;
      if (REACH) centre(r);
    }
    t.changed = t.gathered = false;
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
      if (part.first < part.last)
        return {from, buffer, part, plain, f.wanted.passes_over(position(0), position(count - 1), from, from + PANEL)};
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
      return product<PARTS, false, false>(count, panel.last(), t.queries, f.shape.words, from, to, LINE, f.shape.words,
                                          nullptr);
    for (int64_t j = 0; j < panel.last(); j += 32)
      thirty_two_rows<PARTS, false>(t.queries, f.shape.words, from + j, to + j, LINE, f.shape.words, beside);
  }
  template <typename Beside> void mix(const Panel& panel, Beside& beside) const {
    const int64_t first = words_of<PARTS>(panel.first()), size = words_of<PARTS>(panel.last()) - first;
    const float* p = words_of_row(panel, 0) + first;
    for (int64_t c = 0; c < f.call.d_v; c += PANEL) {
      const float* from = values + c * words_of<PARTS>(f.shape.height) + (words_of<PARTS>(panel.from) + first) * PANEL;
      float* to = t.sums + c;
      if (count <= 16) {
        product<PARTS, true, false>(count, f.call.d_v - c, p, WORDS, from, to, f.shape.width, size, nullptr);
        continue;
      }
      for (int64_t v = 0; v < least(PANEL, f.call.d_v - c); v += 32)
        thirty_two_rows<PARTS, true>(p, WORDS, from + v, to + v, f.shape.width, size, beside);
    }
  }

  // The logits of a row as the call defines them, -inf where masked; its top is raised if they exceed it.
  __attribute__((always_inline)) void prepare(const Panel& panel, int r) const {
    float* x = logits_of(panel, r);
    const Stretch s = stretch(panel, r);
    if (f.scaling.adjusted) adjust(f.call, batch, head, query + r, {x, panel.first(), panel.last(), s.key, s.position}, 1.0f);
    if (!panel.plain && !sees_all(f.call, batch, query + r, panel.from, panel.from + PANEL))
      hide(f.call, batch, head, query + r, s);
    const Floats most = larger(larger(load(x), load(x + W)), larger(load(x + 2 * W), load(x + 3 * W)));
    t.fold[r] = larger(t.fold[r], most);
    if (f.wanted.longest) t.best.take(r, s, maximum(most));
    if (any_above(most, t.limits[r])) exceed(r, s, maximum(most));
  }

  // A limit of NaN, without a top yet, is always exceeded.
  __attribute__((noinline)) void exceed(int r, const Stretch& s, float largest) const {
    if (rises(t.rows, r, largest)) {
      const float centre = REACH ? distance_of(s, largest) : 0.0f;
      const float change = raise<SPREAD, REACH>(t.rows, r, largest, centre, f.wanted.masses(), nullptr, 0);
      if (t.gathered) raise<SPREAD, REACH>(t.past, r, largest, centre, 0, nullptr, 0);
      if (change != 1.0f) t.changes[r] = change, t.changed = true;
      if (REACH) this->centre(r);
    }
    const float top = t.rows.top[r];
    t.bases[r] = top == NOTHING ? 0.0f : top;
    t.limits[r] = top == NOTHING ? __builtin_nanf("") : top + ABOVE;
  }

  // The weights of a panel beside the products of the panels before and after it. KEEP: the weights replace the logits, too.
  template <bool KEEP> void overlap(const Panel& before, const Panel& now, const Panel& after) const {
    if constexpr (REACH) {
      if (now.from + PANEL <= position(0) + 1) return overlap(before, Units<KEEP, false>(*this, now, BEFORE), after);
      if (now.from > position(count - 1)) return overlap(before, Units<KEEP, false>(*this, now, AFTER), after);
    }
    overlap(before, Units<KEEP, REACH>(*this, now, AROUND), after);
  }
  template <typename Units> void overlap(const Panel& before, Units units, const Panel& after) const {
    // In this order: the logits are read next, and a load from the tile that was stored last waits for its products.
    if (after.any()) logits(after, units);
    if (before.any()) mix(before, units);
    units.finish();
  }

  // Adds a panel's weights, which replaced its logits, to the masses.
  void masses(const Panel& panel) const {
    Seen each[BLOCK_ROWS];
    for (int r = 0; r < count; r++) each[r] = seen_in(panel, r, logits_of(panel, r));
    f.wanted.add_after(each, count, true, t.rows, 0);
  }

  // The sums of two vectors of weights, and of two more.
  struct Part {
    Floats total, entropy, squares, first, second;
  };

  // Two vectors of logits become weights, which are added to `part`, or begin it. `far`: the distances from the centre.
  static __attribute__((always_inline)) void weigh(Floats (&x)[2], Part& part, bool begins, float base,
                                                   const Floats (&far)[2]) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const bool first = begins && v == 0;
      const Floats depth = x[v] - base, p = exp2(depth);
      x[v] = p;
      if (first) part.entropy = part.squares = part.second = all(0.0f);
      part.total = first ? p : part.total + p;
      if (SPREAD) {
        // Where p is 0 the depth may be infinite.
        part.entropy = _mm512_mask3_fmadd_ps(p, depth, part.entropy, not_underflowing(depth));
        part.squares += p * p;
      }
      if (REACH) {
        const Floats moment = p * far[v];
        part.first = first ? moment : part.first + moment;
        part.second += moment * far[v];
      }
    }
  }
  static __attribute__((always_inline)) void add(const Part& part, Rows& rows, int r) {
    rows.total[r] += part.total;
    if (SPREAD) rows.entropy[r] += part.entropy, rows.squares[r] += part.squares;
    if (REACH) rows.first[r] += part.first, rows.second[r] += part.second;
  }

  // The weights of a panel, of which only the products and the rows' sums are needed. Half a row is a unit.
  //
  // The distance from the centre is |position - key| - centre: `steps`, which all rows have in common, and a number for each
  // row, unless there are keys on both sides of a query (MIXED).
  template <bool KEEP, bool MIXED> struct Units {
    static constexpr int AT_ONCE = 8;  // beside the products of 32 numbers
    typedef Panels::Part Part;
    Ahead& ahead;
    Rows& rows;
    float* logits;                // of the next unit, as are the next three
    const float* bases;
    float* words;
    const float* offsets;
    int row, left;
    Floats steps[4];

    Units(const Panels& p, const Panel& panel, Side side)
        : ahead(p.t.ahead), rows(p.t.rows), logits(p.logits_of(panel, 0)), bases(p.t.bases), words(p.words_of_row(panel, 0)),
          offsets(p.t.offsets[side == AFTER]), row(0), left(2 * p.count) {
      for (int v = 0; v < 4 && REACH; v++) {
        steps[v] = (float)(p.position(0) - panel.from - v * W) - ramp();
        if (side == AFTER) steps[v] = -steps[v];
      }
    }

    bool begin() const { return left > 0; }
    template <int AT> __attribute__((always_inline)) void after(Part& part) {
#pragma GCC unroll 8
      for (int i = AT * AT_ONCE / PRODUCTS<PARTS>; i < (AT + 1) * AT_ONCE / PRODUCTS<PARTS>; i++) unit(i, part);
    }
    __attribute__((always_inline)) void end() {
      logits += AT_ONCE / 2 * LINE;
      bases += AT_ONCE / 2;
      words += AT_ONCE / 2 * WORDS;
      offsets += AT_ONCE / 2;
      row += AT_ONCE / 2;
      left -= AT_ONCE;
      ahead.fetch();
    }
    void finish() {
      Part part;
      for (; left > 0; end())
        for (int i = 0; i < AT_ONCE; i++) unit(i, part);
    }

   private:
    __attribute__((always_inline)) void unit(int i, Part& part) {
      const int r = i / 2, side = i % 2;
      float* x = logits + r * LINE + side * 2 * W;
      Floats p[2] = {load(x), load(x + W)}, far[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2 && REACH; v++) {
        const Floats step = steps[side * 2 + v];
        far[v] = MIXED ? magnitude(step + (float)(row + r)) - rows.centre[row + r] : step + offsets[r];
      }
      weigh(p, part, side == 0, bases[r], far);
      if (KEEP) store(x, p[0]), store(x + W, p[1]);
      if (side) add(part, rows, row + r);
      split(p[0], p[1], words + r * WORDS + side * STEP<PARTS>, W);
    }
  };

  // The weights of a row, whatever the call asks for.
  __attribute__((noinline)) void weigh_row(const Panel& panel, int r) const {
    Seen one = seen_in(panel, r, nullptr);
    const Stretch& s = one.row;
    if (f.shape.strip) t.tops[r * f.shape.key_blocks + panel.from / PANEL] = t.rows.top[r];
    const bool exact = f.call.dropout == 0;
    if (!panel.quiet) f.wanted.add_before(&one, 1, exact, t.rows, r);
    float* kept = f.shape.strip ? t.strip + r * f.shape.strip + panel.from : s.logits;
    const Dropout dropout = exact ? Dropout{0, 0} : dropout_of(f.call, batch, head, query + r);
    Part part;
    for (int side = 0; side < 2; side++) {
      const int64_t i = side * 2 * W;
      Floats p[2] = {load(s.logits + i), load(s.logits + i + W)}, far[2];
      for (int v = 0; v < 2; v++)
        far[v] = magnitude((float)(s.position - panel.from - i - v * W) - ramp()) - t.rows.centre[r];
      weigh(p, part, side == 0, t.bases[r], far);
      store(kept + i, p[0]);
      store(kept + i + W, p[1]);
      for (int v = 0; v < 2 && dropout.threshold; v++)
        p[v] = choose(noise(dropout.seed, panel.from + i + v * W) >= dropout.threshold, p[v], all(0.0f));
      split(p[0], p[1], words_of_row(panel, r) + words_of<PARTS>(i), W);
    }
    add(part, t.rows, r);
    one.weights = kept;
    if (!panel.quiet) f.wanted.add_after(&one, 1, exact, t.rows, r);
  }

  static void add_sums(Rows& to, const Rows& from, int r) {
    to.total[r] += from.total[r];
    if (SPREAD) to.entropy[r] += from.entropy[r], to.squares[r] += from.squares[r];
    if (REACH) to.first[r] += from.first[r], to.second[r] += from.second[r];
  }

  // Adds the sums of the last panels to those of the panels before, if there are any. `last`: no panel follows.
  void gather(bool last) const {
    for (int r = 0; r < count; r++) {
      if (last && t.gathered) add_sums(t.rows, t.past, r);
      if (!last) keep_sums(r);
      float *sums = t.sums + r * f.shape.width, *out = t.out + r * f.shape.width;
      Ints strange = {};
      for (int64_t c = 0; c < f.call.d_v; c += W) {
        const Floats whole = t.gathered ? load(out + c) + load(sums + c) : load(sums + c);
        strange |= not_finite(whole);
        store(out + c, whole);
        if (!last) store(sums + c, all(0.0f));
      }
      if (any(strange) && !t.rows.broken[r]) f.refused.raise();
    }
    t.gathered = true;
  }
  void keep_sums(int r) const {
    if (!t.gathered) {
      t.past.top[r] = t.rows.top[r];
      t.past.centre[r] = t.rows.centre[r];
      clear_sums<SPREAD, REACH>(t.past, r);
    }
    add_sums(t.past, t.rows, r);
    clear_sums<SPREAD, REACH>(t.rows, r);
  }

  // Rescales the rows of O whose top was raised for the panel that is added next.
  void rescale() const {
    if (!t.changed) return;
    t.changed = false;
    for (int r = 0; r < count; r++) {
      if (t.changes[r] == 1.0f) continue;
      float *sums = t.sums + r * f.shape.width, *out = t.out + r * f.shape.width;
      for (int64_t c = 0; c < f.call.d_v; c += W) {
        store(sums + c, load(sums + c) * t.changes[r]);
        if (t.gathered) store(out + c, load(out + c) * t.changes[r]);
      }
      t.changes[r] = 1.0f;
    }
  }
};
#endif
