// What can be done with an experiment; buttons are shown to those who may.

import { send } from "../../core/api.js";
import { act, ask, confirm, toast } from "../../core/dialog.js";
import { h } from "../../core/dom.js";
import { go } from "../../core/router.js";

const RESTS = ["succeeded", "failed", "cancelled", "stopped"];

/**
 * The buttons.
 * @param {Object} experiment
 * @param {boolean} may whether the reader may steer it
 * @param {() => Promise<void>} again reads the experiment anew
 */
export function actions(experiment, may, again) {
  const path = `/experiments/${experiment.id}`;
  const over = RESTS.includes(experiment.state);
  const button = (title, work, attributes = {}) =>
    h("button", { type: "button", onclick: (event) => act(event.currentTarget, async () => { await work(); await again(); }), ...attributes }, title);
  const post = (what) => send("POST", `${path}/${what}`);
  return h("p", { class: "tools" },
    may && [
      !over && experiment.state !== "paused" && button("Pause", async () => { await post("pause"); toast("Pausing at the next step boundary", { undo: () => post("resume").then(again) }); }),
      (experiment.state === "paused" || (experiment.pause_requested_s && !over)) && button("Resume", () => post("resume")),
      !over && button("Cancel", async () => {
        if (await confirm("Cancel the experiment?", "Its running runs stop at once, and those that wait are never started. Results so far stay; retry starts the rest again.", "Cancel the experiment")) await post("cancel");
      }, { class: "danger" }),
      over && button("Retry", () => post("retry")),
      !over && button("Priority", () => setPriority(experiment)),
      button("Tags", () => setTags(experiment)),
      button("Notes", () => setNotes(experiment)),
      button(experiment.archived_s ? "Take back from the archive" : "Archive", async () => {
        const archived = !experiment.archived_s;
        await send("PUT", `${path}/archive`, { archived });
        toast(archived ? "Archived" : "Taken back", { undo: () => send("PUT", `${path}/archive`, { archived: !archived }).then(again) });
      }),
    ],
    h("a", { class: "button", href: `/new?copy=${experiment.id}` }, "Copy"),
    h("a", { class: "button", href: `/api/v1${path}/report`, target: "_blank" }, "Report"),
    h("a", { class: "button", href: `/api/v1${path}/export?format=csv`, download: true }, "CSV"),
    may && over && h("button", { type: "button", class: "danger", onclick: (event) => act(event.currentTarget, () => remove(experiment)) }, "Delete"));
}

async function remove(experiment) {
  if (!await confirm("Delete the experiment?", "It can be restored for some time; then its figures, logs and checkpoints are removed for good.", "Delete")) return;
  await send("DELETE", `/experiments/${experiment.id}`);
  await go("/");
  toast(`Deleted ${experiment.name}`, { undo: async () => { await send("POST", `/experiments/${experiment.id}/restore`); await go(`/experiments/${experiment.id}`); } });
}

function setPriority(experiment) {
  const choices = ["low", "normal", "high", "urgent"];
  return ask("Priority", [h("label", {}, "Class", h("select", { name: "priority" }, choices.map((name) => h("option", { value: name, selected: experiment.priority === name }, name))))], {
    action: "Set", check: ({ priority }) => send("PUT", `/experiments/${experiment.id}/priority`, { priority }),
  });
}

function setTags(experiment) {
  return ask("Tags", [h("label", {}, "Words, with spaces between them", h("input", { name: "tags", value: experiment.tags.join(" "), autocomplete: "off" }))], {
    action: "Set",
    check: ({ tags }) => {
      const wanted = tags.split(/\s+/).filter(Boolean);
      return send("PATCH", `/experiments/${experiment.id}/tags`, {
        add: wanted.filter((tag) => !experiment.tags.includes(tag)), remove: experiment.tags.filter((tag) => !wanted.includes(tag)),
      });
    },
  });
}

function setNotes(experiment) {
  return ask("Notes", [h("label", {}, "For people", h("textarea", { name: "notes", rows: 6 }, experiment.notes))], {
    action: "Set", check: ({ notes }) => send("PUT", `/experiments/${experiment.id}/notes`, { notes }),
  });
}
