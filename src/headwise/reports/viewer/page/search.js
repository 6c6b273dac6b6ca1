// Search in the text: the list of matches, and moving from one to the next.

const MOST = 500;       // places of a search

class Search {
  constructor({ pieces, found, jumped }) {
    Object.assign(this, { pieces, found, jumped, hits: [], at: -1, q: "" });
    byId("search-form").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    byId("after").addEventListener("click", () => this.step(1));
    byId("before").addEventListener("click", () => this.step(-1));
    byId("query").addEventListener("input", () => { if (!byId("query").value) this.clear(); });
    this.watch = watchVisible((button) => this.context(button), { root: byId("hits"), rootMargin: "80px" });
  }

  open(text) {
    this.text = text;
    this.clear();
  }

  clear() {
    this.leave?.abort();
    byId("query").value = this.q = "";
    this.list([], false);
  }

  // Enter searches; with the same word again it goes on to the next place.
  async submit() {
    const q = byId("query").value;
    if (q === this.q && this.hits.length) { this.step(1); return; }
    if (!q) { this.clear(); return; }
    this.leave?.abort();
    const { signal } = (this.leave = new AbortController());
    try {
      const { positions, more } = await askJSON(`/api/texts/${this.text}/search?q=${encodeURIComponent(q)}&limit=${MOST}`, { signal });
      if (signal.aborted) return;
      this.q = q;
      this.list(positions, more);
      if (positions.length) this.step(1);
    } catch (error) {
      if (!signal.aborted) complain(error);
    }
  }

  list(hits, more) {
    Object.assign(this, { hits, more, at: -1 });
    this.watch.disconnect();
    byId("hits").replaceChildren(...hits.map((hit, i) => this.item(hit, i)));
    for (const id of ["before", "after"]) byId(id).disabled = !hits.length;
    this.words();
    this.found(hits);
  }

  item(hit, i) {
    const button = make("button", { type: "button" }, make("span", { className: "place", textContent: grouped(hit) }), make("span", { className: "context", dir: "auto", textContent: "…" }));
    Object.assign(button, { hit });
    button.addEventListener("click", () => this.go(i));
    this.watch.observe(button);
    return make("li", {}, button);
  }

  // The text around a place, once it is here.
  context(button) {
    if (button.filled) return;
    const { pieces, q } = this, { hit } = button, letters = [...q].length;
    const before = pieces.between(hit - 6, hit), after = pieces.between(hit, hit + letters + 14);
    if (before === null || after === null) return;
    button.filled = true;
    const length = after.toLowerCase().startsWith(q.toLowerCase()) ? q.length : 0;
    button.lastChild.replaceChildren(inLine(before + pieces.ahead(hit)), make("mark", { className: "looked", textContent: inLine(after.slice(0, length)) }), inLine(after.slice(length)));
  }

  arrived() {
    for (const { firstChild } of byId("hits").children) if (firstChild.visible) this.context(firstChild);
  }

  step(by) {
    if (this.hits.length) this.go((this.at + by + this.hits.length) % this.hits.length);
  }

  go(i) {
    this.at = i;
    [...byId("hits").children].forEach((item, k) => {
      if (k === i) item.firstChild.setAttribute("aria-current", "true"); else item.firstChild.removeAttribute("aria-current");
    });
    const item = byId("hits").children[i], box = byId("hits");
    // Only the list scrolls, not the page.
    if (item.offsetTop < box.scrollTop || item.offsetTop + item.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = item.offsetTop - box.clientHeight / 3;
    this.words();
    this.jumped(this.hits[i]);
  }

  words() {
    const n = this.hits.length, asked = byId("query").value;
    const many = fill(this.more ? T.hits_more : T.hits, { n: grouped(n) });
    byId("hits-say").textContent = n ? (this.at < 0 ? many : `${fill(T.hit_of, { i: grouped(this.at + 1), n: grouped(n) })}${this.more ? " +" : ""}`) : asked ? fill(T.no_hits, { q: clipped(inLine(asked), 40) }) : "";
  }
}
