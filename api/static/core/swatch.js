// The short line that stands for a line of a chart, in its colour and with its dashes.

import { svg } from "./dom.js";
import { lineStyle } from "./lines.js";

export const dark = matchMedia("(prefers-color-scheme: dark)");

export const isDark = () =>
  document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : dark.matches;

/** The line of a number; pale if it is not `shown`. */
export function swatch(number, shown = true) {
  const { colour, dash } = lineStyle(number, isDark());
  const stroke = { stroke: colour, "stroke-dasharray": dash.join(" ") || null };
  return svg(
    "svg",
    {
      class: shown ? "line-key" : "line-key off",
      viewBox: "0 0 22 10",
      width: 22,
      height: 10,
      "aria-hidden": "true",
    },
    svg("line", { x1: 1, y1: 5, x2: 21, y2: 5, ...stroke }),
  );
}
