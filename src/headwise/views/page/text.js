// The text: whole characters from tokens, signs for what cannot be seen, and the strip with its two tints.

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

// What can be pointed at: runs of cells whose text begins and ends between whole characters.
function unitsOf(passage) {
  if (passage.units) return passage.units;
  const text = passage.tokens.join(""), ends = graphemeEnds(text), units = [];
  const cellEnds = [];
  let at = 0;
  passage.tokens.forEach((token, i) => {
    at += token.length;
    if ((i + 1) % passage.cell === 0 || i + 1 === passage.tokens.length) cellEnds.push(at);
  });
  let from = 0, first = 0;
  cellEnds.forEach((end, cell) => {
    // A character that is cut between two pooled cells belongs to the first of them.
    end = Math.max(end, from);
    if (passage.cell > 1) while (end < text.length && !ends.has(end)) end++;
    const whole = end === text.length ? cell === cellEnds.length - 1 : ends.has(end) && cellEnds[cell + 1] !== end;
    if (!whole && passage.cell === 1) return;
    units.push({ index: units.length, c0: first, c1: cell + 1, text: text.slice(from, end) });
    from = end;
    first = cell + 1;
  });
  passage.unitOfCell = new Int32Array(passage.cells);
  for (const unit of units) passage.unitOfCell.fill(unit.index, unit.c0, unit.c1);
  return (passage.units = units);
}

const unitName = (unit) => clipped(shown(unit.text.length > 40 ? unit.text.slice(0, 40) : unit.text), 18);

function tokenRange(passage, c0, c1) {
  const from = c0 * passage.cell, to = Math.min(c1 * passage.cell, passage.tokens.length) - 1;
  return from === to ? `${from}` : `${from}–${to}`;
}

function buildStrip(strip, passage) {
  const parts = [];
  for (const unit of unitsOf(passage)) {
    const span = make("span");
    span.dataset.unit = unit.index;
    const after = fillUnit(span, unit.text);
    parts.push(span, ...after);
  }
  strip.classList.toggle("pooled", passage.cell > 1);
  strip.replaceChildren(...parts);
  passage.spans = [...strip.querySelectorAll("[data-unit]")];
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
    if (!(c in SIGNS)) { plain += c; return; }
    flush();
    span.append(make("span", { className: "sign", textContent: SIGNS[c] }));
    if (i === letters.length - 1) return;
    span.append(c === "\n" ? make("br") : make("wbr"));
  });
  flush();
  const last = letters[letters.length - 1];
  return last === "\n" ? [make("br")] : last in SIGNS ? [make("wbr")] : [];
}

// Where a unit looks and who looks at it, per unit: means over its queries, sums over its keys (maxima for peaks).
function exchange(map, passage, unit, kind) {
  const units = unitsOf(passage), n = passage.cells;
  const looks = new Float32Array(units.length), looked = new Float32Array(units.length);
  const peak = kind === "peak";
  for (const other of units) {
    looks[other.index] = block(map, n, unit, other, peak);
    looked[other.index] = block(map, n, other, unit, peak);
  }
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

function tintStrip(passage, unit, pinned, shares, scale) {
  passage.spans.forEach((span, i) => {
    const a = shares ? 0.86 * place(shares.looks[i], shares.top, scale) : 0;
    const b = shares ? 0.86 * place(shares.looked[i], shares.top, scale) : 0;
    span.className = unit && i === unit.index ? (pinned ? "pin" : "on") : "";
    span.style.backgroundImage = tint(a, b);
  });
}

function tint(a, b) {
  const looks = `rgba(var(--looks), ${a.toFixed(3)})`, looked = `rgba(var(--looked), ${b.toFixed(3)})`;
  if (a < 0.012 && b < 0.012) return "";
  if (b < 0.012) return `linear-gradient(${looks}, ${looks})`;
  if (a < 0.012) return `linear-gradient(${looked}, ${looked})`;
  return `linear-gradient(${looks} 50%, ${looked} 50%)`;  // both ways: looks above, looked at below
}

// The largest shares; what is less than a thousandth of the top is nothing to speak of.
function topList(title, colour, shares, top, units, count) {
  const order = [...units.keys()].filter((i) => shares[i] > top / 1000).sort((x, y) => shares[y] - shares[x]).slice(0, count);
  const items = order.map((i) => {
    const bar = make("u");
    bar.style.background = `rgba(var(${colour}), .8)`;
    bar.style.width = `${(100 * shares[i]) / top}%`;
    return make("li", {}, make("b", { textContent: clipped(unitName(units[i]), 10) }), bar, make("span", { textContent: fixed(shares[i]) }));
  });
  return make("div", {}, make("h3", { textContent: title }), make("ol", {}, ...items));
}
