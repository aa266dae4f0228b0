// The list of experiments: the newest first, followed as they change.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { count, money, progress, relative, state } from "../core/format.js";
import { empty, failure } from "../core/states.js";
import { VirtualTable } from "../core/table.js";

const ENDED = ["succeeded", "failed", "cancelled", "stopped"];
const EVERY_MS = 3000;

/** How many of an experiment's runs have ended. */
export const ended = (states) => ENDED.reduce((sum, name) => sum + (states[name] || 0), 0);

const COLUMNS = [
  { key: "id", title: "id", numeric: true, width: 70, render: (one) => one.id },
  { key: "name", title: "name", width: 260, render: (one) => h("a", { href: `/experiments/${one.id}` }, one.name) },
  { key: "state", title: "state", width: 120, render: (one) => state(one.state) },
  { key: "runs", title: "runs ended", width: 190, render: (one) => [progress(ended(one.run_states), one.run_count, one.state), ` ${count(ended(one.run_states))} of ${count(one.run_count)}`] },
  { key: "project", title: "project", width: 120, render: (one) => one.project },
  { key: "owner", title: "owner", width: 120, render: (one) => one.owner },
  { key: "created_s", title: "submitted", width: 130, render: (one) => h("time", { title: new Date(one.created_s * 1000).toISOString() }, relative(one.created_s)) },
];

/** Shows the list. */
export async function show(main, _parameters, { signal }) {
  const table = new VirtualTable({ label: "Experiments", columns: COLUMNS, key: (one) => one.id });
  const note = h("div");
  const read = () => get("/experiments", { page_size: 100 }, { signal });
  const draw = (page) => {
    table.setRows(page.items);
    replace(note, page.items.length ? null : empty("Nothing submitted yet.", h("a", { class: "button", href: "/new" }, "Write an experiment")));
    table.node.hidden = !page.items.length;
  };
  const first = await read();
  replace(main, h("h1", {}, "Experiments"), note, table.node);
  draw(first);
  const timer = setInterval(() => read().then(draw, (error) => { if (error.name !== "AbortError") replace(note, failure(error)); }), EVERY_MS);
  return { title: "Experiments", leave: () => clearInterval(timer) };
}
