// What can be done with an experiment; buttons are shown to those who may.

import { mayManage, send } from "../../core/api.js";
import { act, ask, confirm, toast } from "../../core/dialog.js";
import { h } from "../../core/dom.js";
import { ENDED } from "../../core/format.js";
import { go } from "../../core/router.js";
import { priorityOf, manageButtons } from "../manage.js";

/**
 * The buttons.
 * @param {Object} experiment
 * @param {Object} who reads it
 * @param {() => Promise<void>} again reads the experiment anew
 */
export function actions(experiment, who, again) {
  const path = `/experiments/${experiment.id}`;
  const over = ENDED.has(experiment.state),
    may = mayManage(who, experiment);
  const button = (title, work) =>
    h(
      "button",
      {
        type: "button",
        onclick: event =>
          act(event.currentTarget, async () => {
            await work();
            await again();
          }),
      },
      title,
    );
  return h(
    "div",
    { class: "tools" },
    manageButtons(experiment, who, again),
    may && [
      !over && h("label", {}, "Priority ", priorityOf(experiment, who, again)),
      button("Tags", () => setTags(experiment)),
      button("Notes", () => setNotes(experiment)),
      button(experiment.archived_s ? "Unarchive" : "Archive", async () => {
        const archived = !experiment.archived_s;
        await send("PUT", `${path}/archive`, { archived });
        toast(archived ? "Archived" : "Unarchived", {
          undo: () => send("PUT", `${path}/archive`, { archived: !archived }).then(again),
        });
      }),
    ],
    h("a", { class: "button", href: `/new?copy=${experiment.id}` }, "Copy"),
    h("a", { class: "button", href: `/api/v1${path}/report`, target: "_blank" }, "Report"),
    h("a", { class: "button", href: `/api/v1${path}/export?format=csv`, download: true }, "CSV"),
    may &&
      over &&
      h(
        "button",
        {
          type: "button",
          class: "danger",
          onclick: event => act(event.currentTarget, () => remove(experiment)),
        },
        "Delete",
      ),
  );
}

async function remove(experiment) {
  if (
    !(await confirm(
      `Delete experiment ${experiment.id}?`,
      `${experiment.name} can be restored for some time, under Deleted in the list of experiments; then its figures, logs and checkpoints are removed for good.`,
      "Delete",
    ))
  )
    return;
  await send("DELETE", `/experiments/${experiment.id}`);
  await go("/");
  toast(`Deleted ${experiment.name}`, {
    undo: async () => {
      await send("POST", `/experiments/${experiment.id}/restore`);
      await go(`/experiments/${experiment.id}`);
    },
  });
}

function setTags(experiment) {
  return ask(
    "Tags",
    [
      h(
        "label",
        {},
        "Words, with spaces between them",
        h("input", { name: "tags", value: experiment.tags.join(" "), autocomplete: "off" }),
      ),
    ],
    {
      action: "Set",
      check: ({ tags }) => {
        const wanted = tags.split(/\s+/).filter(Boolean);
        return send("PATCH", `/experiments/${experiment.id}/tags`, {
          add: wanted.filter(tag => !experiment.tags.includes(tag)),
          remove: experiment.tags.filter(tag => !wanted.includes(tag)),
        });
      },
    },
  );
}

function setNotes(experiment) {
  return ask(
    "Notes",
    [h("label", {}, "Markdown", h("textarea", { name: "notes", rows: 6 }, experiment.notes))],
    {
      action: "Set",
      check: ({ notes }) => send("PUT", `/experiments/${experiment.id}/notes`, { notes }),
    },
  );
}
