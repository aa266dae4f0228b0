// Two or three figures against each other; what is brushed, or within the ranges, is listed with its runs.

import { h, replace } from "../../core/dom.js";
import { number } from "../../core/format.js";
import { plainTable } from "../../core/table.js";
import {
  board,
  drawFigure,
  field,
  filterField,
  metricOptions,
  runLinks,
  select,
  whenRunsEnd,
} from "../figures.js";

const FIELDS = { metric: [], filter: "", x0: "", x1: "", y0: "", y1: "" };
const NO_RANGE = { x0: "", x1: "", y0: "", y1: "" };
const MOST_LISTED = 50;

/** Shows the trade-off. */
export async function show(panel, context, { signal }) {
  const picked = h("section", { "aria-live": "polite" });
  let points = [],
    titles = ["", ""];
  const list = view => {
    const within = (value, low, high) =>
      (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
    const any = Object.keys(NO_RANGE).some(name => view[name] !== "");
    const found = points.filter(
      point => within(point.x, view.x0, view.x1) && within(point.y, view.y0, view.y1),
    );
    replace(
      picked,
      h("h2", {}, any ? `${found.length} of ${points.length} configurations chosen` : "On the frontier"),
      table(context, any ? found : points.filter(point => point.frontier), titles),
    );
  };
  const made = await board(panel, context, {
    plots: true,
    fields: FIELDS,
    signal,
    below: picked,
    tools: (view, set, known) => {
      const options = metricOptions(known.metrics),
        [x = "", y = "", colour = ""] = view.metric;
      const pick = (place, name) => {
        const next = [
          x || known.metrics.find(one => one.name === "cost_usd")?.name || known.metrics[0]?.name || "",
          y || known.metrics.find(one => one.name === "accuracy")?.name || known.metrics.at(-1)?.name || "",
          colour,
        ];
        next[place] = name;
        return set({ metric: next.filter(Boolean), ...NO_RANGE });
      };
      const range = (name, label) =>
        field(
          label,
          view[name],
          text => {
            set({ [name]: text === "" || Number.isFinite(Number(text)) ? text : "" });
          },
          { inputmode: "decimal", size: "7", class: "short" },
        );
      return [
        select("across", [["", "cost"], ...options], x, name => pick(0, name)),
        select("up", [["", "headline score"], ...options], y, name => pick(1, name)),
        select("colour", [["", "none"], ...options], colour, name => pick(2, name)),
        filterField(view, set),
        h(
          "fieldset",
          {},
          h("legend", {}, "choose"),
          range("x0", "across from"),
          range("x1", "to"),
          range("y0", "up from"),
          range("y1", "to"),
          h("button", { type: "button", onclick: () => set({ ...NO_RANGE }) }, "All"),
        ),
      ];
    },
    draw: async (view, area, { signal: asked, set }) => {
      const one = await drawFigure(
        context,
        area,
        "tradeoff",
        { metric: view.metric, filter: view.filter },
        {
          signal: asked,
          change: drawn => ({ ...drawn, layout: { ...drawn.layout, dragmode: "select" } }),
          options: {
            onSelect: (chosen, range) =>
              set(
                range
                  ? {
                      x0: short(range.x[0]),
                      x1: short(range.x[1]),
                      y0: short(range.y[0]),
                      y1: short(range.y[1]),
                    }
                  : { ...NO_RANGE },
              ),
          },
        },
      );
      if (!one) return;
      titles = [one.layout.xaxis.title.text, one.layout.yaxis.title.text];
      points = one.data
        .filter(trace => trace.meta.part === "points")
        .flatMap(trace =>
          trace.x.map((x, at) => ({
            x,
            y: trace.y[at],
            text: trace.text[at],
            runs: trace.customdata[at],
            frontier: trace.meta.frontier,
          })),
        );
      list(view);
    },
  });
  whenRunsEnd(context, made.again, signal);
}

const short = value => String(Number(value.toPrecision(5)));

const table = (context, points, titles) =>
  points.length
    ? [
        plainTable(
          "Configurations",
          [
            "configuration",
            { title: titles[0], numeric: true },
            { title: titles[1], numeric: true },
            { title: "runs", wide: true },
          ],
          points
            .slice(0, MOST_LISTED)
            .map(point => [point.text, number(point.x), number(point.y), runLinks(context, point.runs, 3)]),
        ),
        points.length > MOST_LISTED ? h("p", { class: "quiet" }, `The first ${MOST_LISTED}.`) : null,
      ]
    : h("p", { class: "quiet" }, "No configuration is in this range.");
