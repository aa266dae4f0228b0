// Series of a run as lines over steps or time, and what was measured of its devices on the same axis.

import { numeric } from "../../core/format.js";
import { append, nearest } from "../../core/lines.js";

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
const J_PER_KWH = 3.6e6;

/** Titles of the x axis. */
export const AXES = { step: "step", time: "seconds since the start" };

/** A metric's name with its unit. */
export function titled(name) {
  const unit = UNITS.filter(([end]) => name.endsWith(end)).sort((a, b) => b[0].length - a[0].length)[0];
  return unit ? `${name} (${unit[1]})` : name;
}

/** Columns of a series of the API: steps, seconds since the run started, values. */
export const columns = (series, started) => ({
  step: [...series.steps],
  time: series.at_s.map(second => second - started),
  y: series.values.map(known),
  bucket_steps: series.bucket_steps,
});

const known = value => (Number.isFinite(numeric(value)) ? numeric(value) : null);

/** Adds points that the stream sent to columns, in place; what a later attempt does again replaces what was there. */
export function grow(of, fresh, started) {
  const { step, time, y } = columns(fresh, started);
  if (step.length) append(of, "step", { step, time, y });
}

/** A chart of one metric. */
export function chartOf(name, of, x, note = "") {
  return {
    title: titled(name),
    caption: "",
    note: [of.bucket_steps ? `Each ${of.bucket_steps} steps: least and greatest value.` : "", note]
      .filter(Boolean)
      .join(" "),
    x_title: AXES[x],
    y_title: titled(name),
    lines: [{ name, colour: 0, x: of[x], y: of.y }],
  };
}

/** Panels of the devices, each with what it reads from measurements: a value of one window. */
const PANELS = [
  {
    title: "utilisation (%)",
    name: "window_utilisation_pct",
    value: one => numeric(one.value),
  },
  {
    title: "power (W)",
    name: "window_energy_kwh",
    value: one => (numeric(one.value) * J_PER_KWH) / (one.end_s - one.start_s),
  },
];
const MEMORY = "gpu_memory_used_mib";

/**
 * Charts of utilisation, memory and power, of those that were measured.
 * @param {any[]} measurements of the run
 * @param {Record<string, any>} series columns by metric, the memory of the first worker among them
 * @param {string} x "step" or "time"
 * @param {number} started when the run started
 */
export function devicePanels(measurements, series, x, started) {
  const longest = Object.values(series).sort((a, b) => b.step.length - a.step.length)[0];
  const at = second =>
    x === "time" || !longest?.step.length
      ? second - started
      : longest.step[nearest(longest.time, second - started)];
  const panels = PANELS.map(({ title, name, value }) => {
    const scopes = new Map();
    for (const one of measurements)
      if (one.name === name && one.scope !== "overhead" && one.end_s > one.start_s)
        scopes.set(one.scope, [...(scopes.get(one.scope) || []), one]);
    return {
      title,
      x_title: AXES[x],
      y_title: title,
      note: "Each level is the mean of a window.",
      lines: [...scopes].map(([scope, windows], colour) => {
        windows.sort((a, b) => a.start_s - b.start_s);
        return {
          name: scope,
          colour,
          x: windows.flatMap(one => [at(one.start_s), at(one.end_s)]),
          y: windows.flatMap(one => [known(value(one)), known(value(one))]),
        };
      }),
    };
  }).filter(({ lines }) => lines.length);
  const memory = series[MEMORY];
  if (memory?.step.length)
    panels.splice(1, 0, { ...chartOf(MEMORY, memory, x), title: "memory (MiB)", y_title: "memory (MiB)" });
  return panels;
}
