// The map on its canvas: only what is in view, from the loaded tiles, coarser ones until finer ones arrive.

const NUMBERED = 44;    // css pixels a token from which on a cell has its weight written in
const SETTLED = 140;    // ms without a movement until the range follows the view
const SAMPLES = 40000;  // weights that an automatic range looks at

class Plot {
  // Calls `changed()` for every new view, `ranged(range)` for an automatic range.
  constructor(box, base, over, { tiles, pieces, changed, ranged }) {
    Object.assign(this, { box, base, over, tiles, pieces, changed, ranged, shows: null, frame: 0, cursor: null });
    this.camera = new Camera();
    this.axes = new Axes(this.camera, pieces);
    new ResizeObserver(() => this.layout()).observe(box);
  }

  // A head of a text: {layer, head, reduce, coarsest, scale, low, top, auto, small: its map in the overview}.
  show(shows) {
    this.shows = shows;
    this.draw();
  }

  hide() {
    this.shows = null;
    this.tiles.leave();
  }

  layout() {
    const { box, camera } = this, ratio = devicePixelRatio || 1, width = box.clientWidth, height = box.clientHeight;
    if (!width || !height) return;
    const whole = camera.fits, narrow = width < 560;
    this.axes.narrow = narrow;
    const { left, bottom, top, right } = this.axes.gutter;
    camera.plot = { left, top, width: Math.max(40, width - left - right), height: Math.max(40, height - top - bottom) };
    for (const canvas of [this.base, this.over]) fitCanvas(canvas, width, height);
    this.ratio = ratio;
    if (whole) camera.fit(); else camera.hold();
    this.hatch = null;
    this.drawNow(performance.now());
  }

  // Draw in the next frame, once for any number of calls.
  draw() {
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.drawNow(now));
  }

  drawNow(now) {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    if (!this.shows || !this.ratio) return;
    const gliding = this.camera.step(Math.min(50, now - (this.last ?? now)) || 16);
    this.last = now;
    this.wanted();
    const context = this.base.getContext("2d");
    context.clearRect(0, 0, this.box.clientWidth, this.box.clientHeight);
    this.paint(context, this.ratio);
    this.axes.draw(context);
    this.cross();
    this.changed();
    this.box.setAttribute("aria-busy", String(gliding || this.tiles.busy));
    if (gliding) this.draw(); else this.settle();
  }

  // The cells and tiles in view at the level that suits the zoom.
  level() {
    const { camera, shows } = this, cell = camera.cell(this.ratio, shows.coarsest), view = camera.view();
    const first = (token) => Math.floor(token / cell), end = (token) => Math.min(Math.ceil(camera.n / cell), Math.ceil(token / cell));
    return { cell, r0: first(view.r0), r1: end(view.r1), c0: first(view.c0), c1: end(view.c1) };
  }

  name(cell, row, col) {
    const { layer, head, reduce } = this.shows;
    // Cells of one token have nothing to pool: both ways of pooling share them.
    return `${layer}/${head}/${cell}/${row}/${col}/${cell === 1 ? "mean" : reduce}`;
  }

  parts() {
    const level = this.level(), out = [];
    for (let row = Math.floor(level.r0 / SIDE); row * SIDE < level.r1; row++) {
      for (let col = Math.floor(level.c0 / SIDE); col * SIDE < level.c1; col++) {
        out.push({
          name: this.name(level.cell, row, col), cell: level.cell, row, col,
          r0: Math.max(level.r0, row * SIDE), r1: Math.min(level.r1, (row + 1) * SIDE),
          c0: Math.max(level.c0, col * SIDE), c1: Math.min(level.c1, (col + 1) * SIDE),
        });
      }
    }
    return out;
  }

  // Request missing tiles, nearest to the centre first, except those that a coarser tile shows to be empty.
  wanted() {
    const { camera, shows, tiles } = this, missing = [];
    // On the way to another level, its tiles are those to wait for.
    const { goal } = camera, here = camera.cell(this.ratio, shows.coarsest);
    if (goal && camera.cell(this.ratio, shows.coarsest, goal.zoom) !== here) return;
    const most = Math.ceil(camera.n / here);
    for (const part of this.parts()) {
      const { name, cell, row, col } = part;
      if (tiles.get(name) || tiles.blank.has(name)) continue;
      const whole = { cell, r0: row * SIDE, r1: Math.min(most, (row + 1) * SIDE), c0: col * SIDE, c1: Math.min(most, (col + 1) * SIDE) };
      const above = this.above(part);
      if (above && tiles.isBlank(name, above, covering(above, whole))) continue;
      const far = Math.hypot(((part.c0 + part.c1) / 2) * cell - camera.x, ((part.r0 + part.r1) / 2) * cell - camera.y);
      missing.push({ name, layer: shows.layer, head: shows.head, cell, row, col, reduce: cell === 1 ? "mean" : shows.reduce, far });
    }
    missing.sort((a, b) => a.far - b.far);
    tiles.want(missing);
  }

  // The nearest loaded coarser tile that contains this part.
  above({ cell, row, col }) {
    for (let up = 2; cell * up <= this.shows.coarsest; up *= 2) {
      const tile = this.tiles.get(this.name(cell * up, Math.floor(row / up), Math.floor(col / up)));
      if (tile) return tile;
    }
    return null;
  }

  // The finer tiles of the next level that are loaded, after zooming out.
  below({ cell, row, col }) {
    if (cell === 1) return [];
    return [0, 1, 2, 3].map((i) => this.tiles.get(this.name(cell / 2, 2 * row + (i >> 1), 2 * col + (i & 1)))).filter(Boolean);
  }

  paint(context, ratio) {
    const { camera, shows, tiles } = this, { plot, n } = camera;
    const ink = (this.ink = this.inkFor(shows));
    const edge = { x: (token) => Math.round(camera.px(token) * ratio), y: (token) => Math.round(camera.py(token) * ratio) };
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top, plot.width, plot.height);
    context.clip();
    context.save();
    // From here on in pixels of the screen: neighbours share their edges, and nothing is smoothed.
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.imageSmoothingEnabled = false;
    const x0 = edge.x(0), y0 = edge.y(0), x1 = edge.x(n), y1 = edge.y(n);
    context.beginPath();
    context.rect(x0, y0, x1 - x0, y1 - y0);
    context.clip();
    this.hatch ??= hatching(context, ratio);
    this.hatch.setTransform(new DOMMatrix().translate(x0 % hatchSize(ratio), y0 % hatchSize(ratio)));
    context.fillStyle = this.hatch;
    context.fillRect(plot.left * ratio, plot.top * ratio, plot.width * ratio, plot.height * ratio);
    const piece = (tile, r0, r1, c0, c1) => {  // cells of the tile's own level, counted from the map's corner
      const { cell, row, col } = tile, x = edge.x(c0 * cell), y = edge.y(r0 * cell);
      context.drawImage(tiles.picture(tile, ink), c0 - col * SIDE, r0 - row * SIDE, c1 - c0, r1 - r0, x, y, edge.x(c1 * cell) - x, edge.y(r1 * cell) - y);
    };
    for (const part of this.parts()) {
      const tile = tiles.get(part.name);
      if (tile) { piece(tile, part.r0, part.r1, part.c0, part.c1); continue; }
      if (tiles.blank.has(part.name)) continue;
      this.instead(context, part, piece, ink, edge);
    }
    context.restore();
    if (camera.zoom >= NUMBERED) this.numbers(context);
    context.restore();
    context.strokeStyle = css("--line");
    context.lineWidth = 1;
    context.strokeRect(plot.left - 0.5, plot.top - 0.5, plot.width + 1, plot.height + 1);
  }

  // The replacement of a tile that is loading: a coarser tile, otherwise finer ones over the small map.
  instead(context, part, piece, ink, edge) {
    const tile = this.above(part);
    context.save();
    context.beginPath();
    const x = edge.x(part.c0 * part.cell), y = edge.y(part.r0 * part.cell);
    context.rect(x, y, edge.x(part.c1 * part.cell) - x, edge.y(part.r1 * part.cell) - y);
    context.clip();
    if (tile) {
      const c = covering(tile, part);
      piece(tile, c.r0 + tile.row * SIDE, c.r1 + tile.row * SIDE, c.c0 + tile.col * SIDE, c.c1 + tile.col * SIDE);
    } else {
      const { small } = this.shows;
      if (small) {
        if (small.ink !== ink.name) { ink.paint(small, (small.canvas ??= document.createElement("canvas")), small.index); small.ink = ink.name; }
        const end = small.cell * small.cols, x0 = edge.x(0), y0 = edge.y(0);
        context.drawImage(small.canvas, x0, y0, edge.x(end) - x0, edge.y(end) - y0);
      }
      for (const finer of this.below(part)) {
        const r = finer.row * SIDE, c = finer.col * SIDE;
        piece(finer, r, r + finer.rows, c, c + finer.cols);
      }
    }
    context.restore();
  }

  inkFor({ scale, low, top }) {
    const name = `${theme()} ${scale} ${low} ${top}`;
    return this.ink?.name === name ? this.ink : new Ink(scale, low, top);
  }

  numbers(context) {
    const { camera, shows } = this, { plot } = camera, level = this.level(), size = Math.min(13, camera.zoom * 0.27);
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = `${size}px ${css("--ui")}`;
    for (let r = level.r0; r < level.r1; r++) {
      for (let c = level.c0; c < level.c1; c++) {
        const weight = this.weightIn(r, c, 1);
        const x = camera.px(c + 0.5), y = camera.py(r + 0.5);
        if (weight === undefined || Number.isNaN(weight) || x - 1.3 * size < plot.left || x + 1.3 * size > plot.left + plot.width) continue;
        context.fillStyle = inkOn(colourAt(place(weight, shows.top, shows.scale, shows.low)));
        const label = told(weight, (w) => (w === 0 ? "0" : w >= 0.005 ? w.toFixed(2) : w.toExponential(0)));
        context.fillText(label, x, y);
      }
    }
  }

  // The weight of a cell of a level: NaN where it is masked, undefined while it is loading.
  weightIn(r, c, cell) {
    const name = this.name(cell, Math.floor(r / SIDE), Math.floor(c / SIDE)), tile = this.tiles.get(name);
    if (tile) return valueOf(tile, (r % SIDE) * tile.cols + (c % SIDE));
    return this.tiles.blank.has(name) ? NaN : undefined;
  }

  // The cell of the level on show at a point of the box, or null.
  cellAt(px, py) {
    const { camera } = this, { plot } = camera;
    if (!this.shows || px < plot.left || px > plot.left + plot.width || py < plot.top || py > plot.top + plot.height) return null;
    const x = Math.floor(camera.tx(px)), y = Math.floor(camera.ty(py));
    return x >= 0 && y >= 0 && x < camera.n && y < camera.n ? { row: y, col: x } : null;
  }

  // The cell of the token pair (row, col) and its weight.
  read({ row, col }) {
    const { cell } = this.level(), r = Math.floor(row / cell), c = Math.floor(col / cell);
    return { r, c, cell, weight: this.weightIn(r, c, cell) };
  }

  // Lines through the cursor's cell, and bands over the place that a search jumped to.
  cross(context = this.over.getContext("2d")) {
    const { camera } = this, { plot } = camera, { hit } = this.axes;
    if (context.canvas === this.over) context.clearRect(0, 0, this.box.clientWidth, this.box.clientHeight);
    if (!this.shows) return;
    context.save();
    context.beginPath();
    context.rect(0, 0, plot.left + plot.width, plot.top + plot.height + 20);
    context.clip();
    const band = (from, to, colour, across, strong) => {
      const a = across ? camera.py(from) : camera.px(from), b = across ? camera.py(to) : camera.px(to);
      context.strokeStyle = `rgba(${css(colour)}, ${strong})`;
      context.lineWidth = b - a < 7 ? 1 : 1.5;
      if (across) context.strokeRect(plot.left - 2, a - 1, plot.width + 4, Math.max(1, b - a + 2));
      else context.strokeRect(a - 1, plot.top - 2, Math.max(1, b - a + 2), plot.height + 4);
    };
    if (hit !== null) {
      band(hit, hit + 1, "--looks", true, 0.9);
      band(hit, hit + 1, "--looked", false, 0.9);
    }
    if (this.cursor) {
      const { r, c, cell } = this.read(this.cursor), end = (i) => Math.min(camera.n, (i + 1) * cell);
      band(r * cell, end(r), "--looks", true, 0.75);
      band(c * cell, end(c), "--looked", false, 0.75);
      context.strokeStyle = css("--ink");
      context.lineWidth = this.pinned ? 2.5 : 1.5;
      const x = camera.px(c * cell), y = camera.py(r * cell);
      context.strokeRect(x - 1, y - 1, camera.px(end(c)) - x + 2, camera.py(end(r)) - y + 2);
    }
    context.restore();
  }

  // Once the view rests and is complete, an automatic range follows it.
  settle() {
    clearTimeout(this.rest);
    if (this.shows.auto) this.rest = setTimeout(() => { if (this.shows && !this.tiles.busy) this.follow(); }, SETTLED);
  }

  follow() {
    const parts = this.parts().map((part) => [part, this.tiles.get(part.name)]).filter(([, tile]) => tile), found = [];
    for (const [{ r0, r1, c0, c1, row, col }, tile] of parts) {
      const r = row * SIDE, c = col * SIDE;
      found.push(...sampled(tile, { r0: r0 - r, r1: r1 - r, c0: c0 - c, c1: c1 - c }, SAMPLES / parts.length));
    }
    const range = rangeOf(Float32Array.from(found), this.shows.scale);
    if (range.top > 0) this.ranged(range);
  }
}

// The cells of a coarser tile, counted in the tile, that cover a part of a finer level.
function covering(tile, { cell, r0, r1, c0, c1 }) {
  const ratio = tile.cell / cell, r = tile.row * SIDE, c = tile.col * SIDE;
  return {
    r0: Math.floor(r0 / ratio) - r, r1: Math.min(tile.rows, Math.ceil(r1 / ratio) - r),
    c0: Math.floor(c0 / ratio) - c, c1: Math.min(tile.cols, Math.ceil(c1 / ratio) - c),
  };
}

// The pattern of masked areas.
const hatchSize = (ratio) => Math.round(8 * ratio);
function hatching(context, ratio) {
  const size = hatchSize(ratio), canvas = make("canvas", { width: size, height: size }), pen = canvas.getContext("2d");
  pen.fillStyle = css("--masked");
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = css("--line");
  pen.lineWidth = ratio;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift, size);
    pen.lineTo(shift + size, 0);
    pen.stroke();
  }
  return context.createPattern(canvas, "repeat");
}
