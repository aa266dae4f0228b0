// Words that a filter offers at the cursor.

import assert from "node:assert/strict";
import test from "node:test";

import { fitting } from "../../api/static/views/filter.js";

const words = {
  names: ["precision", "batch", "state", "precision"],
  values: name => (name === "state" ? ["succeeded", "failed"] : []),
};

test("names fit at the beginning of a word, wherever the cursor is", () => {
  assert.deepEqual(fitting("pre", 3, words), { before: "", after: "", words: ["precision"], begun: true });
  assert.deepEqual(fitting("pre = fp32 and ba", 3, words).words, ["precision"]);
  assert.deepEqual(fitting("pre = fp32 and ba", 17, words), {
    before: "pre = fp32 and ",
    after: "",
    words: ["batch"],
    begun: true,
  });
});

test("after a comparison the values of its name fit, and a word that is whole is not offered", () => {
  assert.deepEqual(fitting("state = f and batch = 16", 9, words), {
    before: "state = ",
    after: " and batch = 16",
    words: ["failed"],
    begun: true,
  });
  assert.deepEqual(fitting("state = failed", 14, words).words, []);
  assert.deepEqual(fitting("batch = ", 8, words).words, []);
  assert.equal(fitting("fp32 ", 5, words).begun, false);
});
