// Codes of weights, restored from the order of their contexts (see data.py).

const CONTEXTS = 41;

// The size of the codes above a cell and to its left: four contexts for each power of two.
function contextOf(codes, at, r, c, columns) {
  let near = 8;
  if (r > 0) near += 3 * codes[at - columns];
  if (r > 1) near += codes[at - 2 * columns];
  if (c > 0) near += 3 * codes[at - 1];
  if (c > 1) near += codes[at - 2];
  const power = 31 - Math.clz32(near);
  return 4 * (power - 3) + ((near >> (power - 2)) & 3);
}

// [heads * rows * columns] from the number of codes of each context and the codes, all high bytes first. `lower`: cells above
// the diagonal are 0 and not among them.
function codesIn(bytes, heads, rows, columns, lower) {
  const counts = new DataView(bytes.buffer, bytes.byteOffset), next = [], codes = new Uint16Array(heads * rows * columns);
  let count = 0;
  for (let context = 0; context < CONTEXTS; context++) {
    next.push(4 * CONTEXTS + count);
    count += counts.getUint32(4 * context);
  }
  let at = 0;
  for (let head = 0; head < heads; head++) {
    for (let r = 0; r < rows; r++, at += columns) {
      const end = lower ? Math.min(r + 1, columns) : columns;
      for (let c = 0; c < end; c++) {
        const from = next[contextOf(codes, at + c, r, c, columns)]++;
        codes[at + c] = (bytes[from] << 8) | bytes[from + count];
      }
    }
  }
  return codes;
}
