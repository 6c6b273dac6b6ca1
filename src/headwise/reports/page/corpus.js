// The page of a sweep: heads as points, and the passages of the selected one.

const corpus = new CorpusPassages(REPORT.corpus, byId("corpus-list"));
const scatter = new Scatter(byId("scatter"), REPORT.heads, REPORT.statistics, choose);
const AXES = ["x", "y", "colour"], chosenHead = { layer: 0, head: 0 };

const column = (name) => REPORT.statistics.find((one) => one.name === name);

function draw() {
  scatter.show(...AXES.map((axis) => column(byId(`scatter-${axis}`).value)));
  drawRange();
}

// The colours of the points, from the least to the largest value.
function drawRange() {
  const canvas = byId("bar"), [low, high] = scatter.range, context = fitCanvas(canvas), left = 14, right = canvas.clientWidth - 26;
  context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
  for (let x = left; x < right; x++) {
    context.fillStyle = `rgb(${colourAt(0.12 + (0.88 * (x - left)) / (right - left))})`;
    context.fillRect(x, 0, 1.5, 11);
  }
  context.fillStyle = css("--muted");
  context.font = `11px ${css("--ui")}`;
  const shownValue = (value) => (Number.isFinite(value) ? trimmed(value) : "–");
  context.textAlign = "left";
  context.fillText(shownValue(low), left, 26);
  context.textAlign = "right";
  context.fillText(shownValue(high), right, 26);
  context.textAlign = "center";
  context.fillText(scatter.colour.label, (left + right) / 2, 26);
  canvas.setAttribute("aria-label", `${scatter.colour.label}: ${shownValue(low)} – ${shownValue(high)}`);
}

function choose(layer, head) {
  Object.assign(chosenHead, { layer, head });
  const heads = REPORT.heads.filter(([l]) => l === layer).map(([, h]) => h);
  if (!heads.includes(head)) return choose(layer, heads[0]);
  byId("layer").value = layer;
  byId("head").replaceChildren(...heads.map((h) => new Option(h, h)));
  byId("head").value = head;
  byId("head-title").textContent = fill(T.head_name, { layer, head });
  byId("layer-name").textContent = REPORT.names[layer] ?? "";
  const i = REPORT.heads.findIndex(([l, h]) => l === layer && h === head);
  byId("numbers").replaceChildren(...REPORT.statistics.filter((one) => !["layer", "head"].includes(one.name)).flatMap((one) => {
    const value = make("dd", {}, fixed(one.values[i]));
    if (one.unit) value.append(make("small", { textContent: one.unit }));
    return [make("dt", { textContent: one.label, title: one.description }), value];
  }));
  scatter.select(layer, head);
  corpus.show(layer, head).catch(fail);
  const kept = new URLSearchParams({ layer, head, ...Object.fromEntries(AXES.map((axis) => [axis, byId(`scatter-${axis}`).value])) });
  try { history.replaceState(null, "", `#${kept}`); } catch { /* not allowed in some frames */ }
}

function fail(error) {
  byId("failure").hidden = false;
  byId("failure").textContent = fill(T.failure, { error: error?.message ?? error });
}

function start() {
  if (typeof DecompressionStream === "undefined") { fail(new Error("DecompressionStream")); return; }
  byId("facts").replaceChildren(...REPORT.facts.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
  const kept = new URLSearchParams(location.hash.slice(1)), names = REPORT.statistics.map((one) => one.name);
  const across = names.includes("entropy") ? "entropy" : names[0];
  const differs = (name) => new Set(REPORT.statistics[names.indexOf(name)]?.values).size > 1; // no line of points at 0
  const usual = { x: across, y: ["contrast", ...names].find((name) => name !== across && differs(name)) ?? "layer", colour: "layer" };
  for (const axis of AXES) {
    const select = byId(`scatter-${axis}`);
    select.replaceChildren(...REPORT.statistics.map((one) => new Option(one.label, one.name)));
    select.value = names.includes(kept.get(axis)) ? kept.get(axis) : usual[axis];
    select.addEventListener("change", () => { draw(); choose(chosenHead.layer, chosenHead.head); });
  }
  byId("axes").addEventListener("submit", (event) => event.preventDefault());
  byId("layer").replaceChildren(...[...new Set(REPORT.heads.map(([layer]) => layer))].map((layer) => new Option(layer, layer)));
  byId("layer").addEventListener("change", (event) => choose(Number(event.target.value), chosenHead.head));
  byId("head").addEventListener("change", (event) => choose(chosenHead.layer, Number(event.target.value)));
  byId("passages-about").hidden = !REPORT.corpus;
  byId("passages-by").textContent = REPORT.corpus ? corpus.strengthIn() : T.no_passages;
  const place0 = [Number(kept.get("layer") ?? NaN), Number(kept.get("head") ?? NaN)];
  const first = REPORT.heads.some(([l, h]) => l === place0[0] && h === place0[1]) ? place0 : REPORT.first;
  draw();
  choose(...first);
  watchTheme(() => { draw(); choose(chosenHead.layer, chosenHead.head); });
  addEventListener("resize", drawRange);
  let before = null;  // the theme on the screen
  addEventListener("beforeprint", () => { before = theme(); setTheme("light", false); draw(); });
  addEventListener("afterprint", () => { if (before) setTheme(before, false); before = null; draw(); });
}

start();
