// Giving a text to the server, and waiting for its maps.

const TITLE = 28;       // characters of a text's beginning that name it

class Reading {
  // `ready(text)` is told the server's account of a text whose maps can be asked for.
  constructor({ ready }) {
    Object.assign(this, { ready, id: null, open: false, name: "" });
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
    byId("count").textContent = most ? fill(T.count_limit, { n: grouped(n), limit: grouped(most) }) : fill(T.count, { n: grouped(n) });
    byId("count").classList.toggle("over", Boolean(most) && n > most);
  }

  // Characters as the server counts them: code points.
  length() {
    const { value } = byId("text");
    let n = value.length;
    for (const pair of value.matchAll(/[\ud800-\udbff][\udc00-\udfff]/g)) n -= pair.length;
    return n;
  }

  // Show the form, or the text that is being looked at.
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
      say("alert", fill(T.bad_file, { name: file.name }));
    }
    this.count();
  }

  async submit() {
    const text = byId("text").value, n = this.length();
    if (!text.trim()) { say("alert", T.empty_text); return; }
    if (this.most && n > this.most) { say("alert", fill(T.too_long, { n: grouped(n), limit: grouped(this.most) })); return; }
    say("alert", "");
    const title = this.name || clipped(inLine(text.trim().slice(0, 200)), TITLE);
    const { signal } = this.begin();
    try {
      const { id } = await askJSON("/api/texts", { method: "POST", body: { text, title }, signal });
      await this.follow(id, signal);
    } catch (error) {
      complain(error);
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
      if (signal.aborted) return;
      if (error.status === 404) say("alert", T.gone); else complain(error);
      this.ask(true);
    } finally {
      this.end(signal);
    }
  }

  begin() {
    this.leave?.abort();
    this.leave = new AbortController();
    this.id = null;
    byId("progress").hidden = false;
    byId("read").disabled = true;
    this.tell("reading", {});
    return this.leave;
  }

  end(signal) {
    if (this.leave?.signal !== signal) return;
    byId("progress").hidden = true;
    byId("read").disabled = false;
  }

  // Ask how far it is until it is there.
  async follow(id, signal) {
    this.id = id;
    for (let wait = 120; ; wait = Math.min(500, wait * 1.3)) {
      const text = await askJSON(`/api/texts/${id}`, { signal });
      if (text.state === "ready") {
        this.open = true;
        this.ask(false);
        this.ready(text);
        return;
      }
      if (text.state === "failed") throw new Error(fill(T.failed, { error: text.error }));
      if (text.state === "cancelled") throw new Error(T.cancelled);
      this.tell(text.state, text);
      await pause(wait, signal);
    }
  }

  tell(state, { what, done, of }) {
    byId("doing").textContent = [T[`state_${state}`] ?? state, what !== state && what].filter(Boolean).join(" · ");
    const bar = byId("done");
    if (of > 0) { bar.max = of; bar.value = done; } else bar.removeAttribute("value");
  }

  cancel() {
    const { id } = this;
    this.leave?.abort();
    byId("progress").hidden = true;
    byId("read").disabled = false;
    say("status", "");
    say("alert", T.cancelled);
    if (id) ask(`/api/texts/${id}`, { method: "DELETE" }).catch(complain);
  }
}
