// Where time and money went: what was paid for, the parts of a run's time, and when each run ran.

import { h } from "../../core/dom.js";
import { duration, money } from "../../core/format.js";
import { empty } from "../../core/states.js";
import { board, drawFigure, filterField, whenRunsEnd } from "../figures.js";

const FIELDS = { filter: "" };
const PARTS = [
  ["money", "What was paid for"],
  ["breakdown", "The time of a run"],
  ["timeline", "When the runs ran"],
];

/** Shows the figures one below the other; one that cannot be drawn yet says why. */
export async function show(panel, context, { signal }) {
  const made = await board(panel, context, {
    plots: true,
    fields: FIELDS,
    signal,
    tools: (view, set) => [filterField(view, set), facts(context.experiment)],
    draw: async (view, area, { signal: asked }) => {
      if (!area.querySelector("section")) {
        area.replaceChildren(
          ...PARTS.map(([kind, title]) =>
            h("section", { id: `part-${kind}`, "aria-label": title }, h("h2", {}, title), h("div")),
          ),
        );
      }
      await Promise.all(
        PARTS.map(async ([kind]) => {
          const place = area.querySelector(`#part-${kind} > div`);
          try {
            await drawFigure(context, place, kind, { filter: view.filter }, { signal: asked });
          } catch (error) {
            if (error.slug !== "no-answer") throw error;
            place.replaceChildren(empty(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`));
          }
        }),
      );
    },
  });
  whenRunsEnd(context, made.again, signal);
}

function facts(experiment) {
  if (!experiment) return null;
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const { totals } = experiment;
  return h(
    "dl",
    { class: "facts" },
    experiment.started_s
      ? fact("waited in the queue", duration(experiment.started_s - experiment.created_s))
      : null,
    totals
      ? [
          fact("paid so far", money(totals.cost_usd)),
          fact("of it overhead", money(totals.overhead_usd)),
          fact("device time", duration(totals.device_hours * 3600)),
        ]
      : null,
  );
}
