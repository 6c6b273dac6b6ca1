// Sets the theme before anything is drawn: the last choice, otherwise that of the system.
{
  let kept = null;
  try { kept = localStorage.getItem("headwise-theme"); } catch { /* a private window keeps nothing */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = kept === "dark" || kept === "light" ? kept : dark ? "dark" : "light";
}
