// Which configuration to use, and how sure that is: what the experiment was made for.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { metric, point } from "../../core/format.js";
import { select } from "../figures.js";
import { shortTable } from "../parts.js";

/** The best configuration with each value of an axis. */
const each = ({ axis, choices, left_out, text }) => [
  h("p", {}, text),
  shortTable(
    `The best for each ${axis}`,
    [
      [axis, ([, one]) => String(one.winner_point[axis])],
      [
        "Use",
        ([, one]) =>
          point(Object.fromEntries(Object.entries(one.winner_point).filter(([name]) => name !== axis))),
        "wide",
      ],
      ["Figure", ([, one]) => `${one.objective} ${metric(one.objective, one.value)}`],
    ],
    Object.entries(choices),
  ),
  h(
    "details",
    {},
    h("summary", {}, "How sure each is"),
    h(
      "ul",
      {},
      Object.entries(choices).map(([value, one]) => h("li", {}, `${value}: ${one.sure}`)),
    ),
  ),
  Object.entries(left_out).map(([of, why]) => h("p", { class: "quiet" }, `${of}: ${why}`)),
];

/** Shows the recommendation, once a run has a result; before that, nothing. */
export async function answer(place, experiment, signal, per = "") {
  if (!(experiment.run_states.succeeded || experiment.run_states.stopped)) {
    replace(place);
    return;
  }
  place.setAttribute("aria-busy", "true");
  if (!place.hasChildNodes())
    replace(
      place,
      h("section", { class: "card pad answer quiet" }, h("p", {}, "Comparing the configurations …")),
    );
  try {
    const found = await get(`/experiments/${experiment.id}/recommend`, { per: per || null }, { signal });
    const axes = Object.keys(found.winner_point);
    replace(
      place,
      h(
        "section",
        { class: "card pad answer", "aria-label": "Answer" },
        h(
          "p",
          { class: "strong" },
          `Use ${point(found.winner_point)}`,
          found.value === null ? "" : `: ${found.objective} ${metric(found.objective, found.value)}`,
        ),
        h("p", {}, `${found.sure[0].toUpperCase()}${found.sure.slice(1)}.`),
        h(
          "details",
          {},
          h("summary", {}, "Why"),
          h("p", {}, found.text),
          found.notes.length
            ? h(
                "ul",
                {},
                found.notes.map(note => h("li", {}, note)),
              )
            : null,
        ),
        axes.length > 1
          ? h(
              "div",
              { class: "tools" },
              select("the best for each", [["", "–"], ...axes], per, axis =>
                answer(place, experiment, signal, axis),
              ),
            )
          : null,
        found.per ? each(found.per) : null,
      ),
    );
  } catch (error) {
    if (error.name === "AbortError") return;
    replace(
      place,
      h(
        "section",
        { class: "card pad answer quiet", "aria-label": "Answer" },
        h("p", {}, `No recommendation: ${error.message}`),
      ),
    );
  }
  place.removeAttribute("aria-busy");
}
