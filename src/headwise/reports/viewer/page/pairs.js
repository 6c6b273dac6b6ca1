// The pinned cell in all heads, read from the maps themselves and not from tiles.

const PAIR = 64;        // tokens along a side of the largest cell
const STEADY = 120;     // ms until a cell that is still pinned is requested

class Pairs {
  // Calls `arrived()` when the weights of the pinned cell are there, `chosen(layer, head)` for a click on a head.
  constructor(box, plot, { arrived, chosen }) {
    Object.assign(this, { box, plot, arrived, chosen, weights: null, name: "" });
  }

  // Ask for the cell that is pinned now; leave the one that is not.
  follow() {
    const { plot } = this, { reduce } = state, at = plot.shows && plot.pinned ? plot.read(plot.cursor) : null;
    const name = at && at.cell <= PAIR ? `${at.cell}/${at.r}/${at.c}?reduce=${reduce}` : "", drawn = heads.maps?.count;
    if (name === this.name && drawn === this.drawn) return;
    if (name !== this.name) this.weights = null;
    Object.assign(this, { name, drawn, cell: at?.cell });
    clearTimeout(this.timer);
    this.leave?.abort();
    if (name) this.timer = setTimeout(() => this.fetch(name), STEADY);
    else this.box.hidden = true;
  }

  async fetch(name) {
    const { signal } = (this.leave = new AbortController());
    try {
      const { weights } = await askJSON(`/api/texts/${text.id}/pair/${name}`, { signal });
      if (signal.aborted) return;
      this.weights = weights;
      this.draw();
      this.arrived();
    } catch (error) {
      if (!signal.aborted) complain(error);
    }
  }

  // The weight of the pinned cell in the head on show: NaN where it is masked, undefined while it is loading.
  get weight() {
    const found = this.weights?.[state.layer]?.[state.head];
    return found === null ? NaN : found;
  }

  draw() {
    if (!this.weights) return;
    const { weights } = this, most = Math.max(...weights.map((layer) => layer.length));
    const top = Math.max(...weights.flat()) || 1, grid = make("div", { className: "pairs" });
    grid.style.setProperty("--columns", most);
    grid.append(make("span"), ...Array.from({ length: most }, (_, head) => make("span", { className: "axis", textContent: head })));
    weights.forEach((layer, i) => {
      if (!layer.length) return;
      grid.append(make("span", { className: "axis side", textContent: fill(T.layer_short, { layer: i }) }));
      layer.forEach((weight, head) => grid.append(this.one(weight, { layer: i, head }, top)));
      for (let head = layer.length; head < most; head++) grid.append(make("span"));
    });
    this.box.replaceChildren(make("h3", { textContent: this.cell === 1 ? T.pair_in_heads : T.cell_in_heads }), make("div", { className: "scroll" }, grid));
    this.box.hidden = false;
  }

  one(weight, { layer, head }, top) {
    const words = weight === null ? "–" : fixed(weight), name = `${fill(T.head_name, { layer, head })}: ${words}`, at = weight === null ? 0 : place(weight, top, "sqrt");
    const button = make("button", { type: "button", title: name, ariaLabel: name }, make("span", { textContent: weight >= 0.005 ? weight.toFixed(2) : "" }));
    button.setAttribute("aria-pressed", String(layer === state.layer && head === state.head));
    button.style.cssText = `background: rgb(${colourAt(at)}); color: ${inkOn(colourAt(at))}`;
    button.addEventListener("click", () => this.chosen(layer, head));
    return button;
  }
}
