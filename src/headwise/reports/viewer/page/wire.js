// Requests to the server: the token, retries while it is busy or unreachable, and encoded maps.

const TOKEN = new URLSearchParams(location.search).get("token") ?? "";
const PATIENCE = 8;  // how often a busy server is asked again

// An error, with its sentence in the current language.
class Complaint extends Error {
  constructor(sentence, status) {
    super(sentence());
    Object.assign(this, { sentence, status });
  }
}

// One line at the top of the page: `alert` says what went wrong, `status` what is being waited for. A function says it
// again in another language.
const lines = {};

function say(kind, sentence) {
  const line = byId(kind), words = typeof sentence === "function" ? sentence() : sentence;
  lines[kind] = sentence;
  if (line.textContent !== words) line.textContent = words;
  line.hidden = !words;
}

addEventListener("language", () => { for (const kind in lines) say(kind, lines[kind]); });

// A message of the server, {text, zh}, in the language of the page.
const said = (message) => (language === "zh" && message?.zh) || (message?.text ?? "");

const pause = (ms, signal) => new Promise((done, fail) => {
  signal?.throwIfAborted();
  const timer = setTimeout(done, ms);
  signal?.addEventListener("abort", () => { clearTimeout(timer); fail(signal.reason); }, { once: true });
});

const waiting = { lost: 0, busy: 0 };

function tellWaiting(why, by) {
  waiting[why] += by;
  say("status", () => (waiting.lost ? T.lost : waiting.busy ? T.busy : ""));
}

// The response to a request; lost connections and a busy server are waited for, other refusals are thrown.
async function ask(path, { method = "GET", body, signal } = {}) {
  const url = `${path}${path.includes("?") ? "&" : "?"}token=${encodeURIComponent(TOKEN)}`;
  const request = { method, signal, cache: "no-store", credentials: "omit" };
  if (body !== undefined) Object.assign(request, { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  for (let turn = 0, busy = 0; ; turn++) {
    let response = null, why = "lost", delay = Math.min(5000, 400 * 2 ** turn);
    try {
      response = await fetch(url, request);
      if (response.ok) return response;
    } catch (error) {
      if (signal?.aborted) throw error;
    }
    if (response) {
      if (![429, 503].includes(response.status)) throw await refusal(response);
      if (++busy > PATIENCE) throw new Complaint(() => T.still_busy, response.status);
      why = "busy";
      const asked = Number(response.headers.get("Retry-After"));
      if (asked > 0) delay = Math.min(30000, 1000 * asked);
    }
    tellWaiting(why, 1);
    try { await pause(delay, signal); } finally { tellWaiting(why, -1); }
  }
}

async function refusal(response) {
  const { status } = response;
  if (status === 403) return new Complaint(() => T.wrong_token, status);
  let told = {};
  try { told = await response.json(); } catch { /* no JSON: the status must do */ }
  return new Complaint(() => said({ ...told, text: told.error }) || fill(T.refused, { status }), status);
}

const askJSON = async (path, options) => (await ask(path, options)).json();

// Show an error, except for requests that were aborted on purpose.
function complain(error) {
  if (error?.name === "AbortError") return;
  say("alert", error?.sentence ?? String(error?.message ?? error));
}

// 8 bytes, little endian: uint16 rows, cols, uint32 count; then two bytes a weight, see ink.js.
async function askMaps(path, signal) {
  const buffer = await (await ask(path, { signal })).arrayBuffer(), head = new DataView(buffer);
  return { rows: head.getUint16(0, true), cols: head.getUint16(2, true), count: head.getUint32(4, true), codes: new Uint16Array(buffer, 8) };
}
