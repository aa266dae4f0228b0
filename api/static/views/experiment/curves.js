// Curves of metrics in a grid: configurations with bands, or single runs, over steps, time, tokens, cost or energy.

import { chart } from "../../core/chart.js";
import { legend } from "../../core/chart_group.js";
import { h, replace } from "../../core/dom.js";
import { numeric } from "../../core/format.js";
import { append } from "../../core/lines.js";
import { addressedGroup, metricChips, slider } from "../charts.js";
import { ask, board, filterField, metricOptions, seldom, select, tick } from "../figures.js";

const FIELDS = {
  metric: [],
  x: "step",
  by: "cell",
  band: "sd",
  smooth: "0",
  curves: "",
  filter: "",
  hide: "",
  log: "",
  logx: "",
  outliers: "",
  ended: "",
};
const REFRESH_MS = 5000;
const MOST = { cell: ["12", "24", "48", "100"], run: ["50", "100", "200", "400"] };

/** Shows the curves; those of running runs follow the experiment's stream. */
export async function show(panel, context, { signal }) {
  const group = addressedGroup();
  const lines = legend(group);
  const grid = h("div", { class: "charts" });
  let items = [];
  const look = view => {
    const settings = {
      smooth: Number(view.smooth) || 0,
      logX: view.logx === "yes",
      logY: view.log === "yes",
      outliers: view.outliers === "hidden",
      height: items.length > 2 ? 260 : 320,
    };
    const places = items.map(
      ({ metric }) =>
        [...grid.children].find(node => node.dataset.metric === metric) ||
        h("figure", { class: "card pad", "data-metric": metric }),
    );
    if (places.length !== grid.children.length || places.some((node, at) => grid.children[at] !== node))
      replace(grid, places);
    items.forEach((item, at) => {
      if (item.lines.length) chart(places[at], { ...item, title: item.title }, settings, group);
      else replace(places[at], h("h2", {}, item.metric), h("p", { class: "note" }, `${item.note}.`));
    });
    lines.draw();
  };
  const made = await board(panel, context, {
    fields: FIELDS,
    signal,
    tools: (view, set, known) => {
      const shown = view.metric.length ? view.metric : items.map(({ metric }) => metric);
      const left = known.points.filter(({ name }) => !shown.includes(name));
      return [
        h("h2", { class: "unseen" }, "Curves"),
        metricChips(shown, metricOptions(left), metric => set({ metric })),
        select("over", ["step", "time", "tokens", "cost", "energy"], view.x, x => {
          group.set({ zoom: null, marks: [] }); // They were places on another axis.
          return set({ x });
        }),
        select(
          "lines",
          [
            ["cell", "configurations (means)"],
            ["run", "single runs"],
          ],
          view.by,
          by => {
            group.set({ hidden: new Set() });
            return set({ by, curves: "" });
          },
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
        slider("smoothing", view.smooth, {
          min: 0,
          max: 0.99,
          step: 0.01,
          oninput: smooth => look({ ...view, smooth }),
          onchange: smooth => set({ smooth: String(smooth) }),
        }),
        select("at most", MOST[view.by] || MOST.run, view.curves || (MOST[view.by] || MOST.run)[0], curves =>
          set({ curves }),
        ),
        filterField(view, set),
        view.hide && h("button", { type: "button", onclick: () => set({ hide: "" }) }, "Show hidden runs"),
        tick("log x", view.logx === "yes", log => set({ logx: log ? "yes" : "" })),
        tick("log y", view.log === "yes", log => set({ log: log ? "yes" : "" })),
        tick("hide outliers", view.outliers === "hidden", hide => set({ outliers: hide ? "hidden" : "" })),
        tick("succeeded only", view.ended === "yes", ended => set({ ended: ended ? "yes" : "" })),
      ];
    },
    draw: async (view, area, { signal: asked, refresh }) => {
      const answer = await ask(
        context,
        "curves",
        {
          metric: view.metric,
          x: view.x,
          by: view.by,
          band: view.by === "cell" ? view.band : null,
          max_curves: view.curves,
          filter: view.hide
            ? `id NOT IN (${view.hide})${view.filter ? ` and (${view.filter})` : ""}`
            : view.filter,
          unfinished: view.ended === "yes" ? "false" : null,
        },
        { signal: asked },
      );
      if (asked.aborted) return;
      const before = items.length;
      items = answer.items;
      if (grid.parentNode !== area) replace(area, lines.list, grid);
      look(view);
      if (items.length !== before) refresh();
    },
  });
  follow(context, made, () => items, group, signal);
}

/** Lines of single runs grow as points come; means and other axes are asked for again, now and then. */
function follow(context, { view, again }, items, group, signal) {
  const later = seldom(() => again({ quiet: true }), REFRESH_MS, signal);
  context.onChange?.((kind, data) => {
    if (kind === "end") {
      later();
      return;
    }
    if (kind !== "run" || data.run.state === "queued") return;
    let found = false;
    if (view.by === "run" && view.x === "step") {
      for (const { metric, lines } of items()) {
        const line = lines.find(one => one.runs[0] === data.run.id),
          latest = data.latest[metric];
        found ||= Boolean(line);
        if (line && latest?.step > (line.x.at(-1) ?? -1)) {
          const value = numeric(latest.value),
            known = Number.isFinite(value) ? value : null;
          // The range around a line is of buckets of steps; a single point is its own.
          const band = line.low.length ? { low: [known], high: [known] } : {};
          append(line, "x", { x: [latest.step], y: [known], ...band });
          for (const one of group.charts) if (one.data.metric === metric) one.grown();
        }
      }
    }
    if (!found) later();
  });
}
