// The view as the address keeps it, so that a reload or a copied link shows the same.

let late = 0;

// Written once movements have come to rest: browsers refuse to write it often.
function remember() {
  clearTimeout(late);
  late = setTimeout(writeAddress, 250);
}

function writeAddress() {
  clearTimeout(late);
  if (!text) return;
  const { x, y, zoom } = plot.camera, kept = { text: text.id };
  if (state.layer !== null) {
    Object.assign(kept, { layer: state.layer, head: state.head, reduce: state.reduce, scale: state.scale });
    if (!plot.camera.fits) Object.assign(kept, { x: +x.toFixed(2), y: +y.toFixed(2), zoom: +zoom.toPrecision(5) });
    if (!state.auto) Object.assign(kept, { top: +state.top.toPrecision(4), ...(state.low === undefined ? {} : { low: +state.low.toPrecision(4) }) });
    if (plot.pinned) Object.assign(kept, { row: plot.cursor.row, col: plot.cursor.col });
  }
  const hash = "#" + new URLSearchParams(kept);
  if (hash !== location.hash) try { history.replaceState(null, "", hash); } catch { /* too often, or not allowed */ }
}

// The view in the address, without invalid values.
function recall() {
  const kept = new URLSearchParams(location.hash.slice(1)), out = { text: kept.get("text") };
  for (const name of ["layer", "head", "x", "y", "zoom", "low", "top", "row", "col"]) {
    const value = Number(kept.get(name) ?? NaN);
    if (Number.isFinite(value) && value >= 0) out[name] = value;
  }
  for (const name of ["reduce", "scale"]) if ([...byId(name).options].some(({ value }) => value === kept.get(name))) out[name] = kept.get(name);
  return out;
}
