// What a head writes for a chosen query: how much of it comes from each key, which tokens it makes more likely, and which
// channels of the query and the key make the score.

const CHANNEL_LEVELS = 31;  // of a query or key channel, on either side of zero

class Writes {
  constructor() {
    Object.assign(this, { key: null, turn: 0, known: new Map() });
  }

  // The numbers of one layer, made of the bytes of an element of the page when they are first needed; a promise.
  once(name, index, layer, make) {
    const id = `${name}-${index}-${layer}`;
    if (!this.known.has(id)) this.known.set(id, decoded(id).then(make));
    return this.known.get(id);
  }

  // Two bytes a number, all high ones first: those of one head, in parts of its largest number.
  async numbers(name, index, layer, head) {
    const { tops, levels } = REPORT.passages[index].writes[name];
    const all = await this.once(name, index, layer, (bytes) => {
      const count = bytes.length / 2, each = count / tops[layer].length;
      return Float32Array.from({ length: count }, (_, i) => {
        const code = ((bytes[i] << 24) >> 16) | bytes[count + i];
        return code === -32768 ? NaN : (code * tops[layer][Math.floor(i / each)]) / levels;
      });
    });
    return part(all, head, tops[layer].length);
  }

  // The tokens with the largest effects, as indices of words.
  async tokens(index, layer, head) {
    const all = await this.once("tokens", index, layer, (bytes) => {
      const count = bytes.length / 3;
      return Uint32Array.from({ length: count }, (_, i) => (bytes[2 * count + i] << 16) | (bytes[i] << 8) | bytes[count + i]);
    });
    return part(all, head, REPORT.heads);
  }

  // Channels of queries or keys of one head, [C, n].
  async side(name, index, layer, head) {
    const all = await this.once(name, index, layer, (bytes) => Float32Array.from(bytes, (byte) => {
      const code = (byte << 24) >> 24;
      return code === -128 ? NaN : code / CHANNEL_LEVELS;
    }));
    return part(all, head, REPORT.heads);
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
    if (given.norms) {
      const norms = await this.numbers("norms", index, layer, head);
      const sizes = Float32Array.from(keys, (key) => shares[key.index] * norms[key.c0] || 0);
      parts.push(topList(fill(T.writes_from, { what: unitName(unit) }), "--looks", sizes, Math.max(1e-12, ...sizes), keys, 8));
    }
    if (given.logits) {
      const next = (await this.numbers("logits", index, layer, head))[query], following = unitsOf(place0.q)[i + 1], lines = [];
      if (following && !Number.isNaN(next)) lines.push([unitName(following), next, T.next_token]);
      if (given.effects) {
        const values = part(await this.numbers("effects", index, layer, head), query, place0.rows);
        const tokens = part(await this.tokens(index, layer, head), query, place0.rows);
        tokens.forEach((word, k) => { if (!Number.isNaN(values[k])) lines.push([named(given.vocabulary[word]), values[k], ""]); });
      }
      parts.push(this.signed(fill(T.writes_logits, { what: unitName(unit) }), lines));
    }
    if (given.channels) {
      const strongest = shares.reduce((best, share, k) => (share > shares[best] ? k : best), 0), key = this.key ?? keys[strongest];
      const [queries, others] = [await this.side("queries", index, layer, head), await this.side("keys", index, layer, head)];
      const which = given.channels.which[layer][head], scales = (name, k) => given.channels.scales[name][layer][head][k];
      const lines = which.map((channel, k) => {
        const q = queries[k * place0.rows + query] * scales("queries", k), w = others[k * place0.columns + key.c0] * scales("keys", k);
        return [fill(T.channel, { c: channel }), q * w, ""];
      });
      const names = { what: unitName(unit), key: unitName(key), n: lines.length, of: given.channels.of[layer] };
      const unknown = lines.some(([, value]) => Number.isNaN(value));
      parts.push(this.signed(fill(T.writes_channels, names), unknown ? [] : lines.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]))));
    }
    if (mine === this.turn) byId("writes").replaceChildren(...parts);
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

// One of `count` equal parts of an array.
const part = (array, i, count) => array.subarray((i * array.length) / count, ((i + 1) * array.length) / count);
