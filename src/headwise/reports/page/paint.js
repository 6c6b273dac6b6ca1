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
