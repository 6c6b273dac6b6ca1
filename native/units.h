// The weights of a panel of keys, two vectors at a time, which panels.h computes between products of tiles.

#if HEADWISE_TILES
// Two vectors of a row of logits.
template <Operand OF, bool SPREAD, bool REACH> struct TwoVectors {
  // The sums of their weights, and of those of the next two.
  struct Part {
    Floats total, entropy, squares, first, second;
  };

  // Products times `factor` minus `base` become weights, which are added to `part`, or begin it. `far`: the distances from the
  // centre.
  static __attribute__((always_inline)) void weigh(Floats (&x)[2], Part& part, bool begins, float factor, float base,
                                                   const Floats (&far)[2]) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const bool first = begins && v == 0;
      const Floats depth = (OF == PAIRS ? x[v] * factor : x[v]) - base, p = OF == PAIRS ? exp2_scaled(depth) : exp2(depth);
      x[v] = p;
      if (first) part.entropy = part.squares = part.second = all(0.0f);
      part.total = first ? p : part.total + p;
      if (SPREAD) {
        // Where p is 0 the depth may be infinite.
        if (OF == PAIRS)
          part.entropy += p * not_below(depth);
        else
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
  // Which half of a row is first: parts take more room than logits, so that those of the second half do not overwrite the first.
  static constexpr int side_of(int half) { return OF == PARTS ? 1 - half : half; }
  static __attribute__((always_inline)) void store_words(const Floats (&p)[2], float* to) {
    if constexpr (OF == PARTS)
      split(p[0], p[1], to, W);
    else
      write((Brain*)to, p[0], p[1]);
  }
};

// The weights of a panel, of which only the products and the rows' sums are needed. Half a row is a unit. What is multiplied
// takes the place of the logits, unless these are replaced by the weights themselves (KEEP).
//
// The distance from the centre is |position - key| - centre: `steps`, which all rows have in common, and a number for each
// row, unless there are keys on both sides of a query (MIXED).
template <Operand OF, bool SPREAD, bool REACH, bool KEEP, bool MIXED> struct Units {
  static constexpr int AT_ONCE = 8;  // beside the products of 32 numbers
  static constexpr int LINE = LOGITS_STRIDE<OF>, WORDS = KEEP ? WEIGHTS_STRIDE<OF> : LINE;
  typedef TwoVectors<OF, SPREAD, REACH> Two;
  typedef typename Two::Part Part;
  Ahead& ahead;
  Rows& rows;
  float* logits;                // of the next unit, as are the next four
  const float *factors, *bases;
  float* words;
  const float* offsets;
  int row, left;
  int pace, wait;               // units stand beside every how many products of 32 numbers, and beside which next
  Floats steps[4];

  // `distance`: the position of the first query minus the first key.
  Units(Scratch& t, float* logits, float* words, int count, int64_t distance, Side side, int pace)
      : ahead(t.ahead), rows(t.rows), logits(logits), factors(t.factors), bases(t.bases), words(words),
        offsets(t.offsets[side == AFTER]), row(0), left(2 * count), pace(pace), wait(1) {
    for (int v = 0; v < 4 && REACH; v++) {
      steps[v] = (float)(distance - v * W) - ramp();
      if (side == AFTER) steps[v] = -steps[v];
    }
  }

  bool begin() {
    if (--wait) return false;
    wait = pace;
    return left > 0;
  }
  template <int AT> __attribute__((always_inline)) void after(Part& part) {
#pragma GCC unroll 8
    for (int i = AT * AT_ONCE / PRODUCTS<OF>; i < (AT + 1) * AT_ONCE / PRODUCTS<OF>; i++) unit(i, part);
  }
  __attribute__((always_inline)) void end() {
    logits += AT_ONCE / 2 * LINE;
    factors += AT_ONCE / 2;
    bases += AT_ONCE / 2;
    words += AT_ONCE / 2 * WORDS;
    offsets += AT_ONCE / 2;
    row += AT_ONCE / 2;
    left -= AT_ONCE;
    ahead.fetch();
  }
  // The units beside which there were no products.
  void finish() {
    Part part;
    for (; left > 0; end())
      for (int i = 0; i < AT_ONCE; i++) unit(i, part);
  }

 private:
  __attribute__((always_inline)) void unit(int i, Part& part) {
    const int r = i / 2, half = i % 2, side = Two::side_of(half);
    float* x = logits + r * LINE + side * 2 * W;
    Floats p[2] = {load(x), load(x + W)}, far[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2 && REACH; v++) {
      const Floats step = steps[side * 2 + v];
      far[v] = MIXED ? magnitude(step + (float)(row + r)) - rows.centre[row + r] : step + offsets[r];
    }
    Two::weigh(p, part, half == 0, factors[r], bases[r], far);
    if (KEEP) store(x, p[0]), store(x + W, p[1]);
    if (half) Two::add(part, rows, row + r);
    Two::store_words(p, words + r * WORDS + side * STEP<OF>);
  }
};
#endif
