// The text: whole characters from tokens, visible signs, and the strip with its two tints.

// Ends of the characters as people see them: an emoji of many code points is one.
function graphemeEnds(text) {
  const ends = new Set();
  if (typeof Intl !== "undefined" && Intl.Segmenter) {
    for (const { index, segment } of new Intl.Segmenter(undefined, { granularity: "grapheme" }).segment(text)) ends.add(index + segment.length);
  } else {
    let at = 0;
    for (const c of text) ends.add((at += c.length));
  }
  return ends;
}

// What can be pointed at on one side of a map: runs of cells whose text begins and ends between whole characters.
function unitsOf(side) {
  if (side.units) return side.units;
  const { cell: wide, tokens } = side, text = tokens.join(""), ends = graphemeEnds(text), units = [];
  const cellEnds = [];
  let at = 0;
  tokens.forEach((token, i) => {
    at += token.length;
    if ((i + 1) % wide === 0 || i + 1 === tokens.length) cellEnds.push(at);
  });
  let from = 0, first = 0;
  cellEnds.forEach((end, cell) => {
    // A character that is cut between two pooled cells belongs to the first of them.
    end = Math.max(end, from);
    if (wide > 1) while (end < text.length && !ends.has(end)) end++;
    const whole = end === text.length ? cell === cellEnds.length - 1 : ends.has(end) && cellEnds[cell + 1] !== end;
    if (!whole && wide === 1) return;
    units.push({ side, index: units.length, c0: first, c1: cell + 1, text: text.slice(from, end), special: wide === 1 && side.special.has(cell) });
    from = end;
    first = cell + 1;
  });
  side.unitOfCell = new Int32Array(side.cells);
  for (const unit of units) side.unitOfCell.fill(unit.index, unit.c0, unit.c1);
  return (side.units = units);
}

// A word's name needs no sign for the blank before it.
const named = (text) => shown(text.trim() || text);
const unitName = (unit) => clipped(named(unit.text.length > 40 ? unit.text.slice(0, 40) : unit.text), 18);

function tokenRange(side, c0, c1) {
  const from = c0 * side.cell, to = Math.min(c1 * side.cell, side.tokens.length) - 1;
  return from === to ? `${from}` : `${from}–${to}`;
}

function buildStrip(strip, side) {
  const parts = [], { patchOf } = side;
  for (const unit of unitsOf(side)) {
    const span = make("span");
    span.dataset.unit = unit.index;
    if (patchOf?.has(unit)) {  // shown as the image
      span.hidden = true;
      if (unit === side.patches[0]) parts.push(make("span", { className: "image-chip", textContent: fill(T.image_patches, passage().image) }));
      parts.push(span, " ");
      continue;
    }
    if (unit.special) {
      span.append(make("span", { className: "code", textContent: unit.text }));
      parts.push(span, " ");
      continue;
    }
    const after = fillUnit(span, unit.text);
    parts.push(span, ...after);
  }
  strip.classList.toggle("pooled", side.cell > 1);
  strip.replaceChildren(...parts);
  side.spans = [...strip.querySelectorAll("[data-unit]")];
}

// Put a unit's text into its span, signs in their own colour; what must follow outside (breaks) is returned.
function fillUnit(span, text) {
  if (text === "") return [];
  if (UNSEEN.test(text) && !/[\n\t\r]/.test(text)) {
    span.append(make("span", { className: "code", textContent: codeOf(text) }));
    return [];
  }
  let plain = "";
  const flush = () => { if (plain) span.append(plain); plain = ""; };
  const letters = [...text];
  letters.forEach((c, i) => {
    // A single blank between words needs no sign.
    const between = c === " " && text.trim() && letters[i - 1] !== " " && letters[i + 1] !== " ";
    if (!(c in SIGNS) || between) { plain += c; return; }
    flush();
    span.append(make("span", { className: "sign", textContent: SIGNS[c] }));
    if (i === letters.length - 1) return;
    span.append(c === "\n" ? make("br") : make("wbr"));
  });
  flush();
  const last = letters[letters.length - 1];
  return last === "\n" ? [make("br")] : last in SIGNS ? [make("wbr")] : [];
}

// The weights of a unit on each unit of the other side, and those on it: means over queries, sums over keys
// (maxima for peaks). In cross attention a unit does one of both alone.
function exchange(map, passage, unit, kind) {
  const keys = unitsOf(passage.k), queries = unitsOf(passage.q), n = passage.columns;
  const looks = new Float32Array(keys.length), looked = new Float32Array(queries.length);
  const peak = kind === "peak";
  if (unit.side === passage.q) for (const other of keys) looks[other.index] = block(map, n, unit, other, peak);
  if (unit.side === passage.k) for (const other of queries) looked[other.index] = block(map, n, other, unit, peak);
  // One top for both, so that the two tints can be compared.
  return { looks, looked, top: Math.max(...looks, ...looked) };
}

function block(map, n, queries, keys, peak) {
  let sum = 0, most = 0;
  for (let i = queries.c0; i < queries.c1; i++) {
    for (let j = keys.c0; j < keys.c1; j++) {
      const weight = map[i * n + j];
      sum += weight;
      if (weight > most) most = weight;
    }
  }
  return peak ? most : sum / (queries.c1 - queries.c0);
}

function tintStrips(passage, unit, pinned, shares, scale) {
  for (const side of new Set([passage.q, passage.k])) {
    const looks = side === passage.k && shares?.looks, looked = side === passage.q && shares?.looked;
    side.spans.forEach((span, i) => {
      const a = looks ? 0.86 * place(looks[i], shares.top, scale) : 0;
      const b = looked ? 0.86 * place(looked[i], shares.top, scale) : 0;
      const chosen = unit?.side === side && i === unit.index && (pinned ? "pin" : "on"), hit = span.classList.contains("hit") && "hit";
      span.className = [chosen, hit].filter(Boolean).join(" ");
      span.style.backgroundImage = tint(a, b);
    });
  }
}

function tint(a, b) {
  const looks = `rgba(var(--looks), ${a.toFixed(3)})`, looked = `rgba(var(--looked), ${b.toFixed(3)})`;
  if (a < 0.012 && b < 0.012) return "";
  if (b < 0.012) return `linear-gradient(${looks}, ${looks})`;
  if (a < 0.012) return `linear-gradient(${looked}, ${looked})`;
  return `linear-gradient(${looks} 50%, ${looked} 50%)`;  // both ways: looks above, looked at below
}

// The largest shares, without those below a thousandth of the top.
function topList(title, colour, shares, top, units, count) {
  const order = [...units.keys()].filter((i) => shares[i] > top / 1000).sort((x, y) => shares[y] - shares[x]).slice(0, count);
  const items = order.map((i) => {
    const bar = make("u");
    bar.style.background = `rgba(var(${colour}), .8)`;
    bar.style.width = `${(100 * shares[i]) / top}%`;
    return make("li", {}, make("b", { textContent: clipped(unitName(units[i]), 10) }), bar, make("span", { textContent: fixed(shares[i]) }));
  });
  const list = items.length ? make("ol", {}, ...items) : make("p", { className: "hint", textContent: T.none });
  return make("div", {}, make("h3", { textContent: title }), list);
}
