// How the numbers that a product multiplies are stored, as words of 4 bytes:
//
//   SINGLES  a float32
//   PAIRS    two bfloat16 that are neighbours along the axis that the product sums over: two features of a key, or the same
//            feature of two keys
//   PARTS    float32 as the sum of three bfloat16. 32 numbers of that axis are 48 words: 16 pairs (number i, number 16 + i) of
//            first parts, 16 of second and 16 of third ones
//
// Three parts of 8 bits hold the 24 bits of a float32. Of the nine products of parts, tiles compute the six that matter to
// float32; the others are at most 2^-23 of the product (the method is that of Henry, Tang and Heinecke 2019, arXiv:1904.06376).

enum Operand { SINGLES, PAIRS, PARTS };

// The operands of products of a dtype's numbers.
template <typename T> constexpr Operand OPERAND = HEADWISE_TILES ? PARTS : SINGLES;
template <> constexpr Operand OPERAND<Brain> = HEADWISE_DOT ? PAIRS : SINGLES;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }
INLINE int64_t padded(int64_t size, int64_t block) { return blocks(size, block) * block; }

// Sizes of a product of two blocks: rows of A, numbers and words per step of the axis that it sums over, and keys that are
// computed together. Numbers are padded with zeros to whole steps.
template <Operand OF> constexpr bool TILED = OF != SINGLES && HEADWISE_TILES;
template <Operand OF> constexpr int GROUP = TILED<OF> ? 32 : ROWS;
template <Operand OF> constexpr int NUMBERS = TILED<OF> ? 32 : OF == PAIRS ? 2 : 1;
template <Operand OF> constexpr int STEP = OF == PARTS ? 48 : TILED<OF> ? 16 : 1;
template <Operand OF> constexpr int KEYS_AT_ONCE = TILED<OF> ? NUMBERS<OF> : W;

// Words of a vector of `size` numbers.
template <Operand OF> INLINE int64_t words_of(int64_t size) { return blocks(size, NUMBERS<OF>) * STEP<OF>; }

// Vectors of a panel that are computed where its first `columns` are needed: 1 (not with tiles), 2 or all. Others of it are
// neither packed nor read, so that a few keys, or values of a few features, do not take the time of a whole panel.
template <Operand OF> INLINE int vectors_for(int64_t columns) {
  return columns <= W && !TILED<OF> ? 1 : columns <= 2 * W ? 2 : VECTORS;
}

// Whether the numbers of all words are finite.
template <Operand OF> struct Finite {
  typedef uint16_t Halves __attribute__((vector_size(4 * W)));
  Words largest = {};  // bits without the sign; with PAIRS, of both numbers of a word
  __attribute__((always_inline)) void add(Floats words) {
    if (OF == PAIRS) {
      const Halves size = (Halves)words & 0x7fff, other = (Halves)largest;
      largest = (Words)(size > other ? size : other);
    } else {
      const Words size = (Words)words & 0x7fffffffu;
      largest = size > largest ? size : largest;
    }
  }
  void fail() { largest = ~Words{}; }
  bool all() const {
    return !any((Ints)(OF == PAIRS ? (Words)((Halves)largest > 0x7f7f) != 0 : largest > 0x7f7fffffu));
  }
};
