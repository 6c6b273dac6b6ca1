// The table of all heads: a click on a column sorts it, a click on a row shows that head.

class Numbers {
  constructor(table, choose) {
    Object.assign(this, { table, choose, column: null, down: true });
    const columns = [
      { name: T.layer, tip: T.layer_tip, value: (l) => l },
      { name: T.head, tip: T.head_tip, value: (l, h) => h },
      ...REPORT.statistics.map((s) => ({
        name: s.label, unit: s.unit, tip: [s.description, s.unit && fill(T.unit_tip, { unit: s.unit })].filter(Boolean).join(" "),
        value: (l, h) => s.values[l][h], meter: extent(s.values.flat()),
      })),
    ];
    if (PATTERNS.size) columns.push({ name: T.pattern, tip: T.pattern_tip, value: (l, h) => REPORT.patterns[l][h], word: true });
    if (REPORT.roles.length) columns.push({ name: T.role, tip: T.role_tip, value: (l, h) => REPORT.roles[l][h].join(", "), word: true });
    this.columns = columns;
    this.heads = columns.map((column) => this.header(column));
    this.body = make("tbody");
    this.rows = [];
    for (let l = 0; l < REPORT.layers; l++) for (let h = 0; h < REPORT.counts[l]; h++) this.rows.push(this.row(l, h));
    this.body.append(...this.rows);
    table.replaceChildren(make("thead", {}, make("tr", {}, ...this.heads)), this.body);
  }

  header(column) {
    const button = make("button", { type: "button", title: column.tip ?? "" }, make("span", { textContent: column.name }));
    if (column.unit) button.append(make("small", { textContent: column.unit }));
    button.addEventListener("click", () => this.sort(column));
    const cell = make("th", { className: column.word ? "word" : "", scope: "col" }, button);
    cell.setAttribute("aria-sort", "none");
    return cell;
  }

  row(layer, head) {
    const cells = this.columns.map((column) => {
      const value = column.value(layer, head);
      const cell = make("td", { className: column.word ? "word" : "", textContent: column.word ? value || "–" : column.meter ? decimals(value, column.meter) : value });
      if (column.word && value) {
        const dot = make("i", { className: "dot" });
        dot.style.setProperty("--kind", colourOf(value));
        cell.prepend(dot);
      }
      if (column.meter && value !== null) {
        cell.classList.add("meter");
        const [low, high] = column.meter;
        cell.style.backgroundSize = `${high > low ? (44 * (value - low)) / (high - low) : 0}px 2px`;
      }
      return cell;
    });
    const row = make("tr", { tabIndex: 0 }, ...cells);
    Object.assign(row, { layer, head });
    row.addEventListener("click", () => this.choose(layer, head));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") this.choose(layer, head); });
    return row;
  }

  sort(column) {
    // Numbers begin with the largest, words and layers with the first.
    this.down = this.column === column ? !this.down : Boolean(column.meter);
    this.column = column;
    const sign = this.down ? -1 : 1;
    this.rows.sort((a, b) => {
      const x = column.value(a.layer, a.head), y = column.value(b.layer, b.head);
      const lost = (x === null || x === "") - (y === null || y === "");  // missing values come last
      const order = typeof x === "string" ? x.localeCompare(y) : x - y;
      return lost || sign * order || a.layer - b.layer || a.head - b.head;
    });
    this.body.append(...this.rows);
    this.heads.forEach((cell, i) => {
      const sorted = this.columns[i] === column ? (this.down ? "descending" : "ascending") : "none";
      cell.setAttribute("aria-sort", sorted);
    });
  }

  select(layer, head) {
    for (const row of this.rows) row.classList.toggle("on", row.layer === layer && row.head === head);
  }
}

// The same number of decimals for the whole column: three digits for its largest number.
function decimals(value, [low, high]) {
  if (value === null) return "–";
  const most = Math.max(Math.abs(low), Math.abs(high));
  if (most >= 1e5 || (most > 0 && most < 1e-3)) return value.toExponential(2);
  return value.toFixed(most >= 100 ? 1 : most >= 10 ? 2 : 3);
}

function extent(values) {
  const known = values.filter((v) => v !== null);
  return known.length ? [Math.min(0, ...known), Math.max(...known)] : [0, 0];
}
