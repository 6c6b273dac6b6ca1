// Half-precision numbers.

// All 65,536 half-precision numbers, for decoding by a table.
const HALVES = (() => {
  const table = new Float32Array(65536);
  for (let i = 0; i < 65536; i++) {
    const exponent = (i >> 10) & 31, fraction = i & 1023;
    const size = exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15);
    table[i] = i & 0x8000 ? -size : size;
  }
  return table;
})();
