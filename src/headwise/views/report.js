"use strict";
// The page: everything is drawn from the JSON in #data; no request leaves it.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const say = (key) => data.strings[key];
  const state = { passage: 0, layer: 0, head: 0, sentence: -1, scale: "sqrt", peaks: false, held: -1, sort: null, up: false };
  const marks = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
  const seen = (token) => Array.from(token, (c) => marks[c] || c).join("");
  const root = document.documentElement;

  // ---- weights: base64 of zlib of float16, unpacked when a passage is first shown
  const half = new Float32Array(65536);
  for (let i = 0; i < 65536; i++) {
    const e = (i >> 10) & 31, f = i & 1023;
    half[i] = (i & 32768 ? -1 : 1) * (e === 0 ? f * 2 ** -24 : e === 31 ? NaN : (1 + f / 1024) * 2 ** (e - 15));
  }
  async function unpack(code) {
    const bytes = Uint8Array.from(atob(code), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const halves = new Uint16Array(await new Response(stream).arrayBuffer());
    return halves;
  }
  async function load(passage) {
    if (passage.weights) return;
    passage.weights = await unpack(passage.maps);
    passage.largest = passage.peaks ? await unpack(passage.peaks) : null;
    passage.maps = passage.peaks = null;
  }
  const passage = () => data.passages[state.passage];
  const source = () => (state.peaks && passage().largest ? passage().largest : passage().weights);
  const offset = (layer, head) => (layer * data.heads + head) * passage().side ** 2;
  const weight = (i, j) => half[source()[offset(state.layer, state.head) + i * passage().side + j]];

  // ---- colours: even steps of lightness in OKLCH, from the page's ground up
  let palette;
  function makePalette() {
    const dark = root.classList.contains("dark");
    const [l0, l1, h0, h1] = dark ? [0.21, 0.95, 285, 95] : [0.99, 0.27, 95, 285];
    palette = new Uint8ClampedArray(256 * 3);
    for (let i = 0; i < 256; i++) {
      const t = i / 255, l = l0 + (l1 - l0) * t, c = 0.155 * Math.sin(Math.PI * 0.92 * t);
      const way = dark ? h0 + (h1 + 360 - h0) * t : h0 - (h0 + 360 - h1) * t;
      const a = c * Math.cos((way * Math.PI) / 180), b = c * Math.sin((way * Math.PI) / 180);
      const [p, q, r] = [l + 0.3963 * a + 0.2158 * b, l - 0.1056 * a - 0.0639 * b, l - 0.0895 * a - 1.2915 * b].map((x) => x ** 3);
      const rgb = [4.0767 * p - 3.3077 * q + 0.231 * r, -1.2684 * p + 2.6098 * q - 0.3413 * r, -0.0042 * p - 0.7034 * q + 1.7076 * r];
      rgb.forEach((x, k) => (palette[3 * i + k] = 255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * Math.max(x, 0) ** (1 / 2.4) - 0.055)));
    }
  }
  function shade(w, top) {
    if (!(w > 0)) return 0;
    const x = Math.min(1, w / top);
    if (state.scale === "linear") return Math.round(255 * x);
    if (state.scale === "sqrt") return Math.round(255 * Math.sqrt(x));
    return Math.round(255 * Math.max(0, 1 + Math.log10(x) / 4)); // four decades
  }
  function topOf(layer, head, r0 = 0, r1 = passage().side) {
    const values = source(), side = passage().side, from = offset(layer, head);
    let top = 0;
    for (let i = from + r0 * side; i < from + r1 * side; i++) { const w = half[values[i]]; if (w > top) top = w; }
    return top || 1;
  }
  function image(layer, head, r0, r1, top) {
    const n = r1 - r0, side = passage().side, values = source(), from = offset(layer, head);
    const picture = new ImageData(n, n);
    for (let i = 0, at = 0; i < n; i++)
      for (let j = 0; j < n; j++, at += 4) {
        const s = 3 * shade(half[values[from + (r0 + i) * side + r0 + j]], top);
        picture.data[at] = palette[s]; picture.data[at + 1] = palette[s + 1]; picture.data[at + 2] = palette[s + 2]; picture.data[at + 3] = 255;
      }
    return picture;
  }

  // ---- the grid of thumbnails
  function drawGrid() {
    const grid = $("grid");
    if (!grid.children.length) {
      grid.style.gridTemplateColumns = `auto repeat(${data.heads}, minmax(0, 1fr))`;
      grid.append(tag("span", "label"));
      for (let h = 0; h < data.heads; h++) grid.append(tag("span", "label", String(h)));
      for (let l = 0; l < data.layers; l++) {
        grid.append(tag("span", "label", String(l)));
        for (let h = 0; h < data.heads; h++) {
          const button = tag("button", "cell");
          button.type = "button"; button.dataset.layer = l; button.dataset.head = h;
          button.setAttribute("aria-label", `${say("layer")} ${l} ${say("head")} ${h}: ${data.patterns[l][h]}`);
          button.title = `${say("layer")} ${l} · ${say("head")} ${h}\n${data.patterns[l][h]}`;
          button.append(document.createElement("canvas"));
          button.onclick = () => choose(l, h);
          grid.append(button);
        }
      }
    }
    for (const button of grid.querySelectorAll(".cell")) {
      const canvas = button.firstChild, l = +button.dataset.layer, h = +button.dataset.head, side = passage().side;
      canvas.width = canvas.height = side;
      canvas.style.imageRendering = side < 90 ? "pixelated" : "auto";
      canvas.getContext("2d").putImageData(image(l, h, 0, side, topOf(l, h)), 0, 0);
    }
  }

  // ---- the enlarged head
  let frame = { left: 0, cell: 1, r0: 0, n: 1 };
  function range() {
    if (state.sentence < 0) return [0, passage().side];
    const [a, b] = passage().sentences[state.sentence], cell = passage().cell;
    return [Math.floor(a / cell), Math.ceil(b / cell)];
  }
  function label(i) {
    const { tokens, cell } = passage();
    if (cell === 1) return seen(tokens[i]);
    return seen(tokens.slice(i * cell, Math.min(tokens.length, i * cell + cell)).join(""));
  }
  function place(i) {
    const { tokens, cell } = passage();
    if (cell === 1) return String(i);
    return `${i * cell}–${Math.min(tokens.length, i * cell + cell) - 1}`;
  }
  function drawMap(cross) {
    const canvas = $("map"), [r0, r1] = range(), n = r1 - r0;
    const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
    const rough = (width - 30) / n, text = passage().cell === 1 && rough >= 11, left = text ? 26 : 34;
    const cell = (width - left) / n, height = cell * n + left;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d"), top = topOf(state.layer, state.head, r0, r1);
    frame = { left, cell, r0, n };
    const small = document.createElement("canvas");
    small.width = small.height = n;
    small.getContext("2d").putImageData(image(state.layer, state.head, r0, r1, top), 0, 0);
    g.scale(ratio, ratio);
    g.imageSmoothingEnabled = cell < 2;
    g.drawImage(small, left, left, cell * n, cell * n);
    const style = getComputedStyle(root), ink = style.getPropertyValue("--ink"), dim = style.getPropertyValue("--dim");
    g.strokeStyle = style.getPropertyValue("--line"); g.strokeRect(left + 0.5, left + 0.5, cell * n - 1, cell * n - 1);
    g.textBaseline = "middle";
    g.font = `${text ? Math.min(17, cell * 0.82) : 11}px system-ui, "Headwise Han", "Noto Sans CJK SC", sans-serif`;
    const every = text ? 1 : Math.max(1, Math.ceil(n / 8));
    for (let i = 0; i < n; i += every) {
      const word = text ? label(r0 + i) : String((r0 + i) * passage().cell), at = left + (i + (text ? 0.5 : 0)) * cell;
      g.fillStyle = cross && (cross[0] === r0 + i || cross[1] === r0 + i) ? ink : dim;
      g.textAlign = "right"; g.fillText(word, left - 5, text ? at : at + 6, left - 5);
      g.textAlign = text ? "center" : "left"; g.fillText(word, at, left - 10, text ? cell : 60);
    }
    if (cross) {
      g.strokeStyle = ink; g.lineWidth = 1;
      g.strokeRect(left, left + (cross[0] - r0) * cell, cell * n, cell);
      g.strokeRect(left + (cross[1] - r0) * cell, left, cell, cell * n);
    }
    const pattern = data.patterns[state.layer][state.head];
    $("name").textContent = `${say("layer")} ${state.layer} · ${say("head")} ${state.head}${pattern ? " — " + pattern : ""}`;
    $("top").textContent = number(top);
    const ramp = $("colours").getContext("2d").createImageData(256, 1);
    for (let i = 0; i < 256; i++) { const s = 3 * shade(((i + 0.5) / 256) * top, top); ramp.data.set([palette[s], palette[s + 1], palette[s + 2], 255], 4 * i); }
    $("colours").getContext("2d").putImageData(ramp, 0, 0);
    $("cellnote").textContent = passage().cell > 1 ? say("pooled").replaceAll("{cell}", passage().cell) : "";
  }
  function number(x) { return x === 0 ? "0" : x >= 0.001 ? x.toPrecision(3) : x.toExponential(1); }
  function over(event) {
    const canvas = $("map"), box = canvas.getBoundingClientRect();
    const j = Math.floor((event.clientX - box.left - frame.left) / frame.cell), i = Math.floor((event.clientY - box.top - frame.left) / frame.cell);
    if (i < 0 || j < 0 || i >= frame.n || j >= frame.n) return out();
    point(frame.r0 + i, frame.r0 + j, event.clientX - box.left, event.clientY - box.top);
  }
  function point(i, j, x, y) {
    drawMap([i, j]);
    const tip = $("tip"), short = (s) => (Array.from(s).length > 24 ? Array.from(s).slice(0, 24).join("") + "…" : s);
    const kind = passage().cell > 1 ? ` (${say(state.peaks ? "max" : "mean")})` : "";
    tip.textContent = `${say("query")} ${place(i)} “${short(label(i))}”\n${say("key")} ${place(j)} “${short(label(j))}”\n${say("weight")}${kind} ${number(weight(i, j))}`;
    tip.classList.add("on");
    tip.style.left = Math.max(0, Math.min(x + 14, $("stage").clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = (y > 120 ? y - tip.offsetHeight - 12 : y + 16) + "px";
    if (state.held < 0) tint(i);
  }
  function out() { $("tip").classList.remove("on"); drawMap(); if (state.held < 0) tint(-1); }

  // ---- the text
  function drawText() {
    const box = $("text"), { tokens, cell, side } = passage();
    box.textContent = "";
    for (let i = 0; i < side; i++) {
      const span = tag("span");
      span.dataset.i = i; span.tabIndex = 0;
      for (const token of tokens.slice(i * cell, i * cell + cell)) {
        const mark = marks[token];
        if (mark && cell === 1) span.append(tag("i", "mark", mark));
        else span.append(token);
        if (token === "\n" && cell === 1) span.append("\n");
      }
      box.append(span);
    }
  }
  function tint(i) {
    const spans = $("text").children, side = passage().side;
    let row = 0, column = 0;
    if (i >= 0) for (let j = 0; j < side; j++) { row = Math.max(row, weight(i, j)); column = Math.max(column, weight(j, i)); }
    for (let j = 0; j < side; j++) {
      const span = spans[j];
      span.style.background = i >= 0 && row > 0 ? `rgba(var(--looks), ${(0.85 * Math.sqrt(Math.max(0, weight(i, j)) / row)).toFixed(3)})` : "";
      span.style.borderBottomColor = i >= 0 && column > 0 ? `rgba(var(--looked), ${Math.sqrt(Math.max(0, weight(j, i)) / column).toFixed(3)})` : "";
      span.classList.toggle("here", j === i);
    }
  }
  function hold(i) {
    state.held = state.held === i ? -1 : i;
    $("held").textContent = state.held < 0 ? "" : say("held");
    tint(state.held);
  }

  // ---- the table
  function drawTable() {
    const rows = [];
    for (let l = 0; l < data.layers; l++)
      for (let h = 0; h < data.heads; h++) rows.push([l, h, data.patterns[l][h], ...data.statistics.map((s) => s.values[l][h])]);
    const titles = [say("layer"), say("head"), say("pattern"), ...data.statistics.map((s) => s.name.replaceAll("_", " "))];
    const tips = ["", "", "", ...data.statistics.map((s) => `${s.description}${s.unit ? ` [${s.unit}]` : ""}`)];
    if (state.sort !== null)
      rows.sort((a, b) => { const x = a[state.sort] ?? -Infinity, y = b[state.sort] ?? -Infinity; return (state.up ? 1 : -1) * (typeof x === "string" ? x.localeCompare(y) : x < y ? -1 : x > y ? 1 : 0); });
    const line = tag("tr");
    titles.forEach((title, k) => {
      const th = tag("th", k === state.sort ? (state.up ? "asc" : "desc") : ""), button = tag("button", "", title);
      th.title = tips[k]; button.type = "button";
      th.onclick = () => { state.up = state.sort === k ? !state.up : k < 3; state.sort = k; drawTable(); };
      th.append(button); line.append(th);
    });
    $("table").tHead.replaceChildren(line);
    $("table").tBodies[0].replaceChildren(...rows.map((row) => {
      const tr = tag("tr", row[0] === state.layer && row[1] === state.head ? "on" : "");
      row.forEach((x, k) => tr.append(tag("td", "", typeof x === "string" || k < 2 ? String(x) : show(x))));
      tr.onclick = () => choose(row[0], row[1]);
      return tr;
    }));
  }
  function show(x) { return x === null ? "—" : Math.abs(x) >= 1000 ? x.toFixed(0) : Math.abs(x) >= 100 ? x.toFixed(1) : Math.abs(x) >= 10 ? x.toFixed(2) : x.toFixed(3); }

  // ---- choosing
  function choose(layer, head) {
    state.layer = layer; state.head = head;
    $("layer").value = layer; $("head").value = head;
    for (const cell of $("grid").querySelectorAll(".cell")) cell.classList.toggle("on", +cell.dataset.layer === layer && +cell.dataset.head === head);
    drawMap(); tint(state.held); drawTable();
  }
  function step(by) {
    const at = (state.layer * data.heads + state.head + by + data.layers * data.heads) % (data.layers * data.heads);
    choose(Math.floor(at / data.heads), at % data.heads);
  }
  function options(id, pairs) { $(id).replaceChildren(...pairs.map(([value, text]) => { const o = tag("option", "", text); o.value = value; return o; })); }
  async function show_passage(index) {
    state.passage = index; state.sentence = -1; state.held = -1; $("held").textContent = "";
    await load(passage());
    const { sentences, tokens } = passage();
    options("sentence", [[-1, say("whole")], ...sentences.map(([a, b], k) => {
      const start = Array.from(seen(tokens.slice(a, b).join("")));
      return [k, `${k + 1}. ${start.slice(0, 16).join("")}${start.length > 16 ? "…" : ""}`];
    })]);
    $("pooling-label").hidden = !passage().largest;
    drawGrid(); drawText(); choose(state.layer, state.head);
  }
  function theme(dark) { root.classList.toggle("dark", dark); makePalette(); if (passage().weights) { drawGrid(); choose(state.layer, state.head); } }
  function tag(name, cls, text) { const e = document.createElement(name); if (cls) e.className = cls; if (text !== undefined) e.textContent = text; return e; }

  async function start() {
    for (const e of document.querySelectorAll("[data-say]")) e.textContent = say(e.dataset.say);
    $("prev").setAttribute("aria-label", say("prev")); $("next").setAttribute("aria-label", say("next")); $("theme").title = say("theme");
    for (const [name, value] of data.facts) { const d = tag("div"); d.append(tag("dt", "", name), tag("dd", "", value)); $("facts").append(d); }
    for (const note of data.notes) $("notes").append(tag("li", "", note));
    options("passage", data.passages.map((p, k) => [k, p.title])); $("passage-label").hidden = data.passages.length < 2;
    options("layer", [...Array(data.layers).keys()].map((k) => [k, k])); options("head", [...Array(data.heads).keys()].map((k) => [k, k]));
    options("scale", ["sqrt", "linear", "log"].map((k) => [k, say(k)])); options("pooling", ["mean", "max"].map((k) => [k, say(k)]));
    if (typeof DecompressionStream === "undefined") { $("name").textContent = say("unsupported"); return; }
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    theme(dark.matches); dark.addEventListener("change", (e) => theme(e.matches));
    $("theme").onclick = () => theme(!root.classList.contains("dark"));
    $("prev").onclick = () => step(-1); $("next").onclick = () => step(1);
    $("passage").onchange = (e) => show_passage(+e.target.value);
    $("layer").onchange = (e) => choose(+e.target.value, state.head); $("head").onchange = (e) => choose(state.layer, +e.target.value);
    $("sentence").onchange = (e) => { state.sentence = +e.target.value; drawMap(); };
    $("scale").onchange = (e) => { state.scale = e.target.value; drawGrid(); drawMap(); };
    $("pooling").onchange = (e) => { state.peaks = e.target.value === "max"; drawGrid(); choose(state.layer, state.head); };
    $("map").addEventListener("mousemove", over); $("map").addEventListener("mouseleave", out);
    $("map").addEventListener("keydown", (e) => { const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -data.heads, ArrowDown: data.heads }[e.key]; if (by) { e.preventDefault(); step(by); } });
    const at = (e) => { const span = e.target.closest("span[data-i]"); return span ? +span.dataset.i : -1; };
    $("text").addEventListener("mouseover", (e) => { if (state.held < 0 && at(e) >= 0) tint(at(e)); });
    $("text").addEventListener("mouseleave", () => { if (state.held < 0) tint(-1); });
    $("text").addEventListener("click", (e) => { if (at(e) >= 0) hold(at(e)); });
    $("text").addEventListener("keydown", (e) => { if (e.key === "Enter" && at(e) >= 0) hold(at(e)); });
    let wait; window.addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(() => drawMap(), 80); });
    state.layer = data.first[0]; state.head = data.first[1];
    await show_passage(0);
    root.dataset.ready = "1";
  }
  start();
})();
