// The statistics of the selected head, each among those of all heads.

function drawCard(box, layer, head) {
  if (!REPORT.statistics.length) return;
  const list = make("dl"), plots = [];
  for (const statistic of REPORT.statistics) {
    const values = statistic.values.flat(), value = statistic.values[layer][head];
    const number = make("dd", {}, decimals(value, extent(values)));
    if (statistic.unit) number.append(make("small", { textContent: statistic.unit }));
    const plot = make("canvas");
    list.append(make("dt", { textContent: statistic.label, title: statistic.description }), number, plot);
    plots.push(() => drawTicks(plot, values, value));
  }
  const parts = [make("h3", { textContent: fill(T.card, { layer, head }) })];
  if (REPORT.kinds.length) {
    const lines = REPORT.labels[layer][head].map(([label, rows, uniform, confidence, sure]) =>
      fill(sure ? T.label_hint : T.tendency_hint, { label, rows, uniform: uniform.toFixed(2), confidence: Math.floor(100 * confidence) }));
    for (const line of lines.length ? lines : [T.no_label]) parts.push(make("p", { className: "hint", textContent: line, title: T.pattern_tip }));
  }
  box.replaceChildren(...parts, list, make("p", { className: "hint", textContent: T.card_hint }));
  for (const draw of plots) draw();
}

// All heads as faint strokes from the smallest to the largest, the selected one as a strong stroke.
function drawTicks(canvas, values, value) {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const context = fitCanvas(canvas), known = values.filter((v) => v !== null);
  const range = valueRange(known);
  const stroke = (v, colour, thick, tall) => {
    const x = 3 + shareOf(v, range, 0.5) * (width - 6);
    context.fillStyle = colour;
    context.fillRect(x - thick / 2, (height - tall) / 2, thick, tall);
  };
  context.fillStyle = css("--line");
  context.fillRect(3, height / 2 - 0.5, width - 6, 1);
  context.globalAlpha = known.length > 60 ? 0.3 : 0.55;
  for (const v of known) stroke(v, css("--muted"), 1, 8);
  context.globalAlpha = 1;
  if (value !== null) stroke(value, css("--accent"), 3, 16);
}
