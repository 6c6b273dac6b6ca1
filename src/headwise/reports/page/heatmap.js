// The enlarged head: cells, axes with characters, a cross under the pointer, zoom by dragging.

const PLOT_LIMIT = 680;  // css pixels along a side
const LABEL_FONT = 15;
const LABEL_ROOM = 120;  // css pixels of a label, and at most this share of the width
const LABEL_SHARE = 0.24;

// A label, clipped to the room.
function fitted(context, label, room) {
  let letters = [...label];
  while (letters.length > 1 && context.measureText(letters.join("")).width > room) letters = [...letters.slice(0, -2), "…"];
  return letters.join("");
}

class HeatMap {
  // Calls `seen(cell)` with the cell under the pointer (or null), `chosen(cell)` on a click, `zoomed(view)` on a drag.
  constructor(box, base, over, { seen, chosen, zoomed }) {
    Object.assign(this, { box, base, over, seen, chosen, zoomed, drag: null, cursor: null, hits: [], reach: () => {} });
    over.addEventListener("pointermove", (event) => this.move(event));
    over.addEventListener("pointerleave", () => { if (!this.drag) { this.cursor = null; this.seen(null); } });
    over.addEventListener("pointerdown", (event) => this.press(event));
    over.addEventListener("pointerup", (event) => this.release(event));
    over.addEventListener("pointercancel", () => { this.drag = null; this.cross(); });
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("blur", () => { this.cursor = null; this.seen(null); });
  }

  // What to show; `view` is the part of it, {r0, r1, c0, c1} in cells. signed: a difference, with two colours.
  show({ map, passage, view, top, scale, signed = false }) {
    Object.assign(this, { map, passage, view, top, scale, signed });
    this.layout();
    this.draw(this.base.getContext("2d"));
    this.cross();
  }

  layout() {
    const { passage, view, box } = this, context = this.base.getContext("2d");
    const width = box.clientWidth, rows = view.r1 - view.r0, columns = view.c1 - view.c0, most = Math.max(rows, columns);
    this.room = Math.min(LABEL_ROOM, width * LABEL_SHARE);
    const cell = (Math.min(PLOT_LIMIT, width) - 74) / most;
    this.lettered = cell >= 10.5 && passage.cell === 1;
    this.size = Math.max(9, Math.min(LABEL_FONT, cell * 0.82));
    context.font = this.font();
    const widths = (side, from, to) => this.ticks(from, to).map((i) => Math.min(this.room, context.measureText(this.label(i, side)).width));
    const longest = Math.max(0, ...widths(passage.q, view.r0, view.r1)), below = widths(passage.k, view.c0, view.c1), widest = Math.max(0, ...below);
    this.turned = this.lettered && widest > cell * 1.06;
    this.left = 24 + longest + 8;
    this.right = this.lettered ? 8 : Math.max(8, (below.at(-1) ?? 0) / 2);
    this.bottom = 26 + (this.lettered ? (this.turned ? widest + 8 : this.size + 8) : 18);
    this.cell = Math.min(Math.min(PLOT_LIMIT, width - this.left - this.right) / most, 96);
    this.width = this.cell * columns;
    this.height = this.cell * rows;
    this.left += Math.max(0, (width - this.left - this.right - this.width) / 2);
    this.edge = this.left - longest - 32;
    this.top0 = 4;
    box.style.aspectRatio = `${width} / ${Math.ceil(this.height + this.bottom + this.top0)}`;
    for (const canvas of [this.base, this.over]) fitCanvas(canvas, width, Math.ceil(this.height + this.bottom + this.top0));
  }

  // `context`: of a canvas, or of a picture in SVG.
  draw(context) {
    const { map, passage, view, left, top0, width, height } = this;
    const limit = Math.max(64, Math.floor(Math.max(width, height) * (window.devicePixelRatio || 1)));
    const picture = paint(reduced(map, passage.columns, view, limit), this.top, this.scale, passage.causal, this.signed);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, left, top0, width, height);
    context.strokeStyle = css("--line");
    context.lineWidth = 1;
    context.strokeRect(left - 0.5, top0 - 0.5, width + 1, height + 1);
    if (this.cell >= 34 && passage.cell === 1) this.writeValues(context);
    this.axes(context);
  }

  writeValues(context) {
    const { map, passage, view, cell } = this;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${Math.min(13, cell * 0.29)}px ${css("--ui")}`;
    for (let i = view.r0; i < view.r1; i++) {
      for (let j = view.c0; j < view.c1; j++) {
        if (passage.causal && j > i) continue;
        const weight = map[i * passage.columns + j];
        context.fillStyle = inkOn(this.signed ? mixed(weight, this.top) : colourAt(place(weight, this.top, this.scale)));
        context.fillText(weight.toFixed(2), this.left + (j - view.c0 + 0.5) * cell, this.top0 + (i - view.r0 + 0.5) * cell);
      }
    }
  }

  axes(context) {
    const { view, left, top0, width, height, cell, size, room } = this;
    context.fillStyle = css(this.lettered ? "--ink" : "--muted");
    context.font = this.font();
    context.textBaseline = "middle";
    for (const i of this.ticks(view.r0, view.r1)) {
      context.textAlign = "right";
      context.fillText(fitted(context, this.label(i, this.passage.q), room), left - 6, Math.max(6, top0 + (i - view.r0 + 0.5) * cell));
    }
    const below = top0 + height;
    let end = -Infinity;  // of the last number of a narrow map, whose numbers must not meet
    for (const j of this.ticks(view.c0, view.c1)) {
      const x = left + (j - view.c0 + 0.5) * cell, label = fitted(context, this.label(j, this.passage.k), room);
      const half = context.measureText(label).width / 2;
      if (!this.lettered && x - half < end + 4) continue;
      end = x + half;
      if (this.turned) {
        context.textAlign = "right";
        writeUpwards(context, label, x, below + 6);
      } else {
        context.textAlign = "center";
        context.fillText(label, x, below + 6 + size / 2);
      }
    }
    context.fillStyle = css("--muted");
    context.font = `12px ${css("--ui")}`;
    context.textAlign = "center";
    const long = context.measureText(T.key_axis).width / 2, high = context.measureText(T.query_axis).width;
    context.fillText(T.key_axis, Math.min(Math.max(left + width / 2, long + 2), this.box.clientWidth - long - 2), below + this.bottom - 9);
    if (high <= height + this.bottom) writeUpwards(context, T.query_axis, this.edge + 10, Math.max(top0 + height / 2, top0 + high / 2));
  }

  // The width that the longest label of a query takes.
  labelRoom(width, passage) {
    const context = this.base.getContext("2d"), widest = Math.min(LABEL_ROOM, width * LABEL_SHARE);
    context.font = `${LABEL_FONT}px ${css("--han")}, ${css("--ui")}`;
    return passage.q.tokens.reduce((most, token) => (most < widest ? Math.max(most, Math.min(widest, context.measureText(clipped(named(token), 14)).width)) : widest), 0);
  }

  font() {
    return this.lettered ? `${this.size}px ${css("--han")}, ${css("--ui")}` : `11px ${css("--ui")}`;
  }

  label(cell, side) {
    return this.lettered ? clipped(named(side.tokens[cell]), 14) : String(cell * side.cell);
  }

  // All cells if there is room for characters, otherwise about seven round token positions.
  ticks(from, to) {
    if (this.lettered) return Array.from({ length: to - from }, (_, i) => from + i);
    const { cell } = this.passage;
    return roundSteps(from * cell, to * cell).map((token) => token / cell);
  }

  // The cell under the pointer; `clamp` keeps a drag inside.
  cellAt(event, clamp = false) {
    const box = this.over.getBoundingClientRect(), { view } = this;
    let c = Math.floor((event.clientX - box.left - this.left) / this.cell) + view.c0;
    let r = Math.floor((event.clientY - box.top - this.top0) / this.cell) + view.r0;
    if (clamp) {
      c = Math.min(view.c1 - 1, Math.max(view.c0, c));
      r = Math.min(view.r1 - 1, Math.max(view.r0, r));
    }
    return r >= view.r0 && r < view.r1 && c >= view.c0 && c < view.c1 ? { r, c } : null;
  }

  move(event) {
    if (!this.map) return;
    if (this.drag) {
      this.drag.to = this.cellAt(event, true);
      this.cross();
      return;
    }
    this.cursor = this.cellAt(event);
    this.seen(this.cursor && { ...this.cursor, x: event.clientX, y: event.clientY });
  }

  press(event) {
    const from = this.map && this.cellAt(event);
    if (!from || event.button !== 0) return;
    this.drag = { from, to: from };
    this.over.setPointerCapture?.(event.pointerId);
  }

  release(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag) return;
    const to = this.cellAt(event, true), wide = Math.abs(to.c - drag.from.c), high = Math.abs(to.r - drag.from.r);
    if (wide < 2 || high < 2) {
      this.chosen(drag.from);
      return;
    }
    this.zoomed({
      r0: Math.min(to.r, drag.from.r), r1: Math.max(to.r, drag.from.r) + 1,
      c0: Math.min(to.c, drag.from.c), c1: Math.max(to.c, drag.from.c) + 1,
    });
  }

  key(event) {
    const step = ARROWS[event.key];
    if (!this.map || (!step && event.key !== "Enter")) return;
    event.preventDefault();
    if (!step) {
      if (this.cursor) this.chosen(this.cursor);
      return;
    }
    const at = this.cursor ?? { r: this.view.r0, c: this.view.c0 }, by = event.shiftKey ? 10 : 1;
    const to = { r: at.r + by * step[0], c: at.c + by * step[1] };
    this.reach(to);  // where only a part is drawn, to the part with this cell
    const { view } = this;
    this.cursor = {
      r: Math.min(view.r1 - 1, Math.max(view.r0, to.r)),
      c: Math.min(view.c1 - 1, Math.max(view.c0, to.c)),
    };
    const box = this.over.getBoundingClientRect();
    this.seen({
      ...this.cursor,
      x: box.left + this.left + (this.cursor.c - view.c0 + 0.5) * this.cell,
      y: box.top + this.top0 + (this.cursor.r - view.r0 + 0.5) * this.cell,
    });
  }

  // Bands over the pinned or pointed-at unit, the cell under the pointer, and the square being dragged.
  cross(unit = this.unit) {
    this.unit = unit;
    if (!this.map) return;
    const context = this.over.getContext("2d");
    context.clearRect(0, 0, this.over.width, this.over.height);
    this.bands(context);
  }

  bands(context) {
    const { unit, view, left, top0, width, height, cell } = this;
    context.save();
    context.beginPath();
    context.rect(left - 2, top0 - 2, width + 4, height + 4);
    context.clip();
    context.fillStyle = `rgba(${css("--looked")}, .55)`;
    for (const one of this.hits) {
      const thick = Math.max(2, (one.c1 - one.c0) * cell);
      context.fillRect(left - 2, top0 + (one.c0 - view.r0) * cell, 5, thick);
      if (one.side === this.passage.k) context.fillRect(left + (one.c0 - view.c0) * cell, top0 + height - 3, thick, 5);
    }
    if (unit) {
      const thick = (unit.c1 - unit.c0) * cell, y = top0 + (unit.c0 - view.r0) * cell, x = left + (unit.c0 - view.c0) * cell;
      const fine = thick < 7;  // a band too thin to frame is marked by one line on each side
      context.lineWidth = fine ? 1 : 1.5;
      context.strokeStyle = `rgba(${css("--looks")}, ${fine ? 0.75 : 0.95})`;
      if (unit.side === this.passage.q) context.strokeRect(left - 3, y - 1, width + 6, thick + 2);
      context.strokeStyle = `rgba(${css("--looked")}, ${fine ? 0.75 : 0.95})`;
      if (unit.side === this.passage.k) context.strokeRect(x - 1, top0 - 3, thick + 2, height + 6);
    }
    if (this.cursor) {
      const { r, c } = this.cursor;
      context.lineWidth = 2;
      context.strokeStyle = css("--ink");
      context.strokeRect(left + (c - view.c0) * cell - 1, top0 + (r - view.r0) * cell - 1, cell + 2, cell + 2);
    }
    if (this.drag) {
      const { from, to } = this.drag, r = Math.min(from.r, to.r), c = Math.min(from.c, to.c);
      context.fillStyle = `rgba(${css("--looks")}, .18)`;
      context.strokeStyle = css("--ink");
      const box = [left + (c - view.c0) * cell, top0 + (r - view.r0) * cell, (Math.abs(to.c - from.c) + 1) * cell, (Math.abs(to.r - from.r) + 1) * cell];
      context.fillRect(...box);
      context.strokeRect(...box);
    }
    context.restore();
  }
}
