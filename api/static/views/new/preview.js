// What a spec would run: how many runs, what they take, when they start and at whose expense.

import { h } from "../../core/dom.js";
import { count, duration, energy, mass, money, point } from "../../core/format.js";
import { shortTable } from "../parts.js";

const MOST_SHOWN = 50;

const span = (of, write) =>
  of
    ? h(
        "span",
        { title: `90 % interval: ${write(of.low)} to ${write(of.high)}` },
        write(of.middle),
        h("span", { class: "quiet" }, ` (${write(of.low)} – ${write(of.high)})`),
      )
    : "–";

/** The preview of the whole grid. */
export function drawPreview(preview, { project, owner }) {
  const { forecast } = preview,
    trained = preview.run_count - preview.reused_count;
  const infeasible = preview.infeasible_cells;
  const bad = preview.items.filter(run => !run.feasible && !(run.reason in infeasible));
  const fact = (name, ...value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return [
    h(
      "dl",
      { class: "facts big" },
      fact(
        "Runs",
        count(preview.run_count),
        preview.reused_count
          ? h(
              "span",
              { class: "quiet" },
              ` (${count(trained)} trained, ${count(preview.reused_count)} taken over)`,
            )
          : null,
      ),
      forecast
        ? [
            fact("Cost", span(forecast.runs ? forecast.cost_usd : null, money)),
            fact("Energy", span(forecast.runs ? forecast.energy_kwh : null, energy)),
            forecast.co2_kg ? fact("CO2", span(forecast.co2_kg, mass)) : null,
            fact(
              "Device time",
              span(forecast.runs ? forecast.device_hours : null, hours => duration(hours * 3600)),
            ),
          ]
        : null,
      fact("Charged to", `project ${project}, as ${owner}`),
    ),
    preview.start
      ? h("p", { class: "card pad" }, `${preview.start.hardware}: ${preview.start.words}.`)
      : null,
    forecast?.warnings.length
      ? h(
          "ul",
          { class: "notes problem pad card" },
          forecast.warnings.map(line => h("li", {}, line)),
        )
      : null,
    Object.keys(infeasible).length
      ? h(
          "ul",
          { class: "notes pad card" },
          Object.entries(infeasible).map(([reason, cells]) =>
            h("li", {}, `${count(cells)} of ${count(preview.cell_count)} cells would end at once: ${reason}`),
          ),
        )
      : null,
    bad.length
      ? h(
          "p",
          { class: "problem pad card" },
          `${bad.length === preview.items.length ? "No" : `${bad.length} of the first ${preview.items.length}`} run${bad.length === 1 ? "" : "s"} ${bad.length === preview.items.length ? "can be served: " : "cannot be served: "}${bad[0].reason}`,
        )
      : null,
    preview.notes.length
      ? h(
          "ul",
          { class: "notes" },
          preview.notes.map(line => h("li", {}, line)),
        )
      : null,
    forecast
      ? h(
          "ul",
          { class: "notes quiet" },
          [...forecast.basis, ...forecast.unknown].map(line => h("li", {}, line)),
        )
      : null,
    preview.cluster_age_s === null
      ? h("p", { class: "quiet" }, "No scheduler has looked at a cluster yet, so capacity is not judged.")
      : null,
    h(
      "details",
      {},
      h(
        "summary",
        {},
        `First ${Math.min(MOST_SHOWN, preview.items.length)} of ${count(preview.run_count)} runs`,
      ),
      shortTable(
        "Planned runs",
        [
          ["#", run => run.index, "num"],
          ["Values", run => point(run.point), "wide"],
          ["Seed", run => run.seed, "num"],
          ...(preview.items.some(run => run.repeat) ? [["Repeat", run => run.repeat, "num"]] : []),
          ["Hardware", run => `${run.workers > 1 ? `${run.workers} × ` : ""}${run.hardware}`],
          ["Price", run => `${money(run.price_usd_per_hour)}/h`, "num"],
          [
            "",
            run =>
              run.reused_from
                ? h("a", { href: `/runs/${run.reused_from}` }, `= run ${run.reused_from}`)
                : run.feasible
                  ? ""
                  : run.reason,
            "wide",
          ],
        ],
        preview.items.slice(0, MOST_SHOWN),
        "No runs.",
      ),
    ),
  ];
}
