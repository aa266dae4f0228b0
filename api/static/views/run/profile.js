// Where a step goes: kernels and operators of the profiled window, and what each worker did when.

import { ApiError, get } from "../../core/api.js";
import { h, replace, svg } from "../../core/dom.js";
import { number, numeric } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty } from "../../core/states.js";
import { choice, download, section } from "../parts.js";

const ROW = 28,
  LEFT = 96;

// Columns of the table of kernels, as `stillhouse compare --kernels` heads them.
const COLUMNS = [
  ["kernel_ms_per_step", "ms/step"],
  ["step_share_pct", "share %"],
  ["launches_per_step", "launches"],
  ["launch_us", "µs each"],
  ["grid_size", "grid"],
  ["block_size", "block"],
  ["sm_throughput_pct", "SM %"],
  ["memory_throughput_pct", "memory %"],
  ["achieved_occupancy_pct", "occupancy %"],
  ["lsu_pct", "LSU %"],
  ["fma_pct", "FMA %"],
];

/** A row for each kernel of a worker, the one with the most time first; a column for each figure that some kernel has. */
function kernelTable(worker, kernels) {
  const columns = COLUMNS.filter(([name]) => [...kernels.values()].some(of => of.has(name)));
  const rows = [...kernels].sort(
    ([, a], [, b]) => (b.get("kernel_ms_per_step") ?? 0) - (a.get("kernel_ms_per_step") ?? 0),
  );
  return h(
    "table",
    { "aria-label": `Kernels of worker ${worker}` },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "kernel"),
        columns.map(([, heading]) => h("th", { scope: "col", class: "num" }, heading)),
      ),
    ),
    h(
      "tbody",
      {},
      rows.map(([name, of]) =>
        h(
          "tr",
          {},
          h("td", { class: "mono", title: name }, name),
          columns.map(([figure]) =>
            h("td", { class: "num" }, of.has(figure) ? number(of.get(figure), "", 3) : "-"),
          ),
        ),
      ),
    ),
  );
}

/** Figures of each kernel by worker, of the newest attempt that was profiled. */
function kernelsOf(items) {
  const found = items
    .map(one => ({ ...one, place: /^(?:worker:(\d+):)?kernel:(.*)$/s.exec(one.scope) }))
    .filter(({ place, name }) => place && COLUMNS.some(([figure]) => figure === name));
  const newest = Math.max(...found.map(one => one.attempt)),
    workers = new Map();
  for (const {
    place: [, worker = "0", kernel],
    name,
    value,
    attempt,
  } of found) {
    if (attempt !== newest) continue;
    if (!workers.has(worker)) workers.set(worker, new Map());
    const kernels = workers.get(worker);
    if (!kernels.has(kernel)) kernels.set(kernel, new Map());
    kernels.get(kernel).set(name, numeric(value));
  }
  return workers;
}

/** Lines with a bar as long as the value's share of the greatest. */
function ranked(label, rows, unit) {
  const most = Math.max(...rows.map(([, value]) => value));
  return h(
    "ol",
    { class: "ranked", "aria-label": label },
    rows.map(([name, value]) =>
      h(
        "li",
        {},
        h("span", { class: "name mono", title: name }, name),
        h("span", { class: "length", "aria-hidden": "true", style: { width: `${(100 * value) / most}%` } }),
        h("span", { class: "num" }, number(value, unit, 3)),
      ),
    ),
  );
}

/** The steps of a trace in Chrome's format, by number: rows of workers with their phases, in ms from the step's begin. */
function stepsOf({ traceEvents }) {
  const workers = new Map(),
    steps = new Map();
  for (const event of traceEvents) {
    if (event.name === "process_name") workers.set(event.pid, event.args.name);
    if (event.ph !== "X" || event.cat !== "phase") continue;
    if (!steps.has(event.args.step)) steps.set(event.args.step, []);
    steps.get(event.args.step).push({
      worker: event.pid,
      phase: event.name,
      begin: event.ts / 1e3,
      length: event.dur / 1e3,
      micro: event.args.micro_batch,
    });
  }
  return { workers, steps };
}

function gantt({ workers, spans }, phases) {
  const begin = Math.min(...spans.map(one => one.begin)),
    end = Math.max(...spans.map(one => one.begin + one.length)),
    width = 1000;
  const x = at => LEFT + ((width - LEFT - 8) * (at - begin)) / (end - begin || 1),
    rows = [...workers.keys()].sort((a, b) => a - b),
    height = rows.length * ROW + 24;
  return svg(
    "svg",
    {
      class: "gantt",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `Timeline of a step of ${number(end - begin, "ms", 3)} on ${rows.length} workers`,
    },
    rows.map((id, row) => svg("text", { x: 0, y: row * ROW + 18 }, workers.get(id))),
    spans.map(one =>
      svg(
        "rect",
        {
          class: `fill-${phases.indexOf(one.phase) % 8}`,
          x: x(one.begin),
          y: rows.indexOf(one.worker) * ROW + 4,
          width: Math.max(1, x(one.begin + one.length) - x(one.begin)),
          height: ROW - 8,
        },
        svg(
          "title",
          {},
          `${workers.get(one.worker)}: ${one.phase}${one.micro === undefined || one.micro === null ? "" : ` of micro-batch ${one.micro}`}, ${number(one.length, "ms", 3)}`,
        ),
      ),
    ),
    svg("text", { x: LEFT, y: height - 6 }, "0 ms"),
    svg("text", { x: width - 8, y: height - 6, "text-anchor": "end" }, number(end - begin, "ms", 3)),
  );
}

const orReason = async reading => {
  try {
    return await reading;
  } catch (error) {
    if (error instanceof ApiError && error.slug === "no-trace") return { reason: error.message };
    throw error;
  }
};

export async function show(panel, context, { signal }) {
  const [{ items }, trace] = await Promise.all([
    get(`/runs/${context.id}/measurements`, {}, { signal }),
    orReason(get(`/runs/${context.id}/trace`, {}, { signal })),
  ]);
  const named = kind =>
    items
      .filter(one => one.scope.startsWith(`${kind}:`) && one.unit === "ms")
      .map(one => [one.scope.slice(kind.length + 1), numeric(one.value)])
      .sort((a, b) => b[1] - a[1]);
  const kernels = kernelsOf(items),
    operators = named("operator"),
    timeline = h("div");
  if (trace.traceEvents) {
    const { workers, steps } = stepsOf(trace),
      numbers = [...steps.keys()].sort((a, b) => a - b);
    const lengths = numbers
      .map(one => [
        one,
        Math.max(...steps.get(one).map(span => span.begin + span.length)) -
          Math.min(...steps.get(one).map(span => span.begin)),
      ])
      .sort((a, b) => a[1] - b[1]);
    const typical = lengths[Math.floor((lengths.length - 1) / 2)]?.[0],
      phases = [...new Set([...steps.values()].flat().map(span => span.phase))];
    const draw = step =>
      replace(
        timeline,
        h(
          "div",
          { class: "tools" },
          h(
            "label",
            {},
            "step ",
            choice(
              "step",
              numbers.map(one => [String(one), one === typical ? `${one} (typical)` : String(one)]),
              String(step),
              {
                onchange: event => {
                  setQuery({ step: event.target.value });
                  draw(Number(event.target.value));
                },
              },
            ),
          ),
          download(`/api/v1/runs/${context.id}/trace`, "Trace for Perfetto"),
        ),
        h(
          "div",
          { class: "card pad scrolls", tabindex: "0", role: "region", "aria-label": "Timeline of a step" },
          gantt({ workers, spans: steps.get(step) }, phases),
        ),
        h(
          "ul",
          { class: "legend" },
          phases.map((phase, place) =>
            h("li", {}, h("span", { class: `swatch tone-${place % 8}`, "aria-hidden": "true" }), phase),
          ),
        ),
      );
    const wanted = Number(query().get("step"));
    if (numbers.length) draw(steps.has(wanted) ? wanted : typical);
  } else replace(timeline, h("p", { class: "quiet" }, trace.reason));
  replace(
    panel,
    section("A step on each worker", timeline),
    kernels.size || operators.length
      ? [
          [...kernels].map(([worker, of]) =>
            section(
              kernels.size > 1 ? `Kernels of worker ${worker}` : "Kernels",
              h(
                "div",
                {
                  class: "card scrolls",
                  tabindex: "0",
                  role: "region",
                  "aria-label": `Kernels of worker ${worker}, table`,
                },
                kernelTable(worker, of),
              ),
            ),
          ),
          operators.length
            ? section(
                "Operators, CPU time per step",
                h("div", { class: "card pad" }, ranked("Operators", operators, "ms")),
              )
            : null,
          h("p", {}, download(`/api/v1/runs/${context.id}/trace/kernels`, "Kernel trace of worker 0")),
        ]
      : section(
          "Kernels and operators",
          empty("This run was not profiled; submit it with telemetry.profile_steps, such as 5."),
        ),
  );
}
