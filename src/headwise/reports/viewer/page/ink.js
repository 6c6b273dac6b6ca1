// Codes of weights to coloured pixels: a table for each range, so that a new colouring needs no new data.

const ONE = 65534, NOTHING = 65535, STEPS = 1024;  // as in tiles.py: the weight 1, a masked cell, codes for each power of two
const SMALLEST = 2 ** ((2 - ONE) / STEPS);  // of smaller weights it is only known that they are smaller
const WEIGHTS = Float64Array.from({ length: NOTHING + 1 }, (_, code) => 2 ** ((code - ONE) / STEPS));
WEIGHTS.set([0, SMALLEST / 2]);
WEIGHTS[NOTHING] = NaN;

const isNothing = (code) => code === NOTHING;
const valueOf = (map, at) => WEIGHTS[map.codes[at]];
const isTiny = (weight) => weight > 0 && weight < SMALLEST;

// A weight of the map for readers, by default with three digits.
const told = (weight, write = fixed) => (isTiny(weight) ? `< ${write(SMALLEST)}` : write(weight));

// The first code of a weight at or above x.
const codeAbove = (x) => (x > 0 ? Math.min(NOTHING, Math.max(1, Math.ceil(ONE + STEPS * Math.log2(x)))) : 0);

// Pixels to write into, the same for every picture of a size.
let spare = null;
function leaf(width, height) {
  if (spare?.width !== width || spare.height !== height) spare = new ImageData(width, height);
  return spare;
}

// A colouring: theme, scale, and the weights at its two ends.
class Ink {
  constructor(scale, low, top) {
    this.colours = TABLES[theme()].map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
    this.name = `${theme()} ${scale} ${low} ${top}`;
    this.table = new Int32Array(NOTHING + 1);  // masked cells stay transparent
    let from = 0;
    for (let i = 0; i < 256; i++) {
      const end = i === 255 ? NOTHING : codeAbove(weightAt((i + 0.5) / 255, top, scale, low));
      this.table.fill(this.colours[i], from, end);
      from = Math.max(from, end);
    }
  }

  // Paint one of the maps into a canvas of its own size; fully masked cells stay transparent.
  paint(map, canvas, index = 0) {
    const { rows, cols, codes } = map, { table } = this, from = index * rows * cols;
    if (canvas.width !== cols) canvas.width = cols;
    if (canvas.height !== rows) canvas.height = rows;
    const context = canvas.getContext("2d"), image = leaf(cols, rows), pixels = new Int32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = table[codes[from + i]];
    context.putImageData(image, 0, 0);
  }
}

const SATURATED = 0.05;  // above the end of an automatic range lies this share of the weight
const FAINT = 0.02;      // below the beginning of a logarithmic one this share of the cells, if that is within a decade …
const LEAST = 10;        // … at least, and within the scale's own decades

// The range for these weights: {low, top}; low only where the scale needs one, top 0 if they are all tiny. They are sorted
// in place.
function rangeOf(weights, scale) {
  weights.sort();
  let whole = 0;
  for (const w of weights) whole += w;
  let above = 0, at = weights.length - 1;
  while (at > 0 && above + weights[at] <= SATURATED * whole) above += weights[at--];
  const top = weights[at] >= SMALLEST ? weights[at] : 0;
  if (scale !== "log" || !top) return { top };
  const faint = weights[Math.floor(FAINT * weights.length)];
  return { low: Math.min(top / LEAST, Math.max(bottom(top, scale), faint)), top };
}

// The weights of a part of a map, at most about `most` of them, as Float32Array.
function sampled(map, { r0, r1, c0, c1 }, most, index = 0) {
  const step = Math.max(1, Math.ceil(Math.sqrt(((r1 - r0) * (c1 - c0)) / most))), out = [];
  for (let r = r0; r < r1; r += step) {
    for (let c = c0; c < c1; c += step) {
      const weight = valueOf(map, (index * map.rows + r) * map.cols + c);
      if (!Number.isNaN(weight)) out.push(weight);
    }
  }
  return Float32Array.from(out);
}
