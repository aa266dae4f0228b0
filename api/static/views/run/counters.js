// What was measured of the devices: each quantity with unit, provenance and window.

import { get } from "../../core/api.js";
import { chart } from "../../core/chart.js";
import { legend } from "../../core/chart_group.js";
import { h, replace } from "../../core/dom.js";
import { count, number, numeric, when } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty } from "../../core/states.js";
import { addressedGroup } from "../charts.js";
import { choice, section, shortTable } from "../parts.js";

const apart = scope => /^(kernel|operator):/.test(scope);

export async function show(panel, context, { signal }) {
  const { items } = await get(`/runs/${context.id}/measurements`, {}, { signal });
  const groups = new Map();
  for (const one of items.filter(({ scope }) => !apart(scope))) {
    const key = `${one.name} ${one.scope} ${one.provenance}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(one);
  }
  if (!groups.size) {
    replace(panel, empty("Nothing has been measured yet."));
    return;
  }
  const plotted = [
    ...new Set([...groups.values()].filter(rows => rows.length > 1).map(([first]) => first.name)),
  ].sort();
  const area = h("div", { class: "card pad" }),
    place = h("figure");
  const group = addressedGroup(),
    lines = legend(group);
  const draw = name => {
    const own = [...groups.values()].filter(([first]) => first.name === name),
      begin = Math.min(...own.flat().map(one => one.start_s)),
      title = `${name} (${own[0][0].unit})`;
    chart(
      place,
      {
        title,
        x_title: "seconds since the first window",
        y_title: title,
        lines: own.map((rows, colour) => ({
          name: `${rows[0].scope}, ${rows[0].provenance}`,
          colour,
          x: rows.map(one => one.end_s - begin),
          y: rows.map(one => (Number.isFinite(numeric(one.value)) ? numeric(one.value) : null)),
        })),
      },
      {},
      group,
    );
    lines.draw();
  };
  const asked = query().get("name"),
    chosen = plotted.includes(asked) ? asked : plotted[0];
  if (chosen)
    replace(
      area,
      h(
        "div",
        { class: "tools" },
        h(
          "label",
          {},
          "quantity ",
          choice("name", plotted, chosen, {
            onchange: event => {
              setQuery({ name: event.target.value });
              group.set({ zoom: null, hidden: new Set(), marks: [] });
              draw(event.target.value);
            },
          }),
        ),
      ),
      lines.list,
      place,
    );
  const rows = [...groups.values()]
    .map(of => {
      const values = of.map(one => numeric(one.value)).filter(Number.isFinite);
      return {
        first: of[0],
        windows: of.length,
        mean: values.reduce((sum, one) => sum + one, 0) / values.length,
        least: Math.min(...values),
        most: Math.max(...values),
        end: of.at(-1).end_s,
      };
    })
    .sort((a, b) => a.first.name.localeCompare(b.first.name));
  replace(
    panel,
    chosen ? section("Over time", area) : null,
    section(
      "All quantities",
      shortTable(
        "Measured quantities",
        [
          ["Quantity", ({ first }) => h("code", {}, first.name)],
          ["Of", ({ first }) => first.scope, "wide"],
          ["Mean", ({ mean, first }) => number(mean, first.unit === "1" ? "" : first.unit), "num"],
          ["Least", ({ least }) => number(least), "num"],
          ["Greatest", ({ most }) => number(most), "num"],
          ["Windows", ({ windows }) => count(windows), "num"],
          ["Provenance", ({ first }) => first.provenance],
          ["Until", ({ end }) => when(end)],
        ],
        rows,
      ),
    ),
  );
  if (chosen) draw(chosen);
}
