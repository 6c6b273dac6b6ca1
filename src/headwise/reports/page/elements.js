// Elements, words, canvases and keys: what both pages use.

// (row, column) steps of the arrow keys.
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function fill(words, values) {
  return words.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);

function setTheme(name, keep) {
  document.documentElement.dataset.theme = name;
  if (keep) try { localStorage.setItem("headwise-theme", name); } catch { /* a private window keeps nothing */ }
}

// Call `change(theme)` when the reader or the system changes the theme.
function watchTheme(change) {
  byId("theme").addEventListener("click", () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark", true);
    change();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
    setTheme(event.matches ? "dark" : "light", false);
    change();
  });
}

// One tab stop for a grid of buttons with a layer and a head; arrow keys move between them.
function oneStop(box, css) {
  const buttons = [...box.querySelectorAll(css)];
  buttons.forEach((button, i) => { button.tabIndex = i ? -1 : 0; });
  box.onkeydown = (event) => {
    const [down, right] = ARROWS[event.key] ?? [], { layer, head } = event.target;
    if (down === undefined || layer === undefined) return;
    event.preventDefault();
    const next = buttons.find((button) => button.layer === layer + down && button.head === head + right);
    if (!next) return;
    for (const button of buttons) button.tabIndex = button === next ? 0 : -1;
    next.focus();
  };
}

// Fit a canvas to a size in css pixels, by default its own; its context, scaled to css pixels.
function fitCanvas(canvas, width = canvas.clientWidth, height = canvas.clientHeight) {
  const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// Write a text from bottom to top, at (x, y).
function writeUpwards(context, text, x, y, room) {
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.fillText(text, 0, 0, room);
  context.restore();
}

// Black or white, whichever is readable on this colour.
const inkOn = ([r, g, b]) => (0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#1d1e26" : "#ffffff");

// An observer that calls `paint(element)` for what comes into view, and keeps `element.visible`.
const watchVisible = (paint, options = { rootMargin: "200px" }) => new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.visible = isIntersecting;
    if (isIntersecting) paint(target);
  }
}, options);

// Offer data as a file.
function offer(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Offer a canvas as a PNG file.
const download = (canvas, name) => canvas.toBlob((blob) => offer(blob, name));
