// Before anything is painted: the theme that this browser's user has chosen, if any.
try {
  const chosen = localStorage.getItem("firn.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage may be off: then the system's theme it is.
}
