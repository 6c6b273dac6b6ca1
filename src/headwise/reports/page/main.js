// The page: its state, and the updates of its parts.

const state = { tab: "maps", passage: 0, layer: 0, head: 0, sentence: -1, kind: "mean", scale: "sqrt", range: "own", view: null };
let pinned = null;      // the unit that stays
let pointed = null;     // the unit under the pointer
let current = null;     // the map on show
let shownTip = [];      // what the tip was made of
let turn = 0;

const passage = () => REPORT.passages[state.passage];
const wholeView = () => ({ r0: 0, r1: passage().rows, c0: 0, c1: passage().columns });
const unitAt = (side, cell) => unitsOf(side)[side.unitOfCell[cell]];
const topOf = (layer, head) => {
  const { own, all } = passage()[state.kind];
  return state.range === "own" ? own[layer][head] : all;
};

const heat = new HeatMap(byId("map"), byId("map-base"), byId("map-over"), {
  seen: onCell,
  chosen: ({ r }) => pin(unitAt(passage().q, r)),
  zoomed: (view) => { state.view = view; state.sentence = -1; byId("sentence").value = "-1"; refresh(); },
});
const grid = new Grid(byId("grid"), byId("patterns"), chooseHead);
const numbers = new Numbers(byId("table"), (layer, head) => {
  chooseHead(layer, head);
  byId("map").scrollIntoView({ block: "nearest", behavior: "smooth" });
});

const compared = new Compare((layer, head) => {
  openTab("maps");
  chooseHead(layer, head);
});

// One of the two tabs; the other's controls go with it.
function openTab(name) {
  state.tab = name;
  for (const tab of ["maps", "compare"]) {
    byId(tab).hidden = tab !== name;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    byId(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
  }
  byId("controls").hidden = name !== "maps";
  byId("tip").hidden = true;
  if (name === "compare") { compared.show(); remember(); } else refresh();
}

function chooseHead(layer, head) {
  if (!passage().layers.includes(layer)) {
    state.passage = REPORT.passages.findIndex((p) => p.layers.includes(layer));
    openPassage();
  }
  Object.assign(state, { layer, head });
  refresh();
}

// Show the state: everything that depends on it is drawn again.
async function refresh() {
  const mine = ++turn, place0 = passage();
  const heads = REPORT.counts[state.layer];
  state.head = Math.min(state.head, heads - 1);
  if (byId("head").length !== heads) byId("head").replaceChildren(...Array.from({ length: heads }, (_, i) => new Option(i, i)));
  byId("layer").value = state.layer;
  byId("head").value = state.head;
  grid.select(state.layer, state.head);
  numbers.select(state.layer, state.head);
  const pattern = REPORT.patterns[state.layer][state.head], badge = byId("map-pattern");
  byId("map-title").textContent = fill(T.head_name, state);
  byId("layer-name").textContent = REPORT.names[state.layer] ?? "";
  byId("layer-name").hidden = !REPORT.names.length;
  byId("map").setAttribute("aria-label", fill(T.head_name, state) + (pattern ? `, ${pattern}` : ""));
  badge.hidden = !pattern;
  badge.replaceChildren(make("i"), pattern);
  badge.style.setProperty("--kind", colourOf(pattern));
  byId("unzoom").hidden = !state.view;
  grid.show({ passage: place0, index: state.passage, kind: state.kind, scale: state.scale, top: topOf });
  remember();
  try {
    current = await mapOf(state.passage, state.layer, state.head, state.kind);
  } catch (error) {
    fail(error);
    return;
  }
  if (mine !== turn) return;
  const top = topOf(state.layer, state.head);
  heat.show({ map: current, passage: place0, view: state.view ?? wholeView(), top, scale: state.scale });
  const most = place0[state.kind].most[state.layer][state.head];
  drawBar(byId("bar"), top, state.scale, top < most && trimmed(top) !== trimmed(most));
  byId("bar").setAttribute("aria-label", fill(T.bar_label, { top: fixed(top) }));
  drawCard(byId("card"), state.layer, state.head);
  showUnit();
}

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
  byId("unpin").hidden = !pinned;
  byId("strip-hint").hidden = Boolean(unit);
  const lists = [];
  if (unit?.side === place0.q) lists.push(topList(fill(T.looks_most, { what: unitName(unit) }), "--looks", shares.looks, shares.top, unitsOf(place0.k), 5));
  if (unit?.side === place0.k) lists.push(topList(fill(T.looked_most, { what: unitName(unit) }), "--looked", shares.looked, shares.top, unitsOf(place0.q), 5));
  byId("tops").replaceChildren(...lists);
}

function pin(unit) {
  pinned = pinned === unit ? null : unit;
  showUnit();
  remember();
}

// Within the same cell, only the tip moves.
function onCell(cell) {
  const tip = byId("tip"), place0 = passage(), now = [current, pinned, state.view, cell?.r, cell?.c];
  if (cell && !tip.hidden && now.every((part, i) => part === shownTip[i])) { beside(tip, cell.x, cell.y); return; }
  shownTip = now;
  pointed = cell ? unitAt(place0.q, cell.r) : null;
  showUnit();
  tip.hidden = !cell;
  if (!cell) return;
  const weight = current[cell.r * place0.columns + cell.c], masked = place0.causal && cell.c > cell.r;
  const described = (word, side, at) => {
    const text = side.tokens.slice(at * side.cell, (at + 1) * side.cell).join("");
    const name = side.cell > 1 ? `“${clipped(shown(text), 22)}”` : named(text) + (UNSEEN.test(text) || text.length > 1 ? "" : "  ");
    return [make("em", { textContent: word }), make("b", { textContent: name }, make("em", { textContent: ` ${tokenRange(side, at, at + 1)}` }))];
  };
  const pair = make("div", { className: "pair" }, ...described(T.query, place0.q, cell.r), ...described(T.key, place0.k, cell.c));
  for (const b of pair.querySelectorAll("b em")) b.style.fontWeight = 400;
  const note = masked ? T.masked : place0.cell > 1 ? T[`${state.kind}_of`] : T.weight;
  tip.replaceChildren(pair, make("div", { className: "weight" }, fixed(weight), make("small", { textContent: note })));
  beside(tip, cell.x, cell.y);
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

function openPassage() {
  const place0 = passage();
  state.view = null;
  state.sentence = -1;
  pinned = pointed = null;
  buildStrip(byId("strip"), place0.q);
  if (place0.keys) buildStrip(byId("strip-keys"), place0.k);
  for (const id of ["strip-name", "strip-keys-name", "strip-keys"]) byId(id).hidden = !place0.keys;
  if (!place0.layers.includes(state.layer)) state.layer = place0.layers[0];
  byId("layer").replaceChildren(...place0.layers.map((i) => new Option(i, i)));
  byId("passage").value = state.passage;
  const names = place0.sentences.map(([from, to], i) =>
    new Option(`${i + 1}: ${clipped(place0.tokens.slice(from, to).join("").trim().replace(/\s+/g, " "), 22)}`, i));
  byId("sentence").replaceChildren(new Option(T.whole, -1), ...names);
  byId("sentence-field").hidden = names.length < 2;
  byId("cell-hint").textContent = place0.cell > 1 ? fill(T.cell_hint, place0) + " " : "";
  byId("kind-field").hidden = place0.cell === 1;
  if (place0.cell === 1) state.kind = "mean";
  byId("kind").value = state.kind;
}

function openSentence(index) {
  const place0 = passage();
  state.sentence = index;
  state.view = null;
  if (index >= 0) {
    const [from, to] = place0.sentences[index];
    const c0 = Math.floor(from / place0.cell), c1 = Math.ceil(to / place0.cell);
    state.view = { r0: c0, r1: c1, c0, c1 };
    place0.q.spans[place0.q.unitOfCell[c0]]?.scrollIntoView({ block: "nearest" });
  }
  refresh();
}

function controls() {
  byId("passage").replaceChildren(...REPORT.passages.map((p, i) => new Option(clipped(p.title, 60), i)));
  byId("passage-field").hidden = REPORT.passages.length < 2;
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  const on = (id, act) => byId(id).addEventListener("change", (event) => act(event.target.value));
  on("passage", (value) => { state.passage = Number(value); openPassage(); refresh(); });
  on("layer", (value) => { state.layer = Number(value); refresh(); });
  on("head", (value) => { state.head = Number(value); refresh(); });
  on("sentence", (value) => openSentence(Number(value)));
  for (const name of ["kind", "scale", "range"]) on(name, (value) => { state[name] = value; refresh(); });
  byId("unzoom").addEventListener("click", () => { byId("sentence").value = "-1"; openSentence(-1); });
  byId("unpin").addEventListener("click", () => pin(pinned));
  byId("save").addEventListener("click", savePicture);
  watchTheme(() => { if (passage().q.spans) openTab(state.tab); });
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
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (pinned) pin(pinned); else if (state.view) { byId("sentence").value = "-1"; openSentence(-1); }
  });
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => openTab(state.tab), 80); });
  byId("tabs").hidden = !(REPORT.comparisons.length || REPORT.importance.length);
  for (const tab of ["maps", "compare"]) byId(`tab-${tab}`).addEventListener("click", () => openTab(tab));
  byId("tabs").addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    openTab(state.tab === "maps" ? "compare" : "maps");
    byId(`tab-${state.tab}`).focus();
  });
}

// Left and right walk through the text, with what is pinned if something is; Enter pins.
function walk(event, side) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], units = unitsOf(side), now = pinned ?? pointed, at = now?.side === side ? now : null;
  if (event.key === "Enter" && at) { event.preventDefault(); pin(at); }
  if (!step) return;
  event.preventDefault();
  const next = units[Math.min(units.length - 1, Math.max(0, at ? at.index + step : 0))];
  if (pinned) pinned = next; else pointed = next;
  side.spans[next.index].scrollIntoView({ block: "nearest" });
  showUnit();
}

function savePicture() {
  const { base } = heat, out = make("canvas", { width: base.width, height: base.height }), context = out.getContext("2d");
  context.fillStyle = css("--panel");
  context.fillRect(0, 0, out.width, out.height);
  context.drawImage(base, 0, 0);
  download(out, `layer${state.layer}-head${state.head}.png`);
}

// The address keeps what is chosen, so that a reload or a copied link shows the same.
function remember() {
  const kept = { ...(state.tab === "maps" ? {} : { tab: state.tab }), passage: state.passage, layer: state.layer, head: state.head, kind: state.kind, scale: state.scale, range: state.range };
  if (state.sentence >= 0) kept.sentence = state.sentence;
  if (pinned?.side === passage().q) kept.pin = pinned.index;
  try { history.replaceState(null, "", "#" + new URLSearchParams(kept)); } catch { /* not allowed in some frames */ }
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const number = (name, end) => {
    const value = Number(kept.get(name) ?? NaN);
    return Number.isInteger(value) && value >= 0 && value < end ? value : null;
  };
  if (kept.get("tab") === "compare" && !byId("tabs").hidden) state.tab = "compare";
  state.passage = number("passage", REPORT.passages.length) ?? 0;
  byId("passage").value = state.passage;
  state.layer = number("layer", REPORT.counts.length) ?? REPORT.first[0];
  state.head = number("head", REPORT.heads) ?? REPORT.first[1];
  for (const name of ["kind", "scale", "range"]) {
    const known = [...byId(name).options].some((option) => option.value === kept.get(name));
    if (known) state[name] = kept.get(name);
    byId(name).value = state[name];
  }
  openPassage();
  const units = unitsOf(passage().q), pin0 = number("pin", units.length), sentence = number("sentence", passage().sentences.length);
  if (pin0 !== null) pinned = units[pin0];
  else if (!location.hash) pointed = unitAt(passage().q, REPORT.first[2]);  // something to see at once
  if (sentence !== null) { byId("sentence").value = sentence; openSentence(sentence); }
}

function fail(error) {
  byId("failure").hidden = false;
  byId("failure").textContent = fill(T.failure, { error: error?.message ?? error });
}

function start() {
  if (typeof DecompressionStream === "undefined") { fail(new Error("DecompressionStream")); return; }
  byId("facts").replaceChildren(...REPORT.facts.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  byId("notes-panel").hidden = !REPORT.notes.length;
  byId("notes").replaceChildren(...REPORT.notes.map((note) => make("li", { textContent: note })));
  controls();
  recall();
  openTab(state.tab);
  // The packaged font arrives a moment later; the labels on the canvas are then drawn again.
  document.fonts?.ready.then(() => openTab(state.tab));
}

start();
