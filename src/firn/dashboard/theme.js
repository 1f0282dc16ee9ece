// Runs before anything is painted: applies the theme that the user has chosen, if any.
try {
  const chosen = localStorage.getItem("firn.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's theme stays.
}
