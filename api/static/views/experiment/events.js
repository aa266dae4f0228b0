// What happened in an experiment, the last first.

import { get } from "../../core/api.js";
import { replace } from "../../core/dom.js";
import { when } from "../../core/format.js";
import { empty } from "../../core/states.js";
import { painter } from "../../core/stream.js";
import { VirtualTable } from "../../core/table.js";

const COLUMNS = [
  { key: "at_s", title: "when", width: 130, render: one => when(one.at_s) },
  { key: "kind", title: "what", width: 170, render: one => one.kind },
  { key: "run_id", title: "run", numeric: true, width: 80, render: one => one.run_id ?? "" },
  { key: "actor", title: "who", width: 120, render: one => one.actor ?? "" },
  { key: "message", title: "message", width: 700, render: one => one.message },
];

const MOST = 1000; // Events in an answer

/** Shows the events, and adds new ones as they come. */
export async function show(panel, { id, onChange }, { signal }) {
  const events = new Map();
  const table = new VirtualTable({ label: "Events", columns: COLUMNS, key: one => one.number });
  const draw = () => {
    table.setRows([...events.values()].reverse());
    replace(panel, events.size ? table.node : empty("Nothing has happened yet."));
  };
  let read,
    after = 0;
  do {
    read = (await get(`/experiments/${id}/events`, { after, limit: MOST }, { signal })).items;
    for (const one of read) events.set(one.number, one);
    after = read.at(-1)?.number;
  } while (read.length === MOST);
  const paint = painter(draw, signal);
  onChange((kind, data) => {
    if (kind === "event" && !events.has(data.number)) {
      events.set(data.number, data);
      paint();
    }
  });
  draw();
}
