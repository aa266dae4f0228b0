// Figures in the colours of the page, with the same data as a table. Plotly's script is loaded for the first of them.

import { h, replace } from "./dom.js";
import { count, number } from "./format.js";

const SCRIPT = "/static/vendor/plotly.min.js";
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };
const MOST_ROWS = 200,
  LIVE_MS = 1000;

let loaded = null;

/** Loads plotly once; resolves to it. */
export function plotly() {
  loaded ||= new Promise((resolve, reject) => {
    const restore = keepStyles();
    const failed = () => {
      restore();
      loaded = null;
      reject(new Error("the plots' script cannot be loaded; is the server running?"));
    };
    const script = h("script", {
      src: SCRIPT,
      onload: () => {
        restore();
        resolve(/** @type {any} */ (window).Plotly);
      },
      onerror: failed,
    });
    document.head.append(script);
  });
  return loaded;
}

/**
 * Plotly writes style elements, which the page's policy refuses: as the script starts, those of maps, which no figure
 * needs, and a place for its own rules, which takes a sheet without an element as well. Returns what ends this.
 */
function keepStyles() {
  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets.push(sheet);
  const place = h("meta", { id: "plotly.js-style-global" });
  Object.defineProperty(place, "sheet", { value: sheet });
  document.head.append(place);
  const create = Document.prototype.createElement;
  document.createElement = (name, ...more) =>
    create.call(document, name === "style" ? "meta" : name, ...more);
  return () => {
    delete document.createElement;
  };
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () =>
  document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : dark.matches;
const shown = new Map();

function themed(layout) {
  const style = getComputedStyle(document.documentElement);
  const [text, line, dim, card] = ["--ink", "--line", "--quiet", "--card"].map(name =>
    style.getPropertyValue(name).trim(),
  );
  const axis = given => ({ ...given, gridcolor: line, zerolinecolor: dim, linecolor: dim });
  return {
    ...layout,
    autosize: true,
    // What the reader zoomed or hid stays while the axes mean the same.
    uirevision: JSON.stringify([layout.xaxis, layout.yaxis].map(each => [each?.title?.text, each?.type])),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 13, color: text },
    hoverlabel: { ...layout.hoverlabel, bgcolor: card, bordercolor: dim, font: { color: text } },
    xaxis: axis(layout.xaxis),
    yaxis: axis(layout.yaxis),
  };
}

/** Narrow screens have no room for a title beside the plot, nor for the names of axes in each name of a configuration. */
function fitted({ data, layout }, width) {
  if (width > 560) return { data, layout };
  const short = name => (typeof name === "string" ? name.replace(/\S+?=/g, "") : name);
  const places = [...new Set(data.flatMap(trace => trace.y || []).filter(y => typeof y === "string"))];
  const small = { size: 11 };
  return {
    data: data.map(trace => (trace.name ? { ...trace, name: short(trace.name) } : trace)),
    layout: {
      ...layout,
      margin: { ...layout.margin, l: 44, r: 8 },
      legend: { ...layout.legend, font: small },
      xaxis: { ...layout.xaxis, nticks: 5, tickfont: small, title: { ...layout.xaxis?.title, font: small } },
      yaxis: {
        ...layout.yaxis,
        title: { text: "" },
        tickfont: small,
        ...(places.length ? { tickmode: "array", tickvals: places, ticktext: places.map(short) } : {}),
      },
    },
  };
}

// Dark blue on a dark page is hard to see: the two blues of the palette change places there.
const brighter = data =>
  JSON.parse(
    JSON.stringify(data).replace(/#0072B2|#56B4E9/g, blue => (blue === "#0072B2" ? "#56B4E9" : "#0072B2")),
  );

async function paint(container) {
  const { plot, one, handlers } = shown.get(container);
  const Plotly = await plotly();
  if (shown.get(container)?.one !== one || !plot.isConnected) return;
  const { data, layout } = fitted(
    { data: isDark() ? brighter(one.data) : one.data, layout: themed(one.layout) },
    plot.clientWidth,
  );
  shown.get(container).grown.clear(); // The figure has these points by now.
  // Lines get arrays of their own, to which live points are added.
  const own = data.map(trace =>
    trace.meta?.part === "line" ? { ...trace, x: [...trace.x], y: [...trace.y] } : trace,
  );
  await Plotly.react(plot, own, layout, CONFIG);
  for (const kind of ["plotly_click", "plotly_selected", "plotly_deselect"]) plot.removeAllListeners?.(kind);
  if (handlers.onClick) plot.on("plotly_click", event => handlers.onClick(event.points));
  if (handlers.onSelect) {
    plot.on("plotly_selected", event => {
      if (event?.range) handlers.onSelect(event.points, event.range);
    });
    plot.on("plotly_deselect", () => handlers.onSelect(null, null));
  }
  container.dataset.drawn = "true";
}

function repaint() {
  for (const [container] of shown) {
    if (container.isConnected) paint(container);
    else shown.delete(container);
  }
}
dark.addEventListener("change", repaint);
addEventListener("theme", repaint);
matchMedia("(max-width: 40rem)").addEventListener("change", repaint);

/**
 * Draws a figure of the API into a container, or again with other data.
 * @param {HTMLElement} container
 * @param {{caption: string, data: Object[], layout: Object, note?: string}} one
 * @param {{onClick?: Function, onSelect?: Function, captioned?: boolean}} options `onClick(points)`; `onSelect(points, range)`
 *   after a brush, null when it is taken back; `captioned` writes caption and note below the plot
 */
export async function figure(container, one, { onClick, onSelect, captioned = false } = {}) {
  delete container.dataset.drawn;
  let entry = shown.get(container);
  if (!entry || !entry.plot.isConnected) {
    for (const [other] of shown) if (!other.isConnected) shown.delete(other);
    entry = {
      plot: h("div", { class: "plot", role: "img" }),
      words: h("figcaption"),
      table: h("details", { class: "as-table" }),
      grown: new Map(),
      growing: null,
    };
    entry.table.addEventListener("toggle", () => {
      if (entry.table.open && entry.table.children.length < 2) entry.table.append(table(entry.one));
    });
    shown.set(container, entry);
    replace(container, entry.plot, captioned ? entry.words : null, entry.table);
  }
  entry.one = one;
  entry.handlers = { onClick, onSelect };
  entry.plot.setAttribute("aria-label", one.caption);
  entry.plot.style.setProperty("min-height", `${one.layout.height || 320}px`);
  replace(entry.words, h("p", {}, one.caption), one.note ? h("p", { class: "note" }, one.note) : null);
  replace(entry.table, h("summary", {}, "As a table"), entry.table.open ? table(one) : null);
  await paint(container);
}

/** Adds points to lines of a figure that is shown; `add(trace)` returns [x, y] or null. */
export function extended(container, add) {
  const entry = shown.get(container);
  if (!entry) return;
  entry.one.data.forEach((trace, place) => {
    const point = add(trace);
    if (!point) return;
    trace.x.push(point[0]);
    trace.y.push(point[1]);
    if (!entry.grown.has(place)) entry.grown.set(place, [[], []]);
    entry.grown.get(place).forEach((values, axis) => values.push(point[axis]));
  });
  if (entry.grown.size) entry.growing ||= setTimeout(() => grow(container, entry), LIVE_MS);
}

/** Draws the points that came since, however many, without building the figure again. */
async function grow(container, entry) {
  entry.growing = null;
  const Plotly = await plotly();
  if (shown.get(container) !== entry || !entry.plot.isConnected || !entry.grown.size) return;
  const places = [...entry.grown.keys()],
    points = [...entry.grown.values()];
  entry.grown.clear();
  await Plotly.extendTraces(entry.plot, { x: points.map(([x]) => x), y: points.map(([, y]) => y) }, places);
}

const named = trace =>
  trace.meta?.part === "line" && trace.meta.runs.length === 1
    ? h("a", { href: `/runs/${trace.meta.runs[0]}` }, trace.name)
    : trace.name || "";

function table({ data, layout }) {
  const title = axis => layout[axis]?.title?.text || "";
  const lines = data.filter(
    trace => trace.mode?.startsWith("lines") && trace.name && trace.hoverinfo !== "skip",
  );
  const cell = value =>
    h(
      "td",
      { class: typeof value === "number" ? "num" : null },
      typeof value === "number" ? number(value) : (value ?? ""),
    );
  const of = (titles, rows, total) =>
    h(
      "div",
      { class: "card scrolls", tabindex: "0", role: "region", "aria-label": "The figure as a table" },
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
  if (lines.length) {
    const rows = lines.slice(0, MOST_ROWS).map(trace => {
      const values = trace.y.filter(Number.isFinite);
      return [
        named(trace),
        trace.x.at(-1),
        values[0],
        values.at(-1),
        Math.min(...values),
        Math.max(...values),
      ];
    });
    return of(
      ["line", `last ${title("xaxis")}`, `first ${title("yaxis")}`, "last", "least", "greatest"],
      rows,
      lines.length,
    );
  }
  const points = data
    .filter(trace => trace.x && trace.hoverinfo !== "skip")
    .flatMap(trace => trace.x.map((x, at) => [trace.text?.[at] || trace.name || "", trace.y[at], x]));
  return of(["of", title("yaxis") || "row", title("xaxis")], points.slice(0, MOST_ROWS), points.length);
}
