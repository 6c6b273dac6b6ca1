// The comparison of heads: a matrix of similarities, and the importance of each head.

const MOST_PAIRS = 12, MOST_RANKED = 6;
const nameOf = (index) => fill(T.short_name, { layer: Math.floor(index / REPORT.heads), head: index % REPORT.heads });

class Compare {
  constructor(choose) {
    Object.assign(this, { choose, comparison: REPORT.comparisons[0], method: REPORT.importance[0] });
    byId("alike-panel").hidden = !this.comparison;
    byId("importance-panel").hidden = !this.method;
    const options = (id, list) => byId(id).replaceChildren(...list.map((one, i) => new Option(one.label ?? one.name, i)));
    options("comparison", REPORT.comparisons);
    options("method", REPORT.importance);
    byId("comparison").addEventListener("change", (event) => { this.comparison = REPORT.comparisons[event.target.value]; this.show(); });
    byId("method").addEventListener("change", (event) => { this.method = REPORT.importance[event.target.value]; this.show(); });
    byId("order").addEventListener("change", () => this.show());
    this.canvas = byId("matrix");
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
    this.canvas.addEventListener("click", (event) => { const pair = this.pair(event); if (pair) this.go(pair[0]); });
  }

  go(index) {
    byId("tip").hidden = true;
    this.choose(Math.floor(index / REPORT.heads), index % REPORT.heads);
  }

  show() {
    if (this.comparison) this.matrix();
    if (this.method) this.weights();
  }

  // The similarity, up to 1, for measures of similarity and of difference; the sign is kept.
  likeness(value) {
    if (value === null) return 0;
    return this.comparison.small ? 1 - Math.min(1, value / this.top) : value / this.top;
  }

  matrix() {
    const { comparison, canvas } = this, size = comparison.order.length;
    this.top = comparison.values.reduce((most, row, i) => row.reduce((m, v, j) => (i === j || v === null ? m : Math.max(m, Math.abs(v))), most), 1e-12);
    this.at = byId("order").value === "alike" ? comparison.order : [...comparison.order].sort((a, b) => a - b);
    byId("comparison-says").textContent = comparison.description;
    canvas.setAttribute("aria-label", fill(T.alike_label, comparison));
    const width = canvas.parentElement.clientWidth || 600;
    this.left = 58;
    this.cell = Math.max(3, Math.min(40, (width - this.left - 2) / size));
    const side = this.cell * size, height = side + this.left;
    canvas.style.height = `${height}px`;
    const context = fitCanvas(canvas, width, height);
    for (let r = 0; r < size; r++) {
      for (let c = 0; c < size; c++) {
        const value = comparison.values[this.at[r]][this.at[c]];
        context.fillStyle = r === c ? css("--masked") : `rgb(${mixed(this.likeness(value), 1)})`;
        context.fillRect(this.left + c * this.cell, r * this.cell, Math.ceil(this.cell), Math.ceil(this.cell));
      }
    }
    context.fillStyle = css("--muted");
    context.font = `${Math.min(12, Math.max(8, this.cell * 0.8))}px ${css("--ui")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const step = Math.max(1, Math.ceil(11 / this.cell));
    for (let i = 0; i < size; i += step) {
      const middle = (i + 0.5) * this.cell;
      context.fillText(nameOf(this.at[i]), this.left - 6, middle);
      writeUpwards(context, nameOf(this.at[i]), this.left + middle, side + 6);
    }
    const pairs = [];
    for (const i of comparison.order) for (const j of comparison.order) if (j < i && comparison.values[i][j] !== null) pairs.push([j, i, comparison.values[i][j]]);
    pairs.sort((a, b) => this.likeness(b[2]) - this.likeness(a[2]));
    byId("pairs").replaceChildren(...pairs.slice(0, MOST_PAIRS).map(([i, j, value]) => this.line(`${nameOf(i)} – ${nameOf(j)}`, i, value, this.likeness(value))));
  }

  line(name, index, value, share) {
    const button = make("button", { type: "button", textContent: name }), bar = make("u", { className: value < 0 ? "below" : "" });
    button.addEventListener("click", () => this.go(index));
    bar.style.width = `${100 * Math.min(1, Math.abs(share))}%`;
    return make("li", {}, button, bar, make("span", { textContent: fixed(value) }));
  }

  pair(event) {
    const box = this.canvas.getBoundingClientRect(), size = this.at.length;
    const c = Math.floor((event.clientX - box.left - this.left) / this.cell), r = Math.floor((event.clientY - box.top) / this.cell);
    return r >= 0 && c >= 0 && r < size && c < size ? [this.at[r], this.at[c]] : null;
  }

  point(event) {
    const pair = this.pair(event), tip = byId("tip");
    tip.hidden = !pair;
    if (!pair) return;
    const roles = pair.map((index) => REPORT.patterns[Math.floor(index / REPORT.heads)][index % REPORT.heads]);
    const cells = pair.flatMap((index, k) => [make("b", { textContent: nameOf(index) }), make("em", { textContent: roles[k] })]);
    const value = make("div", { className: "weight" }, fixed(this.comparison.values[pair[0]][pair[1]]), make("small", { textContent: this.comparison.unit }));
    tip.replaceChildren(make("div", { className: "pair" }, ...cells), value);
    beside(tip, event.clientX, event.clientY);
  }

  weights() {
    const { method } = this, flat = method.values.flat(), known = flat.filter((v) => v !== null);
    const top = Math.max(1e-12, ...known.map(Math.abs)), box = byId("weighty");
    byId("method-says").textContent = method.description;
    box.style.gridTemplateColumns = `auto repeat(${REPORT.heads}, minmax(34px, 1fr))`;
    const parts = [make("span")];
    for (let h = 0; h < REPORT.heads; h++) parts.push(make("span", { className: "axis", textContent: h }));
    for (let l = 0; l < REPORT.layers; l++) {
      parts.push(make("span", { className: "axis side", textContent: fill(T.layer_short, { layer: l }) }));
      for (let h = 0; h < REPORT.heads; h++) {
        if (h >= REPORT.counts[l]) { parts.push(make("span")); continue; }
        const value = method.values[l][h], colour = mixed(value ?? 0, top);
        const cell = make("button", { type: "button", className: "weight-cell", layer: l, head: h, title: `${headName(l, h)}: ${fixed(value)} ${method.unit}` });
        cell.append(make("span", { textContent: value === null ? fixed(value) : trimmed(Number(value.toPrecision(2))) }));
        cell.style.background = `rgb(${colour})`;
        cell.style.color = inkOn(colour);
        cell.addEventListener("click", () => this.go(l * REPORT.heads + h));
        parts.push(cell);
      }
    }
    box.replaceChildren(...parts);
    oneStop(box, ".weight-cell");
    const order = flat.map((_, i) => i).filter((i) => flat[i] !== null).sort((a, b) => flat[b] - flat[a]);
    const list = (id, which) => byId(id).replaceChildren(...which.map((i) => this.line(nameOf(i), i, flat[i], flat[i] / top)));
    list("most", order.slice(0, MOST_RANKED));
    list("least", order.slice(MOST_RANKED).slice(-MOST_RANKED).reverse());
  }
}
