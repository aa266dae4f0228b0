// Charts that are looked at together, and the legend of their lines.

import { h, replace } from "./dom.js";
import { spread } from "./lines.js";
import { isDark, swatch } from "./swatch.js";

/** What charts that are looked at together share: cursor, zoom, hidden lines, and marks of two steps. */
export class ChartGroup {
  /**
   * @param {{zoom?: [number, number] | null, hidden?: string[], marks?: number[]}} view
   * @param {(group: ChartGroup) => void} changed is called when a reader changes one of them
   */
  constructor({ zoom = null, hidden = [], marks = [] } = {}, changed = () => {}) {
    this.zoom = zoom;
    this.hidden = new Set(hidden);
    this.marks = marks;
    this.changed = changed;
    /** @type {Set<import("./chart.js").Chart>} */
    this.charts = new Set();
    this.legends = new Set();
  }

  /** @param {{zoom?: [number, number] | null, hidden?: Set<string>, marks?: number[]}} change */
  set(change) {
    Object.assign(this, change);
    this.changed(this);
    this.legends.forEach(draw => draw());
    this.again();
  }

  again() {
    for (const chart of this.charts) chart.later();
  }

  toggle(name) {
    const hidden = new Set(this.hidden);
    if (!hidden.delete(name)) hidden.add(name);
    this.set({ hidden });
  }

  mark(x) {
    this.set({ marks: this.marks.length === 1 ? [...this.marks, x].sort((a, b) => a - b) : [x] });
  }

  /**
   * The range of x that is shown, the same in all charts.
   * @returns {[number, number]}
   */
  range(log) {
    if (this.zoom && (!log || this.zoom[0] > 0)) return this.zoom;
    return spread(
      [...this.charts].flatMap(chart => chart.visible()),
      log,
    );
  }

  /** Moves the cursor of all other charts to the same place. */
  point(from, x) {
    for (const chart of this.charts) if (chart !== from) chart.point(x);
  }
}

/**
 * The lines of a group's charts as switches that show and hide them.
 * @param {ChartGroup} group
 */
export function legend(group) {
  const list = h("ul", { class: "lines-key", "aria-label": "Lines" });
  let known = "";
  const draw = () => {
    const lines = new Map(
      [...group.charts].flatMap(one => one.data?.lines || []).map(line => [line.name, line]),
    );
    const now = JSON.stringify([[...lines.keys()], isDark()]);
    if (now !== known) {
      known = now;
      replace(
        list,
        [...lines.values()].map(line =>
          h(
            "li",
            {},
            h(
              "button",
              { type: "button", "data-line": line.name, onclick: () => group.toggle(line.name) },
              swatch(line.colour),
              " ",
              line.name,
            ),
          ),
        ),
        h(
          "li",
          {},
          h(
            "button",
            { type: "button", class: "all", onclick: () => group.set({ hidden: new Set() }) },
            "Show all lines",
          ),
        ),
      );
    }
    for (const button of list.querySelectorAll("button[data-line]"))
      button.setAttribute("aria-pressed", String(!group.hidden.has(button.dataset.line)));
    list.querySelector(".all").hidden = !group.hidden.size;
    list.hidden = lines.size < 2;
  };
  group.legends.add(draw);
  return { list, draw };
}
