// Which configuration to use, and how sure that is: what the experiment was made for.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { metric, point } from "../../core/format.js";

/** Shows the recommendation, once a run has a result; before that, nothing. */
export async function answer(place, experiment, signal) {
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
    const found = await get(`/experiments/${experiment.id}/recommend`, {}, { signal });
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
