// Passages of a corpus: a query, what it attends to, and the text around them.

class CorpusPassages {
  // given: how strengths are measured, null without passages; box: where they are shown.
  constructor(given, box) {
    Object.assign(this, { given, box, turn: 0 });
    if (given) this.all = decoded("corpus-passages").then((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
  }

  // What a strength is, in a sentence.
  strengthIn() {
    return this.given.by === "weight" ? T.passages_by_weight : fill(T.passages_by, this.given);
  }

  async show(layer, head) {
    if (!this.given) return;
    const mine = ++this.turn, found = (await this.all)[`${layer}-${head}`];
    if (mine !== this.turn) return;
    if (!found?.strongest.length) {
      this.box.replaceChildren(make("p", { className: "hint", textContent: T.passages_none }));
      return;
    }
    this.box.replaceChildren(this.list(T.passages_strongest, found.strongest), this.list(T.passages_sampled, found.sampled));
  }

  list(title, passages) {
    const top = Math.max(1e-12, ...passages.map((one) => Math.abs(one.strength)));
    const items = passages.map((one) => this.item(one, top));
    return make("div", {}, make("h3", { textContent: title }), make("ol", { className: "passages" }, ...items));
  }

  item(one, top) {
    const query = one.positions.indexOf(one.query), known = [...one.positions.keys()].filter((i) => one.weights[i] !== null);
    const best = known.sort((a, b) => one.weights[b] - one.weights[a]).slice(0, 3).filter((i, k, [first]) => one.weights[i] > one.weights[first] / 20);
    const keys = best.map((i) => fill(T.passage_key, { token: nameOfToken(one, i), weight: fixed(one.weights[i]) })).join(T.list_comma);
    const bar = make("u");
    bar.style.width = `${(100 * Math.abs(one.strength)) / top}%`;
    return make("li", {},
      make("p", { className: "strength" }, make("b", { textContent: fixed(one.strength) }), make("small", { textContent: this.given.unit }), make("span", { className: "track" }, bar)),
      this.text(one, query),
      make("p", { className: "hint" }, make("span", { textContent: fill(T.passage_attends, { query: nameOfToken(one, query), keys }) }), " ", make("span", { className: "place", textContent: fill(T.passage_place, { file: fileName(one.file), where: one.where, at: one.first + one.query }), title: one.file })));
  }

  // The tokens, those of one character together; "…" where tokens are left out.
  text(one, query) {
    const line = make("p", { className: "strip passage", dir: "auto" }), most = Math.max(1e-12, ...one.weights.map((w) => w ?? 0));
    let text = "", weight = null, chosen = false;
    one.tokens.forEach((token, i) => {
      if (i && one.positions[i] !== one.positions[i - 1] + 1) line.append(make("span", { className: "gap", textContent: " … " }));
      else if (i === 0 && one.positions[0] > 0) line.append(make("span", { className: "gap", textContent: "… " }));
      text += token;
      if (one.weights[i] !== null) weight = (weight ?? 0) + one.weights[i];
      chosen ||= i === query;
      if (token === "" && one.positions[i + 1] === one.positions[i] + 1) return;  // a part of the next one
      const span = make("span", { className: chosen ? "pin" : "" });
      if (weight !== null) {
        span.style.backgroundImage = tint(0.86 * place(weight, Math.min(1, most), "linear"), 0);
        span.title = fixed(weight);
      }
      const after = fillUnit(span, text);
      for (const end of span.querySelectorAll("br")) end.replaceWith(" ");  // of a line: its sign is enough
      line.append(span, ...(after.length ? [" "] : []));
      text = ""; weight = null; chosen = false;
    });
    line.append(make("span", { className: "gap", textContent: " …" }));
    return line;
  }
}

// The text of a token; a part of a character is named with the part that ends it.
function nameOfToken(one, i) {
  let last = i;
  while (one.tokens[last] === "" && one.positions[last + 1] === one.positions[last] + 1) last++;
  return clipped(named(one.tokens[last]), 18);
}

const fileName = (path) => path.split(/[\\/]/).pop();
