// Heads as points by two numbers, and a third as their colour.

const PLANE = { width: 460, height: 340, left: 46, right: 10, top: 10, bottom: 38 };
const SVG = "http://www.w3.org/2000/svg";

function svgPart(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

class Scatter {
  // heads: [layer, head] of each; columns: numbers of each; choose(layer, head).
  constructor(box, heads, columns, choose) {
    Object.assign(this, { box, heads, columns, choose, chosen: 0 });
    box.addEventListener("keydown", (event) => this.key(event));
  }

  show(x, y, colour) {
    Object.assign(this, { x, y, colour });
    const places = [this.along(x, PLANE.left, PLANE.width - PLANE.right), this.along(y, PLANE.height - PLANE.bottom, PLANE.top)];
    const svg = svgPart("svg", { viewBox: `0 0 ${PLANE.width} ${PLANE.height}`, "aria-hidden": "true" });
    svg.append(...this.ticks(places[0], true), ...this.ticks(places[1], false));
    const name = (c) => c.label + (c.unit ? ` (${c.unit})` : "");
    svg.append(svgPart("text", { x: (PLANE.left + PLANE.width - PLANE.right) / 2, y: PLANE.height - 4, "text-anchor": "middle" }, name(x)));
    const middle = (PLANE.top + PLANE.height - PLANE.bottom) / 2;
    svg.append(svgPart("text", { x: 10, y: middle, "text-anchor": "middle", transform: `rotate(-90 10 ${middle})` }, name(y)));
    this.range = valueRange(colour.values);
    const size = this.heads.length > 400 ? 3.5 : 6;
    this.points = this.heads.map(([layer, head], i) => {
      if (x.values[i] === null || y.values[i] === null) return null;
      const value = colour.values[i], at = shareOf(value, this.range, 0.5);
      const fillOf = value === null ? css("--masked") : `rgb(${colourAt(0.12 + 0.88 * at)})`;
      const point = svgPart("circle", { cx: places[0].at(x.values[i]), cy: places[1].at(y.values[i]), r: size, fill: fillOf });
      point.append(svgPart("title", {}, `${nameOfPoint(layer, head)} · ${x.label} ${fixed(x.values[i])}, ${y.label} ${fixed(y.values[i])}, ${colour.label} ${fixed(value)}`));
      point.addEventListener("click", () => this.choose(layer, head));
      return point;
    });
    svg.append(...this.points.filter(Boolean));
    this.box.replaceChildren(svg);
    this.box.setAttribute("aria-label", fill(T.scatter_label, { x: x.label, y: y.label, colour: colour.label }));
    this.select(...this.heads[this.chosen]);
  }

  // Positions of values between two ends, with a little room.
  along(column, from, to) {
    let [low, high] = valueRange(column.values);
    if (!(high > low)) [low, high] = [low - 0.5, high + 0.5];
    const room = 0.05 * (high - low);
    [low, high] = [low - room, high + room];
    return { low, high, at: (value) => from + ((value - low) / (high - low)) * (to - from) };
  }

  ticks({ low, high, at }, across) {
    const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough), parts = [];
    for (let value = Math.ceil(low / step) * step; value <= high; value += step) {
      const place = at(value), shownValue = Math.abs(value) < step / 1e6 ? "0" : trimmed(value);
      if (across) {
        parts.push(svgPart("line", { class: "grid-line", x1: place, x2: place, y1: PLANE.top, y2: PLANE.height - PLANE.bottom }));
        parts.push(svgPart("text", { x: place, y: PLANE.height - PLANE.bottom + 14, "text-anchor": "middle" }, shownValue));
      } else {
        parts.push(svgPart("line", { class: "grid-line", x1: PLANE.left, x2: PLANE.width - PLANE.right, y1: place, y2: place }));
        parts.push(svgPart("text", { x: PLANE.left - 6, y: place + 4, "text-anchor": "end" }, shownValue));
      }
    }
    return parts;
  }

  select(layer, head) {
    this.chosen = this.heads.findIndex(([l, h]) => l === layer && h === head);
    this.points?.forEach((point, i) => point?.classList.toggle("on", i === this.chosen));
    const point = this.points?.[this.chosen];
    if (point) point.parentNode.append(point);  // above the others
  }

  // The nearest head in the direction of an arrow key.
  key(event) {
    const [down, right] = ARROWS[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const place = (i) => [Number(this.points[i].getAttribute("cx")), Number(this.points[i].getAttribute("cy"))];
    const shownOnes = this.points.map((_, i) => i).filter((i) => this.points[i]);
    if (!this.points[this.chosen]) { if (shownOnes.length) this.choose(...this.heads[shownOnes[0]]); return; }
    const [x, y] = place(this.chosen);
    let best = -1, least = Infinity;
    for (const i of shownOnes) {
      const [dx, dy] = [place(i)[0] - x, place(i)[1] - y], ahead = right ? dx * right : dy * down, aside = Math.abs(right ? dy : dx);
      const far = ahead + 2 * aside;
      if (i !== this.chosen && ahead > 0 && far < least) [best, least] = [i, far];
    }
    if (best >= 0) this.choose(...this.heads[best]);
  }
}

const nameOfPoint = (layer, head) => fill(T.short_name, { layer, head });
