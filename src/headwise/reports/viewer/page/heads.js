// All heads as small maps, by layer or by a statistic; drawn when they come into view.

const CELLS = 64;       // along a side of a small map

class Heads {
  constructor(box, choose) {
    Object.assign(this, { box, choose, thumbs: [], statistic: "", order: "layer", range: "own" });
    box.addEventListener("keydown", (event) => this.key(event));
    this.watch = watchVisible((thumb) => this.paint(thumb));
  }

  open(model, text) {
    Object.assign(this, { model, text, maps: null });
    this.counts = model.layers.map((layer) => layer.heads);
    this.watch.disconnect();
    this.thumbs = [];
    this.counts.forEach((heads, layer) => { for (let head = 0; head < heads; head++) this.thumbs.push(this.thumb(layer, head, this.thumbs.length)); });
    if (!(this.statistic in (text.statistics ?? {}))) this.statistic = "";
    this.names();
    this.arrange();
  }

  // The statistics to choose from.
  names() {
    const names = Object.keys(this.text.statistics ?? {});
    byId("statistic").replaceChildren(new Option(T.none, ""), ...names.map((name) => new Option(this.label(name), name)));
  }

  total(model) { return model.layers.reduce((sum, layer) => sum + layer.heads, 0); }

  // More of the same text: more heads are drawn, more is measured.
  update(text) {
    const before = Object.keys(this.text.statistics ?? {}).length;
    this.text = text;
    if (Object.keys(text.statistics ?? {}).length !== before) this.names();
    this.arrange();
  }

  // Whether a head is drawn: they come in order of layers and heads.
  has(layer, head) {
    const thumb = this.thumbs.find((one) => one.layer === layer && one.head === head);
    return Boolean(thumb) && thumb.index < this.text.drawn;
  }

  // The small maps of the heads that are drawn, in order of layers and heads.
  show(maps) {
    let cell = 1;
    while (Math.ceil(this.text.n / cell) > maps.rows) cell *= 2;
    this.maps = Object.assign(maps, { cell });
    this.scaled();
  }

  // Each head's own range on the current scale.
  scaled() {
    const { maps } = this, whole = maps && { r0: 0, r1: maps.rows, c0: 0, c1: maps.cols };
    this.ranges = maps && Array.from({ length: maps.count }, (_, i) => rangeOf(sampled(maps, whole, CELLS * CELLS, i), this.scale));
    this.draw();
  }

  // One head's small map, as the plot shows it until tiles arrive.
  small(layer, head) {
    const index = this.thumbs.findIndex((thumb) => thumb.layer === layer && thumb.head === head);
    return index < (this.maps?.count ?? 0) ? { ...this.maps, index, range: this.ranges[index] } : null;
  }

  thumb(layer, head, index) {
    const button = make("button", { type: "button", className: "thumb" }, make("canvas"), make("i"), make("span", { className: "caption" }));
    Object.assign(button, { layer, head, index });
    button.addEventListener("click", () => this.choose(layer, head));
    this.watch.observe(button);
    return button;
  }

  // The name of a statistic in the language of the page.
  label(name) { return this.text.statistics[name].words[language].label; }

  // Every head's number, or null; [layers][heads].
  value({ layer, head }, name = this.statistic) {
    return this.text.statistics?.[name]?.values[layer]?.[head] ?? null;
  }

  arrange() {
    const { box, counts, thumbs, order } = this, chosen = this.text.statistics?.[this.statistic];
    byId("statistic").value = this.statistic;
    byId("order").disabled = !chosen;
    byId("order").value = chosen ? order : "layer";
    const sorted = chosen && order !== "layer", most = Math.max(...counts);
    box.classList.toggle("sorted", Boolean(sorted));
    box.style.gridTemplateColumns = sorted ? "" : `auto repeat(${most}, minmax(18px, 1fr))`;
    box.style.setProperty("--columns", most);  // so wide that all layers are in view, if they can be
    box.style.setProperty("--rows", counts.length);
    if (sorted) {
      const sign = order === "down" ? -1 : 1, rank = (thumb) => this.value(thumb) ?? sign * Infinity;  // what has no value stands last
      box.replaceChildren(...[...thumbs].sort((a, b) => {
        const x = rank(a), y = rank(b);
        return x === y ? a.index - b.index : sign * (x - y);
      }));
    } else {
      const parts = [make("span"), ...Array.from({ length: most }, (_, head) => make("span", { className: "axis", textContent: head }))];
      counts.forEach((heads, layer) => {
        parts.push(make("span", { className: "axis side", textContent: fill(T.layer_short, { layer }) }));
        parts.push(...thumbs.filter((thumb) => thumb.layer === layer), ...Array.from({ length: most - heads }, () => make("span")));
      });
      box.replaceChildren(...parts);
    }
    this.words(chosen);
    this.draw();
  }

  words(chosen) {
    const known = chosen ? this.thumbs.map((thumb) => this.value(thumb)).filter((v) => v !== null) : [];
    const range = valueRange(known), [low, high] = range, { about, unit } = chosen?.words[language] ?? {};
    for (const thumb of this.thumbs) {
      const value = chosen && this.value(thumb), name = fill(T.head_name, thumb);
      const numbers = Object.keys(this.text.statistics ?? {}).map((key) => `${this.label(key)} ${fixed(this.value(thumb, key))}`);
      thumb.title = [name, ...numbers].join("\n");
      thumb.setAttribute("aria-label", chosen ? `${name}, ${this.label(this.statistic)} ${fixed(value)}` : name);
      thumb.querySelector(".caption").textContent = chosen ? `${fill(T.short_name, thumb)} · ${fixed(value)}` : "";
      thumb.querySelector("i").style.display = chosen ? "" : "none";
      thumb.style.setProperty("--kind", value === null || !known.length ? "transparent" : `rgb(${colourAt(shareOf(value, range, 1))})`);
    }
    byId("statistic-says").textContent = known.length
      ? `${about} ${fill(T.statistic_bar, { name: this.label(this.statistic), low: fixed(low), high: fixed(high), unit })}`.trim() : "";
  }

  // Draw again with these settings: at once what is in view, the rest when it comes.
  draw() {
    if (!this.maps) return;
    for (const thumb of this.thumbs) thumb.disabled = thumb.index >= this.maps.count;
    const top = Math.max(...this.ranges.map((range) => range.top)) || 1, lows = this.ranges.map((range) => range.low).filter(Boolean);
    const all = { top, low: lows.length ? Math.max(bottom(top, this.scale), Math.min(...lows)) : undefined };
    this.inks = (index) => {
      const range = this.range === "own" && this.ranges[index].top > 0 ? this.ranges[index] : all;
      return new Ink(this.scale, range.low, range.top);
    };
    this.turn = {};
    for (const thumb of this.thumbs) if (thumb.visible) this.paint(thumb);
    byId("heads-cell").textContent = this.maps.cell > 1 ? fill(this.reduce === "max" ? T.cell_max : T.cell_mean, { c: this.maps.cell }) : "";
  }

  paint(thumb) {
    if (!this.maps || thumb.index >= this.maps.count || thumb.turn === this.turn) return;
    thumb.turn = this.turn;
    this.inks(thumb.index).paint(this.maps, thumb.querySelector("canvas"), thumb.index);
  }

  select(layer, head) {
    for (const thumb of this.thumbs) {
      const on = thumb.layer === layer && thumb.head === head;
      thumb.setAttribute("aria-pressed", String(on));
      thumb.tabIndex = on || (layer === null && thumb.index === 0) ? 0 : -1;
    }
  }

  // Arrow keys walk over the grid as it is arranged.
  key(event) {
    const { thumbs } = this, from = thumbs.indexOf(event.target), [down, right] = ARROWS[event.key] ?? [];
    if (down === undefined || from < 0) return;
    event.preventDefault();
    const here = event.target.getBoundingClientRect();
    const far = (thumb) => {
      const box = thumb.getBoundingClientRect(), along = right * (box.left - here.left) + down * (box.top - here.top);
      const aside = Math.abs(right ? box.top - here.top : box.left - here.left);
      return along > 1 && aside < here.width / 2 ? along : Infinity;
    };
    const next = thumbs.reduce((best, thumb) => (far(thumb) < far(best) ? thumb : best), event.target);
    if (far(next) < Infinity) { next.tabIndex = 0; next.focus(); }
  }
}
