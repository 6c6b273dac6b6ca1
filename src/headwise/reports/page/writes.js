// What a head writes for a chosen query: how much of it comes from each key, which tokens it makes more likely, and which
// channels of the query and the key make the score.

const CHANNEL_LEVELS = 31;  // of a query or key channel, on either side of zero

class Writes {
  constructor() {
    Object.assign(this, { key: null, turn: 0, known: new Map() });
  }

  // Numbers [heads, …] of one layer of the passage, as Float32Array, and how many a head has; a promise.
  numbers(name, index, layer) {
    const id = `${name}-${index}-${layer}`, { tops } = REPORT.passages[index].writes[name], top = tops[layer];
    if (!this.known.has(id)) {
      this.known.set(id, decoded(id).then((bytes) => {
        const wide = name === "channels" ? 1 : 2, count = bytes.length / wide, each = count / top.length, out = new Float32Array(count);
        for (let i = 0; i < count; i++) {
          const code = wide === 1 ? (bytes[i] << 24) >> 24 : ((bytes[i] << 24) >> 16) | bytes[count + i];
          out[i] = code === (wide === 1 ? -128 : -32768) ? NaN : (code * top[Math.floor(i / each)]) / (wide === 1 ? CHANNEL_LEVELS : 32767);
        }
        return { out, each };
      }));
    }
    return this.known.get(id);
  }

  show(unit) {
    const place0 = passage(), { writes: given } = place0, mine = ++this.turn;
    byId("writes-panel").hidden = !given;
    byId("writes-hint").hidden = Boolean(unit);
    if (!given || !unit || unit.side !== place0.q) { byId("writes").replaceChildren(); return; }
    if (this.key && !unitsOf(place0.k).includes(this.key)) this.key = null;
    this.read(unit, given, mine);
  }

  async read(unit, given, mine) {
    const { passage: index, layer, head } = state, place0 = passage(), i = unit.index, keys = unitsOf(place0.k), parts = [];
    const shares = exchange(current, place0, unit, "mean").looks, query = unit.c0;
    const of = async (name) => {
      const { out, each } = await this.numbers(name, index, layer);
      return out.subarray(head * each, (head + 1) * each);
    };
    if (given.norms) {
      const norms = await of("norms"), sizes = Float32Array.from(keys, (key) => shares[key.index] * norms[key.c0]);
      parts.push(topList(fill(T.writes_from, { what: unitName(unit) }), "--looks", sizes.map((x) => (Number.isNaN(x) ? 0 : x)), Math.max(1e-12, ...sizes.filter((x) => !Number.isNaN(x))), keys, 8));
    }
    if (given.logits) {
      const next = (await of("logits"))[query], following = unitsOf(place0.q)[i + 1], lines = [];
      if (following && !Number.isNaN(next)) lines.push([`${unitName(following)}`, next, T.next_token]);
      if (given.promoted) {
        const values = await of("promoted"), each = values.length / place0.rows, at = (layer * REPORT.heads + head) * place0.rows + query;
        const words = (await this.promoted(index)).subarray(at * each, (at + 1) * each);
        words.forEach((word, k) => { if (!Number.isNaN(values[query * each + k])) lines.push([named(given.words[word]), values[query * each + k], ""]); });
      }
      parts.push(this.signed(fill(T.writes_logits, { what: unitName(unit) }), lines));
    }
    if (given.channels) {
      const strongest = shares.reduce((best, share, k) => (share > shares[best] ? k : best), 0), key = this.key ?? keys[strongest];
      const which = given.channels.which[layer][head], numbers = await of("channels"), each = which.length, side = place0.rows * each;
      const lines = which.map((channel, k) => {
        const [q, w] = given.channels.scales[layer][head][k];
        return [fill(T.channel, { c: channel }), numbers[query * each + k] * q * numbers[side + key.c0 * each + k] * w, ""];
      });
      const unknown = lines.some(([, value]) => Number.isNaN(value));
      parts.push(this.signed(fill(T.writes_channels, { what: unitName(unit), key: unitName(key), n: lines.length, of: given.channels.of[layer] }), unknown ? [] : lines.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]))));
    }
    if (mine === this.turn) byId("writes").replaceChildren(...parts);
  }

  // The indices of promoted tokens, of all layers.
  promoted(index) {
    const id = `words-${index}`;
    if (!this.known.has(id)) this.known.set(id, decoded(id).then((bytes) => Uint16Array.from({ length: bytes.length / 2 }, (_, i) => (bytes[i] << 8) | bytes[bytes.length / 2 + i])));
    return this.known.get(id);
  }

  signed(title, lines) {
    const top = Math.max(1e-12, ...lines.map(([, value]) => Math.abs(value)));
    const items = lines.map(([name, value, note]) => {
      const bar = make("u", { className: value < 0 ? "below" : "" });
      bar.style.width = `${(100 * Math.abs(value)) / top}%`;
      const label = make("b", { textContent: clipped(name, 14) });
      if (note) label.append(" ", make("small", { textContent: note }));
      return make("li", {}, label, bar, make("span", { textContent: `${value < 0 ? "−" : "+"}${fixed(Math.abs(value))}` }));
    });
    return make("div", {}, make("h3", { textContent: title }), items.length ? make("ol", { className: "ranked" }, ...items) : make("p", { className: "hint", textContent: T.none }));
  }
}
