// Several runs next to each other: figures, configuration and environment, what differs first.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { metric, state } from "../core/format.js";
import { go, query, setQuery } from "../core/router.js";
import { empty } from "../core/states.js";
import { plainTable } from "../core/table.js";
import { flattened } from "./experiment/spec.js";
import { field } from "./figures.js";

const MOST = 12;
const numbers = text =>
  [...new Set((text || "").split(/[\s,]+/).map(Number))]
    .filter(id => Number.isInteger(id) && id > 0)
    .slice(0, MOST);

/** What makes one run reproducible: its configuration, and the facts of its last attempt. */
async function readRun(id, signal) {
  const [run, config, { items: attempts }] = await Promise.all([
    get(`/runs/${id}`, {}, { signal }),
    get(`/runs/${id}/config`, {}, { signal }),
    get(`/runs/${id}/attempts`, {}, { signal }),
  ]);
  const facts = { ...attempts.findLast(one => one.facts && Object.keys(one.facts).length)?.facts };
  delete facts.config;
  const figures = Object.fromEntries(Object.entries(run).filter(([, value]) => typeof value === "number"));
  return { run, config: flattened(config), facts: flattened(facts), figures };
}

const LEFT_OUT = new Set(
  "id experiment_id index seed first_attempt not_before_s started_s ended_s".split(" "),
);

/** Shows the runs of the address, `ids=40,41`. */
export async function show(main, _parameters, { signal }) {
  const ids = numbers(query().get("ids"));
  const ask = field("runs", ids.join(", "), text => go(`/compare/runs?ids=${numbers(text).join(",")}`), {
    placeholder: "40, 41",
  });
  const head = [h("h1", {}, "Compare runs"), h("div", { class: "tools" }, ask)];
  if (ids.length < 2) {
    replace(main, head, empty("Name two or more runs to compare, such as 40, 41."));
    return { title: "Compare runs" };
  }
  const runs = await Promise.all(ids.map(id => readRun(id, signal)));
  const tables = h("div");
  const all = h("input", {
    type: "checkbox",
    checked: query().get("all") === "yes",
    onchange: () => {
      setQuery({ all: all.checked ? "yes" : null });
      draw();
    },
  });
  const titles = [
    "field",
    ...runs.map(({ run }) => ({ title: run.name ? `run ${run.id}: ${run.name}` : `run ${run.id}` })),
  ];
  function part(title, key, write, left = new Set()) {
    const names = [...new Set(runs.flatMap(one => Object.keys(one[key])))]
      .filter(name => !left.has(name))
      .sort();
    const differs = name => new Set(runs.map(one => one[key][name])).size > 1;
    const different = names.filter(differs),
      equal = names.filter(name => !differs(name));
    const row = mark => name => [
      h("code", {}, name),
      ...runs.map(one => h(mark, {}, one[key][name] === undefined ? "–" : write(name, one[key][name]))),
    ];
    return [
      h("h2", {}, title),
      h("p", { class: "quiet" }, `${different.length} of ${names.length} differ.`),
      different.length || all.checked
        ? plainTable(title, titles, [
            ...different.map(row("mark")),
            ...(all.checked ? equal.map(row("span")) : []),
          ])
        : null,
    ];
  }
  const text = (_name, value) => value.replace(/^"(.*)"$/s, "$1");
  function draw() {
    replace(
      tables,
      part("Figures", "figures", metric, LEFT_OUT),
      part("Configuration", "config", text),
      part("Environment", "facts", text),
    );
  }
  replace(
    main,
    head,
    h(
      "p",
      { class: "tools" },
      runs.map(({ run }) =>
        h(
          "span",
          { class: "chip" },
          h("a", { href: `/runs/${run.id}` }, `run ${run.id}${run.name ? ` ${run.name}` : ""}`),
          " ",
          state(run.state),
          runs.length > 2
            ? h(
                "button",
                {
                  type: "button",
                  "aria-label": `Leave out run ${run.id}`,
                  onclick: () => go(`/compare/runs?ids=${ids.filter(id => id !== run.id).join(",")}`),
                },
                "×",
              )
            : null,
        ),
      ),
      h("label", {}, all, " also what is equal"),
    ),
    tables,
  );
  draw();
  return { title: "Compare runs" };
}
