// Sums over many keys on two levels: of the last blocks of keys, and of those before. Rounding errors of adding to one long sum
// many times would accumulate.

template <bool SPREAD, bool REACH> struct Levels {
  Scratch& t;
  const int rows_a_group, count;  // queries
  const int64_t width;            // of p V

  void begin() const {
    t.past.masses = t.rows.masses;
    t.gathered = false;
  }

  // Adds the sums, and p V of the groups of rows that have `begun` one, to those of the blocks before.
  void gather(bool* begun) const {
    const bool first = !t.gathered;
    if (first) {
      float* before = t.before;
      t.before = t.out;
      t.out = before;
    }
    for (int r = 0; r < count; r++) {
      if (first) {
        t.past.top[r] = t.rows.top[r];
        t.past.centre[r] = t.rows.centre[r];
        clear_sums<SPREAD, REACH>(t.past, r);
      }
      add(t.past, t.rows, r);
      clear_sums<SPREAD, REACH>(t.rows, r);
      float* before = t.before + r * width;
      const bool any = begun[r / rows_a_group];
      if (first && !any) __builtin_memset(before, 0, (size_t)width * 4);
      if (!first && any) add(before, t.out + r * width);
    }
    for (int r = 0; r < count; r += rows_a_group) begun[r / rows_a_group] = false;
    t.gathered = true;
  }

  // Adds those of the blocks before, if there are any, to the last.
  void finish(const bool* begun) const {
    for (int r = 0; r < count && t.gathered; r++) {
      add(t.rows, t.past, r);
      float* out = t.out + r * width;
      if (!begun[r / rows_a_group]) __builtin_memset(out, 0, (size_t)width * 4);
      add(out, t.before + r * width);
    }
  }

 private:
  static void add(Rows& to, const Rows& from, int r) {
    to.total[r] += from.total[r];
    if (SPREAD) to.entropy[r] += from.entropy[r], to.squares[r] += from.squares[r];
    if (REACH) to.first[r] += from.first[r], to.second[r] += from.second[r];
  }
  void add(float* to, const float* from) const {
    for (int64_t c = 0; c < width; c += W) store(to + c, load(to + c) + load(from + c));
  }
};
