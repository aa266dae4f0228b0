// A table of any length: only the rows in view are in the document.

import { h, replace } from "./dom.js";

const SPARE_ROWS = 6,
  BLOCK_ROWS = 8;

/**
 * A column.
 * @typedef {Object} Column
 * @property {string} key
 * @property {any} title
 * @property {string} [unit] shown after the title
 * @property {boolean} [numeric] aligned to the right
 * @property {number} [width] pixels
 * @property {boolean} [sortable]
 * @property {boolean} [pinned] stays in view at the left; such columns come first
 * @property {boolean} [fixed] has no place and width of the reader's own
 * @property {boolean} [costs] its values are costs, which are read only when it is shown
 * @property {boolean} [figure] it is a number that has a mean
 * @property {(row: any) => any} [value] that number
 * @property {(value: any) => string} [format] its text
 * @property {(value: any) => string} [spread] the text of its standard deviation
 * @property {string} [csv] its name in exports
 * @property {(row: any) => any} render what the cell holds: text, a node, or an array of them
 */

const widthOf = column => column.width || (column.numeric ? 104 : 150);
const kinds = column =>
  [column.numeric ? "num" : "", column.pinned ? "stuck" : "", column.fixed ? "fixed" : ""].join(" ").trim() ||
  null;
const NARROWEST = 44,
  BOX = 38;

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
   * @param {(all: boolean) => void} [options.onSelectAll] their heading gets one for all of them
   * @param {(columns: Column[]) => void} [options.onLayout] columns can be dragged to other places and widths
   * @param {(row: any, columns: Column[]) => Node[] | null} [options.cells] the cells of a row that has other ones
   * @param {(row: any) => string} [options.rowClass]
   * @param {number} [options.rowHeight] pixels
   */
  constructor({
    label,
    columns,
    key,
    need,
    sorted = null,
    onSort,
    onSelect,
    onSelectAll,
    onLayout,
    cells,
    rowClass,
    rowHeight = 34,
  }) {
    this.columns = columns;
    this.key = key;
    this.need = need;
    this.sorted = sorted;
    this.onSort = onSort;
    this.onSelect = onSelect;
    this.onSelectAll = onSelectAll;
    this.onLayout = onLayout;
    this.cells = cells;
    this.rowClass = rowClass;
    this.rowHeight = rowHeight;
    this.rows = [];
    this.total = this.selectable = 0;
    this.selected = new Set();
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
   * @param {number} selectable how many of them can be selected
   */
  setRows(rows, total = rows.length, selectable = total) {
    this.rows = rows;
    this.total = total;
    this.selectable = selectable;
    this.markAll();
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
    this.markAll();
    this.redraw();
  }

  drawHead() {
    const cells = this.columns.map(column => {
      const direction =
        this.sorted?.key === column.key ? (this.sorted.descending ? "descending" : "ascending") : null;
      const title = [column.title, column.unit ? h("span", { class: "unit" }, ` ${column.unit}`) : null];
      const moves = this.onLayout && !column.fixed;
      const cell = h(
        "th",
        {
          scope: "col",
          class: kinds(column),
          "aria-sort": direction,
          draggable: moves ? "true" : null,
          style: { left: this.leftOf(column) },
        },
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
        moves
          ? h("span", {
              class: "grip",
              "aria-hidden": "true",
              title: "Drag to resize",
              onpointerdown: event => this.drag(event, column),
            })
          : null,
      );
      if (moves) this.movable(cell, column);
      return cell;
    });
    this.all = this.onSelectAll
      ? h("input", {
          type: "checkbox",
          "aria-label": "Select all",
          onchange: event => this.onSelectAll(event.target.checked),
        })
      : null;
    replace(
      this.head,
      h(
        "tr",
        {},
        this.onSelect
          ? h(
              "th",
              { scope: "col", class: `box ${this.boxClass()}` },
              this.all || h("span", { class: "unseen" }, "Select"),
            )
          : null,
        cells,
      ),
    );
    this.markAll();
    this.drawWidths();
  }

  /** Where a column that stays in view begins; null where none does. */
  leftOf(column) {
    if (!column.pinned) return null;
    const before = this.columns.slice(0, this.columns.indexOf(column)).filter(one => one.pinned);
    return `${before.reduce((sum, one) => sum + widthOf(one), this.onSelect ? BOX : 0)}px`;
  }

  boxClass() {
    return this.columns.some(column => column.pinned) ? "stuck" : "";
  }

  drawWidths() {
    const widths = this.columns.map(widthOf);
    replace(
      this.columnsRow,
      this.onSelect ? h("col", { style: { width: `${BOX}px` } }) : null,
      widths.map(width => h("col", { style: { width: `${width}px` } })),
    );
    this.table.style.setProperty(
      "min-width",
      `${widths.reduce((sum, width) => sum + width, this.onSelect ? BOX : 0)}px`,
    );
  }

  /** Gives a column the width to which its edge is dragged. */
  drag(event, column) {
    event.preventDefault(); // The heading is not dragged as well.
    const grip = event.target,
      start = grip.parentNode.getBoundingClientRect().width - event.clientX;
    grip.setPointerCapture(event.pointerId);
    grip.onpointermove = moved => {
      column.width = Math.round(Math.max(NARROWEST, start + moved.clientX));
      this.drawWidths();
    };
    grip.onpointerup = () => {
      grip.onpointermove = grip.onpointerup = null;
      this.onLayout(this.columns);
    };
  }

  /** Lets a column be dragged to the place of another. */
  movable(cell, column) {
    const type = "application/x-column";
    cell.addEventListener("dragstart", event => event.dataTransfer.setData(type, column.key));
    cell.addEventListener("dragover", event => {
      if (event.dataTransfer.types.includes(type)) event.preventDefault();
    });
    cell.addEventListener("drop", event => {
      const key = event.dataTransfer.getData(type),
        moved = this.columns.find(one => one.key === key);
      if (!moved || moved === column) return;
      event.preventDefault();
      const right = this.columns.indexOf(moved) < this.columns.indexOf(column);
      const others = this.columns.filter(one => one !== moved);
      others.splice(others.indexOf(column) + (right ? 1 : 0), 0, moved);
      moved.pinned = column.pinned;
      this.onLayout(others);
    });
  }

  /** Shows in the heading's box whether all rows, some or none are selected. */
  markAll() {
    if (!this.all) return;
    this.all.checked = this.selected.size > 0 && this.selected.size >= this.selectable;
    this.all.indeterminate = this.selected.size > 0 && !this.all.checked;
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
    const own = this.cells?.(row, this.columns);
    if (own) return replace(node, own);
    const key = this.key(row);
    const box =
      this.onSelect &&
      h(
        "td",
        { class: `box ${this.boxClass()}` },
        h("input", {
          type: "checkbox",
          "aria-label": `Select ${key}`,
          checked: this.selected.has(key),
          onchange: event => {
            this.selected[event.target.checked ? "add" : "delete"](key);
            this.markAll();
            this.onSelect(this.selected);
          },
        }),
      );
    return replace(
      node,
      box || null,
      this.columns.map(column =>
        h(
          "td",
          {
            class: kinds(column),
            style: { left: this.leftOf(column) },
          },
          column.render(row),
        ),
      ),
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
