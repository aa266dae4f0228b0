// Series of a run: points that arrive while it trains, titles, and its devices on the same axis.

import assert from "node:assert/strict";
import test from "node:test";

import { chartOf, columns, devicePanels, grow, titled } from "../../api/static/views/run/series.js";

const SERIES = { steps: [1, 2, 3], values: [9, "Infinity", 7], at_s: [101, 102, 103], bucket_steps: 1 };

test("steps that a later attempt repeats are replaced, in the arrays that the chart draws", () => {
  const of = columns(SERIES, 100),
    { lines } = chartOf("loss", of, "step");
  grow(of, { steps: [3, 4], values: [6, 5], at_s: [113, 114] }, 100);
  assert.deepEqual(lines[0].x, [1, 2, 3, 4]);
  assert.deepEqual(lines[0].y, [9, null, 6, 5]);
  assert.deepEqual(of.time, [1, 2, 13, 14]);
  assert.deepEqual(SERIES.steps, [1, 2, 3]);
});

test("a metric's title has its unit, the longest that fits", () => {
  assert.equal(titled("samples_per_s"), "samples_per_s (1/s)");
  assert.equal(titled("step_ms"), "step_ms (ms)");
  assert.equal(titled("loss"), "loss");
});

test("a line over time begins with the run, and infinite values leave a gap", () => {
  const { lines, note } = chartOf("loss", columns(SERIES, 100), "time");
  assert.deepEqual(lines[0].x, [1, 2, 3]);
  assert.deepEqual(lines[0].y, [9, null, 7]);
  assert.equal(note, "Each 1 steps: least and greatest value.");
});

const measured = (name, value, start_s, end_s, scope = "device:0") => ({
  name,
  value,
  start_s,
  end_s,
  scope,
});

test("panels of devices stand on the axis of the curve, as levels of windows", () => {
  const series = { loss: columns({ ...SERIES, at_s: [110, 120, 130] }, 100) };
  const windows = [
    measured("window_energy_kwh", 1 / 3600, 120, 130),
    measured("window_energy_kwh", 0.5 / 3600, 110, 120),
    measured("window_energy_kwh", 99, 110, 120, "overhead"),
    measured("window_utilisation_pct", 50, 110, 130),
  ];
  const [use, power] = devicePanels(windows, series, "time", 100);
  assert.deepEqual([use.title, power.title], ["utilisation (%)", "power (W)"]);
  assert.deepEqual(use.lines[0].x, [10, 30]);
  assert.equal(power.lines.length, 1, "overhead is not what the devices use while they train");
  assert.deepEqual(power.lines[0].x, [10, 20, 20, 30]);
  assert.deepEqual(power.lines[0].y.map(Math.round), [50, 50, 100, 100]);
  const [, over] = devicePanels(windows, series, "step", 100);
  assert.deepEqual(over.lines[0].x, [1, 2, 2, 3]);
});

test("memory is a panel where it is sampled", () => {
  const memory = columns({ ...SERIES, values: [1, 2, 3] }, 100);
  const [only] = devicePanels([], { gpu_memory_used_mib: memory }, "step", 100);
  assert.equal(only.title, "memory (MiB)");
  assert.deepEqual(only.lines[0].y, [1, 2, 3]);
  assert.deepEqual(devicePanels([], {}, "step", 100), []);
});
