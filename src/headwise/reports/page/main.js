// The page: its parts, and what is drawn again when the choice changes.

const TABS = ["maps", "compare", "sides"];

const heat = new HeatMap(byId("map"), byId("map-base"), byId("map-over"), {
  seen: onCell,
  chosen: ({ r, c }) => { writes.key = unitAt(passage().k, c); pin(unitAt(passage().q, r)); },
  zoomed: (view) => { state.view = view; state.sentence = -1; byId("sentence").value = "-1"; refresh(); },
});
const full = new FullSize(heat, redrawMap);
const grid = new Grid(byId("grid"), byId("patterns"), (layer, head) => { chooseHead(layer, head); lead(); });
const numbers = new Numbers(byId("table"), (layer, head) => {
  chooseHead(layer, head);
  byId("map-panel").scrollIntoView({ block: "nearest", behavior: "smooth" });
});
const compared = new Compare((layer, head) => {
  openTab("maps");
  chooseHead(layer, head);
  lead();
});
const everywhere = new Everywhere((layer, head) => { chooseHead(layer, head); lead(); });
const arcs = new Arcs(byId("arcs"), byId("arc-heads")), image = new PatchedImage(byId("image")), find = new Find(), sides = new Sides(), writes = new Writes();
const corpus = new CorpusPassages(REPORT.corpus, byId("corpus-list"));

// Where panels are below one another, the map of the chosen head comes into view.
function lead() {
  const { top, bottom } = byId("map").getBoundingClientRect();
  if (innerWidth <= 860 && (top < 0 || bottom > innerHeight)) byId("map-panel").scrollIntoView({ block: "start" });
}

// One of the tabs; the controls of maps go with them.
function openTab(name) {
  state.tab = name;
  for (const tab of TABS) {
    byId(tab).hidden = tab !== name;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
    byId(`tab-${tab}`).tabIndex = tab === name ? 0 : -1;
  }
  byId("controls").hidden = name === "compare";
  for (const field of document.querySelectorAll(".one-head")) field.classList.toggle("aside", name === "sides");
  byId("tip").hidden = true;
  if (name === "compare") { compared.show(); remember(); } else if (name === "sides") sides.refresh().catch(fail); else refresh();
}

function chooseHead(layer, head) {
  if (!passage().layers.includes(layer)) {
    state.passage = REPORT.passages.findIndex((p) => p.layers.includes(layer));
    openPassage();
  }
  Object.assign(state, { layer, head });
  refresh();
}

// A button that shows a head.
function headButton([layer, head]) {
  const button = make("button", { type: "button", textContent: nameOfHead(layer, head) });
  button.addEventListener("click", () => { openTab("maps"); chooseHead(layer, head); lead(); });
  return button;
}

// On a phone, the first finding stands above the map; this button unfolds the others.
function moreFindings() {
  const button = make("button", { type: "button", className: "more", textContent: `+${REPORT.findings.length - 1}` });
  button.setAttribute("aria-label", T.findings);
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => button.setAttribute("aria-expanded", String(byId("findings").classList.toggle("open"))));
  return button;
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
  byId("map-title").textContent = headName(state.layer, state.head);
  byId("layer-name").textContent = REPORT.names[state.layer] ?? "";
  byId("layer-name").hidden = REPORT.layers < 2 || !REPORT.names.length;
  byId("map").setAttribute("aria-label", byId("map-title").textContent + (pattern ? `, ${pattern}` : ""));
  badge.hidden = !pattern;
  badge.replaceChildren(make("i"), pattern);
  badge.style.setProperty("--kind", colourOf(state.layer, state.head));
  byId("unzoom").hidden = !state.view;
  grid.show({ passage: place0, index: state.passage, kind: state.kind, scale: state.scale, top: topOf });
  remember();
  corpus.show(state.layer, state.head).catch(fail);
  try {
    const map = await mapOf(state.passage, state.layer, state.head, state.kind);
    if (mine !== turn) return;
    current = map;
  } catch (error) {
    fail(error);
    return;
  }
  redraw();
}

// Draw the map that is here already: the large one alone, or all that shows it.
function redrawMap() {
  if (!current) return null;
  const place0 = passage(), view = state.view ?? wholeOf(place0), top = topOf(state.layer, state.head);
  const shown = { map: current, passage: place0, view, top, scale: state.scale };
  heat.show({ ...shown, view: full.window(view, place0) });
  full.fit();
  return shown;
}

function redraw() {
  const shown = redrawMap();
  if (!shown) return;
  const { passage: place0, top } = shown, most = place0[state.kind].most[state.layer][state.head];
  arcs.show(shown);
  drawBar(byId("bar"), top, state.scale, top < most && trimmed(top) !== trimmed(most));
  byId("bar").setAttribute("aria-label", fill(T.bar_label, { top: fixed(top) }));
  drawCard(byId("card"), state.layer, state.head);
  if (pinned) reveal(pinned);
  showUnit();
}

function openPassage() {
  const place0 = passage();
  state.view = null;
  current = null;
  state.sentence = -1;
  pinned = pointed = null;
  image.open(place0);
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
  writes.key = null;
  find.mark();
}

function openSentence(index) {
  const place0 = passage();
  state.sentence = index;
  state.view = null;
  if (index >= 0) {
    const [from, to] = place0.sentences[index];
    const c0 = Math.floor(from / place0.cell), c1 = Math.ceil(to / place0.cell);
    state.view = { r0: c0, r1: c1, c0, c1 };
    reveal(unitAt(place0.q, c0));
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
  for (const name of ["kind", "scale", "range"]) on(name, (value) => { state[name] = value; openTab(state.tab); });
  byId("unzoom").addEventListener("click", () => { byId("sentence").value = "-1"; openSentence(-1); });
  byId("unpin").addEventListener("click", () => pin(pinned));
  const title = () => `${headName(state.layer, state.head)} · ${document.title}`;  // what has no room is cut at the end
  saves("save", heat, () => ({ title: title(), name: `layer${state.layer}-head${state.head}` }));
  saves("save-d", sides.maps[2], () => ({ title: sides.title(), name: "difference" }));
  byId("save-arcs").addEventListener("click", () => offer(new Blob([arcs.file()], { type: "image/svg+xml" }), `layer${state.layer}${arcs.layered ? "" : `-head${state.head}`}-arcs.svg`));
  for (const kind of TEXTS) byId(`as-${kind}`).addEventListener("click", () => { showText(kind); refresh(); });
  watchTheme(() => { if (passage().q.spans && !onScreen) openTab(state.tab); });
  strips();
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (pinned) pin(pinned); else if (state.view) { byId("sentence").value = "-1"; openSentence(-1); }
  });
  let wait = 0;
  addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => openTab(state.tab), 80); });
  const heads = REPORT.counts.reduce((sum, count) => sum + count), comparable = REPORT.comparisons.length || REPORT.importance.length;
  for (const [id, count] of [["layer", REPORT.layers], ["head", REPORT.heads]]) byId(id).parentElement.hidden = count < 2;
  byId("as-layer").hidden = REPORT.heads < 2;
  byId("tab-compare").hidden = !comparable;
  byId("tab-sides").hidden = heads * REPORT.passages.length < 2;
  byId("tabs").hidden = byId("tab-compare").hidden && byId("tab-sides").hidden;
  for (const tab of TABS) byId(`tab-${tab}`).addEventListener("click", () => openTab(tab));
  byId("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], shown = TABS.filter((tab) => !byId(`tab-${tab}`).hidden);
    if (!step) return;
    openTab(shown[(shown.indexOf(state.tab) + step + shown.length) % shown.length]);
    byId(`tab-${state.tab}`).focus();
  });
  printed();
}

function fail(error) {
  byId("failure").hidden = false;
  byId("failure").textContent = fill(T.failure, { error: error?.message ?? error });
}

function start() {
  if (typeof DecompressionStream === "undefined") { fail(new Error("DecompressionStream")); return; }
  byId("facts").replaceChildren(...REPORT.facts.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  byId("findings").replaceChildren(...REPORT.findings.map(([text, heads]) => make("li", {}, `${text} `, ...heads.map(headButton))));
  if (REPORT.findings.length > 1) byId("findings").firstChild.append(moreFindings());
  byId("corpus-panel").hidden = !REPORT.corpus;
  if (REPORT.corpus) byId("corpus-by").textContent = corpus.strengthIn();
  byId("notes-panel").hidden = !REPORT.notes.length;
  byId("notes").replaceChildren(...REPORT.notes.map((note) => make("li", { textContent: note })));
  controls();
  recall();
  openTab(state.tab);
  // The packaged font arrives a moment later; the labels on the canvas are then drawn again.
  document.fonts?.ready.then(() => openTab(state.tab));
}

start();
