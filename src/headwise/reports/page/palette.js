// From a weight to a colour: a scale (linear, square root, logarithm), a range, a table of 256 colours.

const LOG_DECADES = 4;  // a logarithmic scale spans 1 : 10,000

// `COLOURS` is the page's: the stops of each theme.
const TABLES = Object.fromEntries(Object.entries(COLOURS).map(([name, stops]) => [name, table(stops)]));

function table(stops) {
  const rgb = stops.map((s) => [1, 3, 5].map((i) => parseInt(s.slice(i, i + 2), 16)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (rgb.length - 1), low = Math.min(rgb.length - 2, Math.floor(at)), part = at - low;
    return rgb[low].map((v, c) => Math.round(v + (rgb[low + 1][c] - v) * part));
  });
}

const theme = () => document.documentElement.dataset.theme;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The lower end of a scale by default.
const bottom = (top, scale) => (scale === "log" ? top / 10 ** LOG_DECADES : 0);

// The position of a weight, 0 to 1, on the scale from `low` to `top`.
function place(weight, top, scale, low = bottom(top, scale)) {
  if (weight <= low || top <= low) return 0;
  if (weight >= top) return 1;
  if (scale === "log") return Math.log(weight / low) / Math.log(top / low);
  const part = (weight - low) / (top - low);
  return scale === "sqrt" ? Math.sqrt(part) : part;
}

// The weight at a position: the inverse of `place`.
function weightAt(at, top, scale, low = bottom(top, scale)) {
  if (scale === "log") return low * (top / low) ** at;
  return low + (top - low) * (scale === "sqrt" ? at * at : at);
}

const colourAt = (at) => TABLES[theme()][Math.round(255 * Math.min(1, Math.max(0, at)))];

// One of `count` colours, for lines on the background: hues around the circle, by turns darker and lighter, as bytes.
function headColour(at, count) {
  const hue = (6 * at) / count, goal = { light: [0.3, 0.46], dark: [0.56, 0.74] }[theme()][at % 2];
  const pure = [Math.abs(hue - 3) - 1, 2 - Math.abs(hue - 2), 2 - Math.abs(hue - 4)].map((part) => Math.min(1, Math.max(0, part)));
  const light = 0.3 * pure[0] + 0.59 * pure[1] + 0.11 * pure[2];
  return pure.map((part) => Math.round(255 * (light > goal ? (part * goal) / light : part + ((1 - part) * (goal - light)) / (1 - light))));
}

const hex = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));

// The colour bar below a picture; `cut`: whether there are weights above its end.
function drawBar(canvas, top, scale, cut, low) {
  canvas.style.setProperty("--ratio", `${canvas.clientWidth} / ${canvas.clientHeight}`);  // kept on paper, where it has another width
  paintBar(fitCanvas(canvas), { left: 14, right: canvas.clientWidth - 26, y: 0 }, top, scale, cut, low);
}

function paintBar(context, { left, right, y }, top, scale, cut, low = bottom(top, scale)) {
  const band = 11;
  for (let x = left; x < right; x++) {
    context.fillStyle = `rgb(${colourAt((x - left) / (right - left))})`;
    context.fillRect(x, y, 1.5, band);
  }
  context.lineWidth = 1;
  context.strokeStyle = css("--line");
  context.strokeRect(left - 0.5, y + 0.5, right - left + 1, band - 1);
  context.fillStyle = css("--muted");
  context.font = `11px ${css("--ui")}`;
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  const spots = scale === "log" ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.2, 0.4, 0.6, 0.8, 1];
  const labels = spots.map((at) => {
    const x = left + at * (right - left), mark = at === 1 && cut ? "≥ " : at === 0 && low > 0 ? "≤ " : "";
    const label = mark + trimmed(weightAt(at, top, scale, low)), half = context.measureText(label).width / 2;
    return { x, label, half, middle: Math.min(right + 25 - half, Math.max(left - 13 + half, x)) };
  });
  const last = labels.at(-1);
  let end = -Infinity;
  for (const { x, label, half, middle } of labels) {
    context.fillRect(x - 0.5, y + band, 1, 4);
    // Both ends are written, and between them what meets no other label.
    const fits = middle - half > end + 6 && middle + half < last.middle - last.half - 6;
    if (x !== last.x && !fits && end > -Infinity) continue;
    context.fillText(label, middle, y + band + 16);
    end = middle + half;
  }
}
