// The part of the map in view: the token at the centre of the plot, and the pixels per token.

const CLOSEST = 96;     // css pixels a token at most
const GLIDE = 70;       // ms; a zoom by wheel or key covers most of its way in that time

class Camera {
  constructor() {
    Object.assign(this, { n: 1, x: 0.5, y: 0.5, zoom: 1, plot: { left: 0, top: 0, width: 1, height: 1 }, goal: null });
  }

  // The zoom at which the whole map fits.
  get whole() {
    return Math.min(CLOSEST, (0.98 * Math.min(this.plot.width, this.plot.height)) / this.n);
  }

  get fits() { return this.zoom <= this.whole * 1.001; }

  fit() { this.to({ x: this.n / 2, y: this.n / 2, zoom: this.whole }); }

  to({ x = this.x, y = this.y, zoom = this.zoom }) {
    Object.assign(this, { x, y, zoom, goal: null });
    this.hold();
  }

  // Keep the map in view: centred if all of it fits, otherwise within its edges.
  hold() {
    this.zoom = Math.min(CLOSEST, Math.max(this.whole, this.zoom));
    for (const [axis, size] of [["x", this.plot.width], ["y", this.plot.height]]) {
      const half = size / 2 / this.zoom, room = 0.04 * size / this.zoom;
      const low = Math.min(half - room, this.n / 2), high = Math.max(this.n - half + room, this.n / 2);
      this[axis] = Math.min(high, Math.max(low, this[axis]));
    }
  }

  // Tokens to css pixels and back.
  px(token) { return this.plot.left + this.plot.width / 2 + (token - this.x) * this.zoom; }
  py(token) { return this.plot.top + this.plot.height / 2 + (token - this.y) * this.zoom; }
  tx(px) { return this.x + (px - this.plot.left - this.plot.width / 2) / this.zoom; }
  ty(py) { return this.y + (py - this.plot.top - this.plot.height / 2) / this.zoom; }

  // The tokens in view: {r0, r1, c0, c1}, fractions included.
  view() {
    const { plot } = this, inside = (token) => Math.min(this.n, Math.max(0, token));
    return {
      c0: inside(this.tx(plot.left)), c1: inside(this.tx(plot.left + plot.width)),
      r0: inside(this.ty(plot.top)), r1: inside(this.ty(plot.top + plot.height)),
    };
  }

  pan(dx, dy) { this.to({ x: this.x - dx / this.zoom, y: this.y - dy / this.zoom }); }

  // Zoom by a factor at once; the point at (px, py) stays in place.
  zoomAt(px, py, factor) {
    const x = this.tx(px), y = this.ty(py), { plot } = this;
    const zoom = Math.min(CLOSEST, Math.max(this.whole, this.zoom * factor));
    this.to({ zoom, x: x - (px - plot.left - plot.width / 2) / zoom, y: y - (py - plot.top - plot.height / 2) / zoom });
  }

  // The same, gliding; further calls add to what is still to come.
  glideAt(px, py, factor) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { this.zoomAt(px, py, factor); return; }
    const zoom = Math.min(CLOSEST, Math.max(this.whole, (this.goal?.zoom ?? this.zoom) * factor));
    this.goal = { zoom, px, py };
  }

  // One frame of the animation, `ms` after the last; returns whether it continues.
  step(ms) {
    if (!this.goal) return false;
    const { zoom, px, py } = this.goal, way = Math.log(zoom / this.zoom), part = 1 - Math.exp(-ms / GLIDE);
    if (Math.abs(way) < 0.003) { this.zoomAt(px, py, zoom / this.zoom); return false; }
    const { goal } = this;
    this.zoomAt(px, py, Math.exp(way * part));
    this.goal = goal;
    return true;
  }

  // Tokens a cell side so that a cell takes at least one pixel of the screen.
  cell(ratio, coarsest, zoom = this.zoom) {
    let cell = 1;
    while (cell < coarsest && cell * zoom * ratio < 0.999) cell *= 2;
    return cell;
  }
}
