// Half floats to coloured pixels: a table for each range, so that a new colouring needs no new data.

const ONE = 0x3c00;  // the half 1.0: what travels is between 0 and 1, or NaN
const isNothing = (bits) => bits > ONE;

// The first half at or above x.
function halfAbove(x) {
  if (!(x > 0)) return 0;
  let low = 0, high = ONE + 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (HALVES[middle] >= x) high = middle; else low = middle + 1;
  }
  return low;
}

const valueOf = (map, at) => (isNothing(map.bits[at]) ? NaN : map.lo + (map.hi - map.lo) * HALVES[map.bits[at]]);

// Pixels to write into, the same for every picture of a size.
let spare = null;
function leaf(width, height) {
  if (spare?.width !== width || spare.height !== height) spare = new ImageData(width, height);
  return spare;
}

// A colouring: theme, scale, and the weights at its two ends.
class Ink {
  constructor(scale, low, top) {
    Object.assign(this, { scale, low, top, tables: new Map() });
    this.colours = TABLES[theme()].map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
    this.name = `${theme()} ${scale} ${low} ${top}`;
  }

  // The colour of each half for maps that travel as lo … hi.
  table({ lo, hi }) {
    const name = `${lo} ${hi}`;
    if (this.tables.has(name)) return this.tables.get(name);
    const table = new Int32Array(ONE + 1);
    if (hi > lo) {
      let from = 0;
      for (let i = 0; i < 256; i++) {
        const end = i === 255 ? ONE + 1 : halfAbove((weightAt((i + 0.5) / 255, this.top, this.scale, this.low) - lo) / (hi - lo));
        table.fill(this.colours[i], from, Math.max(from, end));
        from = Math.max(from, end);
      }
    } else {
      table.fill(this.colours[Math.round(255 * place(lo, this.top, this.scale, this.low))]);
    }
    this.tables.set(name, table);
    return table;
  }

  // Paint one of the maps into a canvas of its own size; fully masked cells stay transparent.
  paint(map, canvas, index = 0) {
    const { rows, cols, bits } = map, table = this.table(map), from = index * rows * cols;
    if (canvas.width !== cols) canvas.width = cols;
    if (canvas.height !== rows) canvas.height = rows;
    const context = canvas.getContext("2d"), image = leaf(cols, rows), pixels = new Int32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = bits[from + i] > ONE ? 0 : table[bits[from + i]];
    context.putImageData(image, 0, 0);
  }
}

const SATURATED = 0.05;  // above the end of an automatic range lies this share of the weight
const FAINT = 0.02;      // below the beginning of a logarithmic one this share of the cells, if that is within a decade …
const LEAST = 10;        // … at least, and within the scale's own decades

// The range for these weights: {low, top}; low only where the scale needs one. They are sorted in place.
function rangeOf(weights, scale) {
  weights.sort();
  let whole = 0;
  for (const w of weights) whole += w;
  let above = 0, at = weights.length - 1;
  while (at > 0 && above + weights[at] <= SATURATED * whole) above += weights[at--];
  const top = weights.length ? weights[at] : 0;
  if (scale !== "log" || !(top > 0)) return { top };
  const faint = weights[Math.floor(FAINT * weights.length)];
  return { low: Math.min(top / LEAST, Math.max(bottom(top, scale), faint)), top };
}

// The weights of a part of a map, at most about `most` of them, as Float32Array.
function sampled(map, { r0, r1, c0, c1 }, most, index = 0) {
  const step = Math.max(1, Math.ceil(Math.sqrt(((r1 - r0) * (c1 - c0)) / most))), out = [];
  for (let r = r0; r < r1; r += step) {
    for (let c = c0; c < c1; c += step) {
      const bits = map.bits[(index * map.rows + r) * map.cols + c];
      if (!isNothing(bits)) out.push(map.lo + (map.hi - map.lo) * HALVES[bits]);
    }
  }
  return Float32Array.from(out);
}
