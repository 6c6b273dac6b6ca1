// An image whose patches are tokens, under the weights between them and the token under the pointer or pinned.

const VEIL = 0.5;              // of the image, under weights
const HEAT = [0.08, 0.84];     // opacity of a weight of 0, and what the largest adds

class PatchedImage {
  constructor(box) {
    Object.assign(this, { box, canvas: byId("image-canvas"), picture: null, towards: "looks" });
    this.canvas.addEventListener("pointermove", (event) => onUnit(this.unitUnder(event), event));
    this.canvas.addEventListener("pointerleave", () => onUnit(null));
    this.canvas.addEventListener("click", (event) => { const unit = this.unitUnder(event); if (unit) pin(unit); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    for (const name of ["looks", "looked"]) byId(`image-${name}`).addEventListener("click", () => { this.towards = name; showUnit(); remember(); });
    byId("save-image").addEventListener("click", () => download(this.canvas, `layer${state.layer}-head${state.head}-image.png`));
  }

  open({ q, k, image }) {
    this.box.hidden = !image;
    this.picture = null;
    if (!image || q.patches !== undefined) return this.load(image);
    for (const [side, first] of [[q, image.query], [k, image.key]]) {
      if (first === null) { side.patches ??= null; continue; }
      // The unit of each patch, and the patch of each unit that has one.
      const units = unitsOf(side), at = Array.from({ length: image.rows * image.columns }, (_, i) => Math.floor((first + i) / side.cell));
      side.patches = at.map((cell) => units[side.unitOfCell[cell]]);
      side.patchOf = new Map();
      side.patches.forEach((unit, i) => { if (!side.patchOf.has(unit)) side.patchOf.set(unit, i); });
    }
    return this.load(image);
  }

  load(image) {
    if (!image) return;
    const picture = new Image();
    picture.onload = () => { if (passage().image === image) { this.picture = picture; showUnit(); } };
    picture.src = image.source;
  }

  // The side whose patches are pointed at: the keys', unless only queries are patches.
  get side() {
    const { q, k } = passage();
    return k.patches ? k : q;
  }

  unitUnder(event) {
    const { image } = passage(), { left, top, width, height } = this.canvas.getBoundingClientRect();
    const r = Math.floor(((event.clientY - top) / height) * image.rows), c = Math.floor(((event.clientX - left) / width) * image.columns);
    return r >= 0 && c >= 0 && r < image.rows && c < image.columns ? this.side.patches[r * image.columns + c] : null;
  }

  // Arrow keys walk over the patches, with what is pinned if something is; Enter pins.
  key(event) {
    const { image } = passage(), { patches, patchOf } = this.side, now = pinned ?? pointed, at = patchOf.get(now), step = ARROWS[event.key];
    if (event.key === "Enter" && at !== undefined) { event.preventDefault(); pin(now); }
    if (!step) return;
    event.preventDefault();
    const r = at === undefined ? 0 : Math.floor(at / image.columns) + step[0], c = at === undefined ? 0 : (at % image.columns) + step[1];
    if (r < 0 || c < 0 || r >= image.rows || c >= image.columns) return;
    const next = patches[r * image.columns + c];
    if (pinned) pin(next); else { pointed = next; showUnit(); }
  }

  // Weights of each patch: those that the unit gives to them, or gets from them. null where it does neither.
  weights(unit, shares) {
    const { q, k } = passage(), found = {};
    if (unit?.side === q && k.patches) found.looks = k.patches.map((u) => shares.looks[u.index]);
    if (unit?.side === k && q.patches) found.looked = q.patches.map((u) => shares.looked[u.index]);
    const some = (name) => found[name]?.some((weight) => weight > 0);
    byId("image-towards").hidden = !(some("looks") && some("looked"));
    const name = some(this.towards) ? this.towards : some("looks") || !found.looked ? "looks" : "looked";
    for (const one of ["looks", "looked"]) byId(`image-${one}`).setAttribute("aria-pressed", String(one === name));
    return found[name] ? { name, values: found[name] } : null;
  }

  show(unit, shares) {
    const { image } = passage();
    if (!image || !this.picture) return;
    const width = Math.min(this.box.clientWidth, (0.6 * innerHeight * image.width) / image.height), height = (width * image.height) / image.width;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.aspectRatio = `${image.width} / ${image.height}`;
    const context = fitCanvas(this.canvas, width, height), found = this.weights(unit, shares);
    context.drawImage(this.picture, 0, 0, width, height);
    const top = !found ? 0 : state.range === "all" ? passage()[state.kind].all : Math.max(...found.values);
    const at = (i) => {
      const r = Math.floor(i / image.columns), c = i % image.columns, edge = (part, of, size) => Math.round((part / of) * size);
      const [x0, x1] = [edge(c, image.columns, width), edge(c + 1, image.columns, width)], [y0, y1] = [edge(r, image.rows, height), edge(r + 1, image.rows, height)];
      return [x0, y0, x1 - x0, y1 - y0];
    };
    if (top > 0) {
      context.globalAlpha = VEIL;
      context.fillStyle = css("--panel");
      context.fillRect(0, 0, width, height);
      found.values.forEach((weight, i) => {
        const part = place(weight, top, state.scale);
        context.globalAlpha = HEAT[0] + HEAT[1] * part;
        context.fillStyle = `rgb(${colourAt(part)})`;
        context.fillRect(...at(i));
      });
      context.globalAlpha = 1;
    }
    const own = this.side.patchOf.has(unit) ? this.side : passage().q.patchOf?.has(unit) ? passage().q : null;
    own?.patches.forEach((one, i) => { if (one === unit) this.frame(context, at(i)); });
    byId("image-bar-row").hidden = !(top > 0);
    if (top > 0) drawBar(byId("image-bar"), top, state.scale, false);
    byId("image-says").textContent = found ? this.says(unit, found) : T.image_hint;
  }

  // A line of both colours is seen on any image.
  frame(context, [x, y, width, height]) {
    for (const [colour, wide] of [["#ffffff", 4], ["#1d1e26", 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = wide;
      context.strokeRect(x + 1, y + 1, width - 2, height - 2);
    }
  }

  says(unit, { name, values }) {
    const { q, k } = passage(), { patches } = name === "looks" ? k : q, units = new Map(patches.map((u, i) => [u, values[i]]));
    const sum = [...units.values()].reduce((all, weight) => all + weight, 0);
    return fill(T[`image_sum_${name}`], { what: unitName(unit), sum: fixed(name === "looks" ? sum : sum / units.size) });
  }
}
