// The unit of text under the pointer or pinned: tints, lists and the tooltip.

const SHOWN = 5;        // keys and queries in each list
let shownTip = [];      // what the tip was made of

// Tint the text for the unit under the pointer or pinned.
function showUnit() {
  const unit = pinned ?? pointed, place0 = passage();
  if (!current || !place0.q.spans) return;
  const shares = unit && exchange(current, place0, unit, state.kind);
  tintStrips(place0, unit, unit === pinned, shares, state.scale);
  if (state.view) {
    const { r0, r1, c0, c1 } = state.view;
    for (const side of [place0.q, place0.k]) {
      const outside = (u, from, to) => u.c1 <= from || u.c0 >= to;
      const out = (u) => (side !== place0.q || outside(u, r0, r1)) && (side !== place0.k || outside(u, c0, c1));
      for (const u of unitsOf(side)) side.spans[u.index].classList.toggle("out", out(u));
    }
  }
  heat.cross(unit);
  arcs.point(unit);
  image.show(unit, shares);
  byId("unpin").hidden = !pinned;
  byId("strip-hint").hidden = Boolean(unit);
  const lists = [];
  if (unit?.side === place0.q) lists.push(topList(fill(T.looks_most, { what: unitName(unit) }), "--looks", shares.looks, shares.top, unitsOf(place0.k), SHOWN));
  if (unit?.side === place0.k) lists.push(topList(fill(T.looked_most, { what: unitName(unit) }), "--looked", shares.looked, shares.top, unitsOf(place0.q), SHOWN));
  byId("tops").replaceChildren(...lists);
  everywhere.show(unit);
  writes.show(unit);
}

function pin(unit) {
  pinned = pinned === unit ? null : unit;
  if (pinned) reveal(pinned);
  showUnit();
  remember();
}

// Scroll a unit into view within the box of its text or of its arcs; the page stays.
function reveal(unit) {
  const element = arcs.open ? arcs.elementOf(unit) : unit.side.spans?.[unit.index];
  const box = element?.closest(".strip, .arcs");
  if (!box) return;
  const outer = box.getBoundingClientRect(), inner = element.getBoundingClientRect();
  if (inner.top < outer.top || inner.bottom > outer.bottom) box.scrollTop += inner.top - outer.top - box.clientHeight / 3;
}

// Within the same cell, only the tip moves.
function onCell(cell) {
  const tip = byId("tip"), place0 = passage(), now = [current, pinned, state.view, cell?.r, cell?.c];
  if (cell && !tip.hidden && now.every((part, i) => part === shownTip[i])) { beside(tip, cell.x, cell.y); return; }
  shownTip = now;
  pointed = cell ? unitAt(place0.q, cell.r) : null;
  if (cell) writes.key = unitAt(place0.k, cell.c);
  showUnit();
  tip.hidden = !cell;
  if (!cell) return;
  const weight = current[cell.r * place0.columns + cell.c], masked = place0.causal && cell.c > cell.r;
  const note = masked ? T.masked : place0.cell > 1 ? T[`${state.kind}_of`] : T.weight;
  tip.replaceChildren(pairOf(place0, cell), make("div", { className: "weight" }, fixed(weight), make("small", { textContent: note })));
  beside(tip, cell.x, cell.y);
}

// The query and the key of a cell, for a tooltip.
function pairOf(place0, { r, c }) {
  const described = (word, side, at) => {
    const text = side.tokens.slice(at * side.cell, (at + 1) * side.cell).join("");
    const name = side.cell > 1 ? `“${clipped(shown(text), 22)}”` : named(text) + (UNSEEN.test(text) || text.length > 1 ? "" : "  ");
    return [make("em", { textContent: word }), make("b", { textContent: name }, make("em", { textContent: ` ${tokenRange(side, at, at + 1)}` }))];
  };
  const pair = make("div", { className: "pair" }, ...described(T.query, place0.q, r), ...described(T.key, place0.k, c));
  for (const b of pair.querySelectorAll("b em")) b.style.fontWeight = 400;
  return pair;
}

// With one character pinned, hovering over another shows the weights between them.
function onUnit(unit, event) {
  const tip = byId("tip");
  pointed = unit;
  if (!pinned) { showUnit(); return; }
  const place0 = passage();
  tip.hidden = !unit || unit === pinned || (place0.keys && unit.side === pinned.side);
  if (tip.hidden) return;
  const { looks, looked } = exchange(current, place0, pinned, state.kind), [here, there] = [unitName(pinned), unitName(unit)];
  const line = (from, to, colour, weight) => {
    const swatch = make("i");
    swatch.style.background = `rgba(var(${colour}), .85)`;
    return [make("span", {}, swatch, `${from} → ${to}`), make("b", { textContent: fixed(weight) })];
  };
  tip.replaceChildren(make("div", { className: "both" },
    ...(pinned.side === place0.q ? line(here, there, "--looks", looks[unit.index]) : []),
    ...(pinned.side === place0.k ? line(there, here, "--looked", looked[unit.index]) : [])));
  beside(tip, event.clientX, event.clientY);
}

function beside(tip, x0, y0) {
  const { width, height } = tip.getBoundingClientRect();
  const x = x0 + 18 + width > innerWidth ? x0 - width - 14 : x0 + 18, y = y0 + 18 + height > innerHeight ? y0 - height - 12 : y0 + 18;
  tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
}

// Left and right walk through the text, with what is pinned if something is; Enter pins.
function walk(event, side) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], units = unitsOf(side), now = pinned ?? pointed, at = now?.side === side ? now : null;
  if (event.key === "Enter" && at) { event.preventDefault(); pin(at); }
  if (!step) return;
  event.preventDefault();
  const next = units[Math.min(units.length - 1, Math.max(0, at ? at.index + step : 0))];
  if (pinned) pinned = next; else pointed = next;
  reveal(next);
  showUnit();
}

// The strips: pointing, pinning, walking.
function strips() {
  for (const [id, of] of [["strip", "q"], ["strip-keys", "k"]]) {
    const strip = byId(id), unitUnder = (event) => {
      const span = event.target.closest?.("[data-unit]");
      return span ? unitsOf(passage()[of])[span.dataset.unit] : null;
    };
    strip.addEventListener("pointerover", (event) => onUnit(unitUnder(event), event));
    strip.addEventListener("pointerleave", () => onUnit(null));
    strip.addEventListener("click", (event) => { const unit = unitUnder(event); if (unit) pin(unit); });
    strip.addEventListener("keydown", (event) => walk(event, passage()[of]));
  }
}
