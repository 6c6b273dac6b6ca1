// Making elements of the page, finding them, and putting words together.

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

// Offer a canvas as a PNG file.
function download(canvas, name) {
  canvas.toBlob((blob) => {
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}
