// Numbers for readers.

const ROUNDING = 1e-5, LEAST_RANGE = 5e-7;

function fixed(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-4) return value.toExponential(1);
  return value.toFixed(Math.max(0, Math.min(5, 2 - Math.floor(Math.log10(size)))));
}

// The smallest and the largest value, as `value_range` in data.py: one number twice, 0 if it is rounding itself, if
// they differ by rounding alone or there are none.
function valueRange(values) {
  const known = values.filter((v) => v !== null);
  if (!known.length) return [0, 0];
  const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (high - low > Math.max(ROUNDING * size, LEAST_RANGE)) return [low, high];
  return size <= LEAST_RANGE ? [0, 0] : [high, high];
}

// Where a value lies in such a range, 0 to 1; `only` in a range of one number.
const shareOf = (value, [low, high], only) => (high > low ? (value - low) / (high - low) : only);

// A number on an axis: "0.04", not "0.0400".
const trimmed = (value) => fixed(value).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");

// Some six round numbers from `from` to `to`.
function roundSteps(from, to) {
  const rough = (to - from) / 6, power = 10 ** Math.floor(Math.log10(rough)), out = [];
  const step = Math.max(1, [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough));
  for (let at = Math.ceil(from / step) * step; at < to; at += step) out.push(at);
  return out;
}
