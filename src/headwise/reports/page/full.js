// The map at full size: cells wide enough for their numbers, in a frame that scrolls over them by whole cells. Only
// the cells in the frame are drawn, so that their characters stay beside them and long texts need no huge canvas.

const FULL_CELL = 35;  // css pixels: with room for a number of two decimals

class FullSize {
  constructor(map, draw) {
    Object.assign(this, { map, button: byId("full"), frame: byId("map-frame"), extent: byId("map-extent") });
    this.button.addEventListener("click", () => { state.full = !state.full; remember(); draw(); });
    this.frame.addEventListener("scroll", () => { if (this.on) draw(); });  // once a frame of the screen
    map.reach = (cell) => this.reach(cell, draw);
  }

  // The part of `range` that is drawn: all of it, or what the frame has room for.
  window(range, passage) {
    const { frame, extent, map, button } = this, high = range.r1 - range.r0, wide = range.c1 - range.c0;
    const room = Math.min(PLOT_LIMIT, frame.clientWidth - map.labelRoom(frame.clientWidth, passage) - 40);
    const shown = Math.max(1, Math.floor(room / FULL_CELL));
    button.hidden = passage.cell > 1 || Math.max(high, wide) <= shown;
    this.on = state.full && !button.hidden && !onScreen;
    button.setAttribute("aria-pressed", String(this.on));
    frame.classList.toggle("full", this.on);
    if (!this.on) {
      for (const { style } of [frame, extent, map.box]) style.width = style.height = "";
      return range;
    }
    const rows = Math.min(high, shown), columns = Math.min(wide, shown);
    map.box.style.width = `${frame.clientWidth}px`;
    extent.style.width = `${frame.clientWidth + (wide - columns) * FULL_CELL}px`;
    const from = (scrolled, cells) => Math.min(cells, Math.max(0, Math.round(scrolled / FULL_CELL)));
    const r0 = range.r0 + from(frame.scrollTop, high - rows), c0 = range.c0 + from(frame.scrollLeft, wide - columns);
    Object.assign(this, { range, more: high - rows });
    return { r0, r1: r0 + rows, c0, c1: c0 + columns };
  }

  // After the map was drawn: as high as it is, and scrolling as far as there are cells.
  fit() {
    if (!this.on) return;
    const { frame, extent, map } = this, high = map.box.offsetHeight;
    extent.style.height = `${high + this.more * FULL_CELL}px`;
    frame.style.height = `${high + frame.offsetHeight - frame.clientHeight}px`;
  }

  // Scroll until a cell is drawn.
  reach({ r, c }, draw) {
    if (!this.on) return;
    const { range, frame, map: { view } } = this;
    const by = (at, from, to) => (at < from ? at - from : at >= to ? at - to + 1 : 0);
    const down = by(Math.min(range.r1 - 1, Math.max(range.r0, r)), view.r0, view.r1);
    const right = by(Math.min(range.c1 - 1, Math.max(range.c0, c)), view.c0, view.c1);
    if (!down && !right) return;
    frame.scrollTo((view.c0 - range.c0 + right) * FULL_CELL, (view.r0 - range.r0 + down) * FULL_CELL);
    draw();
  }
}
