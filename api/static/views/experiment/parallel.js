// Parallel coordinates: a line per run or configuration; ranges of each axis are brushed, or chosen with the keyboard.

import { h, replace, svg } from "../../core/dom.js";
import { count, number } from "../../core/format.js";
import { painter } from "../../core/stream.js";
import { plainTable } from "../../core/table.js";
import { ask, board, filterField, metricOptions, runLinks, select, whenRunsEnd } from "../figures.js";

const FIELDS = { by: "run", metric: [], colour: "", range: [], filter: "" };
const TOP = 46,
  BOTTOM = 26,
  SIDE = 56,
  NARROWEST = 104,
  MOST_LISTED = 50;

/** Shows the lines, the ranges, and what is within them. */
export async function show(panel, context, { signal }) {
  const below = h("section", { "aria-live": "polite" });
  let plot = null,
    last = null;
  const made = await board(panel, context, {
    fields: FIELDS,
    signal,
    below,
    tools: (view, set, known) => [
      select(
        "lines",
        [
          ["run", "runs"],
          ["cell", "configurations (means)"],
        ],
        view.by,
        by => set({ by }),
      ),
      select(
        "add a figure",
        [["", "…"], ...metricOptions(known.metrics)],
        "",
        name =>
          name &&
          set({ metric: [...new Set([...(view.metric.length ? view.metric : drawnMetrics(last)), name])] }),
      ),
      view.metric.map(name =>
        h(
          "span",
          { class: "chip" },
          name,
          h(
            "button",
            {
              type: "button",
              "aria-label": `Leave out ${name}`,
              onclick: () => set({ metric: view.metric.filter(one => one !== name) }),
            },
            "×",
          ),
        ),
      ),
      last
        ? select(
            "colour",
            last.dimensions.map(one => [one.name, one.label]),
            view.colour || last.dimensions.at(-1).name,
            colour => set({ colour }),
          )
        : null,
      filterField(view, set),
    ],
    draw: async (view, area, { signal: asked, set, refresh }) => {
      const one = await ask(
        context,
        "figures/parallel",
        { by: view.by, metric: view.metric, filter: view.filter },
        { signal: asked },
      );
      if (asked.aborted) return;
      const fresh = last === null;
      [last] = one.data;
      if (fresh) refresh();
      const ranges = readRanges(view.range, last.dimensions);
      const changed = next => {
        view.range = [...next].map(([name, [low, high]]) => `${name}:${low}:${high}`);
        set({ range: view.range });
      };
      const chosen = within(last, ranges);
      plot = new Lines(last, ranges, chosen, view.colour, changed, signal);
      replace(
        area,
        h(
          "figure",
          { class: "card pad", "data-drawn": "true" },
          plot.node,
          h("figcaption", {}, h("p", {}, one.caption), one.note ? h("p", {}, one.note) : null),
        ),
        rangesForm(last, ranges, changed),
      );
      plot.draw();
      replace(
        below,
        h(
          "h2",
          {},
          `${count(chosen.length)} of ${count(last.runs.length)} ${view.by === "run" ? "runs" : "configurations"}`,
        ),
        plainTable(
          "Within the ranges",
          [
            ...last.dimensions.map(dimension => ({ title: dimension.label, numeric: !dimension.ticks })),
            { title: "runs", wide: true },
          ],
          chosen
            .slice(0, MOST_LISTED)
            .map(at => [
              ...last.dimensions.map(dimension => told(dimension, dimension.values[at])),
              runLinks(context, last.runs[at], 3),
            ]),
        ),
        chosen.length > MOST_LISTED ? h("p", { class: "quiet" }, `The first ${MOST_LISTED}.`) : null,
      );
    },
  });
  whenRunsEnd(context, made.again, signal);
}

const drawnMetrics = trace => (trace ? trace.dimensions.filter(one => !one.ticks).map(one => one.name) : []);
const told = (dimension, value) =>
  value === null ? "–" : dimension.ticks ? dimension.ticks[value] : number(value);

/** Ranges in the address, "name:low:high", of dimensions that there are. */
function readRanges(texts, dimensions) {
  const found = new Map();
  for (const text of texts) {
    const [, name, low, high] = /^(.*):([^:]*):([^:]*)$/.exec(text) || [];
    if (
      dimensions.some(one => one.name === name) &&
      Number.isFinite(Number(low)) &&
      Number.isFinite(Number(high))
    )
      found.set(name, [Number(low), Number(high)]);
  }
  return found;
}

function within({ dimensions, runs }, ranges) {
  const limits = dimensions
    .filter(one => ranges.has(one.name))
    .map(one => [one.values, ...ranges.get(one.name)]);
  return runs
    .map((_, at) => at)
    .filter(at =>
      limits.every(([values, low, high]) => values[at] !== null && values[at] >= low && values[at] <= high),
    );
}

/** The same ranges as fields, for the keyboard. */
function rangesForm({ dimensions }, ranges, changed) {
  const put = (name, range) => {
    const next = new Map(ranges);
    if (range) next.set(name, range);
    else next.delete(name);
    changed(next);
  };
  const fields = dimensions.map(dimension => {
    const [low, high] = extent(dimension),
      [from, to] = ranges.get(dimension.name) || [low, high];
    const limit = (label, value, other) =>
      h(
        "label",
        {},
        `${label} `,
        dimension.ticks
          ? h(
              "select",
              { onchange: event => put(dimension.name, other(Number(event.target.value))) },
              dimension.ticks.map((tick, at) =>
                h("option", { value: at, selected: at === Math.round(value) }, tick),
              ),
            )
          : h("input", {
              type: "text",
              inputmode: "decimal",
              size: "7",
              value: Number(value.toPrecision(6)),
              onchange: event => put(dimension.name, other(Number(event.target.value) || 0)),
            }),
      );
    return h(
      "fieldset",
      {},
      h("legend", {}, dimension.label),
      limit("from", from, value => [value, to]),
      " ",
      limit("to", to, value => [from, value]),
      ranges.has(dimension.name)
        ? [" ", h("button", { type: "button", onclick: () => put(dimension.name, null) }, "All")]
        : null,
    );
  });
  return h(
    "details",
    { open: ranges.size > 0 },
    h("summary", {}, ranges.size ? `Ranges of ${ranges.size} axes` : "Choose ranges"),
    h("div", { class: "tools" }, fields),
  );
}

function extent(dimension) {
  if (dimension.ticks) return [0, Math.max(0, dimension.ticks.length - 1)];
  const known = dimension.values.filter(value => value !== null);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity),
    high = known.reduce((most, value) => Math.max(most, value), -Infinity);
  return low === Infinity ? [0, 1] : [low, high];
}

/** The drawing: lines on a canvas, axes and brushes as a drawing above it. */
class Lines {
  constructor(trace, ranges, chosen, colour, changed, signal) {
    this.trace = trace;
    this.ranges = ranges;
    this.chosen = new Set(chosen);
    this.changed = changed;
    this.colour = trace.dimensions.find(one => one.name === colour) || trace.dimensions.at(-1);
    this.canvas = h("canvas", { "aria-hidden": "true" });
    this.axes = svg("svg", {
      role: "img",
      "aria-label": "Parallel coordinates; the ranges can be chosen below",
    });
    this.sheet = h("div", { class: "parallel" }, this.canvas, this.axes);
    this.node = h(
      "div",
      { class: "scrolls-x", tabindex: "0", role: "region", "aria-label": "Parallel coordinates" },
      this.sheet,
    );
    const again = painter(() => this.node.isConnected && this.draw(), signal);
    new ResizeObserver(again).observe(this.node);
    addEventListener("theme", again, { signal });
  }

  draw() {
    const { dimensions, runs } = this.trace;
    const width = Math.max(this.node.clientWidth, 2 * SIDE + NARROWEST * (dimensions.length - 1)),
      height = 420;
    if (!this.node.clientWidth) return;
    const step = (width - 2 * SIDE) / Math.max(1, dimensions.length - 1);
    this.x = dimensions.map((_, at) => SIDE + at * step);
    this.extents = dimensions.map(extent);
    this.y = (at, value) => {
      const [low, high] = this.extents[at];
      return height - BOTTOM - (high > low ? (value - low) / (high - low) : 0.5) * (height - TOP - BOTTOM);
    };
    this.value = (at, y) => {
      const [low, high] = this.extents[at];
      return low + ((height - BOTTOM - y) / (height - TOP - BOTTOM)) * (high - low);
    };
    const ratio = devicePixelRatio || 1,
      style = getComputedStyle(document.documentElement);
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    for (const [name, size] of [
      ["width", width],
      ["height", height],
    ])
      for (const node of [this.canvas, this.sheet]) node.style.setProperty(name, `${size}px`);
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const rest = [],
      shown = [];
    runs.forEach((_, at) => (this.chosen.has(at) ? shown : rest).push(at));
    pen.lineWidth = 1;
    pen.globalAlpha = 0.35;
    pen.strokeStyle = style.getPropertyValue("--line");
    if (this.ranges.size) rest.forEach(at => this.line(pen, at));
    pen.globalAlpha = Math.max(0.12, Math.min(0.9, 60 / Math.max(1, shown.length)));
    const [low, high] = extent(this.colour);
    for (const at of shown) {
      const value = this.colour.values[at],
        share = value === null || high === low ? 0.5 : (value - low) / (high - low);
      pen.strokeStyle = mixed(share);
      this.line(pen, at);
    }
    this.drawAxes(width, height);
  }

  line(pen, at) {
    pen.beginPath();
    let down = false;
    this.trace.dimensions.forEach((dimension, place) => {
      const value = dimension.values[at];
      if (value === null) {
        down = false;
        return;
      }
      pen[down ? "lineTo" : "moveTo"](this.x[place], this.y(place, value));
      down = true;
    });
    pen.stroke();
  }

  drawAxes(width, height) {
    this.axes.setAttribute("viewBox", `0 0 ${width} ${height}`);
    replace(
      this.axes,
      this.trace.dimensions.map((dimension, at) => {
        const x = this.x[at],
          [low, high] = this.extents[at],
          range = this.ranges.get(dimension.name);
        const ticks = dimension.ticks
          ? sparse(dimension.ticks)
          : [[high, number(high)], ...(high > low ? [[low, number(low)]] : [])];
        const hit = svg("rect", {
          class: "brush",
          x: x - 16,
          y: TOP - 8,
          width: 32,
          height: height - TOP - BOTTOM + 16,
        });
        hit.addEventListener("pointerdown", event => this.brush(event, at, hit));
        return svg(
          "g",
          {},
          svg("line", { class: "axis", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }),
          hit,
          range
            ? svg("rect", {
                class: "range",
                x: x - 6,
                width: 12,
                y: this.y(at, range[1]) - 2,
                height: Math.max(4, this.y(at, range[0]) - this.y(at, range[1]) + 4),
              })
            : null,
          svg(
            "text",
            {
              x,
              y: at % 2 ? 14 : 30,
              "text-anchor": at ? (at === this.x.length - 1 ? "end" : "middle") : "start",
              dx: at ? (at === this.x.length - 1 ? SIDE - 6 : 0) : 6 - SIDE,
              class: "title",
            },
            dimension.label,
          ),
          ticks.map(([value, text]) => svg("text", { x: x + 6, y: this.y(at, value) + 4 }, text)),
        );
      }),
    );
  }

  /** Chooses a range of an axis with the pointer; a click takes it back. */
  brush(event, at, hit) {
    const box = this.axes.getBoundingClientRect();
    const place = moved => Math.max(TOP, Math.min(420 - BOTTOM, moved.clientY - box.top));
    const start = place(event),
      dimension = this.trace.dimensions[at];
    const mark = svg("rect", { class: "range", x: this.x[at] - 6, width: 12, y: start, height: 0 });
    this.axes.append(mark);
    hit.setPointerCapture(event.pointerId);
    const move = moved => {
      const end = place(moved);
      mark.setAttribute("y", Math.min(start, end));
      mark.setAttribute("height", Math.abs(end - start));
    };
    hit.addEventListener("pointermove", move);
    hit.addEventListener(
      "pointerup",
      ended => {
        hit.removeEventListener("pointermove", move);
        mark.remove();
        const end = place(ended),
          next = new Map(this.ranges);
        if (Math.abs(end - start) < 4) next.delete(dimension.name);
        else {
          const [low, high] = [
            this.value(at, Math.max(start, end)),
            this.value(at, Math.min(start, end)),
          ].map(value => Number(value.toPrecision(5)));
          next.set(dimension.name, [low, high]);
        }
        this.changed(next);
      },
      { once: true },
    );
  }
}

/** Names of values, at most a dozen of them. */
const sparse = ticks => {
  const every = Math.ceil(ticks.length / 12);
  return ticks.map((tick, at) => [at, tick]).filter(([at]) => at % every === 0);
};

/** From the palette's orange to its blue: both ends are told apart by every reader, on light and dark. */
const mixed = share =>
  `rgb(${[
    [230, 0],
    [159, 114],
    [60, 178],
  ]
    .map(([from, to]) => Math.round(from + (to - from) * share))
    .join(",")})`;
