// Search in the text of the queries: every match is marked, Enter goes to the next one and pins its first token.

class Find {
  constructor() {
    Object.assign(this, { hits: [], at: -1 });
    byId("find").addEventListener("input", () => this.start(byId("find").value));
    byId("find").addEventListener("keydown", (event) => {
      if (event.key === "Enter") { event.preventDefault(); this.step(event.shiftKey ? -1 : 1); }
      if (event.key === "Escape") { event.stopPropagation(); this.start(""); }
    });
    for (const [id, by] of [["find-before", -1], ["find-after", 1]]) byId(id).addEventListener("click", () => this.step(by));
  }

  start(words) {
    byId("find").value = words;
    this.word = words;
    this.mark();
    remember();
  }

  // Find and mark the word in the passage on show; upper and lower case are the same.
  mark() {
    const { q } = passage(), units = unitsOf(q), word = (this.word ?? "").toLowerCase();
    Object.assign(this, { hits: [], at: -1 });
    const hit = new Uint8Array(units.length);
    if (word) {
      // Lower case may be longer, so each unit counts its own.
      const lower = units.map((u) => u.text.toLowerCase()), starts = [], text = lower.join("");
      let from = 0;
      for (const part of lower) { starts.push(from); from += part.length; }
      for (let i = 0, at = text.indexOf(word); at >= 0; at = text.indexOf(word, at + word.length)) {
        while (i + 1 < units.length && starts[i + 1] <= at) i++;
        this.hits.push(i);
        for (let k = i; k < units.length && starts[k] < at + word.length; k++) hit[k] = 1;
      }
    }
    units.forEach((u) => q.spans[u.index]?.classList.toggle("hit", hit[u.index] === 1));
    heat.hits = units.filter((u) => hit[u.index]);
    heat.cross();
    this.say();
  }

  step(by) {
    if (!this.hits.length) return;
    this.at = (this.at + by + this.hits.length) % this.hits.length;
    const unit = unitsOf(passage().q)[this.hits[this.at]];
    pinned = unit;
    reveal(unit);
    showUnit();
    this.say();
    remember();
  }

  say() {
    const { length } = this.hits;
    for (const id of ["find-before", "find-after"]) byId(id).disabled = !length;
    byId("found").textContent = !this.word ? "" : this.at >= 0 ? fill(T.hit_of, { i: this.at + 1, n: length }) : fill(T.hits, { n: length });
  }
}
