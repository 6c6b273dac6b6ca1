// Two maps side by side, of two heads or of two texts, and their difference.

const LARGEST = 12;  // differences in the list

class Sides {
  constructor() {
    this.places = [{ passage: 0, layer: 0, head: 0 }, { passage: 0, layer: 0, head: 0 }];
    this.maps = ["a", "b", "d"].map((name) => new HeatMap(byId(`side-${name}`), byId(`side-${name}-base`), byId(`side-${name}-over`), {
      seen: (cell) => this.seen(name, cell), chosen: () => {}, zoomed: () => {},
    }));
    this.places.forEach((place, i) => {
      const [passages, layers, heads] = this.fields(i);
      passages.replaceChildren(...REPORT.passages.map((p, k) => new Option(clipped(p.title || `${k + 1}`, 60), k)));
      passages.parentElement.hidden = REPORT.passages.length < 2;
      for (const field of [passages, layers, heads]) {
        field.addEventListener("change", () => {
          [place.passage, place.layer, place.head] = this.fields(i).map((f) => Number(f.value));
          this.refresh();
        });
      }
    });
  }

  fields(i) {
    return ["passage", "layer", "head"].map((name) => byId(`${name}-${"ab"[i]}`));
  }

  // What the address keeps; without it, the head on show beside the next one, or the same head on the next text.
  kept() {
    return state.tab === "sides" ? { beside: this.places.map((p) => [p.passage, p.layer, p.head].join(".")).join("-") } : {};
  }

  recall() {
    const kept = new URLSearchParams(location.hash.slice(1)).get("beside")?.split("-").map((p) => p.split(".").map(Number)) ?? [];
    const fits = ([p, l, h]) => REPORT.passages[p]?.layers.includes(l) && h >= 0 && h < REPORT.counts[l] && Number.isInteger(h);
    if (kept.length !== 2 || !kept.every(fits)) return;
    this.chosen = true;
    kept.forEach(([passage, layer, head], i) => Object.assign(this.places[i], { passage, layer, head }));
  }

  begin() {
    if (this.chosen) return;
    this.chosen = true;
    const { passage, layer, head } = state, next = REPORT.passages.findIndex((p, i) => i !== passage && p.layers.includes(layer));
    const other = head + 1 < REPORT.counts[layer] ? head + 1 : Math.max(0, head - 1);
    Object.assign(this.places[0], { passage, layer, head });
    Object.assign(this.places[1], next >= 0 ? { passage: next, layer, head } : { passage, layer, head: other });
  }

  async refresh() {
    const mine = (this.turn = (this.turn ?? 0) + 1), { kind, scale } = state;
    this.begin();
    this.places.forEach((place, i) => {
      const [passages, layers, heads] = this.fields(i), shown = REPORT.passages[place.passage];
      if (!shown.layers.includes(place.layer)) place.layer = shown.layers[0];
      place.head = Math.min(place.head, REPORT.counts[place.layer] - 1);
      passages.value = place.passage;
      layers.replaceChildren(...shown.layers.map((l) => new Option(l, l)));
      heads.replaceChildren(...Array.from({ length: REPORT.counts[place.layer] }, (_, h) => new Option(h, h)));
      layers.value = place.layer;
      heads.value = place.head;
      byId(`side-${"ab"[i]}-pattern`).textContent = REPORT.patterns[place.layer][place.head];
    });
    remember();
    const shown = this.places.map((place) => REPORT.passages[place.passage]);
    const kinds = shown.map((p) => (p[kind] ? kind : "mean"));
    const weights = await Promise.all(this.places.map((p, i) => mapOf(p.passage, p.layer, p.head, kinds[i])));
    if (mine !== this.turn) return;
    Object.assign(this, { shown, weights });
    const top = Math.max(...this.places.map((p, i) => shown[i][kinds[i]].own[p.layer][p.head]));
    this.top = top;
    shown.forEach((passage, i) => this.maps[i].show({ map: weights[i], passage, view: wholeOf(passage), top, scale }));
    drawBar(byId("side-bar"), top, scale, true);
    this.subtract();
  }

  // The difference over the tokens that both texts have in common.
  subtract() {
    const { shown: [a, b], weights: [x, y] } = this;
    this.pairs = a.cell === b.cell && !a.keys === !b.keys ? { q: aligned(a.q, b.q), k: a.keys ? aligned(a.k, b.k) : null } : null;
    if (this.pairs) this.pairs.k ??= this.pairs.q;
    const { q, k } = this.pairs ?? {}, enough = this.pairs !== null && q.length > 1 && k.length > 1;
    byId("side-d").hidden = byId("side-d-bar").parentElement.hidden = !enough;
    byId("differences").replaceChildren();
    byId("side-note").textContent = !enough ? T.no_difference : a === b ? T.difference_same : fill(T.difference_of, { n: q.length, a: a.q.cells, b: b.q.cells });
    this.difference = null;
    if (!enough) return;
    const map = new Float32Array(q.length * k.length), found = [];
    q.forEach(([i, r], row) => k.forEach(([j, c], column) => {
      const value = x[i * a.columns + j] - y[r * b.columns + c];
      map[row * k.length + column] = value;
      found.push({ row, column, value });
    }));
    const side = (of, pairs) => ({ tokens: pairs.flatMap(([i, r]) => both(a[of], i, b[of], r)), cell: a.cell, cells: pairs.length, special: new Set() });
    const passage = { q: side("q", q), rows: q.length, columns: k.length, cell: a.cell, causal: a.causal && b.causal };
    passage.k = k === q ? passage.q : side("k", k);
    const size = map.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
    this.difference = { map, passage, q, k };
    this.maps[2].show({ map, passage, view: wholeOf(passage), top: size, scale: "sqrt", signed: true });
    drawSigned(byId("side-d-bar"), size);
    found.sort((one, two) => Math.abs(two.value) - Math.abs(one.value));
    byId("differences").replaceChildren(...found.slice(0, LARGEST).filter((one) => one.value).map((one) => this.line(one, size)));
  }

  title() {
    return this.places.map((p, i) => `${clipped(this.shown[i].title, 24)} ${nameOfHead(p.layer, p.head)}`.trim()).join(" − ");
  }

  line({ row, column, value }, size) {
    const { q, k } = this.difference, [a, b] = this.shown, [x, y] = this.weights, [i, r] = q[row], [j, c] = k[column];
    const bar = make("u", { className: value < 0 ? "below" : "" });
    bar.style.width = `${(100 * Math.abs(value)) / size}%`;
    const both = `${fixed(x[i * a.columns + j])} − ${fixed(y[r * b.columns + c])}`;
    return make("li", {}, make("b", { textContent: clipped(`${named(textOf(a.q, i))} → ${named(textOf(a.k, j))}`, 28) }), bar, make("span", { textContent: `${value > 0 ? "+" : "−"}${fixed(Math.abs(value))}`, title: both }));
  }

  // The weights of both, and their difference, wherever the pointer is.
  seen(name, cell) {
    const tip = byId("tip");
    tip.hidden = !cell;
    if (!cell) return;
    const at = { a: 0, b: 1, d: 2 }[name], { difference } = this, [a, b] = this.shown, [x, y] = this.weights;
    const row = difference?.q.findIndex((pair, i) => (at === 2 ? i : pair[at]) === cell.r), column = difference?.k.findIndex((pair, i) => (at === 2 ? i : pair[at]) === cell.c);
    const passage = at === 2 ? difference.passage : this.shown[at], parts = [pairOf(passage, cell)];
    if (difference && row >= 0 && column >= 0) {
      const [i, r] = difference.q[row], [j, c] = difference.k[column], lines = [["A", x[i * a.columns + j]], ["B", y[r * b.columns + c]], ["A − B", difference.map[row * difference.k.length + column]]];
      parts.push(make("div", { className: "both" }, ...lines.flatMap(([word, value]) => [make("span", { textContent: word }), make("b", { textContent: fixed(value) })])));
    } else parts.push(make("div", { className: "weight" }, fixed(this.weights[at][cell.r * passage.columns + cell.c])));
    tip.replaceChildren(...parts);
    beside(tip, cell.x, cell.y);
  }
}

// Cells of a side as text.
const textOf = (side, at) => side.tokens.slice(at * side.cell, (at + 1) * side.cell).join("");

// The tokens of a cell that two sides have in common; one that differs shows both.
function both(one, i, other, j) {
  const tokens = one.tokens.slice(i * one.cell, (i + 1) * one.cell), theirs = textOf(other, j);
  return one.cell > 1 || tokens[0] === theirs ? tokens : [`${tokens[0]}/${theirs}`];
}

// Pairs of cells of two sides: by position if they have as many, otherwise the longest common sequence of their texts.
function aligned(one, other) {
  if (one === other || one.cells === other.cells) return Array.from({ length: one.cells }, (_, i) => [i, i]);
  const n = one.cells, m = other.cells, width = m + 1, best = new Uint16Array((n + 1) * width), pairs = [];
  const x = Array.from({ length: n }, (_, i) => textOf(one, i)), y = Array.from({ length: m }, (_, j) => textOf(other, j));
  for (let i = n - 1; i >= 0; i--) {
    for (let j = m - 1; j >= 0; j--) best[i * width + j] = x[i] === y[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  }
  for (let i = 0, j = 0; i < n && j < m;) {
    if (x[i] === y[j]) pairs.push([i++, j++]);
    else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i++;
    else j++;
  }
  return pairs;
}

// The colour bar of a difference.
function drawSigned(canvas, top) {
  const context = fitCanvas(canvas), left = 26, right = canvas.clientWidth - 26, middle = (left + right) / 2;
  for (let x = left; x < right; x++) {
    const at = (x - middle) / (right - middle);
    context.fillStyle = `rgb(${mixed(Math.sign(at) * Math.abs(at), 1)})`;
    context.fillRect(x, 0, 1.5, 11);
  }
  context.fillStyle = css("--muted");
  context.font = `11px ${css("--ui")}`;
  context.textAlign = "center";
  for (const at of [-1, -0.5, 0, 0.5, 1]) context.fillText(`${at < 0 ? "−" : at > 0 ? "+" : ""}${trimmed(top * at * at)}`, middle + at * (right - middle), 27);
}
