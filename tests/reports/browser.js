// Put into a copy of the page by the fixture `played`: helpers, then the test's own steps, then the result.
const out = {};
const all = (css) => [...document.querySelectorAll(css)];
const one = (css) => document.querySelector(css);
const text = (css) => one(css).textContent;
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const until = async (what) => {
  for (let i = 0; i < 200; i++) { if (what()) return; await pause(10); }
  throw new Error("waited in vain for " + what);
};
// The change, and until the map is drawn anew: its weights may have to be unpacked first.
let draws = 0;
const drawImage = CanvasRenderingContext2D.prototype.drawImage;
CanvasRenderingContext2D.prototype.drawImage = function (...what) {
  if (this.canvas.id === "map-base") draws++;
  drawImage.apply(this, what);
};
const drawn = async (change) => { draws = 0; change(); await until(() => draws); await new Promise(requestAnimationFrame); };
const point = (element, type, at = {}) => element.dispatchEvent(new PointerEvent(type, { bubbles: true, pointerId: 1, button: 0, ...at }));
const press = (element, key, more = {}) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...more }));
const choose = (css, value) => { one(css).value = value; one(css).dispatchEvent(new Event("change", { bubbles: true })); };
const colours = (canvas) => {
  if (!canvas.width || !canvas.height) return 0;
  // Read from a copy: the browser remarks on canvases that are read often.
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const data = copy.getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
  for (let i = 0; i < data.length; i += 4) found.add(`${data[i]},${data[i + 1]},${data[i + 2]},${data[i + 3]}`);
  return found.size;
};
const units = () => all("#strip > [data-unit]");
const ready = () => until(() => colours(one("#map-base")) > 8);
// Everything the tooltip says, with the pointer taken over the whole map. Each step draws: three to a cell are enough.
const sweep = async (steps) => {
  const over = one("#map-over"), box = over.getBoundingClientRect(), said = new Set();
  for (let i = 0; i < steps; i++) for (let j = 0; j < steps; j++) {
    point(over, "pointermove", { clientX: box.left + (box.width * (j + 0.5)) / steps, clientY: box.top + (box.height * (i + 0.5)) / steps });
    if (!one("#tip").hidden) said.add([...one("#tip").querySelectorAll("em, b, .weight")].map((e) => e.textContent.trim()).join("|"));
  }
  return [...said];
};
addEventListener("load", async () => {
  try {
    await document.fonts.ready;
    await steps();
  } catch (error) {
    out.error = String(error?.stack ?? error);
  }
  document.documentElement.dataset.result = JSON.stringify(out);
});
