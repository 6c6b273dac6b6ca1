// Memory that is fetched before it is used, so that nothing waits for it.

// Of the L2 cache, for one thread's heads. Tiles are for CPUs with an L2 cache of 2 MB.
constexpr int64_t LOCAL_BYTES = (HEADWISE_TILES ? 1536 : 512) << 10;

template <int LEVEL = 3, typename T> INLINE void ask_for(const T* row, int64_t size) {
  for (int64_t c = 0; c < size; c += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + c, 0, LEVEL);
}

// How many lines are fetched at once, so that the bytes of a group are after so many `fetches`. 0, none: groups do not fit in
// the cache beside `others`, or all of them do.
static int64_t lines_ahead_of(int64_t bytes, int64_t others, int64_t groups, int64_t fetches) {
  const bool pays = others + bytes <= LOCAL_BYTES && groups * bytes > LOCAL_BYTES && fetches > 0;
  return pays ? blocks(blocks(bytes, 64), fetches) : 0;
}

// What the next KV head is computed from, and where this one's results go: a few cache lines at a time, between products, into
// the L2 cache. Many small heads are read from memory in hardly less time than is computed with them.
struct Ahead {
  struct Range {
    const char* row;
    int64_t stride, rows;    // of the rows that are left
    int64_t line, lines;     // of the row
  };
  Range ranges[8];
  int begun, count;
  int64_t at_once;

  // `lines`: that are fetched at once.
  void begin(int64_t lines) {
    begun = count = 0;
    at_once = lines;
  }
  // Rows of some heads, from `head` on, of `size` numbers of `each` bytes.
  void add(const headwise_tensor& x, int64_t each, int64_t batch, int64_t head, int64_t heads, int64_t size, int64_t rows) {
    if (!size || !rows) return;  // there may be no memory
    const char* first = (const char*)x.data + (batch * x.batch + head * x.head) * each;
    if (x.head == size) {  // heads lie beside each other
      size *= heads;
    } else if (x.head == rows * x.row) {
      rows *= heads;
    }
    if (x.row == size) size *= rows, rows = least(rows, 1);
    ranges[count++] = {first, x.row * each, rows, 0, blocks(size * each, 64)};
  }
  __attribute__((always_inline)) void fetch() {
    if (begun < count) fetch_lines();
  }

 private:
  __attribute__((noinline)) void fetch_lines() {
    for (int64_t left = at_once; left > 0 && begun < count;) {
      Range& x = ranges[begun];
      const int64_t some = least(left, x.lines - x.line);
      ask_for<2>(x.row + x.line * 64, some * 64);
      left -= some;
      x.line += some;
      if (x.line < x.lines) continue;
      x.line = 0;
      x.row += x.stride;
      begun += --x.rows == 0;
    }
  }
};
