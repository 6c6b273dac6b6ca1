// The tokens of the text, fetched in stretches when they are first shown.

const STRETCH = 1024;   // tokens a request
const STRETCHES = 200;  // kept
const WORDY = 1.8;      // characters a token from which on tokens are words and need wider margins

class Pieces {
  constructor(arrived) {
    Object.assign(this, { arrived, kept: new Map(), n: 0 });
  }

  open(text, n) {
    this.leave?.abort();
    this.leave = new AbortController();
    Object.assign(this, { text, n, wordy: false });
    this.kept.clear();
    this.at(0);
  }

  // The piece at a position; undefined while it is on its way.
  at(i) {
    return this.stretch(Math.floor(i / STRETCH))?.[i % STRETCH];
  }

  // The text of [from, to), or null while a part of it is on its way; with the text between tokens, also
  // at the beginning if it continues from an earlier token.
  between(from, to, goesOn = false) {
    let text = "";
    for (let i = Math.max(0, from); i < Math.min(this.n, to); i++) {
      const piece = this.at(i);
      if (piece === undefined) return null;
      text += (i > from || goesOn ? this.kept.get(Math.floor(i / STRETCH)).ahead?.[i % STRETCH] ?? "" : "") + piece;
    }
    return text;
  }

  // The text between a token and the one before.
  ahead(i) {
    return i < this.n && this.at(i) !== undefined ? this.kept.get(Math.floor(i / STRETCH)).ahead?.[i % STRETCH] ?? "" : "";
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
      const found = await askJSON(`/api/texts/${this.text}/tokens?from=${from}&to=${to}`, { signal });
      Object.assign(entry, found);
      const before = this.wordy;
      this.wordy ||= found.pieces.join("").length > WORDY * found.pieces.length;
      this.arrived(this.wordy !== before);
    } catch (error) {
      if (signal.aborted) return;
      complain(error);
      setTimeout(() => { if (this.kept.get(number) === entry) this.kept.delete(number); }, SULK);
    }
  }
}
