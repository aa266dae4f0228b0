// What one may do with an experiment: priority, pause, resume, cancel, retry; undone where that is possible.

import { mayManage, send } from "../core/api.js";
import { act, confirm, toast } from "../core/dialog.js";
import { h } from "../core/dom.js";
import { count, ENDED } from "../core/format.js";

const PRIORITIES = [
  [25, "low"],
  [50, "normal"],
  [75, "high"],
  [100, "urgent"],
];

/** A priority in words, where it has a word. */
export const priorityName = priority =>
  PRIORITIES.find(([value]) => value === priority)?.[1] ?? String(priority);

/** A choice of priorities for who may set them; their name for others. */
export function priorityOf(experiment, who, changed) {
  if (!mayManage(who, experiment)) return priorityName(experiment.priority);
  const set = priority => send("PUT", `/experiments/${experiment.id}/priority`, { priority }).then(changed);
  const known = PRIORITIES.some(([value]) => value === experiment.priority)
    ? PRIORITIES
    : [[experiment.priority, String(experiment.priority)], ...PRIORITIES];
  const before = experiment.priority;
  return h(
    "select",
    {
      "aria-label": `Priority of ${experiment.name}`,
      onchange: event =>
        act(event.target, async () => {
          const after = Number(event.target.value);
          await set(after);
          toast(`${experiment.name} has priority ${priorityName(after)}`, { undo: () => set(before) });
        }),
    },
    known.map(([value, name]) => h("option", { value, selected: value === experiment.priority }, name)),
  );
}

/** Buttons for what is possible now; none for who may not. */
export function manageButtons(experiment, who, changed) {
  if (!mayManage(who, experiment)) return null;
  const post = action => send("POST", `/experiments/${experiment.id}/${action}`).then(changed);
  const button = (text, run, kind) =>
    h(
      "button",
      {
        type: "button",
        class: kind,
        "aria-label": `${text} ${experiment.name}`,
        onclick: event => act(event.currentTarget, run),
      },
      text,
    );
  const { name, state, run_states } = experiment,
    failed = run_states?.failed,
    asked = experiment.cancel_requested_s;
  return h(
    "span",
    { class: "actions" },
    ["queued", "starting", "running"].includes(state) && !asked
      ? button("Pause", async () => {
          await post("pause");
          toast(`${name} pauses at its next checkpoint`, { undo: () => post("resume") });
        })
      : null,
    state === "paused" && !asked
      ? button("Resume", async () => {
          await post("resume");
          toast(`${name} is in the queue again`, { undo: () => post("pause") });
        })
      : null,
    !ENDED.has(state) && !asked
      ? button(
          "Cancel",
          async () => {
            if (
              !(await confirm(
                `Cancel ${name}?`,
                "Its runs stop at their next step. What they have reported stays; a retry continues from their checkpoints.",
                "Cancel the experiment",
              ))
            )
              return;
            await post("cancel");
            toast(`${name} is being cancelled`);
          },
          "danger",
        )
      : null,
    failed && ENDED.has(state) && state !== "succeeded"
      ? button(`Retry ${count(failed)} failed`, async () => {
          await post("retry?failed=true");
          toast(`${name}: ${count(failed)} runs are in the queue again`);
        })
      : null,
    state === "cancelled"
      ? button("Retry", async () => {
          await post("retry");
          toast(`${name} is in the queue again`);
        })
      : null,
    asked && !ENDED.has(state) ? h("span", { class: "bad" }, "cancelling …") : null,
  );
}
