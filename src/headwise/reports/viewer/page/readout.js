// What the cursor's cell says: its weight, its two places, and the text around them.

const AROUND = 14;      // tokens on either side of a place
const LONGEST = 28;     // characters of a cell's own text

class Readout {
  constructor(box, plot, pieces, pairs) {
    Object.assign(this, { box, plot, pieces, pairs, said: "" });
  }

  draw() {
    const { plot } = this, { cursor } = plot;
    if (!cursor) { this.tell("hint", [make("span", { className: "muted", textContent: T.point_hint })]); return; }
    const { r, c, cell, weight, words } = this.read(), sides = [this.side(T.query, r, cell, "looks"), this.side(T.key, c, cell, "looked")];
    const name = JSON.stringify([language, words, plot.shows.reduce, cell, plot.pinned, ...sides.map((side) => side.said)]);
    if (name === this.said) return;
    const number = make("b", { textContent: words });
    const note = weight === undefined ? T.not_there_yet : Number.isNaN(weight) ? T.nothing_allowed : this.note(cell);
    this.tell(name, [make("div", { className: "weight" }, number, make("small", { textContent: note })), make("dl", {}, ...sides.flatMap((side) => side.parts))]);
  }

  // The cursor's cell and its weight: of the tile with three digits, of the map itself, once it is there, with six.
  read() {
    const { plot, pairs } = this, at = plot.read(plot.cursor), weight = pairs.weight ?? at.weight;
    const words = weight === undefined ? "…" : Number.isNaN(weight) ? "–" : pairs.weight === undefined ? told(weight) : String(Number(weight.toPrecision(6)));
    return { ...at, weight, words };
  }

  // The meaning of a number at this level.
  note(cell) {
    return cell === 1 ? T.weight : fill(this.plot.shows.reduce === "max" ? T.max_of : T.mean_of, { c: cell });
  }

  // One sentence for those who listen.
  sentence() {
    const { r, c, cell, weight, words } = this.read(), of = (i) => this.range(i, cell);
    const tokens = (i) => clipped(shown(this.pieces.between(i * cell, (i + 1) * cell) ?? ""), LONGEST);
    const number = weight === undefined ? T.not_there_yet : Number.isNaN(weight) ? T.nothing_allowed : `${this.note(cell)} ${words}`;
    return `${T.query} ${of(r)} ${tokens(r)}, ${T.key} ${of(c)} ${tokens(c)}: ${number}`;
  }

  range(i, cell) {
    const last = Math.min(this.plot.camera.n, (i + 1) * cell) - 1;
    return cell === 1 ? grouped(i) : `${grouped(i * cell)}–${grouped(last)}`;
  }

  side(word, i, cell, colour) {
    const from = i * cell, to = Math.min(this.plot.camera.n, from + cell), { pieces } = this;
    const own = pieces.between(from, cell > 64 ? from + 64 : to), before = pieces.between(from - AROUND, from), after = pieces.between(to, to + AROUND, true);
    const marked = own === null ? "…" : cell === 1 ? shown(own) : clipped(inLine(own), LONGEST);
    const context = make("dd", { className: "context" },
      make("span", { className: "before", textContent: inLine((before ?? "") + pieces.ahead(from)) }), make("mark", { className: colour, textContent: marked }),
      make("span", { textContent: inLine(after ?? "") }));
    return {
      said: [word, from, before, own, after],
      parts: [make("dt", {}, make("i", { className: colour }), `${word} `, make("span", { textContent: this.range(i, cell) })), context],
    };
  }

  tell(name, parts) {
    if (name === this.said) return;
    this.said = name;
    this.box.replaceChildren(...parts);
  }
}

// Text that stays in its line and cannot turn it around; spaces stay spaces.
function inLine(text) {
  return [...text].map((c) => (c === " " ? c : SIGNS[c] ?? (UNSEEN.test(c) && !/[\u200d\ufe0f]/.test(c) ? "·" : c))).join("");
}
