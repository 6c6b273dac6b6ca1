// The text, a token at a time, fetched in stretches when it is first looked at.

const STRETCH = 1024;   // tokens a request
const STRETCHES = 200;  // kept

class Pieces {
  constructor(arrived) {
    Object.assign(this, { arrived, kept: new Map(), n: 0 });
  }

  open(text, n) {
    this.leave?.abort();
    this.leave = new AbortController();
    Object.assign(this, { text, n });
    this.kept.clear();
  }

  // The piece at a position; undefined while it is on its way.
  at(i) {
    return this.stretch(Math.floor(i / STRETCH))?.[i % STRETCH];
  }

  // The text of [from, to), or null while a part of it is on its way.
  between(from, to) {
    let text = "";
    for (let i = Math.max(0, from); i < Math.min(this.n, to); i++) {
      const piece = this.at(i);
      if (piece === undefined) return null;
      text += piece;
    }
    return text;
  }

  stretch(number) {
    const found = this.kept.get(number);
    if (found) return found.pieces;
    const entry = { pieces: null };
    this.kept.set(number, entry);
    if (this.kept.size > STRETCHES) this.kept.delete(this.kept.keys().next().value);
    this.fetch(number, entry);
    return null;
  }

  async fetch(number, entry) {
    const from = number * STRETCH, to = Math.min(this.n, from + STRETCH), { signal } = this.leave;
    try {
      entry.pieces = (await askJSON(`/api/texts/${this.text}/tokens?from=${from}&to=${to}`, { signal })).pieces;
      this.arrived();
    } catch (error) {
      if (signal.aborted) return;
      complain(error);
      setTimeout(() => { if (this.kept.get(number) === entry) this.kept.delete(number); }, SULK);
    }
  }
}
