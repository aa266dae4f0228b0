// Curves of any metric: configurations with bands, or single runs, over steps, time, tokens, cost or energy.

import { extended } from "../../core/figure.js";
import { numeric } from "../../core/format.js";
import { go } from "../../core/router.js";
import { board, drawFigure, filterField, metricOptions, seldom, select, tick } from "../figures.js";

const FIELDS = {
  metric: "",
  x: "step",
  by: "cell",
  band: "sd",
  smooth: "0",
  curves: "",
  filter: "",
  log: "",
  ended: "",
};
const REFRESH_MS = 5000;
const MOST = { cell: ["12", "24", "48", "100"], run: ["50", "100", "200", "400"] };

/** Shows the curves; those of running runs follow the experiment's stream. */
export async function show(panel, context, { signal }) {
  let area;
  const metricOf = (view, known) =>
    view.metric || (known.points.some(one => one.name === "loss") ? "loss" : known.points[0]?.name || "loss");
  const made = await board(panel, context, {
    fields: FIELDS,
    signal,
    tools: (view, set, known) => [
      select("metric", metricOptions(known.points), metricOf(view, known), metric => set({ metric })),
      select("over", ["step", "time", "tokens", "cost", "energy"], view.x, x => set({ x })),
      select(
        "lines",
        [
          ["cell", "configurations (means)"],
          ["run", "single runs"],
        ],
        view.by,
        by => set({ by, curves: "" }),
      ),
      view.by === "cell"
        ? select(
            "band",
            [
              ["sd", "± 1 SD"],
              ["range", "least to greatest"],
            ],
            view.band,
            band => set({ band }),
          )
        : null,
      select(
        "smoothing",
        [
          ["0", "none"],
          ["0.6", "0.6"],
          ["0.9", "0.9"],
          ["0.97", "0.97"],
        ],
        view.smooth,
        smooth => set({ smooth }),
      ),
      select("at most", MOST[view.by] || MOST.run, view.curves || (MOST[view.by] || MOST.run)[0], curves =>
        set({ curves }),
      ),
      filterField(view, set),
      tick("logarithmic", view.log === "yes", log => set({ log: log ? "yes" : "" })),
      tick("succeeded only", view.ended === "yes", ended => set({ ended: ended ? "yes" : "" })),
    ],
    draw: async (view, into, { signal: asked }) => {
      area = into;
      const parameters = {
        metric: view.metric,
        x: view.x,
        by: view.by,
        band: view.by === "cell" ? view.band : null,
        smooth: view.smooth,
        max_curves: view.curves,
        filter: view.filter,
        unfinished: view.ended === "yes" ? "false" : null,
      };
      await drawFigure(context, into, "curve", parameters, {
        signal: asked,
        change: one =>
          view.log === "yes"
            ? { ...one, layout: { ...one.layout, yaxis: { ...one.layout.yaxis, type: "log" } } }
            : one,
        options: {
          onClick: ([point]) => {
            const runs = point.data.meta?.runs;
            if (runs?.length === 1) go(`/runs/${runs[0]}`);
          },
        },
      });
    },
  });
  follow(context, made, () => area?.querySelector("figure"), signal);
}

/** Lines of single runs grow as points come; means and other axes are asked for again, now and then. */
function follow(context, { view, again }, container, signal) {
  const later = seldom(again, REFRESH_MS, signal);
  context.onChange?.((kind, data) => {
    if (kind === "end") {
      later();
      return;
    }
    if (kind !== "run" || data.run.state === "queued") return;
    const simple = view.by === "run" && view.x === "step" && view.smooth === "0";
    const place = container();
    let found = false;
    if (simple && place) {
      const latest = data.latest[view.metric || "loss"];
      extended(place, trace => {
        if (trace.meta?.part !== "line" || trace.meta.runs[0] !== data.run.id) return null;
        found = true;
        return latest && latest.step > trace.x.at(-1) ? [latest.step, numeric(latest.value)] : null;
      });
    }
    if (!found) later();
  });
}
