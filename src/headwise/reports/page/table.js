// The table of all heads: a click on a column sorts it, a click on a row shows that head. It has one tab stop; arrow keys
// move between its column names and rows.

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
    if (REPORT.patterns.flat().some(Boolean)) columns.push({ name: T.pattern, tip: T.pattern_tip, value: (l, h) => REPORT.patterns[l][h], word: true });
    this.columns = columns;
    this.heads = columns.map((column) => this.header(column));
    this.body = make("tbody");
    this.rows = [];
    for (let l = 0; l < REPORT.layers; l++) for (let h = 0; h < REPORT.counts[l]; h++) this.rows.push(this.row(l, h));
    this.body.append(...this.rows);
    table.replaceChildren(make("thead", {}, make("tr", {}, ...this.heads)), this.body);
    this.stop = this.rows[0];
    this.stop.tabIndex = 0;
    table.addEventListener("keydown", (event) => this.key(event));
    table.addEventListener("focusin", (event) => this.stopAt(event.target));
  }

  stopAt(element) {
    this.stop.tabIndex = -1;
    this.stop = element;
    element.tabIndex = 0;
  }

  key(event) {
    const [down, right] = ARROWS[event.key] ?? [], row = this.rows.indexOf(event.target);
    const buttons = this.heads.map((cell) => cell.firstChild), column = buttons.indexOf(event.target);
    if (event.key === "Enter" && row >= 0) this.choose(event.target.layer, event.target.head);
    if (down === undefined) return;
    event.preventDefault();
    if (row >= 0 && row + down < 0) buttons[this.columns.indexOf(this.column ?? this.columns[0])].focus();
    else if (row >= 0) this.rows[row + down]?.focus();
    else if (down > 0) this.rows[0].focus();
    else buttons[column + right]?.focus();
  }

  header(column) {
    const button = make("button", { type: "button", title: column.tip ?? "", tabIndex: -1 }, make("span", { textContent: column.name }));
    if (column.unit) button.append(make("small", { textContent: column.unit }));
    button.addEventListener("click", () => this.sort(column));
    const cell = make("th", { className: column.word ? "word" : "", scope: "col" }, button);
    cell.setAttribute("aria-sort", "none");
    return cell;
  }

  row(layer, head) {
    const cells = this.columns.map((column) => {
      const value = column.value(layer, head);
      if (column.word) return make("td", { className: "word" }, ...wordsOf(value, colourOf(layer, head)));
      const cell = make("td", { textContent: column.meter ? decimals(value, column.meter) : value });
      if (column.meter && value !== null) {
        cell.classList.add("meter");
        cell.style.backgroundSize = `${44 * shareOf(value, column.meter, 0)}px 2px`;
      }
      return cell;
    });
    const row = make("tr", { tabIndex: -1 }, ...cells);
    Object.assign(row, { layer, head });
    row.addEventListener("click", () => this.choose(layer, head));
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
    for (const row of this.rows) {
      const on = row.layer === layer && row.head === head;
      row.classList.toggle("on", on);
      if (on && !this.table.contains(document.activeElement)) this.stopAt(row);
    }
  }
}

// A list as parts that lines are broken between, after a dot in that colour.
function wordsOf(value, colour) {
  if (!value) return ["–"];
  const dot = make("i", { className: "dot" });
  dot.style.setProperty("--kind", colour);
  return value.split(T.list_comma).flatMap((part, i) => {
    const whole = make("span", {}, ...(i ? [] : [dot]), part);
    return i ? [T.list_comma, whole] : [whole];
  });
}

// The same number of decimals for the whole column: three digits for its largest number.
function decimals(value, [low, high]) {
  if (value === null) return "–";
  const most = Math.max(Math.abs(low), Math.abs(high));
  if (most >= 1e5 || (most > 0 && most < 1e-3)) return value.toExponential(2);
  return value.toFixed(most >= 100 ? 1 : most >= 10 ? 2 : 3).replace(/^-(?=[0.]+$)/, "");
}

// From 0, or the smallest number if that is below it.
function extent(values) {
  const [low, high] = valueRange(values);
  return [Math.min(0, low), high];
}
