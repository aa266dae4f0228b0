// What each value of each axis changes, with intervals, and the same in words.

import { h } from "../../core/dom.js";
import { ask, board, drawFigure, filterField, metricOptions, select, whenRunsEnd } from "../figures.js";

const FIELDS = { metric: "", filter: "" };

/** Shows the effects. */
export async function show(panel, context, { signal }) {
  const made = await board(panel, context, {
    plots: true,
    fields: FIELDS,
    signal,
    tools: (view, set, known) => [
      select("on", [["", "time"], ...metricOptions(known.metrics)], view.metric, metric => set({ metric })),
      filterField(view, set),
    ],
    draw: async (view, area, { signal: asked }) => {
      const given = { metric: view.metric || "total_time_s", filter: view.filter };
      const [answer] = await Promise.all([
        ask(context, "effects", given, { signal: asked }),
        drawFigure(context, area, "effect", given, { signal: asked }),
      ]);
      if (asked.aborted) return;
      area.querySelector(".in-words")?.remove();
      area.append(
        h(
          "section",
          { class: "in-words" },
          h("h2", {}, "In words"),
          h(
            "ul",
            {},
            answer.items.flatMap(item => item.sentences).map(sentence => h("li", {}, sentence)),
          ),
          answer.notes.length
            ? h(
                "ul",
                { class: "quiet" },
                answer.notes.map(note => h("li", {}, note)),
              )
            : null,
        ),
      );
    },
  });
  whenRunsEnd(context, made.again, signal);
}
