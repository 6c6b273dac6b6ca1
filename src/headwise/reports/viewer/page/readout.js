// What the cursor's cell says: its weight, its two places, and the text around them.

const AROUND = 14;      // tokens on either side of a place
const LONGEST = 28;     // characters of a cell's own text

class Readout {
  constructor(box, plot, pieces) {
    Object.assign(this, { box, plot, pieces, said: "" });
  }

  draw() {
    const { plot } = this, { cursor } = plot;
    if (!cursor) { this.tell("hint", [make("span", { className: "muted", textContent: T.point_hint })]); return; }
    const { r, c, cell, weight } = plot.read(cursor), sides = [this.side(T.query, r, cell, "looks"), this.side(T.key, c, cell, "looked")];
    const name = JSON.stringify([language, weight ?? "…", Number.isNaN(weight), plot.shows.reduce, cell, plot.pinned, ...sides.map((side) => side.said)]);
    if (name === this.said) return;
    const nothing = Number.isNaN(weight);
    const number = make("b", { textContent: weight === undefined ? "…" : nothing ? "–" : fixed(weight) });
    const note = weight === undefined ? T.not_there_yet : nothing ? T.nothing_allowed : this.note(cell);
    this.tell(name, [make("div", { className: "weight" }, number, make("small", { textContent: note })), make("dl", {}, ...sides.flatMap((side) => side.parts))]);
  }

  // The meaning of a number at this level.
  note(cell) {
    return cell === 1 ? T.weight : fill(this.plot.shows.reduce === "max" ? T.max_of : T.mean_of, { c: cell });
  }

  // One sentence for those who listen.
  sentence() {
    const { r, c, cell, weight } = this.plot.read(this.plot.cursor), of = (i) => this.range(i, cell);
    const tokens = (i) => clipped(shown(this.pieces.between(i * cell, (i + 1) * cell) ?? ""), LONGEST);
    const number = weight === undefined ? T.not_there_yet : Number.isNaN(weight) ? T.nothing_allowed : `${this.note(cell)} ${fixed(weight)}`;
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
