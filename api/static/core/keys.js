// Keys that work on every page: through the rows of a table, to a search field, and a list of them all.

import { h } from "./dom.js";

/** @type {[string, string][]} */
const KEYS = [
  ["Ctrl+K", "Find experiments, runs, pages, people and actions"],
  ["/", "Search or filter on this page"],
  ["j or ↓, k or ↑", "Next and previous row"],
  ["Enter", "Open the row"],
  ["x or Space", "Select the row"],
  ["Escape", "Close a menu or a dialog"],
  ["?", "Show these keys"],
];

const STEPS = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 };
const TABLES = "main :is(.table-scroll, .scrolls)";

const rowsOf = table =>
  /** @type {HTMLElement[]} */ (
    [...table.querySelectorAll("tbody tr:not(.gap)")].filter(row => row.offsetParent)
  );

/** Whether keys are text for what has the focus. */
export const isTyping = () =>
  Boolean(
    document.activeElement?.closest("input:not([type=checkbox]), textarea, select, [contenteditable=true]"),
  ) || Boolean(document.activeElement?.shadowRoot);

function focusRow(row) {
  row.tabIndex = -1;
  row.focus({ preventScroll: true });
  row.scrollIntoView({ block: "nearest" });
}

/** Puts the focus on the first row of the page's first table; without one, on the page. */
export function focusRows() {
  for (const table of document.querySelectorAll(TABLES)) {
    const [first] = rowsOf(table);
    if (first) return focusRow(first);
  }
  document.getElementById("main").focus();
}

function step(by, active) {
  const row = active?.closest("main tbody tr");
  if (row) {
    const rows = rowsOf(row.closest("table")),
      next = rows[rows.indexOf(row) + by];
    if (next) focusRow(next);
    return Boolean(next);
  }
  // An arrow scrolls what has the focus, unless that is a table.
  const table = active?.closest(TABLES) || document.querySelector(TABLES);
  const [first] = table ? rowsOf(table) : [];
  if (first) focusRow(first);
  return Boolean(first);
}

function pressed(event) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || isTyping()) return;
  if (document.querySelector("dialog[open]")) return;
  const active = document.activeElement,
    row = active?.matches("main tbody tr") ? active : null;
  const onTable = row || active?.closest(TABLES);
  if (event.key in STEPS) {
    if (event.key.startsWith("Arrow") && !onTable) return;
    if (step(STEPS[event.key], active)) event.preventDefault();
  } else if (row && event.key === "Enter") {
    /** @type {HTMLElement} */ (row.querySelector("a[href]"))?.click();
  } else if (row && (event.key === "x" || event.key === " ")) {
    event.preventDefault();
    /** @type {HTMLElement} */ (row.querySelector("input[type=checkbox]"))?.click();
  } else if (event.key === "?") showKeys();
}

function showKeys() {
  const dialog = h(
    "dialog",
    { "aria-labelledby": "keys-title", onclose: () => dialog.remove() },
    h("h2", { id: "keys-title" }, "Keys"),
    h(
      "dl",
      { class: "keys" },
      KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]),
    ),
    h("p", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
  );
  document.body.append(dialog);
  dialog.showModal();
}

/** Listens to them. */
export const listen = () => document.addEventListener("keydown", pressed);
