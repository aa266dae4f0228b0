// The figures of a dashboard: what the address says of them, and how they are drawn.

import { get } from "../core/api.js";
import { chart } from "../core/chart.js";
import { legend } from "../core/chart_group.js";
import { h, replace } from "../core/dom.js";
import { empty, loading } from "../core/states.js";
import { addressedGroup } from "./charts.js";
import { choices } from "./figures.js";

/** Most experiments that are drawn together, the newest first. */
const MOST_EXPERIMENTS = 20,
  REFRESH_MS = 60_000;

/** What a dashboard's address says: filters of experiments and of runs, and a query for each panel. */
export const written = parameters => ({
  experiments: parameters.get("experiments") || "",
  filter: parameters.get("filter") || "",
  panels: parameters.getAll("panel"),
});

/** The same as a query. */
export function asQuery({ experiments, filter, panels }) {
  const query = new URLSearchParams();
  if (experiments) query.set("experiments", experiments);
  if (filter) query.set("filter", filter);
  for (const panel of panels) query.append("panel", panel);
  return query.toString();
}

/** The parameters of a panel, of those that its kind of figure reads. */
function parameters(panel, kind) {
  const given = new URLSearchParams(panel);
  return Object.fromEntries(
    ["metric", "x", "by"]
      .filter(name => kind.reads.includes(name))
      .map(name => [name, name === "metric" ? given.getAll(name) : given.get(name)]),
  );
}

/** The experiments of a dashboard, as the context that questions about figures take. */
export async function contextOf({ experiments }, signal) {
  const { items } = await get(
    "/experiments",
    { filter: experiments, page_size: MOST_EXPERIMENTS },
    { signal },
  );
  return { ids: items.map(one => one.id), names: items.map(one => one.name) };
}

/**
 * Draws a dashboard's panels in an area, again every minute.
 * @param {HTMLElement} area
 * @param {{experiments: string, filter: string, panels: string[]}} dashboard
 * @param {AbortSignal} signal
 * @param {(panel: string, place: number, known: any) => Node | null} tools what stands above a panel
 */
export async function drawPanels(area, dashboard, signal, tools = () => null) {
  replace(area, loading());
  const context = await contextOf(dashboard, signal);
  if (!context.ids.length) {
    replace(area, empty("No experiment matches the filter of experiments."));
    return;
  }
  const known = await choices(context, { signal }),
    group = addressedGroup(),
    lines = legend(group),
    [first, ...also] = context.ids;
  const places = dashboard.panels.map((panel, at) => {
    const drawn = h("div", { class: "panel-figures" });
    return { drawn, node: h("section", { class: "panel-place" }, tools(panel, at, known), drawn) };
  });
  replace(
    area,
    h(
      "p",
      { class: "quiet" },
      `${context.ids.length} ${context.ids.length === 1 ? "experiment" : "experiments"}: `,
      context.ids.map((id, at) => [
        at ? ", " : "",
        h("a", { href: `/experiments/${id}` }, `${id} ${context.names[at]}`),
      ]),
    ),
    lines.list,
    h(
      "div",
      { class: "panels" },
      places.map(({ node }) => node),
    ),
  );
  const draw = async ({ drawn }, panel) => {
    const name = new URLSearchParams(panel).get("figure"),
      kind = known.figures.find(one => one.id === name);
    try {
      if (!kind) throw new Error(`There is no figure "${name}".`);
      const asked = { ...parameters(panel, kind), filter: dashboard.filter, also };
      if (kind.form === "lines") {
        const { items } = await get(`/experiments/${first}/curves`, asked, { signal });
        for (const item of items) {
          const figure =
            [...drawn.children].find(node => node.dataset.metric === item.metric) ||
            drawn.appendChild(h("figure", { class: "card pad", "data-metric": item.metric }));
          if (item.lines.length) chart(figure, item, { height: 280 }, group);
          else replace(figure, h("h2", {}, item.title), h("p", { class: "note" }, `${item.note}.`));
        }
      } else {
        const one = await get(`/experiments/${first}/figures/${name}`, asked, { signal });
        const { figure } = await import("../core/figure.js");
        const place = drawn.firstElementChild || drawn.appendChild(h("figure", { class: "card pad" }));
        await figure(place, one, { captioned: true });
      }
    } catch (error) {
      if (error.name !== "AbortError") replace(drawn, h("p", { class: "card pad note" }, error.message));
    }
  };
  const drawAll = async () => {
    await Promise.all(places.map((place, at) => draw(place, dashboard.panels[at])));
    lines.draw();
  };
  await drawAll();
  const timer = setInterval(() => document.hidden || drawAll(), REFRESH_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
}
