// Giving a text to the server, and waiting for its maps.

const TITLE = 120;      // characters of a text's beginning that name it

class Reading {
  // Calls `ready(text)` with the state of a text once its first heads are drawn, `more(text)` for further heads, and
  // `left()` when a newer text replaces it.
  constructor({ ready, more, left }) {
    Object.assign(this, { ready, more, left, id: null, open: false, name: "", account: {} });
    byId("form").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    byId("text").addEventListener("input", () => { this.name = ""; this.count(); });
    byId("text").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit(); });
    byId("file").addEventListener("change", (event) => { this.file(event.target.files[0]); event.target.value = ""; });
    byId("cancel").addEventListener("click", () => this.cancel());
    byId("another").addEventListener("click", () => this.ask(true));
    byId("keep").addEventListener("click", () => this.ask(false));
    byId("text").addEventListener("dragover", (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); });
    byId("text").addEventListener("drop", (event) => {
      const [file] = event.dataTransfer?.files ?? [];
      if (file) { event.preventDefault(); this.file(file); }
    });
  }

  set limit(characters) {
    this.most = characters;
    this.count();
  }

  count() {
    const n = this.length(), { most } = this;
    byId("count").textContent = most ? fill(T.count_limit, { n: grouped(n), limit: grouped(most) }) : n === 1 ? T.count_one : fill(T.count, { n: grouped(n) });
    byId("count").classList.toggle("over", Boolean(most) && n > most);
  }

  // Characters as the server counts them: code points.
  length() {
    const { value } = byId("text");
    let n = value.length;
    for (const pair of value.matchAll(/[\ud800-\udbff][\udc00-\udfff]/g)) n -= pair.length;
    return n;
  }

  // Show the form, or the current text.
  ask(asking) {
    byId("entry").hidden = !asking;
    for (const id of ["reading", "another"]) byId(id).hidden = asking;
    byId("keep").hidden = !this.open;
    byId("stage").hidden = asking || !this.open;
    if (asking) byId("text").focus({ preventScroll: true });
    dispatchEvent(new Event("stage"));
  }

  async file(file) {
    if (!file) return;
    try {
      byId("text").value = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      this.name = file.name;
      say("alert", "");
    } catch {
      say("alert", () => fill(T.bad_file, { name: file.name }));
    }
    this.count();
  }

  async submit() {
    const text = byId("text").value, n = this.length();
    if (!text.trim()) { say("alert", () => T.empty_text); return; }
    if (this.most && n > this.most) { say("alert", () => fill(T.too_long, { n: grouped(n), limit: grouped(this.most) })); return; }
    say("alert", "");
    const title = this.name || clipped(inLine(text.trim().slice(0, 200)), TITLE);
    const { signal } = this.begin();
    byId("read").disabled = true;
    try {
      const { id } = await askJSON("/api/texts", { method: "POST", body: { text, title }, signal }).finally(() => { byId("read").disabled = false; });
      this.open = false;  // the server keeps one text
      this.left();
      byId("keep").hidden = true;
      await this.follow(id, signal);
    } catch (error) {
      this.over(error, signal);
    } finally {
      this.end(signal);
    }
  }

  // A text that the server has, from a link.
  async restore(id) {
    const { signal } = this.begin();
    try {
      await this.follow(id, signal);
    } catch (error) {
      this.over(error, signal, true);
    } finally {
      this.end(signal);
    }
  }

  // A text will not come to its end: back to the form, unless an older one is on show.
  over(error, signal, linked = false) {
    if (signal.aborted) return;
    if (linked && error.status === 404) say("alert", () => T.gone); else complain(error);
    if (linked || this.id === this.shown) { this.open = false; this.ask(true); }
  }

  begin() {
    this.leave?.abort();
    this.leave = new AbortController();
    Object.assign(this, { id: null, account: {}, since: null });
    byId("progress").hidden = false;
    this.tell();
    return this.leave;
  }

  end(signal) {
    if (this.leave?.signal === signal) byId("progress").hidden = true;
  }

  // Poll the state until it is complete, and show heads as they are drawn.
  async follow(id, signal) {
    Object.assign(this, { id, shown: null });
    for (let wait = 120, drawn = 0; ; wait = Math.min(drawn ? 2000 : 500, wait * 1.3)) {
      const text = await askJSON(`/api/texts/${id}`, { signal });
      if (text.state === "failed") throw new Complaint(() => fill(T.failed, { error: said(text.error) }));
      if (text.state === "cancelled") throw new Complaint(() => T.taken);
      this.tell(text);
      if (text.state === "ready") byId("progress").hidden = true;  // before the map is laid out
      if (text.drawn > drawn) {
        if (drawn) this.more(text);
        else {
          Object.assign(this, { open: true, shown: id });
          this.ask(false);
          this.ready(text);
        }
        ({ drawn } = text);
      }
      if (text.state === "ready") return;
      await pause(wait, signal);
    }
  }

  // What is being done, and how long it will take at the pace so far.
  tell(account = this.account) {
    const { what, done, of, layer, drawn } = (this.account = account), bar = byId("done"), now = performance.now();
    const facts = { layer: layer + 1, layers: model?.layers.length, drawn: drawn ?? 0, heads: model && heads.total(model) };
    byId("doing").textContent = what === "drawing" || what === "reading" ? fill(T[`state_${what}`], facts) : T.state_waiting;
    if (of > 0) { bar.max = of; bar.value = done; } else bar.removeAttribute("value");
    if (done > 0) this.since ??= { done, now };
    const seconds = this.since && done > this.since.done ? ((of - done) * (now - this.since.now)) / (done - this.since.done) / 1000 : 0;
    const patient = this.since && now - this.since.now > 3000 && seconds > 5;
    byId("left").textContent = !patient ? "" : seconds < 90 ? fill(T.seconds_left, { n: Math.ceil(seconds / 10) * 10 }) : fill(T.minutes_left, { n: Math.round(seconds / 60) });
  }

  cancel() {
    const { id } = this;
    this.leave?.abort();
    byId("progress").hidden = true;
    say("status", "");
    say("alert", () => T.cancelled);
    if (id) ask(`/api/texts/${id}`, { method: "DELETE" }).catch(complain);
    if (id === this.shown) { this.open = false; this.ask(true); }
  }
}
