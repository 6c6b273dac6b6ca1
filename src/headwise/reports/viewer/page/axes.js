// Both axes: positions, or tokens when zoomed in, and marks for matches of a search.

const LETTERED = 11;    // css pixels a token from which on it is written out
const GUTTER = { left: 78, bottom: 62, top: 6, right: 8 };
const WORDS = { left: 122, bottom: 88, top: 6, right: 8 };
const NARROW = { left: 66, bottom: 62, top: 6, right: 4 };

// A label, clipped to the room.
function fitted(context, label, room) {
  while (label.length > 1 && context.measureText(label).width > room) label = clipped(label, [...label].length - 1);
  return label;
}

class Axes {
  constructor(camera, pieces) {
    Object.assign(this, { camera, pieces, hits: [], hit: null });
  }

  draw(context) {
    const { camera } = this, { plot } = camera, view = camera.view();
    const lettered = camera.zoom >= LETTERED;
    context.textBaseline = "middle";
    this.marks(context, view);
    for (const side of ["left", "bottom"]) {
      const [from, to] = side === "left" ? [view.r0, view.r1] : [view.c0, view.c1];
      const turned = lettered && this.letters(context, side, Math.floor(from), Math.min(camera.n, Math.ceil(to)));
      if (!turned) this.positions(context, side, from, to, lettered);
    }
    context.fillStyle = css("--muted");
    context.font = `12px ${css("--ui")}`;
    context.textAlign = "center";
    context.fillText(T.key_axis, plot.left + plot.width / 2, plot.top + plot.height + this.gutter.bottom - 8, plot.width);
    writeUpwards(context, T.query_axis, 9, plot.top + plot.height / 2, plot.height);
  }

  get gutter() { return this.narrow ? NARROW : this.pieces.wordy ? WORDS : GUTTER; }

  // The tokens of one axis; whether they had to be turned to find room.
  letters(context, side, from, to) {
    const { camera, pieces } = this, { plot } = camera, size = Math.max(9, Math.min(15, camera.zoom * 0.82));
    const edge = side === "left" ? plot.left : plot.top + plot.height;
    context.font = `${size}px ${css("--han")}, ${css("--ui")}`;
    context.fillStyle = css("--ink");
    const labels = [];
    for (let i = from; i < to; i++) labels.push(clipped(shown(pieces.at(i) ?? ""), 16));
    const turned = side === "bottom" && labels.some((label) => context.measureText(label).width > camera.zoom * 1.06);
    const room = turned ? this.gutter.bottom - 22 : this.gutter.left - 42;
    labels.forEach((label, k) => {
      const i = from + k;
      if (pieces.at(i) === undefined) return;
      if (side === "left") {
        const y = camera.py(i + 0.5);
        if (y < plot.top || y > plot.top + plot.height) return;
        context.textAlign = "right";
        context.fillText(fitted(context, label, room), edge - 5, y);
        return;
      }
      const x = camera.px(i + 0.5);
      if (x < plot.left || x > plot.left + plot.width) return;
      if (turned) {
        context.textAlign = "right";
        writeUpwards(context, fitted(context, label, room), x, edge + 5);
      } else {
        context.textAlign = "center";
        context.fillText(label, x, edge + 5 + size / 2);
      }
    });
    return turned;
  }

  // Round positions; beside the letters they move outwards.
  positions(context, side, from, to, lettered) {
    const { camera } = this, { plot } = camera;
    context.font = `11px ${css("--ui")}`;
    context.fillStyle = css("--muted");
    for (const at of roundSteps(from, to)) {
      const label = grouped(at);
      if (side === "left") {
        const y = camera.py(at + (lettered ? 0.5 : 0));
        context.textAlign = lettered ? "left" : "right";
        if (!lettered) context.fillRect(plot.left - 4, Math.round(y), 4, 1);
        context.fillText(label, lettered ? 19 : plot.left - 7, Math.min(plot.top + plot.height - 5, Math.max(plot.top + 5, y)), lettered ? 24 : plot.left - 24);
      } else {
        const x = camera.px(at + (lettered ? 0.5 : 0)), y = plot.top + plot.height, half = context.measureText(label).width / 2;
        context.textAlign = "center";
        if (!lettered) context.fillRect(Math.round(x), y, 1, 4);
        context.fillText(label, Math.min(plot.left + plot.width - half, Math.max(plot.left + half - 4, x)), y + (lettered ? 36 : 12));
      }
    }
  }

  // For each place that a search found a tick on each axis, or a tint behind its token.
  marks(context, view) {
    const { camera } = this, { plot } = camera, lettered = camera.zoom >= LETTERED, thick = Math.max(2, lettered ? camera.zoom : Math.min(camera.zoom, 6));
    for (const at of this.hits) {
      const long = lettered ? (this.pieces.wordy ? 40 : 24) : at === this.hit ? 10 : 6;
      context.fillStyle = `rgba(${css("--looked")}, ${lettered ? (at === this.hit ? 0.5 : 0.28) : 1})`;
      if (at >= view.r0 - 1 && at < view.r1) this.inside(context, plot.left - long, camera.py(at + 0.5) - thick / 2, long, thick, "y");
      if (at >= view.c0 - 1 && at < view.c1) this.inside(context, camera.px(at + 0.5) - thick / 2, plot.top + plot.height, thick, long, "x");
    }
  }

  // A rectangle beside the plot, no longer than its side.
  inside(context, x, y, width, height, axis) {
    const { plot } = this.camera, [low, high] = axis === "x" ? [plot.left, plot.left + plot.width] : [plot.top, plot.top + plot.height];
    const from = Math.max(low, axis === "x" ? x : y), to = Math.min(high, axis === "x" ? x + width : y + height);
    if (to > from) context.fillRect(axis === "x" ? from : x, axis === "x" ? y : from, axis === "x" ? to - from : width, axis === "x" ? height : to - from);
  }
}
