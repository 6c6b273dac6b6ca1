// Tiles of the map: those loaded, those loading, and those not worth a request.

const SIDE = 256;       // cells a tile's side
const AT_ONCE = 6;      // requests on their way
const KEPT = 400;       // decoded tiles, some 150 MB with their pictures
const SULK = 4000;      // ms until a tile that was refused is asked for again

class Tiles {
  constructor(arrived) {
    Object.assign(this, { arrived, kept: new Map(), blank: new Set(), way: new Map(), wanted: [], refused: new Map() });
  }

  // Another text: nothing of the last one holds.
  open(text) {
    this.text = text;
    this.leave();
    this.kept.clear();
    this.blank.clear();
    this.refused.clear();
  }

  // Stop all requests.
  leave() {
    this.wanted = [];
    for (const request of this.way.values()) request.abort();
    this.way.clear();
  }

  get(name) {
    const tile = this.kept.get(name);
    if (tile) {
      this.kept.delete(name);
      this.kept.set(name, tile);  // now the newest
    }
    return tile;
  }

  // What the view wants now, nearest first: [{name, layer, head, cell, row, col, reduce}]; all else is called off.
  want(wanted) {
    const names = new Set(wanted.map((tile) => tile.name)), now = performance.now();
    for (const [name, request] of this.way) {
      if (names.has(name)) continue;
      request.abort();
      this.way.delete(name);
    }
    this.wanted = wanted.filter(({ name }) => !this.kept.has(name) && !this.way.has(name) && !((this.refused.get(name) ?? 0) > now));
    this.next();
  }

  get busy() { return this.way.size + this.wanted.length > 0; }

  next() {
    while (this.way.size < AT_ONCE && this.wanted.length) this.fetch(this.wanted.shift());
  }

  async fetch({ name, layer, head, cell, row, col, reduce }) {
    const request = new AbortController();
    this.way.set(name, request);
    try {
      const tile = await askMaps(`/api/texts/${this.text}/tiles/${layer}/${head}/${cell}/${row}/${col}?reduce=${reduce}`, request.signal);
      if (request.signal.aborted) return;
      this.keep(name, Object.assign(tile, { cell, row, col }));
    } catch (error) {
      if (request.signal.aborted) return;
      this.refused.set(name, performance.now() + SULK);
      complain(error);
    }
    this.way.delete(name);
    this.next();
    this.arrived();
  }

  keep(name, tile) {
    this.kept.set(name, tile);
    while (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value);
  }

  // A tile's picture in this ink.
  picture(tile, ink) {
    if (tile.ink !== ink.name) {
      tile.canvas ??= document.createElement("canvas");
      ink.paint(tile, tile.canvas);
      tile.ink = ink.name;
    }
    return tile.canvas;
  }

  // Whether a coarser tile shows that this part of it is fully masked, [r0, r1) × [c0, c1) of its cells.
  isBlank(name, tile, { r0, r1, c0, c1 }) {
    if (this.blank.has(name)) return true;
    for (let r = r0; r < r1; r++) for (let c = c0; c < c1; c++) if (!isNothing(tile.codes[r * tile.cols + c])) return false;
    this.blank.add(name);
    return true;
  }
}
