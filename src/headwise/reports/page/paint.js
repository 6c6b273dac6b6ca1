// A picture of a reduced map, one pixel a cell; signed: a difference, blue above zero and orange below.
function paint(cells, top, scale, causal, signed) {
  const canvas = document.createElement("canvas");
  canvas.width = cells.width;
  canvas.height = cells.height;
  const context = canvas.getContext("2d"), image = context.createImageData(cells.width, cells.height);
  const mask = hex(css("--masked")), differences = signed && Array.from({ length: 511 }, (_, i) => mixed(i - 255, 255));
  for (let i = 0; i < cells.values.length; i++) {
    const value = cells.values[i];
    const [r, g, b] = causal && cells.masked[i] ? mask
      : signed ? differences[255 + Math.round(255 * Math.sign(value) * place(Math.abs(value), top, scale))] : colourAt(place(value, top, scale));
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// From the background to blue for large values, to orange for negative ones.
function mixed(value, top) {
  const part = top > 0 ? Math.min(1, Math.abs(value) / top) : 0, ground = hex(css("--panel"));
  const ink = css(value < 0 ? "--looked" : "--looks").split(",").map(Number);
  return ground.map((g, c) => Math.round(g + (ink[c] - g) * part));
}
