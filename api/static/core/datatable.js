// The numbers of a figure as a table, for those who read rather than look.

import { h } from "./dom.js";
import { count, number } from "./format.js";

/** Most rows of such a table. */
export const MOST_ROWS = 200;

/**
 * @param {string} label
 * @param {string[]} titles
 * @param {any[][]} rows cells: numbers, nodes or texts
 * @param {number} total how many rows there are, if not all of them are given
 */
export function dataTable(label, titles, rows, total = rows.length) {
  const cell = value =>
    h(
      "td",
      { class: typeof value === "number" ? "num" : null },
      typeof value === "number" ? number(value) : (value ?? ""),
    );
  return h(
    "div",
    { class: "card scrolls", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      {},
      total > rows.length ? h("caption", {}, `The first ${rows.length} of ${count(total)} rows`) : null,
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          titles.map(text => h("th", { scope: "col" }, text)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(cells => h("tr", {}, cells.map(cell))),
      ),
    ),
  );
}
