// What waits, and why.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { empty } from "../core/states.js";
import { plainTable } from "../core/table.js";

const EVERY_MS = 3000;

/** Shows the queue. */
export async function show(main, _parameters, { signal }) {
  const draw = (queue) => replace(main, h("h1", {}, "Queue"),
    h("p", { class: "quiet" }, queue.schedulers_alive.length ? `Running schedulers: ${queue.schedulers_alive.join(", ")}` : "No scheduler is running, so nothing will start."),
    queue.items.length
      ? plainTable("Queue", [{ title: "position", numeric: true }, "experiment", "owner", { title: "reason", wide: true }], queue.items.map((entry) => [
        entry.position, entry.experiment ? h("a", { href: `/experiments/${entry.experiment.id}` }, `${entry.experiment.id} ${entry.experiment.name}`) : "–",
        entry.experiment?.owner ?? "", entry.reason]))
      : empty("Nothing is waiting."));
  const read = () => get("/queue", {}, { signal });
  draw(await read());
  const timer = setInterval(() => read().then(draw, () => {}), EVERY_MS);
  return { title: "Queue", leave: () => clearInterval(timer) };
}
