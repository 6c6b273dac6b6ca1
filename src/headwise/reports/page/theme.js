// Before anything is drawn: dark or light, as the reader's system or last choice has it.
{
  let kept = null;
  try { kept = localStorage.getItem("headwise-theme"); } catch { /* a private window keeps nothing */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = kept === "dark" || kept === "light" ? kept : dark ? "dark" : "light";
}
