// The report's data: JSON at once, each layer's weights only when they are first shown.

const REPORT = JSON.parse(document.getElementById("report").textContent);
const T = REPORT.words, COLOURS = REPORT.colours;
const CACHE_BYTES = 400e6;  // decoded layers that are kept; the oldest go first

const VALUES = new Uint8Array(128);  // of the letters of base 85
[..."0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%:()*+-;,=.?@^_`{|}~"].forEach((c, i) => { VALUES[c.charCodeAt(0)] = i; });

const layers = new Map();

// The two sides of a map, queries and keys; the same object except in cross attention.
for (const passage of REPORT.passages) {
  passage.q = { tokens: passage.tokens, cell: passage.cell, cells: passage.rows, special: new Set(passage.special) };
  passage.k = passage.keys ? { tokens: passage.keys, cell: passage.cell, cells: passage.columns, special: new Set(passage.special_keys) } : passage.q;
}

// The weights of one layer as Float32Array [heads * rows * columns]; a promise.
function weightsOf(passage, layer, kind) {
  const key = `${passage}-${layer}-${kind}`;
  if (layers.has(key)) {
    const found = layers.get(key);
    layers.delete(key);
    layers.set(key, found);  // now the newest
    return found;
  }
  const { rows, columns, [kind]: { most, lower } } = REPORT.passages[passage], tops = most[layer];
  const keep = Math.max(2, Math.floor(CACHE_BYTES / (4 * REPORT.heads * rows * columns)));
  while (layers.size >= keep) layers.delete(layers.keys().next().value);
  const promise = decoded(`w-${key}`).then((bytes) => weightsIn(codesIn(bytes, tops.length, rows, columns, lower), tops));
  layers.set(key, promise);
  return promise;
}

// Base 85: five letters as four bytes; what is missing at the end counts as the last letter.
function bytesOf(text) {
  const count = Math.ceil(text.length / 5), out = new DataView(new ArrayBuffer(4 * count));
  for (let i = 0; i < count; i++) {
    let sum = 0;
    for (let k = 5 * i; k < 5 * i + 5; k++) sum = sum * 85 + (k < text.length ? VALUES[text.charCodeAt(k)] : 84);
    out.setUint32(4 * i, sum);
  }
  return new Uint8Array(out.buffer, 0, Math.floor((text.length * 4) / 5));
}

// The bytes of a compressed element of the page; a promise.
async function decoded(id) {
  const stream = new Blob([bytesOf(byId(id).textContent)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Codes as weights; `tops`: the largest weight of each head.
function weightsIn(codes, tops) {
  const each = codes.length / tops.length, out = new Float32Array(codes.length);
  const shares = Float64Array.from({ length: REPORT.levels + 1 }, (_, code) => (code / REPORT.levels) ** 2);
  tops.forEach((top, head) => {
    for (let i = head * each; i < (head + 1) * each; i++) out[i] = top * shares[codes[i]];
  });
  return out;
}

async function mapOf(passage, layer, head, kind) {
  const weights = await weightsOf(passage, layer, kind), { rows, columns } = REPORT.passages[passage], size = rows * columns;
  return weights.subarray(head * size, (head + 1) * size);
}

// Rows and columns [r0, r1) x [c0, c1) of a map `width0` wide, at most `limit` along a side: the largest weight of each square (of
// a difference, the one furthest from zero), so that thin lines stay.
function reduced(map, width0, view, limit) {
  const rows = view.r1 - view.r0, columns = view.c1 - view.c0;
  const step = Math.max(1, Math.ceil(Math.max(rows, columns) / limit));
  const height = Math.ceil(rows / step), width = Math.ceil(columns / step);
  const out = new Float32Array(height * width), masked = new Uint8Array(height * width).fill(1);
  for (let r = 0; r < rows; r++) {
    const from = (view.r0 + r) * width0 + view.c0, to = Math.floor(r / step) * width;
    for (let c = 0; c < columns; c++) {
      const at = to + Math.floor(c / step), weight = map[from + c];
      if (Math.abs(weight) > Math.abs(out[at])) out[at] = weight;
      if (view.c0 + c <= view.r0 + r) masked[at] = 0;
    }
  }
  return { values: out, masked, height, width };
}
