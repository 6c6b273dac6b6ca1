// A token in all heads: which key it attends to most in each head, and which query attends to it most.

const IN_LIST = 12;

class Everywhere {
  constructor(choose) {
    Object.assign(this, { choose, turn: 0 });
    byId("no-sink").addEventListener("change", () => this.show(this.unit));
    byId("everywhere-panel").hidden = REPORT.counts.reduce((a, b) => a + b) < 2;
  }

  // Wait until the pointer rests: all layers are read.
  show(unit) {
    this.unit = unit;
    const mine = ++this.turn;
    clearTimeout(this.wait);
    byId("everywhere-hint").hidden = Boolean(unit);
    if (!unit) { byId("everywhere").replaceChildren(); return; }
    this.wait = setTimeout(() => this.read(unit, mine), unit === pinned ? 0 : 120);
  }

  async read(unit, mine) {
    const place0 = passage(), index = state.passage, { kind } = state, looks = [], looked = [];
    for (const layer of place0.layers) {
      for (let head = 0; head < REPORT.counts[layer]; head++) {
        const map = await mapOf(index, layer, head, kind);
        if (mine !== this.turn) return;
        const found = exchange(map, place0, unit, kind);
        if (unit.side === place0.q) looks.push({ layer, head, ...this.largest(found.looks, unitsOf(place0.k), unit) });
        if (unit.side === place0.k) looked.push({ layer, head, ...this.largest(found.looked, unitsOf(place0.q), unit) });
      }
    }
    const lists = [];
    if (looks.length) lists.push(this.list(fill(T.looks_where, { what: unitName(unit) }), looks, "--looks", (line) => `→ ${unitName(line.unit)}`));
    if (looked.length) lists.push(this.list(fill(T.looked_where, { what: unitName(unit) }), looked, "--looked", (line) => `← ${unitName(line.unit)}`));
    byId("everywhere").replaceChildren(...lists);
  }

  // The largest of the shares, to five digits, so that rounding orders no heads; without the first token and the unit itself if that is chosen.
  largest(shares, units, unit) {
    const plain = byId("no-sink").checked;
    let most = -1;
    for (let i = 0; i < shares.length; i++) {
      const left = plain && (units[i].c0 === 0 || (units === unitsOf(unit.side) && i === unit.index));
      if (!left && (most < 0 || shares[i] > shares[most])) most = i;
    }
    return most < 0 ? { unit: null, weight: 0 } : { unit: units[most], weight: Number(shares[most].toPrecision(5)) };
  }

  list(title, lines, colour, name) {
    const order = lines.filter((line) => line.weight > 0).sort((a, b) => b.weight - a.weight).slice(0, IN_LIST), top = order[0]?.weight || 1;
    const items = order.map((line) => {
      const button = make("button", { type: "button", textContent: nameOfHead(line.layer, line.head), title: REPORT.patterns[line.layer][line.head] });
      button.addEventListener("click", () => this.choose(line.layer, line.head));
      const bar = make("u"), dot = make("i", { className: "dot" });
      dot.style.setProperty("--kind", colourOf(line.layer, line.head));
      bar.style.cssText = `width: ${(100 * line.weight) / top}%; background: rgba(var(${colour}), .8)`;
      return make("li", {}, make("span", {}, dot, button), make("b", { textContent: name(line) }), bar, make("span", { textContent: fixed(line.weight) }));
    });
    return make("div", {}, make("h3", { textContent: title }), items.length ? make("ol", { className: "ranked four" }, ...items) : make("p", { className: "hint", textContent: T.none }));
  }
}
