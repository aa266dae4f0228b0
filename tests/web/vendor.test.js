// The libraries in api/static/vendor are those of package-lock.json.

import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import test from "node:test";

import { made } from "../../api/vendor.mjs";

const FOLDER = new URL("../../api/static/vendor/", import.meta.url);
const read = name => readFileSync(new URL(name, FOLDER), "utf8");
const locked = JSON.parse(readFileSync(new URL("../../package-lock.json", import.meta.url), "utf8")).packages;
const scripts = readdirSync(FOLDER).filter(name => name.endsWith(".js"));
const parts = name => /^\/\*! (.+) \*\/\n/.exec(read(name))[1].split(", ");

for (const name of scripts)
  test(`${name} names the locked versions of its packages`, () => {
    for (const part of parts(name)) {
      const [, library, version] = /^(\S+) (\S+)$/.exec(part);
      assert.equal(version, locked[`node_modules/${library}`].version, library);
    }
  });

test("each package's licence is there", () => {
  const licences = read("LICENSES.txt");
  for (const part of scripts.flatMap(parts)) assert.ok(licences.includes(`\n${part} (`), part);
});

test("nothing in the folder was written by hand", async () => {
  const files = await made();
  assert.deepEqual(readdirSync(FOLDER).sort(), Object.keys(files).sort());
  for (const [name, text] of Object.entries(files)) assert.ok(read(name) === text, `${name}: npm run vendor`);
});
