// Series of a run: smoothing, and points that arrive while it trains.

import assert from "node:assert/strict";
import test from "node:test";

// The module of plots asks for the colour scheme as it is loaded.
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.addEventListener ??= () => {};
const { extended, lineFigure, smoothed, titled } = await import("../../api/static/views/run/series.js");

test("the exponential mean leaves out what is not a number", () => {
  assert.deepEqual(smoothed([1, null, 3], 0.5), [1, null, 2]);
  assert.deepEqual(smoothed([], 0.9), []);
});

test("steps that a later attempt repeats are replaced", () => {
  const series = { steps: [1, 2, 3], values: [9, 8, 7], at_s: [1, 2, 3], bucket_steps: 1 };
  const longer = extended(series, { steps: [3, 4], values: [6, 5], at_s: [13, 14] });
  assert.deepEqual(longer.steps, [1, 2, 3, 4]);
  assert.deepEqual(longer.values, [9, 8, 6, 5]);
  assert.equal(longer.bucket_steps, 1);
  assert.deepEqual(series.steps, [1, 2, 3]);
});

test("a metric's title has its unit, the longest that fits", () => {
  assert.equal(titled("samples_per_s"), "samples_per_s (1/s)");
  assert.equal(titled("step_ms"), "step_ms (ms)");
  assert.equal(titled("loss"), "loss");
});

test("a line over time begins with the run, and infinite values leave a gap", () => {
  const series = { steps: [1, 2], values: ["Infinity", 2], at_s: [105, 110] };
  const [line] = lineFigure("loss", series, { x: "time", started: 100 }).data;
  assert.deepEqual(line.x, [5, 10]);
  assert.deepEqual(line.y, [null, 2]);
});
