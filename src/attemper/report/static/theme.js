// Light or dark: as the system has it, or as the reader chose, which the browser remembers where it may.

const root = document.documentElement;
const KEPT = "attemper-theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

/** "light" or "dark"; paper is always light. */
export function theme() {
  if (matchMedia("print").matches) return "light";
  return root.dataset.theme || (darkSystem.matches ? "dark" : "light");
}

/** What the reader chose, after `choice` has been put there. Pages opened from a disk may have no storage. */
function kept(choice) {
  try {
    if (choice !== undefined) localStorage.setItem(KEPT, choice);
    return localStorage.getItem(KEPT);
  } catch {
    return null;
  }
}

/** The button that switches, and calls `changed` whenever the colours are others. */
export function themeButton(changed = () => {}) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  const name = () => {
    const other = theme() === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Switch to ${other} colours`);
  };
  button.addEventListener("click", () => {
    const choice = theme() === "dark" ? "light" : "dark";
    root.dataset.theme = choice;
    // Who is back at the system's colours follows it again, from the next time on.
    kept((choice === "dark") === darkSystem.matches ? "" : choice);
    name();
    changed();
  });
  darkSystem.addEventListener("change", () => {
    name();
    changed();
  });
  const before = kept();
  if (before === "light" || before === "dark") root.dataset.theme = before;
  name();
  return button;
}
