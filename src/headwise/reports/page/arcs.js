// Arcs between tokens: queries on the left, keys on the right, a line for each weight (Vig 2019, BertViz), of the chosen
// head or of all heads of its layer, a colour each.

const ARC_LINES = 1200;  // the strongest ones are drawn
const ARC_ROW = 22, ARC_WIDTH = 370, ARC_GAP = 130, ARC_BUNDLE = 14;  // the lines of all heads at a token lie beside one another
const SVG = byId("vector").namespaceURI;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const arcName = (unit) => clipped(unitName(unit), 12);

class Arcs {
  constructor(box, list) {
    Object.assign(this, { box, list, open: false, layered: false, off: new Set() });
    box.addEventListener("pointerover", (event) => onUnit(this.unitUnder(event), event));
    box.addEventListener("pointerleave", () => onUnit(null));
    box.addEventListener("click", (event) => { const unit = this.unitUnder(event); if (unit) pin(unit); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowUp: "ArrowLeft", ArrowDown: "ArrowRight", Enter: "Enter" }[event.key];
      if (step) walk({ key: step, preventDefault: () => event.preventDefault() }, (pinned ?? pointed)?.side ?? this.place.q);
    });
  }

  // Draw the tokens in view; `top` is the weight of a full line. All heads of a layer have one, so that lines can be compared.
  show({ map, passage: place, view, top, scale }) {
    if (!this.open) return;
    const { layer } = state, every = Array.from({ length: REPORT.counts[layer] }, (_, head) => head), size = place.rows * place.columns;
    Object.assign(this, { place, scale, top: this.layered ? Math.max(...every.map((head) => topOf(layer, head))) : top });
    // A map is a part of the weights of its layer.
    const mapOfHead = (head) => new Float32Array(map.buffer, map.BYTES_PER_ELEMENT * size * head, size);
    this.heads = this.layered ? every.filter((head) => !this.off.has(head)).map((head) => ({ head, map: mapOfHead(head), colour: headColour(head, every.length) })) : [{ map }];
    this.listed(every);
    const within = (side, from, to) => unitsOf(side).filter((u) => u.c0 < to && u.c1 > from);
    this.queries = within(place.q, view.r0, view.r1);
    this.keys = within(place.k, view.c0, view.c1);
    const pen = make("canvas").getContext("2d");
    pen.font = `14px ${css("--han")}, ${css("--ui")}`;
    this.left = 16 + Math.ceil([...this.queries, ...this.keys].reduce((most, unit) => Math.max(most, pen.measureText(arcName(unit)).width), 0));
    this.right = Math.max(ARC_WIDTH - this.left, this.left + ARC_GAP);
    const height = ARC_ROW * Math.max(this.queries.length, this.keys.length) + 8, width = this.left + this.right;
    this.lines = svg("g", { fill: "none", "stroke-width": Math.max(1, 2 - this.heads.length / 10) });
    this.names = [...this.queries.map((u, i) => this.name(u, i, "q")), ...this.keys.map((u, i) => this.name(u, i, "k"))];
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": this.title() }, this.lines, ...this.names);
    this.box.replaceChildren(picture);
    this.point(pinned ?? pointed);
  }

  title() {
    return this.layered ? `${fill(T.layer_short, state)}: ${T.all_heads}` : byId("map-title").textContent;
  }

  // The heads of the layer in their colours: a click switches one on or off, a double click leaves it alone, or all.
  listed(every) {
    const { list, off } = this, { layer } = state, made = `${layer} ${theme()}`;
    list.hidden = byId("arcs-hint").hidden = !this.layered;
    if (!this.layered) return;
    byId("arcs-hint").textContent = fill(T.arcs_hint, { layer, top: fixed(this.top) });
    const change = (now) => { this.off = new Set(now); refresh(); };
    if (list.made !== made) {
      const buttons = every.map((head) => {
        const button = make("button", { type: "button", layer: 0, head, title: headName(layer, head) }, make("i"), `${head}`);
        button.style.setProperty("--kind", `rgb(${headColour(head, every.length)})`);
        button.setAttribute("aria-label", button.title);
        button.addEventListener("click", () => change(this.off.has(head) ? [...this.off].filter((other) => other !== head) : [...this.off, head]));
        button.addEventListener("dblclick", () => change(this.heads.length === 1 && this.heads[0].head === head ? [] : every.filter((other) => other !== head)));
        return button;
      });
      const all = make("button", { type: "button", layer: 0, head: every.length, textContent: T.all });
      all.addEventListener("click", () => change(this.off.size ? [] : every));
      list.replaceChildren(...buttons, all);
      list.made = made;
      oneStop(list, "button");
    }
    for (const button of list.children) button.setAttribute("aria-pressed", String(button.head < every.length ? !off.has(button.head) : !off.size));
  }

  name(unit, row, of) {
    const x = of === "q" ? this.left - 8 : this.right + 8;
    const element = svg("text", { x, y: ARC_ROW * (row + 0.5) + 4, "text-anchor": of === "q" ? "end" : "start", "dominant-baseline": "central", tabindex: -1 }, arcName(unit));
    element.dataset.arc = `${of}${row}`;
    return element;
  }

  unitUnder(event) {
    const [of, ...row] = event.target.closest?.("[data-arc]")?.dataset.arc ?? "";
    return of ? (of === "q" ? this.queries : this.keys)[Number(row.join(""))] : null;
  }

  elementOf(unit) {
    const at = this.queries?.indexOf(unit) ?? -1, other = this.keys?.indexOf(unit) ?? -1;
    return this.names?.[at >= 0 ? at : other >= 0 ? this.queries.length + other : -1];
  }

  // All lines, or only those of a unit.
  point(unit) {
    if (!this.open || !this.queries) return;
    const { queries, keys, heads, place, top } = this, peak = state.kind === "peak", found = [], each = queries.length * keys.length;
    const mine = unit && [queries, keys].some((units) => units.includes(unit)) ? unit : null, weights = new Float32Array(heads.length * each);
    heads.forEach(({ map }, h) => queries.forEach((query, i) => keys.forEach((key, j) => {
      if (!mine || query === mine || key === mine) weights[h * each + i * keys.length + j] = block(map, place.columns, query, key, peak);
    })));
    const least = Math.max(top / 1000, weights.slice().sort().at(-ARC_LINES) ?? 0);
    weights.forEach((weight, at) => {
      if (weight < least) return;
      const h = Math.floor(at / each), i = Math.floor((at % each) / keys.length), j = at % keys.length;
      const colour = heads[h].colour ?? css(mine && queries[i] !== mine ? "--looked" : "--looks");
      found.push({ i, j, weight, colour, beside: ARC_BUNDLE * ((h + 0.5) / heads.length - 0.5) });
    });
    found.sort((a, b) => b.weight - a.weight).splice(ARC_LINES);
    this.lines.replaceChildren(...found.reverse().map((line) => this.line(line)));
    this.names.forEach((name, i) => {
      const one = i < this.queries.length ? this.queries[i] : this.keys[i - this.queries.length];
      name.classList.toggle("chosen", one === mine);
    });
  }

  line({ i, j, weight, colour, beside }) {
    const y0 = ARC_ROW * (i + 0.5) + 4 + beside, y1 = ARC_ROW * (j + 0.5) + 4 + beside, x0 = this.left, x1 = this.right, bend = (x1 - x0) * 0.45;
    const stroke = `rgb(${colour})`;
    return svg("path", { d: `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}`, stroke, "stroke-opacity": Math.max(0.03, 0.95 * place(weight, this.top, this.scale)).toFixed(3) });
  }

  // The picture as a file of its own.
  file() {
    const copy = this.box.firstChild.cloneNode(true);
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("font-family", css("--han") + ", sans-serif");
    copy.setAttribute("font-size", 14);
    copy.setAttribute("fill", css("--ink"));
    for (const text of copy.querySelectorAll("text")) for (const name of ["class", "tabindex", "data-arc"]) text.removeAttribute(name);
    if (this.layered) this.legend(copy);
    copy.prepend(svg("rect", { width: "100%", height: "100%", fill: css("--panel") }));
    return new XMLSerializer().serializeToString(copy);
  }

  // The heads in their colours, below the picture of a file.
  legend(picture) {
    const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number), across = 10;
    const names = this.heads.map(({ head, colour }, at) =>
      svg("text", { x: 12 + (at % across) * 36, y: height + 20 * (Math.floor(at / across) + 1), fill: `rgb(${colour})`, "font-weight": 700 }, nameOfHead(state.layer, head)));
    const high = height + 20 * Math.ceil(names.length / across) + 8;
    picture.setAttribute("viewBox", `0 0 ${width} ${high}`);
    picture.setAttribute("height", high);
    picture.append(...names);
  }
}

const TEXTS = ["strip", "arcs", "layer"];

// The text as a strip, as arcs of the chosen head, or as those of all heads of its layer.
function showText(kind) {
  state.text = kind;
  Object.assign(arcs, { open: kind !== "strip", layered: kind === "layer" });
  for (const name of TEXTS) byId(`as-${name}`).setAttribute("aria-pressed", String(name === kind));
  byId("directions").hidden = arcs.layered;
  for (const id of ["strip", "strip-keys", "strip-name", "strip-keys-name"]) byId(id).classList.toggle("unseen", arcs.open);
  byId("arcs").hidden = byId("save-arcs").hidden = !arcs.open;
  byId("arc-heads").hidden = byId("arcs-hint").hidden = !arcs.layered;
}
