// Configurations that ran several tasks: mean rank, wins, and how probable it is that one is better than another.

import { h, replace } from "../../core/dom.js";
import { number, point } from "../../core/format.js";
import { plainTable } from "../../core/table.js";
import { ask, board, filterField, metricOptions, select, whenRunsEnd } from "../figures.js";

const MOST = 100;
const within = (value, low, high) => [
  number(value, "", 3),
  low === null ? "" : h("span", { class: "quiet" }, ` (${number(low, "", 3)}–${number(high, "", 3)})`),
];

/** Shows the ranking over tasks. */
export async function show(panel, context, { signal }) {
  const made = await board(panel, context, {
    fields: { metric: "", filter: "" },
    signal,
    tools: (view, set, known) => [
      select("figure", [["", "each task's own"], ...metricOptions(known.metrics)], view.metric, metric =>
        set({ metric }),
      ),
      filterField(view, set),
    ],
    draw: async (view, area, { signal: asked }) => {
      const answer = await ask(
        context,
        "tasks",
        { metric: view.metric || null, filter: view.filter },
        { signal: asked },
      );
      if (asked.aborted) return;
      const tasks = answer.tasks.map(({ task, metric }) => [task, metric.name]);
      replace(
        area,
        plainTable(
          "Configurations over tasks",
          [
            { title: "configuration", wide: true },
            { title: "mean rank (95%)", numeric: true },
            { title: "wins", numeric: true },
            ...tasks.map(([task, metric]) => ({ title: `${task} ${metric}`, numeric: true })),
          ],
          answer.standings.map(one => [
            point(one.point),
            within(one.mean_rank, one.low, one.high),
            one.wins,
            ...tasks.map(([task]) => number(one.means[task])),
          ]),
        ),
        answer.improvements.length
          ? [
              h("h2", {}, "Probability of improvement"),
              plainTable(
                "Probability of improvement",
                [
                  { title: "A", wide: true },
                  { title: "B", wide: true },
                  { title: "a run of A is better (95%)", numeric: true },
                ],
                answer.improvements
                  .slice(0, MOST)
                  .map(one => [one.a, one.b, within(one.probability, one.low, one.high)]),
              ),
            ]
          : null,
        [...answer.notes, ...Object.entries(answer.left_out).map(([of, why]) => `${of}: ${why}`)].map(note =>
          h("p", { class: "quiet" }, note),
        ),
      );
    },
  });
  whenRunsEnd(context, made.again, signal);
}
