// The spec: as it was submitted, with every default, and how it differs from another experiment's.

import { get, getText } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { query, setQuery } from "../../core/router.js";
import { empty, failure } from "../../core/states.js";
import { plainTable } from "../../core/table.js";

/** Every field of a document by its dotted name. */
export function flattened(value, prefix = "", found = {}) {
  if (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) {
    for (const [key, one] of Object.entries(value)) flattened(one, prefix ? `${prefix}.${key}` : key, found);
  } else found[prefix] = JSON.stringify(value);
  return found;
}

const resolvedOf = (id, signal) => get(`/experiments/${id}/spec`, { form: "canonical" }, { signal });

/** Shows the spec. */
export async function show(panel, { id }, { signal }) {
  const [text, resolved] = await Promise.all([
    getText(`/experiments/${id}/spec`, {}, { signal, accept: "*/*" }),
    resolvedOf(id, signal),
  ]);
  const differences = h("div");
  const against = async other => {
    if (!other) {
      replace(differences);
      return;
    }
    try {
      const ours = flattened(resolved),
        theirs = flattened(await resolvedOf(other, signal));
      const names = [...new Set([...Object.keys(ours), ...Object.keys(theirs)])]
        .filter(name => ours[name] !== theirs[name])
        .sort();
      replace(
        differences,
        names.length
          ? plainTable(
              "Differences",
              ["field", `experiment ${id}`, `experiment ${other}`],
              names.map(name => [
                h("code", {}, name),
                h("code", {}, ours[name] ?? "–"),
                h("code", {}, theirs[name] ?? "–"),
              ]),
            )
          : empty("Both specs are the same."),
      );
    } catch (error) {
      if (error.name !== "AbortError") replace(differences, failure(error));
    }
  };
  replace(
    panel,
    h("h2", {}, "As submitted"),
    h("pre", { class: "card pad", tabindex: "0" }, text || "(from the command line or another program)"),
    h("p", {}, h("a", { class: "button", href: `/new?copy=${id}` }, "Copy and change it")),
    h("h2", {}, "Difference to another experiment"),
    h(
      "label",
      { class: "field" },
      "Its id",
      h("input", {
        type: "number",
        min: "1",
        inputmode: "numeric",
        value: query().get("against") || "",
        onchange: event => {
          setQuery({ against: event.target.value });
          against(event.target.value);
        },
      }),
    ),
    differences,
    h("h2", {}, "With every default"),
    h("pre", { class: "card pad", tabindex: "0" }, JSON.stringify(resolved, null, 2)),
  );
  await against(query().get("against"));
}
