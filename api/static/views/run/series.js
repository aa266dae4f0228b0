// Series of a run as lines over steps or time; the figure's own component draws them.

import { figure } from "../../core/figure.js";
import { numeric } from "../../core/format.js";

/** Okabe and Ito's colours without yellow. */
export const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"];
const UNITS = [
  ["_s", "s"],
  ["_ms", "ms"],
  ["_kwh", "kWh"],
  ["_usd", "USD"],
  ["_mib", "MiB"],
  ["_pct", "%"],
  ["_per_s", "1/s"],
  ["_w", "W"],
];

/** A metric's name with its unit. */
export function titled(name) {
  const unit = UNITS.filter(([end]) => name.endsWith(end)).sort((a, b) => b[0].length - a[0].length)[0];
  return unit ? `${name} (${unit[1]})` : name;
}

/** An exponential mean; what is not a number is left out of it. */
export function smoothed(values, weight) {
  let mean = NaN;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    mean = Number.isFinite(mean) ? weight * mean + (1 - weight) * value : value;
    return mean;
  });
}

/** A figure with one metric: {steps, values, at_s, attempts?, bucket_steps}. */
export function lineFigure(name, series, { x = "step", smooth = 0, started = 0, log = false } = {}) {
  const values = series.values.map(numeric),
    at = x === "time" ? series.at_s.map(second => second - (started || series.at_s[0])) : series.steps;
  const drawn = {
    type: "scatter",
    mode: series.steps.length < 40 ? "lines+markers" : "lines",
    line: { color: COLOURS[0] },
    x: at,
    y: values.map(value => (Number.isFinite(value) ? value : null)),
    name,
  };
  const data = smooth
    ? [
        { ...drawn, opacity: 0.3, showlegend: false },
        { ...drawn, mode: "lines", y: smoothed(values, smooth), name: `${name}, smoothed ${smooth}` },
      ]
    : [drawn];
  const layout = {
    height: 320,
    margin: { t: 10, r: 16, b: 44, l: 64 },
    showlegend: Boolean(smooth),
    legend: { orientation: "h", y: 1.12 },
    xaxis: { title: { text: x === "time" ? "seconds since the start" : "step" } },
    yaxis: { title: { text: titled(name) }, type: log ? "log" : "linear" },
  };
  return { id: `run-${name}`, caption: titled(name), data, layout };
}

/** Adds new points to a series; what a later attempt does again replaces what was there. */
export function extended(series, fresh) {
  const kept = {
    steps: [...(series?.steps || [])],
    values: [...(series?.values || [])],
    at_s: [...(series?.at_s || [])],
  };
  const first = fresh.steps[0];
  while (kept.steps.length && kept.steps.at(-1) >= first) {
    kept.steps.pop();
    kept.values.pop();
    kept.at_s.pop();
  }
  kept.steps.push(...fresh.steps);
  kept.values.push(...fresh.values);
  kept.at_s.push(...fresh.at_s);
  return { ...kept, bucket_steps: series?.bucket_steps ?? fresh.bucket_steps };
}

export { figure };
