// What happened in an experiment, the last first.

import { get } from "../../core/api.js";
import { replace } from "../../core/dom.js";
import { when } from "../../core/format.js";
import { empty } from "../../core/states.js";
import { plainTable } from "../../core/table.js";

const SHOWN = 200;

/** Shows the events, and adds new ones as they come. */
export async function show(panel, { id, onChange }, { signal }) {
  const events = new Map();
  for (const one of (await get(`/experiments/${id}/events`, {}, { signal })).items) events.set(one.id, one);
  const draw = () => replace(panel, events.size
    ? plainTable("Events", ["when", "what", { title: "run", numeric: true }, "who", { title: "message", wide: true }],
      [...events.values()].slice(-SHOWN).reverse().map((one) => [when(one.at_s), one.kind, one.run_id ?? "", one.actor ?? "", one.message]))
    : empty("Nothing has happened yet."));
  onChange((kind, data) => { if (kind === "event" && !events.has(data.id)) { events.set(data.id, data); draw(); } });
  draw();
}
