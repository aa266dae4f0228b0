// Lines of charts: colours, smoothing, outliers, ranges and paths.

import assert from "node:assert/strict";
import test from "node:test";

import {
  append,
  area,
  between,
  COLOURS,
  fences,
  leftOut,
  lineStyle,
  logTicks,
  nearest,
  padded,
  smoothed,
  spread,
  stroke,
  SvgPath,
  valuesWithin,
} from "../../api/static/core/lines.js";

const ALL = [-Infinity, Infinity];
const line = (x, y, more = {}) => ({ name: "a", colour: 0, x, y, ...more });
const drawn = (x, y, range = ALL) => {
  const pen = new SvgPath();
  stroke(
    pen,
    line(x, y),
    at => at,
    at => at,
    range,
  );
  return String(pen);
};

test("the first sixteen lines have sixteen colours, and the first 64 do not look alike", () => {
  for (const dark of [false, true]) {
    const styles = Array.from({ length: 64 }, (_, number) => lineStyle(number, dark));
    assert.equal(new Set(styles.slice(0, 16).map(style => style.colour)).size, 16);
    assert.equal(new Set(styles.map(style => JSON.stringify(style))).size, 64);
  }
  assert.equal(lineStyle(0, true).colour, COLOURS[4]);
});

test("the moving average has no bias at the start and leaves out what is not a number", () => {
  assert.deepEqual(smoothed([4, 4, 4], 0.9), [4, 4, 4]);
  const [first, gap, last] = smoothed([1, null, 3], 0.5);
  assert.deepEqual([first, gap], [1, null]);
  assert.ok(Math.abs(last - (0.5 * 0.5 + 0.5 * 3) / 0.75) < 1e-12);
  assert.deepEqual(smoothed([1, 2], 0), [1, 2]);
});

test("a heavier weight follows more slowly", () => {
  const step = [0, 0, 0, 0, 1, 1, 1, 1];
  const ends = [0, 0.3, 0.6, 0.9].map(weight => smoothed(step, weight).at(-1));
  assert.deepEqual(
    ends,
    [...ends].sort((a, b) => b - a),
  );
});

test("the nearest point is found at both ends and between", () => {
  const places = [-5, 14, 15.1, 99].map(x => nearest([10, 20, 30], x));
  assert.deepEqual(places, [0, 0, 1, 2]);
  assert.equal(nearest([], 3), -1);
});

test("outliers are three interquartile ranges away, and the note counts them", () => {
  const values = [1, 2, 3, 4, 5, 6, 7, 100, 200, -80];
  const bounds = fences(values);
  assert.deepEqual(bounds, [2.25 - 13.5, 6.75 + 13.5]);
  assert.equal(leftOut(values, bounds), "2 points above 20.25 and 1 point below -11.25 are not shown.");
  assert.equal(leftOut([1, 2, 30], [0, 12.4]), "1 point above 12.4 is not shown.");
  assert.equal(leftOut([1, 2], [0, 12.4]), "");
  assert.equal(fences([3, 3, 3, 3, 9]), null);
  assert.equal(fences([]), null);
});

test("on a logarithmic axis outliers are judged by their logarithm", () => {
  const values = [1e-3, 1e-2, 1e-1, 1, 10];
  const [low, high] = fences(values, true);
  assert.ok(low < 1e-3 && high > 10, "each is ten times the one before");
  assert.ok(fences(values)[1] < 10);
});

test("values count within the range that is shown, and positive ones on a logarithmic axis", () => {
  const lines = [line([1, 2, 3, 4], [-1, 2, null, 4]), line([2, 9], [5, 6])];
  assert.deepEqual([...valuesWithin(lines, [2, 4])], [2, 4, 5]);
  assert.deepEqual([...valuesWithin(lines, [1, 9], true)], [2, 4, 5, 6]);
});

test("axes have room, also around a single value", () => {
  assert.deepEqual(padded(0, 100), [-5, 105]);
  assert.deepEqual(padded(2, 2), [1.8, 2.2]);
  assert.deepEqual(padded(4, 4, true), [2, 8]);
  assert.deepEqual(padded(Infinity, -Infinity), [0, 1]);
  assert.deepEqual(spread([line([0, 5], [1, 1]), line([2, 8], [1, 1])]), [0, 8]);
  assert.deepEqual(spread([line([0, 5, 9], [1, 1, 1])], true), [5, 9]);
  assert.deepEqual(spread([line([3], [1])]), [2, 4]);
});

test("a logarithmic axis has round numbers, however short it is", () => {
  assert.deepEqual(logTicks(0.17, 0.4), [0.2, 0.3, 0.4]);
  assert.deepEqual(logTicks(0.8, 60), [1, 2, 5, 10, 20, 50]);
  assert.deepEqual(logTicks(1e-6, 1), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1]);
  assert.ok(logTicks(1e-30, 1).length <= 9);
});

test("a line is a path with gaps where there is no number", () => {
  assert.equal(drawn([0, 10, 20, 30, 40], [1, 2, null, 4, 5.126]), "M0 1L10 2M30 4L40 5.13");
  assert.equal(drawn([], []), "");
});

test("a zoomed line leads out of the chart on both sides", () => {
  assert.equal(drawn([0, 10, 20, 30, 40, 50], [1, 2, 3, 4, 5, 6], [20, 30]), "M10 2L20 3L30 4L40 5");
});

test("points in one column of pixels are drawn by their first, extremes and last", () => {
  const x = Array.from({ length: 10_000 }, (_, place) => place / 1000),
    y = x.map((_, place) => (place === 5_555 ? 99 : place % 7));
  const path = drawn(x, y);
  assert.ok(path.split("L").length < 60, "ten columns of four points");
  assert.match(path, / 99L/);
});

test("a band is a closed area around its line, and ends at a gap", () => {
  const pen = new SvgPath();
  const band = line([0, 1, 2, 3, 4], [], { low: [0, 1, null, 1, 1], high: [2, 3, null, 3, 3] });
  area(
    pen,
    band,
    at => at,
    at => at,
  );
  assert.equal(String(pen), "M0 2L1 3L1 1L0 0ZM3 3L4 3L4 1L3 1Z");
});

test("new points replace those that an attempt does again", () => {
  const grown = line([1, 2, 3], [9, 8, 7]);
  append(grown, "x", { x: [3, 4], y: [6, 5] });
  assert.deepEqual(
    [grown.x, grown.y],
    [
      [1, 2, 3, 4],
      [9, 8, 6, 5],
    ],
  );
});

test("two steps are compared line by line at their nearest points", () => {
  const [one, other] = between([line([1, 10, 20], [5, 4, 1]), line([1, 10], [2, null])], [2, 19]);
  assert.deepEqual([one.a, one.b, one.difference], [{ x: 1, y: 5 }, { x: 20, y: 1 }, -4]);
  assert.ok(Number.isNaN(other.difference));
});
