// Groups of runs in the table: a row with what they share, and mean and spread of each figure.

import { h } from "../../core/dom.js";
import { count, numeric, point, RUN_STATES } from "../../core/format.js";
import { difference } from "./run_columns.js";

/**
 * Groups in order: that of what they are grouped by, or of the mean of the figure that the table is sorted by.
 * @param {Object[]} groups
 * @param {{key: string, descending: boolean} | null} sorted
 */
export function ordered(groups, sorted) {
  const { key, descending } = sorted || { key: "", descending: false };
  if (!groups.some(group => group.figures[key])) return groups;
  const mean = group => numeric(group.figures[key].mean);
  const none = one => Number.isNaN(mean(one));
  return [...groups].sort(
    (a, b) => Number(none(a)) - Number(none(b)) || (descending ? mean(b) - mean(a) : mean(a) - mean(b)) || 0,
  );
}

/** The mean of a figure over a group, as a difference if there is a baseline. */
function figureCell(of, column, { baseline, percent }) {
  if (!of?.count) return h("td", { class: "num" }, "–");
  const spread = of.sd === null ? "" : ` ± ${column.spread(of.sd)}`;
  const said = `mean ${column.format(of.mean)}${spread}, from ${column.format(of.least)} to ${column.format(of.greatest)}, over ${count(of.count)}`;
  return h(
    "td",
    { class: "num", title: said },
    baseline ? difference(of.mean, column.value(baseline), column.format, percent) : column.format(of.mean),
    h("span", { class: "quiet" }, spread),
  );
}

/**
 * The cells of a group.
 * @param {Object} row as the API has it, with its `key` and, once they are known, the `ids` of its runs
 * @param {Object[]} columns of the table
 * @param {{keys: string[], baseline: Object|null, percent: boolean, open: boolean, selected: boolean,
 *   onOpen: () => void, onSelect: (box: HTMLInputElement) => void}} view
 */
export function groupCells(row, columns, view) {
  const stuck = columns.some(column => column.pinned) ? "stuck" : "";
  const lead = columns.findIndex(column => column.figure),
    span = lead < 0 ? columns.length : lead;
  const label = point(Object.fromEntries(view.keys.map((key, at) => [key, row.values[at] ?? "none"])));
  const states = RUN_STATES.filter(state => row.states[state]).map(state => `${row.states[state]} ${state}`);
  return [
    h(
      "td",
      { class: `box ${stuck}` },
      h("input", {
        type: "checkbox",
        "aria-label": `Select ${label}`,
        checked: view.selected,
        onchange: event => view.onSelect(event.target),
      }),
    ),
    h(
      "td",
      { colspan: span, class: stuck, style: { left: stuck ? "38px" : null } },
      h(
        "button",
        { type: "button", class: "sorts", "aria-expanded": String(view.open), onclick: view.onOpen },
        h("span", { "aria-hidden": "true" }, view.open ? "▾ " : "▸ "),
        label,
      ),
      h("span", { class: "quiet" }, ` ${count(row.count)} runs: ${states.join(", ")}`),
    ),
    ...columns
      .slice(span)
      .map(column => (column.figure ? figureCell(row.figures[column.key], column, view) : h("td"))),
  ];
}

/**
 * Choices of what runs are grouped by, one for each level and one more.
 * @param {string[]} chosen
 * @param {string[]} names of what they can be grouped by
 * @param {number} most levels
 * @param {(chosen: string[]) => void} onChange
 */
export const groupSelects = (chosen, names, most, onChange) =>
  [...chosen, ""].slice(0, most).map((key, at) =>
    h(
      "label",
      { class: "field" },
      at ? "then by" : "Group by",
      h(
        "select",
        {
          onchange: event => {
            const next = event.target.value;
            onChange([...chosen.slice(0, at), next, ...(next ? chosen.slice(at + 1) : [])].filter(Boolean));
          },
        },
        h("option", { value: "" }, "none"),
        names
          .filter(one => one === key || !chosen.includes(one))
          .map(one => h("option", { value: one, selected: one === key }, one)),
      ),
    ),
  );
