// On paper: light colours, the text as text, and the comparison of the heads below the maps.

let onScreen = null;  // the theme and the form of the text on the screen

function printing(starts) {
  if (starts) onScreen ??= { theme: theme(), text: state.text };
  else if (onScreen === null) return;
  setTheme(starts ? "light" : onScreen.theme, false);
  showText(starts ? "strip" : onScreen.text);
  if (!starts) onScreen = null;
  openTab(state.tab);
  if (!starts) return;
  turn++;  // what is not drawn at once would be drawn too late
  byId("maps").hidden = false;
  redraw();
  heat.bands(heat.base.getContext("2d"));  // Chromium prints a canvas that was cleared as a white rectangle
  if (!byId("tab-compare").hidden) {
    byId("compare").hidden = false;
    compared.show();
  }
}

function printed() {
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
}
