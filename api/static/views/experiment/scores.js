// Configurations by a weighted sum: the ranking follows the sliders at once, the figure comes from the server.

import { debounced, h, replace } from "../../core/dom.js";
import { number, point } from "../../core/format.js";
import { plainTable } from "../../core/table.js";
import { ask, board, drawFigure, filterField, metricOptions, select, whenRunsEnd } from "../figures.js";

const STRATEGIES = [
  "balance",
  "time_cost_energy",
  "time_energy_cost",
  "cost_time_energy",
  "cost_energy_time",
  "energy_time_cost",
  "energy_cost_time",
];
const FIELDS = { strategy: "", weight: [], filter: "" };
const FIRST = ["total_time_s", "cost_usd", "energy_kwh"];
const MOST_RANKED = 20,
  WAIT_MS = 300;

const read = weights =>
  Object.fromEntries(
    weights.map(text => {
      const at = text.lastIndexOf("=");
      return [text.slice(0, at), Number(text.slice(at + 1)) || 0];
    }),
  );
const written = weights => Object.entries(weights).map(([name, weight]) => `${name}=${weight}`);

/** Shows weights, ranking and figure. */
export async function show(panel, context, { signal }) {
  const ranking = h("section", { "aria-live": "polite" });
  let parts = null,
    known = null,
    /** @type {(call: () => void) => void} */
    later = () => {};
  const rank = weights => {
    if (!parts || !Object.keys(weights).length) {
      replace(ranking);
      return;
    }
    const scored = parts
      .map(one => ({
        ...one,
        score: Object.entries(weights).reduce(
          (sum, [name, weight]) => sum + weight * (one.parts[name] || 0),
          0,
        ),
      }))
      .sort((a, b) => a.score - b.score);
    replace(
      ranking,
      h("h2", {}, "Ranking"),
      plainTable(
        "Ranking",
        [
          { title: "rank", numeric: true },
          "configuration",
          { title: "score (lower is better)", numeric: true },
        ],
        scored.slice(0, MOST_RANKED).map((one, place) => [place + 1, point(one.point), number(one.score)]),
      ),
    );
  };
  const made = await board(panel, context, {
    plots: true,
    fields: FIELDS,
    signal,
    below: ranking,
    tools: (view, set, choices) => {
      known = choices;
      const weights = read(view.weight);
      const slide = (name, weight) => {
        const value = h("span", { class: "value" }, weight);
        return h(
          "label",
          { class: "field slider" },
          h("span", {}, name, " ", value),
          h("input", {
            type: "range",
            min: "0",
            max: "1",
            step: "0.05",
            value: weight,
            name,
            oninput: event => {
              view.weight = written({ ...read(view.weight), [name]: Number(event.target.value) });
              value.textContent = event.target.value;
              rank(read(view.weight));
              later(() => set({ weight: view.weight }));
            },
          }),
        );
      };
      return [
        select(
          "strategy",
          [["", "own weights"], ...STRATEGIES.map(name => [name, name.replaceAll("_", " > ")])],
          view.weight.length ? "" : view.strategy || "balance",
          strategy =>
            set(
              strategy
                ? { strategy, weight: [] }
                : { strategy: "", weight: written(Object.fromEntries(usable().map(name => [name, 0.5]))) },
            ),
        ),
        Object.entries(weights).map(([name, weight]) => slide(name, weight)),
        view.weight.length
          ? select(
              "add",
              [["", "…"], ...metricOptions(choices.metrics.filter(one => one.better))],
              "",
              name => name && set({ weight: written({ ...weights, [name]: 0.5 }) }),
            )
          : null,
        filterField(view, set),
      ];
    },
    draw: async (view, area, { signal: asked }) => {
      const weights = read(view.weight),
        names = Object.keys(weights);
      const heavy = Object.values(weights).some(Boolean);
      if (names.length && !heavy) {
        replace(
          area,
          h("p", { class: "card pad" }, "All weights are 0: every configuration scores the same."),
        );
        rank(weights);
        return;
      }
      const [answer] = await Promise.all([
        names.length
          ? ask(
              context,
              "score",
              { weight: names.map(name => `${name}=1`), filter: view.filter },
              { signal: asked },
            )
          : null,
        drawFigure(
          context,
          area,
          "score",
          { strategy: names.length ? null : view.strategy, weight: view.weight, filter: view.filter },
          { signal: asked },
        ),
      ]);
      if (asked.aborted) return;
      parts = answer?.ranking ?? null;
      rank(weights);
    },
  });
  const usable = () => FIRST.filter(name => known.metrics.some(one => one.name === name));
  later = debounced(call => call(), WAIT_MS, signal);
  whenRunsEnd(context, made.again, signal);
}
