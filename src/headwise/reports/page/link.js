// The address keeps what is chosen, so that a reload or a copied link shows the same.

const VIEW = ["r0", "r1", "c0", "c1"];

function remember() {
  const kept = { ...(state.tab === "maps" ? {} : { tab: state.tab }), passage: state.passage, layer: state.layer, head: state.head, kind: state.kind, scale: state.scale, range: state.range };
  if (state.text !== "strip") kept.text = state.text;
  if (arcs.layered && arcs.off.size) kept.off = [...arcs.off].join("-");
  if (state.full) kept.full = 1;
  if (passage().image && image.towards !== "looks") kept.image = image.towards;
  if (state.sentence >= 0) kept.sentence = state.sentence;
  else if (state.view) kept.view = VIEW.map((name) => state.view[name]).join("-");
  if (pinned) kept[pinned.side === passage().q ? "pin" : "pinkey"] = pinned.index;
  if (byId("find").value) kept.find = byId("find").value;
  Object.assign(kept, sides.kept());
  try { history.replaceState(null, "", "#" + new URLSearchParams(kept)); } catch { /* not allowed in some frames */ }
}

function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const number = (name, end) => {
    const value = Number(kept.get(name) ?? NaN);
    return Number.isInteger(value) && value >= 0 && value < end ? value : null;
  };
  if (TABS.includes(kept.get("tab")) && !byId(`tab-${kept.get("tab")}`).hidden) state.tab = kept.get("tab");
  const [layer0, head0, token0, side0, passage0] = REPORT.first;  // something to see at once
  state.passage = number("passage", REPORT.passages.length) ?? passage0;
  byId("passage").value = state.passage;
  state.layer = number("layer", REPORT.counts.length) ?? layer0;
  state.head = number("head", REPORT.heads) ?? head0;
  for (const name of ["kind", "scale", "range"]) {
    const known = [...byId(name).options].some((option) => option.value === kept.get(name));
    if (known) state[name] = kept.get(name);
    byId(name).value = state[name];
  }
  state.full = kept.get("full") === "1";
  openPassage();
  sides.recall(number);
  if (TEXTS.includes(kept.get("text"))) showText(kept.get("text"));
  arcs.off = new Set((kept.get("off") ?? "").split("-").filter(Boolean).map(Number).filter((head) => head < REPORT.heads));
  const place0 = passage(), pin0 = number("pin", unitsOf(place0.q).length), key0 = number("pinkey", unitsOf(place0.k).length);
  if (pin0 !== null) pinned = unitsOf(place0.q)[pin0];
  else if (key0 !== null) pinned = unitsOf(place0.k)[key0];
  else if (!location.hash) pointed = unitAt(place0[side0], token0);
  if (kept.get("image") === "looked") image.towards = "looked";
  const sentence = number("sentence", place0.sentences.length);
  if (sentence !== null) { byId("sentence").value = sentence; openSentence(sentence); } else state.view = viewIn(kept.get("view"), place0);
  if (kept.get("find")) find.start(kept.get("find"));
}

// "r0-r1-c0-c1" as a part of a map of at least two cells; null if it is not one.
function viewIn(text, place0) {
  const [r0, r1, c0, c1, ...more] = (text ?? "").split("-").map((part) => (/^\d+$/.test(part) ? Number(part) : NaN));
  const fits = r0 + 1 < r1 && r1 <= place0.rows && c0 + 1 < c1 && c1 <= place0.columns && !more.length;
  return fits ? { r0, r1, c0, c1 } : null;
}
