// The keys that a token attends to most, and the queries that attend to it most, in the head on show.

const IN_LIST = 8;

class Tops {
  // Calls `chosen({row, col})` for a click on a line.
  constructor(box, chosen) {
    Object.assign(this, { box, chosen, token: null });
  }

  hide() {
    this.leave?.abort();
    this.token = null;
    this.box.hidden = true;
  }

  async show(token) {
    this.leave?.abort();
    this.token = token;
    const { signal } = (this.leave = new AbortController()), { layer, head } = state;
    if (layer === null) return;
    try {
      const found = await askJSON(`/api/texts/${text.id}/tops/${layer}/${head}/${token}?k=${IN_LIST}`, { signal });
      if (signal.aborted || token !== this.token) return;
      const what = clipped(shown(found.piece.trim() || found.piece), 16);
      this.box.replaceChildren(
        this.list(fill(T.looks_most, { what }), "--looks", found.keys, (at) => ({ row: token, col: at })),
        this.list(fill(T.looked_most, { what }), "--looked", found.queries, (at) => ({ row: at, col: token })),
      );
      this.box.hidden = false;
    } catch (error) {
      if (!signal.aborted) complain(error);
    }
  }

  list(title, colour, lines, cell) {
    const top = lines[0]?.weight || 1, items = lines.map(({ at, piece, weight }) => {
      const button = make("button", { type: "button", textContent: clipped(shown(piece.trim() || piece), 14), title: grouped(at) }), bar = make("u");
      button.addEventListener("click", () => this.chosen(cell(at)));
      bar.style.cssText = `width: ${(100 * weight) / top}%; background: rgba(var(${colour}), .8)`;
      return make("li", {}, button, make("span", { className: "place", textContent: grouped(at) }), bar, make("span", { textContent: fixed(weight) }));
    });
    return make("div", {}, make("h3", { textContent: title }), items.length ? make("ol", {}, ...items) : make("p", { className: "hint", textContent: T.none }));
  }
}
