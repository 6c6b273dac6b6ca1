// All heads as small pictures, layer by head; drawn when they come into view.

const THUMB = 112;  // cells along a side at most
const ALL_DRAWN = 256;  // heads at most that are drawn before they come into view
// The kind of a head, in the colour of its role if it has a label, in grey if it has a tendency alone.
const kindOf = (layer, head) => REPORT.kinds[REPORT.kindOf[layer][head]];
const colourOf = (layer, head) => kindOf(layer, head)?.colour ?? "transparent";

class Grid {
  constructor(box, legend, choose) {
    Object.assign(this, { box, choose, only: null, turn: 0 });
    const { layers: rows, heads } = REPORT;
    // Sixteen heads fit beside the map from 1280 pixels on.
    box.style.gridTemplateColumns = `auto repeat(${heads}, minmax(14px, 1fr))`;
    box.style.columnGap = heads > 12 ? "3px" : heads > 8 ? "4px" : "";
    const parts = [make("span")];
    for (let h = 0; h < heads; h++) parts.push(make("span", { className: "axis", textContent: h }));
    this.thumbs = [];
    this.rows = [];
    for (let l = 0; l < rows; l++) {
      const name = make("span", { className: "axis side", textContent: fill(T.layer_short, { layer: l }), title: REPORT.names[l] ?? "" });
      const row = [name, ...Array.from({ length: heads }, (_, h) => (h < REPORT.counts[l] ? this.thumb(l, h) : make("span")))];
      this.rows.push(row);
      parts.push(...row);
    }
    box.replaceChildren(...parts);
    box.addEventListener("keydown", (event) => this.key(event));
    this.watch = watchVisible((thumb) => this.paint(thumb));
    for (const thumb of this.thumbs) this.watch.observe(thumb);
    this.legend(legend);
  }

  thumb(layer, head) {
    const pattern = REPORT.patterns[layer][head];
    const button = make("button", { type: "button", className: "thumb" }, make("canvas"), make("i"));
    Object.assign(button, { layer, head, title: headName(layer, head) + (pattern ? ` · ${pattern}` : "") });
    button.setAttribute("aria-label", button.title);
    button.style.setProperty("--kind", colourOf(layer, head));
    button.addEventListener("click", () => this.choose(layer, head));
    this.thumbs.push(button);
    return button;
  }

  legend(list) {
    const items = REPORT.kinds.map(({ name, count, colour }) => {
      const button = make("button", { type: "button" }, make("i"), name, make("span", { textContent: count }));
      button.style.setProperty("--kind", colour);
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        this.only = this.only === name ? null : name;
        for (const other of list.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button && this.only !== null));
        for (const t of this.thumbs) t.classList.toggle("faint", this.only !== null && kindOf(t.layer, t.head)?.name !== this.only);
      });
      return make("li", {}, button);
    });
    list.replaceChildren(...items);
  }

  // Draw with these settings what is in view, and the rest when it comes into view; only the layers of the passage.
  show(settings) {
    this.settings = settings;
    this.rows.forEach((row, l) => { for (const part of row) part.hidden = !settings.passage.layers.includes(l); });
    this.turn++;
    for (const thumb of this.thumbs) if (thumb.visible) this.paint(thumb);
    if (this.thumbs.length <= ALL_DRAWN) this.rest(this.turn);
  }

  // The others when there is nothing else to do, but soon: they must be there when the page is printed at once.
  async rest(turn) {
    const pause = () => new Promise((done) => window.requestIdleCallback ? requestIdleCallback(done, { timeout: 50 }) : setTimeout(done));
    for (const thumb of this.thumbs) {
      await pause();
      if (turn !== this.turn) return;
      await this.paint(thumb);
    }
  }

  select(layer, head) {
    for (const t of this.thumbs) {
      const on = t.layer === layer && t.head === head;
      t.setAttribute("aria-pressed", String(on));
      t.tabIndex = on ? 0 : -1;
    }
  }

  async paint(thumb) {
    const { settings, turn } = this;
    if (!settings || thumb.turn === turn || thumb.hidden) return;
    thumb.turn = turn;
    const { passage, index, kind, scale, top } = settings;
    const map = await mapOf(index, thumb.layer, thumb.head, kind);
    if (turn !== this.turn) return;
    const whole = { r0: 0, r1: passage.rows, c0: 0, c1: passage.columns };
    const picture = paint(reduced(map, passage.columns, whole, THUMB), top(thumb.layer, thumb.head), scale, passage.causal);
    const canvas = thumb.querySelector("canvas");
    canvas.width = picture.width;
    canvas.height = picture.height;
    canvas.getContext("2d").drawImage(picture, 0, 0);
  }

  key(event) {
    const [down, right] = ARROWS[event.key] ?? [];
    const { layer, head } = event.target;
    if (down === undefined || layer === undefined) return;
    event.preventDefault();
    this.thumbs.find((thumb) => thumb.layer === layer + down && thumb.head === head + right)?.focus();
  }
}
