// Figures in the colours of the page, with the same data as a table. Plotly's script is loaded for the first of them.

import { dataTable, MOST_ROWS } from "./datatable.js";
import { h, replace } from "./dom.js";

const SCRIPT = "/static/vendor/plotly.min.js";
const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };

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
  await Plotly.react(plot, data, layout, CONFIG);
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

function table({ data, layout }) {
  const title = axis => layout[axis]?.title?.text || "";
  const points = data
    .filter(trace => trace.x && trace.hoverinfo !== "skip")
    .flatMap(trace => trace.x.map((x, at) => [trace.text?.[at] || trace.name || "", trace.y[at], x]));
  return dataTable(
    "The figure as a table",
    ["of", title("yaxis") || "row", title("xaxis")],
    points.slice(0, MOST_ROWS),
    points.length,
  );
}
