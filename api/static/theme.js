// The chosen theme, before anything is drawn: "light", "dark", or that of the system.

const KEY = "stillhouse-theme";

/** The themes in the order in which the button goes through them. */
export const THEMES = ["system", "light", "dark"];

/** The theme that was chosen in this browser. */
export const chosenTheme = () => localStorage.getItem(KEY) || "system";

/** Puts a theme on the page, and keeps it in this browser. */
export function chooseTheme(theme) {
  localStorage.setItem(KEY, theme);
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  dispatchEvent(new CustomEvent("theme"));
}
