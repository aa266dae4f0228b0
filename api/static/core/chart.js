// Charts of lines. Axes, zoom and cursor are uPlot's; the lines are drawn from their own numbers, so that each has its
// own places on the x axis, grows without the chart being built again, and is written to SVG by the same functions.

import uPlot from "../vendor/uplot.js";
import { dataTable, MOST_ROWS } from "./datatable.js";
import { announce, h, replace } from "./dom.js";
import { number } from "./format.js";
import {
  area,
  between,
  fences,
  leftOut,
  lineStyle,
  logTicks,
  nearest,
  padded,
  smoothed,
  stroke,
  valuesWithin,
} from "./lines.js";
import { dark, isDark, swatch } from "./swatch.js";

/** @typedef {import("./lines.js").Line} Line */
/** @typedef {import("./chart_group.js").ChartGroup} ChartGroup */
/**
 * @typedef {{title: string, caption?: string, note?: string, x_title: string, y_title: string, lines: Line[]}} Data
 * @typedef {{smooth?: number, logX?: boolean, logY?: boolean, outliers?: boolean, height?: number, stepped?: boolean}} View
 *   `smooth` is the weight of the moving average; `outliers` leaves them out
 */

const MOST_FAINT = 40,
  MOST_IN_TIP = 8,
  FEW_POINTS = 12,
  REACH_PX = 30,
  KEYS = "Arrow keys move the cursor, + and - zoom, Escape shows everything, Enter marks a step to compare.";

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const charts = new Map();
const repaint = () => charts.forEach(chart => chart.later());
dark.addEventListener("change", repaint);
addEventListener("theme", repaint);

export class Chart {
  constructor(container, group) {
    this.container = container;
    this.group = group;
    this.data = null;
    this.view = {};
    this.plot = null;
    this.frame = null;
    this.focused = null;
    /** @type {"pointer" | "keys" | "group"} What moved the cursor last */
    this.led = "group";
    this.revision = 0;
    this.comparison = "";
    this.counts = { built: 0, redraws: 0 };
    this.tip = h("div", { class: "chart-tip", hidden: true });
    this.area = h("div", {
      class: "chart",
      tabindex: "0",
      role: "group",
      "aria-roledescription": "chart",
      onkeydown: event => this.key(event),
    });
    this.title = h("h2");
    this.tools = h("div", { class: "chart-tools" });
    this.words = h("figcaption");
    this.marks = h("div");
    this.table = h("details", { class: "as-table" });
    this.table.addEventListener("toggle", () => {
      if (this.table.open && this.table.children.length < 2) this.table.append(this.asTable());
    });
    replace(
      container,
      h("div", { class: "chart-head" }, this.title, this.tools),
      this.area,
      this.marks,
      this.words,
      this.table,
    );
    this.sized = new ResizeObserver(() => this.resize());
    this.sized.observe(this.area);
    for (const one of charts.values()) if (!one.container.isConnected) one.leave(); // Of pages that were left
    group.charts.add(this);
    charts.set(container, this);
  }

  /**
   * Shows data, in the place of what was shown.
   * @param {Data} data
   * @param {View} view
   */
  show(data, view) {
    const axes = JSON.stringify([view.logX, view.logY, data.x_title, data.y_title, view.height]);
    this.data = data;
    this.view = view;
    this.smoothedLines = null;
    this.revision++;
    this.title.textContent = data.title;
    this.area.setAttribute("aria-label", `${data.caption || data.title} ${KEYS}`);
    replace(this.table, h("summary", {}, "As a table"), this.table.open ? this.asTable() : null);
    if (this.axes === axes && this.plot) {
      this.later();
      return;
    }
    this.axes = axes;
    this.build();
  }

  /** Draws what changed in the lines, once for the next frame, however often this is called. */
  grown() {
    this.smoothedLines = null;
    this.revision++;
    this.group.again();
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (!this.container.isConnected) this.leave();
      else if (this.plot) this.plot.setData(this.#ends());
    });
  }

  leave() {
    this.plot?.destroy();
    this.plot = null;
    this.sized.disconnect();
    this.group.charts.delete(this);
    charts.delete(this.container);
  }

  /** The lines that are not hidden. */
  visible() {
    return this.data ? this.data.lines.filter(line => !this.group.hidden.has(line.name)) : [];
  }

  /** The same as they are drawn. */
  drawn() {
    const { smooth = 0 } = this.view;
    this.smoothedLines ??= new Map(
      this.data.lines.map(line => {
        // The range of one run's values is of the values as they are measured.
        const weight = line.runs?.length === 1 ? 0 : smooth;
        const band = line.low?.length
          ? { low: smoothed(line.low, weight), high: smoothed(line.high, weight) }
          : {};
        return [line, { ...line, ...band, y: smoothed(line.y, smooth) }];
      }),
    );
    return this.visible().map(line => this.smoothedLines.get(line));
  }

  build() {
    this.plot?.destroy();
    const { logX, logY, height = 320 } = this.view;
    const axis = (title, log, more) => ({
      label: title,
      labelSize: 22,
      labelGap: 2,
      font: "12px system-ui, sans-serif",
      labelFont: "12px system-ui, sans-serif",
      stroke: () => colour("--quiet"),
      grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1, size: 5 },
      values: (plot, splits) => splits.map(value => (value === null ? "" : number(value))),
      ...(log
        ? { splits: (plot, at, low, high) => logTicks(low, high), filter: (plot, splits) => splits }
        : {}),
      ...more,
    });
    this.plot = new uPlot(
      {
        width: Math.max(this.area.clientWidth, 50),
        height,
        legend: { show: false },
        padding: [10, 12, 0, 0],
        scales: {
          x: { time: false, distr: logX ? 3 : 1, range: () => this.group.range(logX) },
          y: { distr: logY ? 3 : 1, range: () => this.#heights() },
        },
        axes: [
          axis(this.data.x_title, logX, { space: 64, size: 30 }),
          axis(this.data.y_title, logY, { size: 58, space: height < 200 ? 22 : 34 }),
        ],
        series: [{}, { scale: "y", auto: false, paths: () => null, points: { show: false } }],
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => this.group.zoom && this.group.set({ zoom: null }) },
        },
        hooks: {
          draw: [() => this.#paint()],
          setCursor: [() => this.#read()],
          setSelect: [plot => this.#select(plot)],
        },
      },
      this.#ends(),
      this.area,
    );
    this.plot.over.append(this.tip);
    this.plot.over.addEventListener("click", () => this.#mark());
    this.plot.over.addEventListener("mouseenter", () => (this.led = "pointer"));
    this.plot.over.addEventListener("mousemove", () => (this.led = "pointer"), { capture: true });
    this.counts.built++;
    this.#counted();
  }

  resize() {
    const width = this.area.clientWidth;
    if (this.plot && width > 50 && width !== this.plot.width)
      this.plot.setSize({ width, height: this.plot.height });
  }

  /** Moves the cursor as if a pointer did, without telling other charts. */
  point(x) {
    if (!this.plot) return;
    this.led = "group";
    this.plot.setCursor({ left: x === null ? -10 : this.plot.valToPos(x, "x"), top: 0 });
  }

  #ends() {
    return [this.group.range(this.view.logX), [null, null]];
  }

  /** @returns {[number, number]} */
  #heights() {
    const { logY, outliers } = this.view,
      range = this.group.range(this.view.logX),
      lines = this.drawn();
    const values = [...valuesWithin(lines, range, logY)];
    const bounds = (outliers && fences(values, logY)) || [-Infinity, Infinity];
    const around = lines.flatMap(line =>
      line.low ? [line.low, line.high].map(y => ({ x: line.x, y })) : [],
    );
    if (this.view.smooth && lines.length <= MOST_FAINT) around.push(...this.visible());
    let low = Infinity,
      high = -Infinity;
    for (const value of [...values, ...valuesWithin(around, range, logY)]) {
      if (value < bounds[0] || value > bounds[1]) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    const unseen = logY ? [...valuesWithin(lines, range)].filter(value => value <= 0).length : 0;
    this.#note([
      outliers ? leftOut(values, bounds, value => number(value)) : "",
      unseen ? `${unseen} points at or below 0 have no place on a logarithmic axis.` : "",
    ]);
    return padded(low, high, logY);
  }

  #note(more) {
    const { smooth } = this.view,
      faint = this.data.lines.length <= MOST_FAINT;
    const note = [
      smooth
        ? `Smoothed: exponential moving average, weight ${smooth} on what came before${faint ? "; faint lines are as measured" : ""}.`
        : "",
      ...more,
      this.data.note,
    ]
      .filter(Boolean)
      .join(" ");
    const words = [this.data.caption, note].join("\n");
    if (words === this.said) return;
    this.said = words;
    replace(
      this.words,
      this.data.caption ? h("p", {}, this.data.caption) : null,
      note ? h("p", { class: "note" }, note) : null,
    );
  }

  #paint() {
    const { plot } = this;
    if (!plot) return;
    const { ctx, bbox } = plot,
      ratio = uPlot.pxRatio,
      shade = isDark();
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    for (const { pen, colour, dash, width, alpha, fill } of this.paths(ratio, shade)) {
      ctx.globalAlpha = alpha;
      if (fill) {
        ctx.fillStyle = colour;
        ctx.fill(pen);
      } else {
        ctx.strokeStyle = colour;
        ctx.lineWidth = width * ratio;
        ctx.setLineDash(dash.map(length => length * ratio));
        ctx.stroke(pen);
      }
    }
    ctx.restore();
    this.counts.redraws++;
    this.#counted();
    this.#tools();
    this.#compared();
    this.container.dataset.drawn = "true";
  }

  /**
   * Everything that is drawn inside the axes, in its order.
   * @param {number} ratio pixels of the canvas to one of the page
   * @param {boolean} shade whether the page is dark
   * @param {new () => any} Pen Path2D, or what writes the same path elsewhere
   * @returns {Generator<{pen: any, name: string, colour: string, dash: number[], width: number, alpha: number, fill?: boolean}>}
   */
  *paths(ratio, shade, Pen = Path2D) {
    const { plot } = this,
      range = this.group.range(this.view.logX),
      lines = this.drawn();
    const across = x => (plot.valToPos(x, "x", true) * ratio) / uPlot.pxRatio,
      up = y => (plot.valToPos(y, "y", true) * ratio) / uPlot.pxRatio;
    const alpha = line => (this.focused && this.focused !== line.name ? 0.25 : 1);
    const style = line => ({ ...lineStyle(line.colour, shade), name: line.name });
    for (const line of lines) {
      if (!line.low) continue;
      const pen = new Pen();
      area(pen, /** @type {any} */ (line), across, up);
      yield { ...style(line), pen, fill: true, alpha: 0.16 * alpha(line), width: 0 };
    }
    if (this.view.smooth && lines.length <= MOST_FAINT) {
      for (const line of this.visible()) {
        const pen = new Pen();
        stroke(pen, line, across, up, range);
        yield { ...style(line), pen, dash: [], width: 1, alpha: 0.3 * alpha(line) };
      }
    }
    for (const line of lines) {
      const pen = new Pen();
      stroke(pen, line, across, up, range);
      yield { ...style(line), pen, width: lines.length > MOST_FAINT ? 1 : 2, alpha: alpha(line) };
      if (line.x.length > FEW_POINTS) continue;
      const dots = new Pen(),
        size = 3 * ratio;
      line.x.forEach((x, place) => {
        if (!Number.isFinite(line.y[place])) return;
        const [left, top] = [across(x), up(line.y[place])];
        dots.moveTo(left - size, top);
        for (const [right, down] of [
          [0, -size],
          [size, 0],
          [0, size],
        ])
          dots.lineTo(left + right, top + down);
        dots.closePath();
      });
      yield { ...style(line), pen: dots, fill: true, alpha: alpha(line), width: 0 };
    }
    for (const x of this.group.marks) {
      const pen = new Pen(),
        { top, height } = plot.bbox;
      pen.moveTo(across(x), (top * ratio) / uPlot.pxRatio);
      pen.lineTo(across(x), ((top + height) * ratio) / uPlot.pxRatio);
      yield { name: "", colour: colour("--quiet"), dash: [4, 3], pen, width: 1.5, alpha: 1 };
    }
  }

  #counted() {
    for (const [name, value] of Object.entries(this.counts)) this.area.dataset[name] = String(value);
  }

  #select(plot) {
    const { left, width } = plot.select;
    if (width < 3) return;
    const zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.group.set({ zoom: /** @type {[number, number]} */ (zoom) });
  }

  /** The points of the lines that are nearest to a place on the x axis, the greatest value first. */
  #near(x) {
    const away = (line, place) =>
      Math.abs(this.plot.valToPos(line.x[place], "x") - this.plot.valToPos(x, "x"));
    return (
      this.drawn()
        .map(line => ({ line, place: nearest(line.x, x) }))
        .filter(({ line, place }) => place >= 0 && Number.isFinite(line.y[place]))
        // A line that ended long before, or begins long after, has nothing to say here.
        .filter(
          ({ line, place }) => (line.x[0] <= x && x <= line.x.at(-1)) || away(line, place) < 2 * REACH_PX,
        )
        .map(({ line, place }) => ({ line, x: line.x[place], y: line.y[place] }))
        .sort((a, b) => b.y - a.y)
    );
  }

  #read() {
    const { plot } = this;
    if (!plot) return;
    const { left, top } = plot.cursor;
    if (left < 0) {
      this.tip.hidden = true;
      this.#focus(null);
      if (this.led !== "group") this.group.point(this, null);
      return;
    }
    const x = plot.posToVal(left, "x"),
      near = this.#near(x);
    if (this.led !== "group") this.group.point(this, x);
    let closest = null,
      away = REACH_PX;
    if (this.led === "pointer") {
      for (const one of near) {
        const distance = Math.abs(plot.valToPos(one.y, "y") - top);
        if (distance < away) [closest, away] = [one, distance];
      }
    }
    this.#focus(near.length > 1 ? closest?.line.name : null);
    this.tip.hidden = !near.length;
    if (!near.length) return;
    const start = Math.max(0, Math.min(near.indexOf(closest) - MOST_IN_TIP / 2, near.length - MOST_IN_TIP));
    const told = near.length > MOST_IN_TIP ? near.slice(start, start + MOST_IN_TIP) : near;
    replace(
      this.tip,
      h(
        "b",
        {},
        `${this.data.x_title.replace(/ \(optimizer updates\)$/, "")} ${number((closest || near[0]).x)}`,
      ),
      told.map(one =>
        h(
          "div",
          { class: one === closest ? "here" : null },
          swatch(one.line.colour),
          ` ${number(one.y)} `,
          near.length > 1 || this.data.lines.length > 1 ? h("span", { class: "quiet" }, one.line.name) : null,
        ),
      ),
      near.length > told.length
        ? h("div", { class: "quiet" }, `and ${near.length - told.length} more`)
        : null,
    );
    const right = left > plot.over.clientWidth / 2;
    this.tip.style.setProperty("left", right ? "auto" : `${left + 12}px`);
    this.tip.style.setProperty("right", right ? `${plot.over.clientWidth - left + 12}px` : "auto");
  }

  #focus(name) {
    if (this.focused === (name ?? null)) return;
    this.focused = name ?? null;
    this.later();
  }

  #mark() {
    const { left } = this.plot.cursor;
    if (left < 0) return;
    const x = this.plot.posToVal(left, "x"),
      [first] = this.#near(x);
    this.group.mark(first ? first.x : x);
  }

  key(event) {
    const { plot } = this;
    if (!plot || event.target !== this.area || event.altKey || event.ctrlKey || event.metaKey) return;
    const [low, high] = this.group.range(this.view.logX),
      wide = plot.over.clientWidth,
      at = plot.cursor.left >= 0 ? plot.cursor.left : wide / 2;
    const zoomed = factor => {
      const ends = [at - at * factor, at + (wide - at) * factor].map(left => plot.posToVal(left, "x"));
      return /** @type {[number, number]} */ (ends);
    };
    /** @type {Record<string, () => void>} */
    const does = {
      ArrowLeft: () => this.#step(-1, at),
      ArrowRight: () => this.#step(1, at),
      Home: () => this.#move(plot.valToPos(low, "x")),
      End: () => this.#move(plot.valToPos(high, "x")),
      "+": () => this.group.set({ zoom: zoomed(0.5) }),
      "-": () => this.group.zoom && this.group.set({ zoom: zoomed(2) }),
      Escape: () => this.group.set({ zoom: null, marks: [] }),
      Enter: () => this.#mark(),
    };
    if (!does[event.key]) return;
    event.preventDefault();
    does[event.key]();
  }

  /** Moves the cursor to the next point of any line, at least a few pixels on. */
  #step(direction, at) {
    const { plot } = this,
      [low, high] = this.group.range(this.view.logX);
    const least = plot.cursor.left >= 0 ? 4 : 0;
    const places = this.drawn()
      .flatMap(line => line.x)
      .filter(x => x >= low && x <= high)
      .map(x => plot.valToPos(x, "x"))
      .filter(left => direction * (left - at) >= least)
      .sort((a, b) => direction * (a - b));
    if (places.length) this.#move(places[0]);
  }

  #move(left) {
    this.led = "keys";
    this.plot.setCursor({ left, top: 0 });
    const near = this.#near(this.plot.posToVal(left, "x")).slice(0, MOST_IN_TIP);
    if (near.length)
      announce(`${number(near[0].x)}: ${near.map(one => `${one.line.name} ${number(one.y)}`).join(", ")}`);
  }

  #tools() {
    const { zoom } = this.group;
    if (this.zoomed === Boolean(zoom)) return;
    this.zoomed = Boolean(zoom);
    const button = (text, label, onclick) =>
      h("button", { type: "button", "aria-label": label, title: label, onclick }, text);
    const file = kind => async () => {
      const { save } = await import("./chart_files.js");
      await save(this, kind);
    };
    replace(
      this.tools,
      zoom
        ? button("Show all", `Show all of ${this.data.title}`, () => this.group.set({ zoom: null }))
        : null,
      button("PNG", `Save ${this.data.title} as PNG`, file("png")),
      button("SVG", `Save ${this.data.title} as SVG`, file("svg")),
    );
  }

  /** What lies between the two marks, or that a second one is missing. */
  #compared() {
    const { marks, hidden } = this.group,
      now = marks.length ? JSON.stringify([marks, [...hidden], this.revision]) : "";
    if (now === this.comparison) return;
    this.comparison = now;
    const held = this.marks.contains(document.activeElement);
    const clear = h(
      "button",
      { type: "button", onclick: () => this.group.set({ marks: [] }) },
      "End the comparison",
    );
    if (!marks.length) replace(this.marks);
    else if (marks.length === 1)
      replace(
        this.marks,
        h(
          "p",
          { class: "quiet marked" },
          `Marked at ${number(marks[0])}. Click a second place to compare the two. `,
          clear,
        ),
      );
    else {
      const rows = between(this.drawn(), /** @type {[number, number]} */ (marks));
      replace(
        this.marks,
        dataTable(
          `${this.data.title} at two places`,
          ["line", `at ${number(marks[0])}`, `at ${number(marks[1])}`, "difference"],
          rows.slice(0, MOST_ROWS).map(({ line, a, b, difference }) => [named(line), a.y, b.y, difference]),
          rows.length,
        ),
        h("p", { class: "marked" }, clear),
      );
    }
    if (held && marks.length) clear.focus();
  }

  asTable() {
    const { lines, x_title, y_title } = this.data;
    const rows = lines.slice(0, MOST_ROWS).map(line => {
      const values = line.y.filter(Number.isFinite);
      const ends = values.length ? [Math.min(...values), Math.max(...values)] : ["", ""];
      return [named(line), line.x.at(-1), values[0], values.at(-1), ...ends];
    });
    const titles = ["line", `last ${x_title}`, `first ${y_title}`, "last", "least", "greatest"];
    return dataTable("The figure as a table", titles, rows, lines.length);
  }
}

/** The name of a line; one of a single run leads to it. */
const named = line =>
  line.runs?.length === 1 ? h("a", { href: `/runs/${line.runs[0]}` }, line.name) : line.name;

/**
 * Shows a chart in a container, or other data in the chart that is there.
 * @param {HTMLElement} container
 * @param {Data} data
 * @param {View} view
 * @param {ChartGroup} group
 */
export function chart(container, data, view, group) {
  let shown = charts.get(container);
  if (shown && (shown.group !== group || !shown.area.isConnected)) {
    shown.leave();
    shown = null;
  }
  shown ||= new Chart(container, group);
  shown.show(data, view);
  return shown;
}

/** The chart that a container shows. */
export const chartIn = container => charts.get(container);
