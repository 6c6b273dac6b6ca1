// What is chosen, and what is on show.

const state = {
  tab: "maps", passage: 0, layer: 0, head: 0, sentence: -1, kind: "mean", scale: "sqrt", range: "own", view: null, text: "strip", full: false,
};
let pinned = null;      // the unit that stays
let pointed = null;     // the unit under the pointer
let current = null;     // the map on show
let turn = 0;

const passage = () => REPORT.passages[state.passage];
const wholeOf = (passage) => ({ r0: 0, r1: passage.rows, c0: 0, c1: passage.columns });
const unitAt = (side, cell) => unitsOf(side)[side.unitOfCell[cell]];
const topOf = (layer, head) => {
  const { own, all } = passage()[state.kind];
  return state.range === "own" ? own[layer][head] : all;
};
// A report of one layer, such as that of a map, names it.
const headName = (layer, head) => {
  if (REPORT.layers > 1 || !REPORT.names[0]) return fill(T.head_name, { layer, head });
  return REPORT.heads > 1 ? `${REPORT.names[0]} · ${fill(T.head_short, { head })}` : REPORT.names[0];
};
const nameOfHead = (layer, head) => fill(T.short_name, { layer, head });
