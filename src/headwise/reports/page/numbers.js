// Numbers for readers.

function fixed(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1);
  return value.toFixed(Math.max(0, Math.min(5, 2 - Math.floor(Math.log10(size)))));
}

// A number on an axis: "0.04", not "0.0400".
const trimmed = (value) => fixed(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

// Some six round numbers from `from` to `to`.
function roundSteps(from, to) {
  const rough = (to - from) / 6, power = 10 ** Math.floor(Math.log10(rough)), out = [];
  const step = Math.max(1, [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough));
  for (let at = Math.ceil(from / step) * step; at < to; at += step) out.push(at);
  return out;
}
