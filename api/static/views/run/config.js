// What a run was resolved to, and what makes it reproducible: versions, fingerprints, parity of its kernels.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { number } from "../../core/format.js";
import { code, section, shortTable } from "../parts.js";

/** Leaves of a document by dotted name. */
function* leaves(value, path = "") {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [key, inner] of Object.entries(value)) yield* leaves(inner, path ? `${path}.${key}` : key);
  } else yield [path, value];
}

const shown = value =>
  typeof value === "number"
    ? number(value, "", 8)
    : typeof value === "string"
      ? value
      : JSON.stringify(value);
const table = (caption, document, changed = new Set()) =>
  shortTable(
    caption,
    [
      ["Name", ([name]) => h("code", {}, name)],
      ["Value", ([name, value]) => (changed.has(name) ? h("b", {}, shown(value)) : shown(value)), "wide"],
    ],
    [...leaves(document)],
  );

export async function show(panel, context, { signal }) {
  const [config, { items }] = await Promise.all([
    get(`/runs/${context.id}/config`, {}, { signal }),
    get(`/runs/${context.id}/attempts`, {}, { signal }),
  ]);
  const last = items.findLast(one => one.facts && Object.keys(one.facts).length),
    facts = { ...last?.facts };
  delete facts.config;
  const parity = Object.entries(facts).filter(([name]) => name.includes("parity")),
    others = Object.fromEntries(Object.entries(facts).filter(([name]) => !name.includes("parity")));
  const axes = new Set(Object.keys(context.run.point)),
    text = JSON.stringify(config, null, 2);
  replace(
    panel,
    section(
      "Resolved configuration",
      h(
        "p",
        { class: "quiet" },
        "With all defaults; what the axes set is bold. Submitting it makes this one run.",
      ),
      h(
        "p",
        { class: "tools" },
        h("a", { class: "button", href: `/new?copy=${context.experiment.id}` }, "Copy the experiment"),
      ),
      table("Configuration", config, axes),
      h("details", {}, h("summary", {}, "As JSON"), code(text, "Configuration as JSON")),
    ),
    section(
      "Parity of its kernels",
      parity.length
        ? parity.map(([name, record]) => [h("h3", {}, name), table(name, record)])
        : h(
            "p",
            { class: "quiet" },
            "No kernels of our own ran, or they were not compared with a reference.",
          ),
    ),
    section(
      `Record of ${last ? `attempt ${last.number}` : "its attempts"}`,
      Object.keys(others).length
        ? table("Record", others)
        : h("p", { class: "quiet" }, "It follows when the first attempt trains."),
    ),
  );
}
