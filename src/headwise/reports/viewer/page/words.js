// The page's words and colours, and its two languages.

const SETTINGS = JSON.parse(byId("settings").textContent);
const COLOURS = SETTINGS.colours;
const T = {};
let language = "en";

// Put every word of the page into a language; what is made by scripts listens to "language".
function speak(name, keep) {
  language = name;
  Object.assign(T, SETTINGS.words[name]);
  document.documentElement.lang = name;
  if (keep) try { sessionStorage.setItem("headwise-language", name); } catch { /* a private window keeps nothing */ }
  for (const [attribute, set] of [
    ["t", (e, words) => { e.textContent = words; }],
    ["tTitle", (e, words) => { e.title = words; }],
    ["tLabel", (e, words) => { e.setAttribute("aria-label", words); }],
    ["tPlaceholder", (e, words) => { e.placeholder = words; }],
  ]) {
    const css = `[data-${attribute.replace(/[A-Z]/g, (c) => "-" + c.toLowerCase())}]`;
    for (const element of document.querySelectorAll(css)) set(element, T[element.dataset[attribute]]);
  }
  dispatchEvent(new Event("language"));
}

// The language chosen in this tab, otherwise that of the command, otherwise that of the browser.
function firstLanguage() {
  let kept = null;
  try { kept = sessionStorage.getItem("headwise-language"); } catch { /* a private window keeps nothing */ }
  if (kept in SETTINGS.words) return kept;
  return SETTINGS.lang ?? (navigator.language.startsWith("zh") ? "zh" : "en");
}

const inTokens = (n) => (n === 1 ? T.one_token : fill(T.tokens, { n: grouped(n) }));
const grouped = (number) => number.toLocaleString("en-US");  // 20,000 in both languages
