// Visible signs for invisible characters.

const SIGNS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\u3000": "␣" };

// Invisible characters and those that change the direction of the line, shown by their code points.
const UNSEEN = /^[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Cs}\p{Co}\p{Cn}]+$/u;
const MARK = /^[\p{M}\u200d\ufe0f]/u;

const codeOf = (text) => [...text].map((c) => "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")).join(" ");

// A text for a label, a tooltip or a list.
function shown(text) {
  if (text === "") return "·";
  if (UNSEEN.test(text) && !/^[\n\t\r]+$/.test(text)) return codeOf(text);
  const seen = [...text].map((c) => SIGNS[c] ?? c).join("");
  return MARK.test(seen) ? "◌" + seen : seen;
}

const clipped = (text, length) => {
  const letters = [...text];
  return letters.length > length ? letters.slice(0, length - 1).join("") + "…" : text;
};
