// Arcs between tokens: queries on the left, keys on the right, a line for each weight (Vig 2019, BertViz).

const ARC_LINES = 1200;  // the strongest ones are drawn
const ARC_ROW = 22, ARC_GAP = 130, ARC_NAME = 120;
const SVG = byId("vector").namespaceURI;

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

class Arcs {
  constructor(box) {
    Object.assign(this, { box, open: false });
    box.addEventListener("pointerover", (event) => onUnit(this.unitUnder(event), event));
    box.addEventListener("pointerleave", () => onUnit(null));
    box.addEventListener("click", (event) => { const unit = this.unitUnder(event); if (unit) pin(unit); });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowUp: "ArrowLeft", ArrowDown: "ArrowRight", Enter: "Enter" }[event.key];
      if (step) walk({ key: step, preventDefault: () => event.preventDefault() }, (pinned ?? pointed)?.side ?? this.place.q);
    });
  }

  // Draw the tokens in view; `top` is the weight of a full line.
  show({ map, passage: place, view, top, scale }) {
    Object.assign(this, { map, place, top, scale });
    if (!this.open) return;
    const within = (side, from, to) => unitsOf(side).filter((u) => u.c0 < to && u.c1 > from);
    this.queries = within(place.q, view.r0, view.r1);
    this.keys = within(place.k, view.c0, view.c1);
    const height = ARC_ROW * Math.max(this.queries.length, this.keys.length) + 8, width = 2 * ARC_NAME + ARC_GAP;
    this.lines = svg("g", { fill: "none", "stroke-width": 2 });
    this.names = [...this.queries.map((u, i) => this.name(u, i, "q")), ...this.keys.map((u, i) => this.name(u, i, "k"))];
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": byId("map-title").textContent }, this.lines, ...this.names);
    this.box.replaceChildren(picture);
    this.point(pinned ?? pointed);
  }

  name(unit, row, of) {
    const x = of === "q" ? ARC_NAME - 8 : ARC_NAME + ARC_GAP + 8;
    const element = svg("text", { x, y: ARC_ROW * (row + 0.5) + 4, "text-anchor": of === "q" ? "end" : "start", "dominant-baseline": "central", tabindex: -1 }, clipped(unitName(unit), 12));
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
    const { map, place, top } = this, peak = state.kind === "peak", found = [];
    const mine = unit && [this.queries, this.keys].some((units) => units.includes(unit)) ? unit : null;
    this.queries.forEach((query, i) => this.keys.forEach((key, j) => {
      if (mine && query !== mine && key !== mine) return;
      const weight = block(map, place.columns, query, key, peak);
      if (weight > top / 1000) found.push({ i, j, weight, colour: mine && query !== mine ? "--looked" : "--looks" });
    }));
    found.sort((a, b) => b.weight - a.weight).splice(ARC_LINES);
    this.lines.replaceChildren(...found.reverse().map((line) => this.line(line)));
    this.names.forEach((name, i) => {
      const one = i < this.queries.length ? this.queries[i] : this.keys[i - this.queries.length];
      name.classList.toggle("chosen", one === mine);
    });
  }

  line({ i, j, weight, colour }) {
    const y0 = ARC_ROW * (i + 0.5) + 4, y1 = ARC_ROW * (j + 0.5) + 4, x0 = ARC_NAME, x1 = ARC_NAME + ARC_GAP, bend = ARC_GAP * 0.45;
    const stroke = `rgb(${css(colour)})`;
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
    copy.prepend(svg("rect", { width: "100%", height: "100%", fill: css("--panel") }));
    return new XMLSerializer().serializeToString(copy);
  }
}

// The text as a strip, or as arcs.
function showText(kind) {
  state.text = kind;
  arcs.open = kind === "arcs";
  for (const name of ["strip", "arcs"]) byId(`as-${name}`).setAttribute("aria-pressed", String(name === kind));
  for (const id of ["strip", "strip-keys", "strip-name", "strip-keys-name"]) byId(id).classList.toggle("unseen", arcs.open);
  byId("arcs").hidden = byId("save-arcs").hidden = !arcs.open;
}
