// The largest weights of each row and their keys, found in the pass.
//
// A key is encoded as one number: its logit in the upper 32 bits, in an encoding with the order of unsigned numbers, and in
// the lower bits its index counted from the end. So all numbers differ, and of equal logits the lower key has the larger.
//
//   logits of a block →   those above the limit →   a list for each row  →   cut to the best when it is long;
//                         (mostly none: a check         (unsorted)           the last of them is the limit
//                          of the block's maximum)

typedef uint64_t Ranked;

INLINE Ranked ranked(float logit, int64_t key) {
  uint32_t u;
  const float x = logit + 0.0f;  // -0 is 0
  __builtin_memcpy(&u, &x, 4);
  u = x != x ? 0xffffffffu : u ^ (u & 0x80000000u ? 0xffffffffu : 0x80000000u);
  return (Ranked)u << 32 | (0xffffffffu - (uint32_t)key);
}
INLINE float logit_of(Ranked r) {
  uint32_t u = (uint32_t)(r >> 32);
  u ^= u & 0x80000000u ? 0x80000000u : 0xffffffffu;
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
INLINE int64_t key_of(Ranked r) { return (int64_t)(0xffffffffu - (uint32_t)r); }

// Partitions so that all of [0, i] are at least all of (i, count), and returns i.
static int64_t split(Ranked* x, int64_t count) {
  const Ranked a = x[0], b = x[(count - 1) / 2], c = x[count - 1];  // never the last of two, which would leave one side empty
  const Ranked middle = a < b ? (b < c ? b : a < c ? c : a) : (a < c ? a : b < c ? c : b);
  for (int64_t i = -1, j = count;;) {
    do i++;
    while (x[i] > middle);
    do j--;
    while (x[j] < middle);
    if (i >= j) return j;
    const Ranked t = x[i];
    x[i] = x[j];
    x[j] = t;
  }
}

// Moves the `wanted` largest to the front, in any order.
static void bring_forward(Ranked* x, int64_t count, int64_t wanted) {
  while (count > 1) {
    const int64_t left = split(x, count) + 1;
    if (wanted < left) {
      count = left;
    } else {
      x += left;
      count -= left;
      wanted -= left;
      if (!wanted) return;
    }
  }
}

// Sorts, largest first.
static void put_in_order(Ranked* x, int64_t count) {
  while (count > 16) {
    const int64_t left = split(x, count) + 1;
    put_in_order(x + left, count - left);
    count = left;
  }
  for (int64_t i = 1; i < count; i++) {
    const Ranked one = x[i];
    int64_t j = i;
    for (; j > 0 && x[j - 1] < one; j--) x[j] = x[j - 1];
    x[j] = one;
  }
}

// A row's largest weights: a logit z is a weight of 2^(z · factor - top) · inverse.
struct BestRow {
  const Ranked* list;  // the largest first
  int64_t found;
  float factor, top, inverse;
  bool broken;         // the log-sum-exp is NaN, so the order is undefined
};

struct Best {
  int64_t wanted, room;
  Ranked* list;  // [BLOCK_ROWS][room]
  int32_t count[BLOCK_ROWS];
  float limit[BLOCK_ROWS];  // logits at or below it are discarded

  static int64_t room_for(int64_t wanted) { return wanted ? long_list(wanted) + BLOCK_KEYS + W : 0; }
  static int64_t long_list(int64_t wanted) { return 2 * wanted + 64; }

  void clear(int rows) {
    for (int r = 0; r < rows; r++) count[r] = 0, limit[r] = NOTHING;
  }

  // Adds the next stretch of row r; `top` is at least its largest logit.
  void take(int r, const Stretch& s, float top) {
    if (top <= limit[r]) return;
    Ranked* x = list + r * room;
    int32_t found = count[r];
    const Floats least_useful = all(limit[r]);
    for (int64_t i = s.from; i < s.to; i += W) {
      unsigned useful = bits(~(load(s.logits + i) <= least_useful));
      for (; useful; useful &= useful - 1) {
        const int lane = __builtin_ctz(useful);
        x[found++] = ranked(s.logits[i + lane], s.key + i + lane);
      }
    }
    if (found > long_list(wanted)) {
      bring_forward(x, found, wanted);
      found = (int32_t)wanted;
      Ranked last = x[0];
      for (int64_t i = 1; i < wanted; i++) last = x[i] < last ? x[i] : last;
      limit[r] = logit_of(last);
    }
    count[r] = found;
  }

  // Returns row r after all its keys have been added.
  BestRow finish(int r, float factor, float top, float inverse, bool broken) {
    Ranked* x = list + r * room;
    int64_t found = count[r];
    if (found > wanted) {
      bring_forward(x, found, wanted);
      found = wanted;
    }
    put_in_order(x, found);
    return {x, found, factor, top, inverse, broken};
  }
};
