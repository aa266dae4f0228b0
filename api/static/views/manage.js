// What one may do with an experiment: priority, pause, resume, cancel, retry; undone where that is possible.

import { mayManage, send } from "../core/api.js";
import { act, confirm, toast } from "../core/dialog.js";
import { count, ENDED } from "../core/format.js";
import { html } from "../vendor/preact.js";

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
export function PriorityOf({ experiment, who, changed }) {
  const { id, name, priority } = experiment;
  if (!mayManage(who, experiment)) return priorityName(priority);
  const set = wanted => send("PUT", `/experiments/${id}/priority`, { priority: wanted }).then(changed);
  const known = PRIORITIES.some(([value]) => value === priority)
    ? PRIORITIES
    : [[priority, String(priority)], ...PRIORITIES];
  const choose = event =>
    act(event.currentTarget, async () => {
      const after = Number(event.target.value);
      await set(after);
      toast(`${name} has priority ${priorityName(after)}`, { undo: () => set(priority) });
    });
  return html`<select aria-label=${`Priority of ${name}`} value=${priority} onChange=${choose}>
    ${known.map(([value, title]) => html`<option value=${value}>${title}</option>`)}
  </select>`;
}

/**
 * What one may do with an experiment now, what is wanted most first.
 * @returns {{title: string, run: () => Promise<any>, kind?: "primary" | "danger"}[]}
 */
export function manageable(experiment, who, changed) {
  if (!mayManage(who, experiment)) return [];
  const { id, name, state, run_states } = experiment,
    failed = run_states?.failed,
    asked = experiment.cancel_requested_s,
    over = ENDED.has(state);
  const post = action => send("POST", `/experiments/${id}/${action}`).then(changed);
  const found = [];
  const may = (title, run, kind = undefined) => found.push({ title, run, kind });
  if (failed && over && state !== "succeeded")
    may(
      `Retry ${count(failed)} failed`,
      async () => {
        await post("retry?failed=true");
        toast(`${name}: ${count(failed)} runs are in the queue again`);
      },
      "primary",
    );
  if (state === "cancelled")
    may(
      "Retry",
      async () => {
        await post("retry");
        toast(`${name} is in the queue again`);
      },
      "primary",
    );
  if (state === "paused" && !asked)
    may(
      "Resume",
      async () => {
        await post("resume");
        toast(`${name} is in the queue again`, { undo: () => post("pause") });
      },
      "primary",
    );
  if (["queued", "starting", "running"].includes(state) && !asked)
    may("Pause", async () => {
      await post("pause");
      toast(`${name} pauses at its next checkpoint`, { undo: () => post("resume") });
    });
  if (!over && !asked)
    may(
      "Cancel",
      async () => {
        const sure = await confirm(
          `Cancel ${name}?`,
          "Its runs stop at their next step. What they have reported stays; a retry continues from their checkpoints.",
          "Cancel the experiment",
        );
        if (!sure) return;
        await post("cancel");
        toast(`${name} is being cancelled`);
      },
      "danger",
    );
  return found;
}

/** A button for something one may do with what has this name. */
export const Do = ({ title, run, kind = undefined, name }) =>
  html`<button
    type="button"
    class=${kind}
    aria-label=${`${title} ${name}`}
    onClick=${event => act(event.currentTarget, run)}
  >
    ${title}
  </button>`;

/** Buttons for what is possible now; none for who may not. */
export const ManageButtons = ({ experiment, who, changed }) =>
  html`<span class="actions">
    ${manageable(experiment, who, changed).map(
      ({ kind, ...one }) =>
        html`<${Do} key=${one.title} ...${one} kind=${kind === "danger" ? kind : null} name=${experiment.name} />`,
    )}
    ${isCancelling(experiment) && html`<span class="bad">cancelling …</span>`}
  </span>`;

/** Whether it was asked to end, and has not. */
export const isCancelling = one => Boolean(one.cancel_requested_s) && !ENDED.has(one.state);

/** The tag of experiments that are starred, for everyone who sees them. */
const STARRED = "starred";

/** A filter of the list for them. */
export const STARRED_FILTER = `tag = ${STARRED}`;

/** The tags that are words of people. */
export const tagsOf = experiment => experiment.tags.filter(tag => tag !== STARRED);

/** A star that who may can set and take away, and others see where it is set. */
export function Star({ experiment, who, changed }) {
  const { id, name, tags } = experiment,
    starred = tags.includes(STARRED);
  if (!mayManage(who, experiment)) return starred ? html`<span title="Starred">★</span>` : null;
  const set = event =>
    act(event.currentTarget, () =>
      send("PATCH", `/experiments/${id}/tags`, { [starred ? "remove" : "add"]: [STARRED] }).then(changed),
    );
  return html`<button
    type="button"
    class="sorts star"
    aria-pressed=${String(starred)}
    aria-label=${`Star ${name}`}
    onClick=${set}
  >
    ${starred ? "★" : "☆"}
  </button>`;
}
