// The runs of an experiment.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { duration, money, number, progress, state } from "../../core/format.js";
import { empty } from "../../core/states.js";
import { VirtualTable } from "../../core/table.js";

const PAGE = 500;

function columnsOf(axes, headline) {
  return [
    { key: "id", title: "run", numeric: true, width: 70, render: (run) => h("a", { href: `/runs/${run.id}` }, run.id) },
    ...axes.map((axis) => ({ key: axis, title: axis, width: 140, render: (run) => String(run.point[axis] ?? "") })),
    { key: "seed", title: "seed", numeric: true, width: 64, render: (run) => run.seed },
    { key: "state", title: "state", width: 130, render: (run) => h("span", { title: run.failure_message || null }, state(run.state)) },
    { key: "step", title: "progress", width: 190, render: (run) => [progress(run.state === "succeeded" ? 1 : run.step, run.state === "succeeded" ? 1 : run.total_steps || 1, run.state), ` ${run.step}${run.total_steps ? ` / ${run.total_steps}` : ""}`] },
    { key: "loss", title: "loss", numeric: true, render: (run) => number(run.train_loss ?? run.latest?.loss?.value) },
    { key: "score", title: headline || "score", numeric: true, render: (run) => number(run.score) },
    { key: "time", title: "time", numeric: true, render: (run) => duration(run.total_time_s) },
    { key: "cost", title: "cost", numeric: true, render: (run) => money(run.cost_usd) },
  ];
}

/** Shows the table; runs are read as they come into view, and change as they are trained. */
export async function show(panel, { id, experiment, onChange }, { signal }) {
  const rows = [], places = new Map();
  let token = null, reading = null;
  const more = async () => {
    const page = await get(`/experiments/${id}/runs`, { page_size: PAGE, page_token: token }, { signal });
    for (const run of page.items) { places.set(run.id, rows.length); rows.push(run); }
    token = page.next_page_token;
  };
  await more();
  const axes = [...new Set(rows.flatMap((run) => Object.keys(run.point)))];
  const headlines = new Set(rows.map((run) => run.headline).filter(Boolean));
  const table = new VirtualTable({
    label: "Runs", key: (run) => run.id,
    columns: columnsOf(axes, headlines.size === 1 ? [...headlines][0] : null),
    need: () => { if (token) reading ||= more().finally(() => { reading = null; table.setRows(rows, Math.max(experiment.run_count, rows.length)); }); },
  });
  table.setRows(rows, Math.max(experiment.run_count, rows.length));
  onChange((kind, data) => {
    if (kind !== "run" || !places.has(data.run.id)) return;
    const place = places.get(data.run.id);
    rows[place] = { ...data.run, latest: { ...rows[place].latest, ...data.latest } };
    table.update(rows[place]);
  });
  replace(panel, rows.length ? table.node : empty("This experiment has no runs."));
}
