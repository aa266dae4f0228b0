// A table of any length: only the rows in view are in the document.

import { h, replace } from "./dom.js";

const SPARE_ROWS = 6,
  BLOCK_ROWS = 8;

/**
 * A column.
 * @typedef {Object} Column
 * @property {string} key
 * @property {string} title
 * @property {string} [unit] shown after the title
 * @property {boolean} [numeric] aligned to the right
 * @property {number} [width] pixels
 * @property {boolean} [sortable]
 * @property {boolean} [costs] its values are costs, which are read only when it is shown
 * @property {(row: any) => any} render what the cell holds: text, a node, or an array of them
 */

/** A table; `node` is its element. Rows are given with `setRows`, and may be filled in as they come into view. */
export class VirtualTable {
  /**
   * @param {Object} options
   * @param {string} options.label what the table lists
   * @param {Column[]} options.columns
   * @param {(row: any) => any} options.key tells rows apart
   * @param {(from: number, to: number) => void} [options.need] called when rows that are still undefined come into view
   * @param {{key: string, descending: boolean} | null} [options.sorted]
   * @param {(key: string, descending: boolean) => void} [options.onSort]
   * @param {(keys: Set<any>) => void} [options.onSelect] rows get a box to select them
   * @param {(row: any) => string} [options.rowClass]
   * @param {number} [options.rowHeight] pixels
   */
  constructor({ label, columns, key, need, sorted = null, onSort, onSelect, rowClass, rowHeight = 34 }) {
    this.columns = columns;
    this.key = key;
    this.need = need;
    this.sorted = sorted;
    this.onSort = onSort;
    this.onSelect = onSelect;
    this.rowClass = rowClass;
    this.rowHeight = rowHeight;
    this.rows = [];
    this.total = 0;
    this.selected = new Set();
    this.pinned = new Set();
    this.first = -1;
    this.drawn = new Map();
    this.columnsRow = h("colgroup");
    this.head = h("thead");
    this.above = h("tr", { class: "gap", "aria-hidden": "true" }, h("td"));
    this.below = h("tr", { class: "gap", "aria-hidden": "true" }, h("td"));
    this.body = h("tbody", {}, this.above, this.below);
    this.table = h("table", { "aria-label": label, class: "virtual" }, this.columnsRow, this.head, this.body);
    this.node = h(
      "div",
      { class: "table-scroll card", tabindex: "0", role: "region", "aria-label": label },
      this.table,
    );
    this.node.addEventListener("scroll", () => this.paint(), { passive: true });
    new ResizeObserver(() => this.paint()).observe(this.node);
    this.drawHead();
  }

  /** Shows other columns. */
  setColumns(columns) {
    this.columns = columns;
    this.drawHead();
    this.redraw();
  }

  /**
   * Shows rows.
   * @param {any[]} rows those that are known; the places of others may be undefined
   * @param {number} total how many there are
   */
  setRows(rows, total = rows.length) {
    this.rows = rows;
    this.total = total;
    this.table.setAttribute("aria-rowcount", total + 1);
    this.first = -1;
    this.paint(); // Rows that are the same objects stay as they are.
  }

  /** Draws one row again, if it is in view. */
  update(row) {
    const found = this.drawn.get(this.key(row));
    if (!found) return;
    found.row = row;
    this.fill(found.node, row, found.index);
  }

  /** Marks what the rows are sorted by. */
  setSorted(sorted) {
    this.sorted = sorted;
    this.drawHead();
  }

  /** Selects these keys alone. */
  select(keys) {
    this.selected = new Set(keys);
    this.redraw();
  }

  drawHead() {
    const cells = this.columns.map(column => {
      const direction =
        this.sorted?.key === column.key ? (this.sorted.descending ? "descending" : "ascending") : null;
      const title = [column.title, column.unit ? h("span", { class: "unit" }, ` ${column.unit}`) : null];
      return h(
        "th",
        { scope: "col", class: column.numeric ? "num" : null, "aria-sort": direction },
        column.sortable && this.onSort
          ? h(
              "button",
              {
                type: "button",
                class: "sorts",
                onclick: () => this.onSort(column.key, direction === "ascending"),
              },
              title,
              h(
                "span",
                { class: "arrow", "aria-hidden": "true" },
                direction ? (direction === "descending" ? " ↓" : " ↑") : "",
              ),
            )
          : title,
      );
    });
    replace(
      this.head,
      h(
        "tr",
        {},
        this.onSelect
          ? h("th", { scope: "col", class: "box" }, h("span", { class: "unseen" }, "Select"))
          : null,
        cells,
      ),
    );
    const widths = this.columns.map(column => column.width || (column.numeric ? 104 : 150));
    replace(
      this.columnsRow,
      this.onSelect ? h("col", { style: { width: "38px" } }) : null,
      widths.map(width => h("col", { style: { width: `${width}px` } })),
    );
    this.table.style.setProperty(
      "min-width",
      `${widths.reduce((sum, width) => sum + width, this.onSelect ? 38 : 0)}px`,
    );
  }

  redraw() {
    for (const { node } of this.drawn.values()) node.remove();
    this.drawn.clear();
    this.first = -1;
    this.paint();
  }

  paint() {
    const height = this.node.clientHeight || 600;
    // In whole blocks: what a change of the table's layout costs does not depend on how many rows change.
    const top = this.node.scrollTop / this.rowHeight,
      bottom = top + height / this.rowHeight;
    const first = Math.max(0, BLOCK_ROWS * Math.floor((top - SPARE_ROWS) / BLOCK_ROWS));
    const end = Math.min(this.total, BLOCK_ROWS * Math.ceil((bottom + SPARE_ROWS) / BLOCK_ROWS));
    if (first === this.first && end === this.end) return;
    this.first = first;
    this.end = end;
    const kept = new Map();
    let before = this.above,
      unknown = null;
    for (let index = first; index < end; index++) {
      const row = this.rows[index];
      if (row === undefined) unknown ??= index;
      const key = row === undefined ? `unknown ${index}` : this.key(row);
      let found = this.drawn.get(key);
      if (found) this.drawn.delete(key);
      if (!found || found.row !== row || found.index !== index)
        found = { node: this.fill(found?.node ?? h("tr"), row, index), row, index };
      if (before.nextSibling !== found.node) before.after(found.node);
      before = found.node;
      kept.set(key, found);
    }
    for (const { node } of this.drawn.values()) node.remove();
    this.drawn = kept;
    const span = this.columns.length + (this.onSelect ? 1 : 0);
    for (const [gap, rows] of [
      [this.above, first],
      [this.below, this.total - end],
    ]) {
      gap.firstChild.colSpan = span;
      gap.style.setProperty("height", `${rows * this.rowHeight}px`);
      gap.hidden = rows === 0;
    }
    if (unknown !== null) this.need?.(unknown, end);
  }

  fill(node, row, index) {
    node.setAttribute("aria-rowindex", index + 2);
    node.className = (row !== undefined && this.rowClass?.(row)) || "";
    if (row === undefined)
      return replace(
        node,
        h("td", { colspan: this.columns.length + (this.onSelect ? 1 : 0), class: "quiet" }, "…"),
      );
    const key = this.key(row);
    const box =
      this.onSelect &&
      h(
        "td",
        { class: "box" },
        h("input", {
          type: "checkbox",
          "aria-label": `Select ${key}`,
          checked: this.selected.has(key),
          onchange: event => {
            this.selected[event.target.checked ? "add" : "delete"](key);
            this.onSelect(this.selected);
          },
        }),
      );
    return replace(
      node,
      box || null,
      this.columns.map(column => h("td", { class: column.numeric ? "num" : null }, column.render(row))),
    );
  }
}

/**
 * A short table, all of it in the document.
 * @param {string} label
 * @param {(string | {title: string, numeric?: boolean, wide?: boolean})[]} headings
 * @param {any[][]} rows what the cells hold
 */
export function plainTable(label, headings, rows) {
  const columns = headings.map(heading => (typeof heading === "string" ? { title: heading } : heading));
  const kind = column => [column.numeric ? "num" : "", column.wide ? "wide" : ""].join(" ").trim() || null;
  return h(
    "div",
    { class: "card scrolls", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      { "aria-label": label },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(column => h("th", { scope: "col", class: kind(column) }, column.title)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(cells =>
          h(
            "tr",
            {},
            cells.map((cell, i) => h("td", { class: kind(columns[i]) }, cell)),
          ),
        ),
      ),
    ),
  );
}
