// The outline of a spec's text, which completion and the chips of axes work on.

import assert from "node:assert/strict";
import test from "node:test";

import { edits } from "../../api/static/views/new/axes.js";
import { at, context, drop, edited, locate, outline, put, written } from "../../api/static/views/new/yaml.js";

const SPEC = `name: first
search:
  axes:
    batch.global_size: [16, 32]
    precision:
      - fp32
      - "bf16" # the default
`;

const axis = (text, name) => at(outline(text), `search.axes.${name}`);

test("entries and items are found at dotted paths, keys with dots included", () => {
  const root = outline(SPEC);
  assert.equal(at(root, "name").text, "first");
  assert.deepEqual(
    axis(SPEC, "batch.global_size").items.map(item => item.text),
    ["16", "32"],
  );
  assert.deepEqual(
    axis(SPEC, "precision").items.map(item => item.text),
    ["fp32", "bf16"],
  );
});

test("a path that is not there is found as far as it goes", () => {
  const place = locate(outline(SPEC), "search.strategy");
  assert.equal(place.whole, false);
  assert.equal(place.place.key, "search");
  assert.equal(at(outline(SPEC), "search.strategy"), null);
});

test("unfinished text has an outline", () => {
  for (let length = 0; length <= SPEC.length; length++)
    assert.ok(outline(SPEC.slice(0, length)).end <= length);
});

test("what is being written: a key, a value, an item", () => {
  const near = text => context(text, outline(text), text.length);
  assert.deepEqual(near("search:\n  ax"), { path: ["search"], part: "key", from: 10, word: "ax" });
  assert.deepEqual(near("model:\n  dropout: 0."), {
    path: ["model", "dropout"],
    part: "value",
    from: 18,
    word: "0.",
  });
  assert.equal(near("precision:\n  - bf").part, "item");
  assert.equal(near("name: a # a comm"), null);
});

test("values are quoted only where YAML would read something else", () => {
  assert.equal(written("bf16"), "bf16");
  assert.equal(written("1e-4"), "1e-4");
  assert.equal(written("a: b"), '"a: b"');
  assert.equal(written(""), '""');
});

test("values are added to flow and block lists, and taken out again", () => {
  const more = edited(SPEC, edits.add(SPEC, axis(SPEC, "batch.global_size"), "64"));
  assert.match(more, /\[16, 32, 64\]/);
  assert.match(edited(SPEC, edits.remove(SPEC, axis(SPEC, "batch.global_size"), 0)), /\[32\]/);
  assert.match(
    edited(SPEC, edits.add(SPEC, axis(SPEC, "precision"), "fp16")),
    /- "bf16" # the default\n {6}- fp16/,
  );
  assert.doesNotMatch(edited(SPEC, edits.remove(SPEC, axis(SPEC, "precision"), 0)), /fp32/);
});

test("an axis is added where there is a search, where there is none, and to an empty text", () => {
  for (const text of [SPEC, "name: first\n", "", "search: {}\n", "{name: first}"]) {
    const more = edited(text, edits.addAxis(text, outline(text), "seed", ["0", "1"]));
    assert.deepEqual(
      axis(more, "seed").items.map(item => item.text),
      ["0", "1"],
      `in ${JSON.stringify(text)}: ${more}`,
    );
    const less = edited(more, edits.removeAxis(more, outline(more), "seed"));
    assert.equal(axis(less, "seed"), null);
  }
});

test("a field is written in its line, and what stands around it stays", () => {
  const text =
    "# why\nname: a # short\nmodel: {name: tiny} # small\nlength:\n  epochs: 2 # enough\nbudget:\nseeds: [0]";
  const set = (keys, raw) => edited(text, put(text, outline(text), keys, raw));
  assert.equal(set(["name"], "b"), text.replace("name: a", "name: b"));
  assert.equal(set(["length", "epochs"], "3"), text.replace("epochs: 2", "epochs: 3"));
  assert.equal(set(["length", "steps"], "9"), text.replace("# enough\n", "# enough\n  steps: 9\n"));
  assert.equal(set(["model", "dropout"], "0.1"), text.replace("{name: tiny}", "{name: tiny, dropout: 0.1}"));
  assert.equal(set(["budget", "cost_usd"], "5"), text.replace("budget:", "budget: {cost_usd: 5}"));
  assert.equal(set(["search", "axes", "a.b"], "[1]"), `${text}\nsearch:\n  axes:\n    a.b: [1]`);
});

test("a field is taken away with its line, and with the sections that it leaves empty", () => {
  const text = "name: a\nsearch:\n  axes:\n    a.b: [1] # one\nmodel: {name: tiny, dropout: 0.1}\n";
  const without = keys => edited(text, drop(text, outline(text), keys));
  assert.equal(without(["search", "axes", "a.b"]), "name: a\nmodel: {name: tiny, dropout: 0.1}\n");
  assert.equal(without(["model", "name"]), text.replace("name: tiny, ", ""));
  assert.equal(without(["model", "dropout"]), text.replace(", dropout: 0.1", ""));
  assert.equal(drop(text, outline(text), ["model", "path"]), null);
});
