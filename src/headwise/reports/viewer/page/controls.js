// The row above the map: pooling, scale and range.

const FLOOR = -8;       // decades: a range begins and ends between 1e-8 and 1

class Controls {
  // Calls `changed({reduce})`, `changed({scale})` or `changed({low, top, auto})`.
  constructor(changed) {
    this.changed = changed;
    for (const id of ["reduce", "reduce-all"]) byId(id).addEventListener("change", (event) => changed({ reduce: event.target.value }));
    byId("scale").addEventListener("change", (event) => changed({ scale: event.target.value }));
    byId("auto").addEventListener("change", (event) => changed({ auto: event.target.checked }));
    for (const id of ["low", "high"]) byId(id).addEventListener("input", () => this.slide(id));
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  // A slider was moved; the two keep a little apart.
  slide(id) {
    const low = byId("low"), high = byId("high"), apart = 0.1;
    if (id === "low") low.value = Math.min(low.value, high.value - apart);
    else high.value = Math.max(high.value, Number(low.value) + apart);
    const bottom = Number(low.value) <= FLOOR && byId("scale").value !== "log" ? 0 : 10 ** low.value;
    this.changed({ low: bottom, top: 10 ** high.value, auto: false });
  }

  show({ reduce, scale, low, top, auto }) {
    byId("reduce").value = byId("reduce-all").value = reduce;
    byId("scale").value = scale;
    byId("auto").checked = auto;
    const from = low ?? bottom(top, scale), place = (weight) => Math.max(FLOOR, Math.log10(weight || 10 ** FLOOR));
    byId("low").value = place(from);
    byId("high").value = place(top);
    const share = (id) => ((byId(id).value - FLOOR) / -FLOOR) * 100;
    byId("low").parentElement.style.setProperty("--from", `${share("low")}%`);
    byId("low").parentElement.style.setProperty("--to", `${share("high")}%`);
    byId("range-says").textContent = `${trimmed(from)} – ${trimmed(top)}`;
    for (const [id, weight] of [["low", from], ["high", top]]) byId(id).setAttribute("aria-valuetext", trimmed(weight));
    drawBar(byId("bar"), top, scale, true, low);
    byId("bar").setAttribute("aria-label", fill(T.bar_label, { top: fixed(top) }));
  }
}
