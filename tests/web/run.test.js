// What pages of a run compute: stretches of tags, words of a text, histograms as paths.

import assert from "node:assert/strict";
import { test } from "node:test";

globalThis.matchMedia = /** @type {any} */ (() => ({ addEventListener() {} }));
const { stretches, words } = await import("../../api/static/views/run/predictions.js");
const { shaded, spread } = await import("../../api/static/views/run/histograms.js");

test("tags of one entity are one stretch, and a B begins another", () => {
  assert.deepEqual(stretches(["B-A", "I-A", "O", "O", "B-A", "B-A", "I-B"]), [
    [0, 2, "A"],
    [2, 4, null],
    [4, 5, "A"],
    [5, 6, "A"],
    [6, 7, "B"],
  ]);
});

test("words are between spaces, else words and marks, else not known", () => {
  assert.deepEqual(words("Ada lives.", 2), ["Ada", "lives."]);
  assert.deepEqual(words("Ada lives.", 3), ["Ada", "lives", "."]);
  assert.equal(words("Ada lives.", 5), undefined);
});

test("some of many steps have the first and the last", () => {
  const all = Array.from({ length: 200 }, (_, place) => place);
  const some = spread(all, 60);
  assert.equal(some.length, 60);
  assert.deepEqual([some[0], some.at(-1)], [0, 199]);
  assert.deepEqual(spread([1, 2], 60), [1, 2]);
});

test("a step's bins are as high as its own range, around zero in the middle", () => {
  const counts = Array(64).fill(0);
  counts[63] = 5;
  const paths = shaded([[1, counts], null, [2, counts]], 2);
  assert.equal(paths.slice(0, -1).join(""), "");
  // The upper edge of half the range is halfway between middle and top; the other column's is at the top.
  assert.deepEqual(
    [...paths.at(-1).matchAll(/M([\d.]+) ([\d.]+)h/g)].map(([, x, y]) => [x, y]),
    [
      ["0.0", "32.00"],
      ["213.3", "0.00"],
    ],
  );
});
