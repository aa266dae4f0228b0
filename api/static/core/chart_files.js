// A chart as a file: PNG of its canvas, SVG of its numbers, each with title, axes and legend.

import uPlot from "../vendor/uplot.js";
import { toast } from "./dialog.js";
import { h, svg } from "./dom.js";
import { lineStyle, SvgPath } from "./lines.js";

const TITLE_PX = 34,
  ROW_PX = 20,
  EDGE_PX = 12,
  KEY_PX = 26,
  LETTER_PX = 7;
const FONT = "system-ui, sans-serif";

/** Where each name of the legend goes, in rows as wide as the chart; a single line needs none. */
export function legendPlaces(names, width) {
  if (names.length < 2) return { places: [], height: 0 };
  let left = EDGE_PX,
    row = 0;
  const places = names.map(name => {
    const wide = KEY_PX + name.length * LETTER_PX + EDGE_PX;
    if (left > EDGE_PX && left + wide > width) {
      left = EDGE_PX;
      row++;
    }
    const place = { name, left, top: TITLE_PX + row * ROW_PX };
    left += wide;
    return place;
  });
  return { places, height: (row + 1) * ROW_PX };
}

function shared(chart) {
  const style = getComputedStyle(document.documentElement),
    colour = name => style.getPropertyValue(name).trim();
  const lines = chart.visible(),
    { width, height } = chart.plot;
  const shade = getComputedStyle(document.documentElement).colorScheme === "dark";
  const legend = legendPlaces(
    lines.map(line => line.name),
    width,
  );
  return { colour, lines, width, height, shade, legend, top: TITLE_PX + legend.height };
}

/** The chart as an SVG element, which needs nothing of the page. */
export function asSvg(chart) {
  const { plot, data } = chart,
    { colour, lines, width, height, shade, legend, top } = shared(chart);
  const ratio = uPlot.pxRatio,
    [left, upper, wide, tall] = ["left", "top", "width", "height"].map(name => plot.bbox[name] / ratio);
  const right = left + wide,
    lower = upper + tall,
    ink = colour("--ink"),
    quiet = colour("--quiet"),
    thin = colour("--line");
  const text = (x, y, words, more = {}) =>
    svg("text", { x, y, fill: quiet, "font-size": 12, "font-family": FONT, ...more }, words);
  const [across, up] = plot.axes.map(({ _splits, _values }) =>
    (_splits || []).map((at, place) => ({ at, words: _values[place] })).filter(({ at }) => at !== null),
  );
  const gridX = across.map(({ at, words }) => {
    const x = left + plot.valToPos(at, "x");
    return [
      svg("path", { d: `M${x} ${upper}V${lower}`, stroke: thin }),
      text(x, lower + 18, words, { "text-anchor": "middle" }),
    ];
  });
  const gridY = up.map(({ at, words }) => {
    const y = upper + plot.valToPos(at, "y");
    return [
      svg("path", { d: `M${left} ${y}H${right}`, stroke: thin }),
      text(left - 8, y + 4, words, { "text-anchor": "end" }),
    ];
  });
  const drawn = [...chart.paths(1, shade, SvgPath)].map(one =>
    svg("path", {
      d: String(one.pen),
      fill: one.fill ? one.colour : "none",
      stroke: one.fill ? null : one.colour,
      "stroke-width": one.fill ? null : one.width,
      "stroke-dasharray": one.fill || !one.dash.length ? null : one.dash.join(" "),
      "stroke-linejoin": "round",
      opacity: one.alpha,
    }),
  );
  return svg(
    "svg",
    {
      xmlns: "http://www.w3.org/2000/svg",
      width,
      height: height + top,
      viewBox: `0 0 ${width} ${height + top}`,
    },
    svg("title", {}, data.title),
    svg("rect", { width, height: height + top, fill: colour("--card") }),
    text(EDGE_PX, 22, data.title, { fill: ink, "font-size": 15, "font-weight": 600 }),
    legend.places.map((place, number) => {
      const style = lineStyle(lines[number].colour, shade);
      return [
        svg("path", {
          d: `M${place.left} ${place.top + 8}h18`,
          stroke: style.colour,
          "stroke-width": 2,
          "stroke-dasharray": style.dash.length ? style.dash.join(" ") : null,
        }),
        text(place.left + KEY_PX, place.top + 12, place.name, { fill: ink }),
      ];
    }),
    svg(
      "g",
      { transform: `translate(0 ${top})` },
      svg("clipPath", { id: "inside" }, svg("rect", { x: left, y: upper, width: wide, height: tall })),
      gridX,
      gridY,
      text((left + right) / 2, height - 6, data.x_title, { "text-anchor": "middle" }),
      text(0, 0, data.y_title, {
        "text-anchor": "middle",
        transform: `translate(14 ${(upper + lower) / 2}) rotate(-90)`,
      }),
      svg("g", { "clip-path": "url(#inside)" }, drawn),
    ),
  );
}

/** The canvas of the chart below its title and legend. */
export function asCanvas(chart) {
  const { plot, data } = chart,
    { colour, lines, width, height, shade, legend, top } = shared(chart);
  const ratio = uPlot.pxRatio;
  const canvas = /** @type {HTMLCanvasElement} */ (
    h("canvas", { width: Math.round(width * ratio), height: Math.round((height + top) * ratio) })
  );
  const drawing = canvas.getContext("2d");
  drawing.scale(ratio, ratio);
  drawing.fillStyle = colour("--card");
  drawing.fillRect(0, 0, width, height + top);
  drawing.fillStyle = colour("--ink");
  drawing.font = `600 15px ${FONT}`;
  drawing.fillText(data.title, EDGE_PX, 22);
  drawing.font = `12px ${FONT}`;
  legend.places.forEach((place, number) => {
    const style = lineStyle(lines[number].colour, shade);
    drawing.strokeStyle = style.colour;
    drawing.lineWidth = 2;
    drawing.setLineDash(style.dash);
    drawing.beginPath();
    drawing.moveTo(place.left, place.top + 8);
    drawing.lineTo(place.left + 18, place.top + 8);
    drawing.stroke();
    drawing.fillText(place.name, place.left + KEY_PX, place.top + 12);
  });
  drawing.drawImage(plot.ctx.canvas, 0, top, width, height);
  return canvas;
}

/** Saves a chart as a file of a kind: "png" or "svg". */
export async function save(chart, kind) {
  const blob =
    kind === "svg"
      ? new Blob([new XMLSerializer().serializeToString(asSvg(chart))], { type: "image/svg+xml" })
      : await new Promise(done => asCanvas(chart).toBlob(done, "image/png"));
  const address = URL.createObjectURL(blob);
  const name = chart.data.title.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "chart";
  h("a", { href: address, download: `${name}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  toast(`${name}.${kind} is saved`);
}
