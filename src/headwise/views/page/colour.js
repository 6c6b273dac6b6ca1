// From a weight to a colour: a scale (linear, square root, logarithm), a range, a table of 256 colours.

const LOG_DECADES = 4;  // a logarithmic scale spans 1 : 10,000

const TABLES = Object.fromEntries(Object.entries(REPORT.colours).map(([theme, stops]) => [theme, table(stops)]));

function table(stops) {
  const rgb = stops.map((s) => [1, 3, 5].map((i) => parseInt(s.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (rgb.length - 1), low = Math.min(rgb.length - 2, Math.floor(at)), part = at - low;
    return rgb[low].map((v, c) => Math.round(v + (rgb[low + 1][c] - v) * part));
  });
}

const theme = () => document.documentElement.dataset.theme;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Where a weight stands between 0 and 1 on the scale.
function place(weight, top, scale) {
  if (weight <= 0 || top <= 0) return 0;
  const part = Math.min(1, weight / top);
  if (scale === "sqrt") return Math.sqrt(part);
  if (scale === "log") return Math.max(0, 1 + Math.log10(part) / LOG_DECADES);
  return part;
}

// The weight that stands there: the inverse of `place`.
function weightAt(at, top, scale) {
  if (scale === "sqrt") return top * at * at;
  if (scale === "log") return top * 10 ** ((at - 1) * LOG_DECADES);
  return top * at;
}

const colourAt = (at) => TABLES[theme()][Math.round(255 * Math.min(1, Math.max(0, at)))];

// A picture of a reduced map, one pixel a cell.
function paint(cells, top, scale, causal) {
  const canvas = document.createElement("canvas");
  canvas.width = cells.width;
  canvas.height = cells.height;
  const context = canvas.getContext("2d"), image = context.createImageData(cells.width, cells.height);
  const mask = hex(css("--masked"));
  for (let i = 0; i < cells.values.length; i++) {
    const [r, g, b] = causal && cells.masked[i] ? mask : colourAt(place(cells.values[i], top, scale));
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// A number on an axis: "0.04", not "0.0400".
const trimmed = (value) => fixed(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

const hex = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

function drawBar(canvas, top, scale, cut) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d"), left = 14, right = width - 26, band = 11;
  context.scale(ratio, ratio);
  for (let x = left; x < right; x++) {
    context.fillStyle = `rgb(${colourAt((x - left) / (right - left))})`;
    context.fillRect(x, 0, 1.5, band);
  }
  context.strokeStyle = css("--line");
  context.strokeRect(left - 0.5, 0.5, right - left + 1, band - 1);
  context.fillStyle = css("--muted");
  context.font = `11px ${css("--ui")}`;
  context.textAlign = "center";
  const spots = scale === "log" ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.2, 0.4, 0.6, 0.8, 1];
  for (const at of spots) {
    const x = left + at * (right - left), mark = at === 1 && cut ? "≥ " : at === 0 && scale === "log" ? "≤ " : "";
    context.fillRect(x - 0.5, band, 1, 4);
    context.fillText(mark + trimmed(weightAt(at, top, scale)), x, band + 16);
  }
}
