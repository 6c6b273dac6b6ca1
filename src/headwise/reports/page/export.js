// Files of what is on show: the map in view as PNG and SVG, its numbers as CSV, the arcs as SVG.

const SHARP = 2;        // pixels of a PNG for a css pixel, at least

// The title, the map and its colour bar, on a canvas or in SVG.
function figure(context, map, title, width, height) {
  const head = 36, { clientHeight } = map.box;
  context.fillStyle = css("--panel");
  context.fillRect(0, 0, width, height);
  context.fillStyle = css("--ink");
  context.font = `600 15px ${css("--ui")}`;
  context.textAlign = "left";
  context.textBaseline = "alphabetic";
  context.fillText(fitted(context, title, width - 20), 10, 24);
  context.save();
  context.translate(0, head);
  map.draw(context);
  if (!map.signed) paintBar(context, { left: 24, right: width - 36, y: clientHeight + 6 }, map.top, map.scale, true);
  context.restore();
}

const figureSize = (map) => ({ width: map.box.clientWidth, height: map.box.clientHeight + 36 + (map.signed ? 8 : 44) });

function savePNG(map, title, name) {
  const { width, height } = figureSize(map), ratio = Math.max(SHARP, devicePixelRatio || 1);
  const canvas = make("canvas", { width: width * ratio, height: height * ratio }), context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  figure(context, map, title, width, height);
  canvas.toBlob((blob) => offer(blob, `${name}.png`));
}

function saveSVG(map, title, name) {
  const { width, height } = figureSize(map), pen = new SvgPen(width, height);
  figure(pen, map, title, width, height);
  offer(new Blob([pen.toString()], { type: "image/svg+xml" }), `${name}.svg`);
}

// One line for each cell in view that is not masked. Tokens are JSON strings: no program takes one for a formula.
function tableOf({ map, passage, view }) {
  const token = (side, at) => `"${JSON.stringify(textOf(side, at)).replaceAll('"', '""')}"`;
  const lines = ["query,query_text,key,key_text,weight"];
  for (let r = view.r0; r < view.r1; r++) {
    for (let c = view.c0; c < view.c1; c++) {
      if (passage.causal && c > r) continue;
      const weight = map[r * passage.columns + c];
      lines.push([r * passage.q.cell, token(passage.q, r), c * passage.k.cell, token(passage.k, c), Number(weight.toPrecision(4))].join(","));
    }
  }
  return lines.join("\r\n") + "\r\n";
}

function saveCSV(map, name) {
  offer(new Blob(["\ufeff", tableOf(map)], { type: "text/csv" }), `${name}.csv`);
}

// Buttons PNG, SVG and CSV for a map; `what()` gives its title and the name of the files.
function saves(id, map, what) {
  byId(`${id}-png`).addEventListener("click", () => savePNG(map, what().title, what().name));
  byId(`${id}-svg`).addEventListener("click", () => saveSVG(map, what().title, what().name));
  byId(`${id}-csv`).addEventListener("click", () => saveCSV(map, what().name));
}
