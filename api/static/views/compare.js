// Several experiments together, in the same tabs as one.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { state } from "../core/format.js";
import { go, query, setQuery } from "../core/router.js";
import { empty, failure, loading } from "../core/states.js";
import { field } from "./figures.js";

/** @type {[string, string, () => Promise<{show: Function}>][]} */
const TABS = [
  ["curves", "Curves", () => import("./experiment/curves.js")],
  ["compare", "Compare", () => import("./experiment/compare.js")],
  ["frontier", "Frontier", () => import("./experiment/frontier.js")],
  ["effects", "Effects", () => import("./experiment/effects.js")],
  ["parallel", "Parallel", () => import("./experiment/parallel.js")],
  ["scores", "Scores", () => import("./experiment/scores.js")],
  ["tasks", "Tasks", () => import("./experiment/tasks.js")],
  ["money", "Time and money", () => import("./experiment/money.js")],
];

const numbers = text => [
  ...new Set(
    (text || "")
      .split(/[\s,]+/)
      .map(Number)
      .filter(id => Number.isInteger(id) && id > 0),
  ),
];

/** Shows the experiments of the address, `ids=1,2`. */
export async function show(main, parameters, { signal }) {
  const given = query(),
    ids = numbers(given.get("ids")),
    tab = given.get("tab") || "curves";
  const title = h("h1", {}, "Compare experiments");
  const ask = field("experiments", ids.join(", "), text => go(`/compare?ids=${numbers(text).join(",")}`), {
    placeholder: "12, 13",
  });
  if (!ids.length) {
    replace(
      main,
      title,
      h("div", { class: "tools" }, ask),
      empty("Name the experiments to compare, such as 12, 13."),
    );
    return { title: "Compare" };
  }
  const experiments = await Promise.all(ids.map(id => get(`/experiments/${id}`, {}, { signal })));
  const panel = h("section", { class: "panel", "aria-busy": "true" }, loading());
  replace(
    main,
    title,
    h(
      "div",
      { class: "tools" },
      ask,
      experiments.map(one =>
        h(
          "span",
          { class: "chip" },
          h("a", { href: `/experiments/${one.id}` }, `${one.id} ${one.name}`),
          " ",
          state(one.state),
          ids.length > 1
            ? h(
                "button",
                {
                  type: "button",
                  "aria-label": `Leave out ${one.id}`,
                  onclick: () => go(`/compare?ids=${ids.filter(id => id !== one.id).join(",")}&tab=${tab}`),
                },
                "×",
              )
            : null,
        ),
      ),
    ),
    h(
      "nav",
      { class: "tabs", "aria-label": "Parts of the comparison" },
      TABS.map(([name, text]) =>
        h(
          "a",
          { href: `/compare?ids=${ids.join(",")}&tab=${name}`, "aria-current": name === tab ? "page" : null },
          text,
        ),
      ),
    ),
    panel,
  );
  const found = TABS.find(([name]) => name === tab) || TABS[0];
  if (found[0] !== tab) setQuery({ tab: null });
  try {
    await (await found[2]()).show(panel, { ids, id: ids[0] }, { signal });
  } catch (error) {
    if (error.name !== "AbortError") replace(panel, failure(error));
  }
  panel.setAttribute("aria-busy", "false");
  return { title: "Compare" };
}
