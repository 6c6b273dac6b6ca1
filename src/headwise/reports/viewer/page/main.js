// The page: its state, and the updates of its parts.

const state = { layer: null, head: null, reduce: "mean", scale: "log", low: undefined, top: 1, auto: true };
let model = null, text = null;
let awaited = null;  // the view of a link whose head is not drawn yet

const pieces = new Pieces((wordy) => { if (wordy) plot.layout(); plot.draw(); search.arrived(); });
const tiles = new Tiles(() => plot.draw());
const plot = new Plot(byId("map"), byId("map-base"), byId("map-over"), { tiles, pieces, changed: onView, ranged: onRange });
const pairs = new Pairs(byId("pairs"), plot, { arrived: () => readout.draw(), chosen: openHead });
const readout = new Readout(byId("readout"), plot, pieces, pairs);
const tops = new Tops(byId("tops"), ({ row, col }) => { goTo(row, col); });
const heads = new Heads(byId("grid"), (layer, head) => openHead(layer, head));
const controls = new Controls(change);
const reading = new Reading({ ready: openText, more: moreHeads, left: leaveText });
const search = new Search({ pieces, found: (hits) => { Object.assign(plot.axes, { hits, hit: null }); plot.draw(); }, jumped: jump });
new Hand(byId("map-over"), plot, {
  seen: (point) => { if (!plot.pinned) putCursor(point && plot.cellAt(point.x, point.y)); },
  chosen: (point) => pin(plot.cellAt(point.x, point.y)),
});

// The first heads of a text are drawn: they are shown, and the view that the address names.
async function openText(found) {
  const kept = recall();
  text = found;
  tellText();
  tiles.open(text.id);
  pieces.open(text.id, text.n);
  search.open(text.id);
  plot.camera.n = text.n;
  plot.camera.fit();
  putCursor(null);
  heads.open(model, text);
  awaited = null;
  if (kept.text !== text.id) closeHead();
  else if (!isComing(kept)) restore(kept);
  else {
    awaited = kept;
    closeHead({ quiet: true });
  }
  await fetchSmall();
}

// Whether the head exists but is not drawn yet.
function isComing({ layer, head }) {
  return head < model.layers[layer]?.heads && !heads.has(layer, head);
}

// A newer text replaces it: stop its requests.
function leaveText() {
  plot.hide();
  pieces.leave?.abort();
  text = null;
}

// More heads of it are drawn.
async function moreHeads(found) {
  if (found.id !== text?.id) return;
  text = found;
  tellText();
  heads.update(text);
  await fetchSmall();
}

// The small maps of all heads; requested again when the pooling changes.
async function fetchSmall() {
  const { id } = text, { reduce } = state;
  try {
    const maps = await askMaps(`/api/texts/${id}/overview?reduce=${reduce}&cells=${CELLS}`);
    if (id !== text?.id || reduce !== state.reduce) return;
    Object.assign(heads, { scale: state.scale, reduce });
    heads.show(maps);
    if (awaited && !isComing(awaited)) {
      const kept = awaited;
      awaited = null;
      restore(kept);
    } else if (state.layer !== null) showHead();
  } catch (error) {
    if (id === text?.id) complain(error);
  }
}

function openHead(layer, head, { push = true } = {}) {
  const first = state.layer === null;
  awaited = null;
  Object.assign(state, { layer, head });
  say("alert", "");
  if (state.auto) begin();
  document.body.classList.add("deep");
  for (const [id, hidden] of [["map-panel", false], ["search-panel", false], ["close", false], ["heads-title", true]]) byId(id).hidden = hidden;
  if (first && push) history.pushState(null, "", location.href);
  plot.layout();
  showHead();
  if (first) byId("map").focus({ preventScroll: true });
  if (first && innerWidth < 900) byId("map-panel").scrollIntoView({ block: "start" });
}

// An automatic range begins with that of the small map.
function begin() {
  const range = heads.small(state.layer, state.head)?.range;
  if (range?.top > 0) Object.assign(state, { low: undefined }, range);
}

// Back to all heads.
function closeHead({ quiet = false } = {}) {
  const shown = heads.thumbs.find((thumb) => thumb.layer === state.layer && thumb.head === state.head);
  const focused = byId("map-panel").contains(document.activeElement) || document.activeElement === byId("close");
  Object.assign(state, { layer: null, head: null });
  plot.hide();
  document.body.classList.remove("deep");
  for (const [id, hidden] of [["map-panel", true], ["search-panel", true], ["close", true], ["heads-title", false]]) byId(id).hidden = hidden;
  heads.select(null, null);
  if (focused && shown) shown.focus();  // the keyboard goes on from there
  controls.show(state);
  if (!quiet) remember();
}

function showHead() {
  const { layer, head } = state;
  byId("map-title").textContent = fill(T.head_name, state);
  byId("map").setAttribute("aria-label", fill(T.map_label, state));
  heads.select(layer, head);
  controls.show(state);
  plot.show({ ...state, coarsest: text.coarsest, small: heads.small(layer, head) });
  if (tops.token !== null) tops.show(tops.token);
  pairs.draw();
  remember();
}

// The reader changed the pooling, the scale or the range.
function change(what) {
  Object.assign(state, what);
  if (what.reduce) fetchSmall();
  if (what.scale) {
    heads.scale = state.scale;
    heads.scaled();
    state.low = undefined;
  }
  if (state.auto) begin();
  controls.show(state);
  if (state.layer !== null) showHead();
}

// An automatic range follows the view, except for small changes.
function onRange({ low, top }) {
  const near = (a, b) => a === b || Math.abs(Math.log(a / b)) < 0.04;
  if (!state.auto || (near(top, state.top) && near(low, state.low))) return;
  Object.assign(state, { low, top });
  showHead();
}

function onView() {
  const { cell } = plot.level();
  byId("level").textContent = cell === 1 ? T.level_exact : fill(state.reduce === "max" ? T.level_max : T.level_mean, { c: cell });
  pairs.follow();
  readout.draw();
  remember();
}

function putCursor(cell) {
  plot.cursor = cell;
  if (!cell) plot.pinned = false;
  if (!plot.pinned) tops.hide();
  if (!plot.shows) { pairs.follow(); return; }
  plot.cross();
  pairs.follow();
  readout.draw();
}

function pin(cell) {
  const same = plot.pinned && cell && plot.cursor.row === cell.row && plot.cursor.col === cell.col;
  plot.pinned = Boolean(cell) && !same;
  putCursor(cell);
  if (plot.pinned) tops.show(cell.row);
  remember();
}

// To a place of the text: its query and its key in the middle, near enough to read.
function jump(hit) {
  putCursor(null);  // what was pinned is elsewhere
  plot.axes.hit = hit;
  plot.camera.to({ x: hit + 0.5, y: hit + 0.5, zoom: Math.max(plot.camera.zoom, 18) });
  plot.draw();
  tops.show(hit);
}

// To a cell, which is pinned.
function goTo(row, col) {
  plot.camera.to({ x: col + 0.5, y: row + 0.5, zoom: Math.max(plot.camera.zoom, 18) });
  plot.pinned = false;
  pin({ row, col });
  plot.draw();
}

// The next or previous head, over the ends of layers.
function turnHead(by) {
  const drawn = heads.thumbs.slice(0, heads.maps?.count), at = drawn.findIndex((thumb) => thumb.layer === state.layer && thumb.head === state.head);
  const { layer, head } = drawn[(at + by + drawn.length) % drawn.length];
  openHead(layer, head);
}

function zoomMiddle(factor) {
  const { left, top, width, height } = plot.camera.plot;
  const at = plot.cursor && plot.pinned ? { x: plot.camera.px(plot.cursor.col + 0.5), y: plot.camera.py(plot.cursor.row + 0.5) } : { x: left + width / 2, y: top + height / 2 };
  plot.camera.glideAt(at.x, at.y, factor);
  plot.draw();
}

function fit() {
  plot.camera.fit();
  plot.draw();
}

// Arrow keys move the map, or the cursor that Enter has set.
function onMapKey(event) {
  const step = ARROWS[event.key], { camera } = plot;
  if (event.ctrlKey || event.metaKey || event.altKey || !plot.shows) return;
  if (step && plot.pinned) {
    const { cell } = plot.level(), by = cell * (event.shiftKey ? 10 : 1), inside = (i) => Math.min(camera.n - 1, Math.max(0, i));
    const cursor = { row: inside(plot.cursor.row + by * step[0]), col: inside(plot.cursor.col + by * step[1]) };
    const x = camera.px(cursor.col), y = camera.py(cursor.row), { left, top, width, height } = camera.plot;
    if (x < left || x > left + width - camera.zoom) camera.to({ x: cursor.col + 0.5 });
    if (y < top || y > top + height - camera.zoom) camera.to({ y: cursor.row + 0.5 });
    putCursor(cursor);
    plot.draw();
    byId("spoken").textContent = readout.sentence();
  } else if (step) {
    const far = (event.shiftKey ? 0.8 : 0.12) * Math.min(camera.plot.width, camera.plot.height);
    camera.pan(-far * step[1], -far * step[0]);
    plot.draw();
  } else if (event.key === "Enter" && !plot.pinned) {
    const { view } = { view: camera.view() };
    pin(plot.cursor ?? { row: Math.floor((view.r0 + view.r1) / 2), col: Math.floor((view.c0 + view.c1) / 2) });
    byId("spoken").textContent = readout.sentence();
  } else return;
  event.preventDefault();
}

// Keys that work outside of text fields.
function onKey(event) {
  const typing = event.target.closest?.("input:not([type=range],[type=checkbox]), textarea, select");
  if (event.key === "Escape" && event.target.id === "query") { byId("map").focus(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || byId("stage").hidden || state.layer === null) return;
  const act = {
    "+": () => zoomMiddle(2), "=": () => zoomMiddle(2), "-": () => zoomMiddle(0.5), 0: fit, "[": () => turnHead(-1), "]": () => turnHead(1),
    m: () => change({ reduce: state.reduce === "max" ? "mean" : "max" }), "/": () => byId("query").focus(),
    n: () => search.step(1), N: () => search.step(-1),
    Escape: () => { if (plot.pinned || plot.axes.hit !== null) { plot.axes.hit = null; putCursor(null); plot.draw(); remember(); } else closeHead(); },
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function savePicture() {
  const { cell } = plot.level(), { r0, r1, c0, c1 } = plot.camera.view(), whole = (from, to) => `${grouped(Math.floor(from))}–${grouped(Math.ceil(to) - 1)}`;
  const says = `${byId("level").textContent} · ${T.query} ${whole(r0, r1)} · ${T.key} ${whole(c0, c1)} · ${T[state.scale]}`;
  const picture = pictureOf(plot, { title: `${clipped(inLine(text.title || ""), 60)} — ${fill(T.head_name, state)}`, says, foot: `headwise · ${modelName()} · ${inTokens(text.n)}` });
  download(picture, `layer${state.layer}-head${state.head}-${cell === 1 ? "exact" : state.reduce + cell}.png`);
}

async function copyLink() {
  writeAddress();
  try {
    await navigator.clipboard.writeText(location.href);
    say("status", () => T.linked);
  } catch {
    say("status", () => T.link_by_hand);
  }
  setTimeout(() => { if ([T.linked, T.link_by_hand].includes(byId("status").textContent)) say("status", ""); }, 2500);
}

function restore({ layer, head, x, y, zoom, low, top, row, col, reduce = state.reduce, scale = state.scale }) {
  Object.assign(state, { reduce, scale });
  if (!(head < model.layers[layer]?.heads)) { closeHead(); return; }
  if (top > 0) Object.assign(state, { top, low, auto: false });
  openHead(layer, head, { push: false });
  if (zoom > 0 && x !== undefined && y !== undefined) plot.camera.to({ x, y, zoom }); else plot.camera.fit();
  if (row < text.n && col < text.n) pin({ row: Math.floor(row), col: Math.floor(col) });
  plot.draw();
}

// The packaged font, so that Chinese is drawn properly whatever fonts the machine has.
async function fetchFont() {
  try {
    const face = new FontFace("Headwise Han", await (await ask("/api/font")).arrayBuffer(), { unicodeRange: "U+2190-21FF, U+2400-243F, U+2E80-10FFFF" });
    document.fonts.add(await face.load());
    plot.draw();
  } catch { /* the machine's own fonts will do */ }
}

function themed() {
  plot.hatch = null;
  if (!text) return;
  heads.arrange();
  controls.show(state);
  pairs.draw();
  plot.draw();
}

const modelName = () => said({ text: model.name, zh: model.zh });

function tellText() {
  byId("reading-title").textContent = byId("reading-title").title = text.title || text.id;
  byId("reading-facts").textContent = `${modelName()} · ${inTokens(text.n)}`;
  byId("notes").replaceChildren(...(text.notes ?? []).map((note) => make("li", { textContent: said(note) })));
}

function tellModel() {
  if (!model) return;
  const total = heads.total(model);
  byId("model").textContent = fill(T.model_facts, { name: modelName(), layers: model.layers.length, heads: total });
  byId("model").title = model.context ? fill(T.trained, { n: grouped(model.context) }) : "";
  reading.count();
}

function listen() {
  const on = (id, act) => byId(id).addEventListener("click", act);
  on("close", closeHead);
  on("head-before", () => turnHead(-1));
  on("head-after", () => turnHead(1));
  on("zoom-in", () => zoomMiddle(2));
  on("zoom-out", () => zoomMiddle(0.5));
  on("fit", fit);
  on("keys", () => byId("keys").setAttribute("aria-expanded", String(!(byId("map-help").hidden = !byId("map-help").hidden))));
  on("link", copyLink);
  on("save", savePicture);
  watchTheme(themed);
  on("language", () => speak(language === "en" ? "zh" : "en", true));
  byId("statistic").addEventListener("change", (event) => { heads.statistic = event.target.value; heads.arrange(); });
  byId("order").addEventListener("change", (event) => { heads.order = event.target.value; heads.arrange(); });
  byId("heads-range").addEventListener("change", (event) => { heads.range = event.target.value; heads.draw(); });
  byId("map").addEventListener("keydown", onMapKey);
  document.addEventListener("keydown", onKey);
  addEventListener("stage", () => plot.layout());
  addEventListener("popstate", () => { const kept = recall(); if (kept.text === text?.id) { if (kept.layer === undefined) closeHead(); else restore(kept); } });
  addEventListener("language", () => { tellModel(); reading.tell(); if (!text) return; tellText(); heads.names(); heads.arrange(); controls.show(state); search.words(); if (state.layer !== null) showHead(); });
}

async function start() {
  listen();
  speak(firstLanguage(), false);
  reading.ask(true);
  try {
    model = await askJSON("/api/model");
    tellModel();
    fetchFont();
    reading.limit = model.limits?.characters;
    const id = recall().text ?? model.text;  // the address's text, else what the server reads already
    if (id) await reading.restore(id);
  } catch (error) {
    complain(error);
  }
}

start();
