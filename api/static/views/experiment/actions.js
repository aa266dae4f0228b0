// What can be done with an experiment: the most wanted as a button, everything else in one menu.

import { mayManage, send } from "../../core/api.js";
import { ask, confirm, toast } from "../../core/dialog.js";
import { h } from "../../core/dom.js";
import { ENDED } from "../../core/format.js";
import { go } from "../../core/router.js";
import { html } from "../../vendor/preact.js";
import { Do, isCancelling, manageable, PriorityOf, tagsOf } from "../manage.js";

/**
 * The actions; those are shown that the reader may do.
 * @param {Object} properties
 * @param {Object} properties.experiment
 * @param {Object} properties.who reads it
 * @param {() => Promise<void>} properties.again reads the experiment again
 */
export function Actions({ experiment, who, again }) {
  const { id, name, state, archived_s } = experiment;
  const may = mayManage(who, experiment);
  const managing = manageable(experiment, who, again);
  const wanted = managing.find(one => one.kind === "primary");
  const one = (title, work) => ({ title, run: () => work().then(again) });
  const organising = may
    ? [
        one("Rename", () => rename(experiment)),
        one("Tags", () => setTags(experiment)),
        one("Notes", () => setNotes(experiment)),
        one(archived_s ? "Unarchive" : "Archive", () => archive(experiment, again)),
      ]
    : [];
  const link = (title, href, more = {}) => html`<a class="button" href=${href} ...${more}>${title}</a>`;
  const copy = wanted => link("Copy", `/new?copy=${id}`, wanted ? { class: "button primary" } : {});
  const api = `/api/v1/experiments/${id}`;
  return html`<div class="acts" data-actions>
    ${isCancelling(experiment) && html`<span class="bad">cancelling …</span>`}
    ${wanted ? html`<${Do} ...${wanted} name=${name} />` : copy(true)}
    <details class="menu end">
      <summary class="button">Actions</summary>
      <div class="card pad list">
        ${managing.filter(each => each !== wanted).map(each => html`<${Do} key=${each.title} ...${each} name=${name} />`)}
        ${
          may &&
          !ENDED.has(state) &&
          html`<label>Priority <${PriorityOf} experiment=${experiment} who=${who} changed=${again} /></label>`
        }
        ${organising.map(each => html`<${Do} key=${each.title} ...${each} name=${name} />`)}
        ${wanted && copy(false)}
        ${link("Report", `${api}/report`, { target: "_blank" })}
        ${link("CSV", `${api}/export?format=csv`, { download: true })}
        ${
          may &&
          ENDED.has(state) &&
          html`<${Do} title="Delete" kind="danger" name=${name} run=${() => remove(experiment)} />`
        }
      </div>
    </details>
  </div>`;
}

async function archive({ id, archived_s }, again) {
  const set = archived => send("PUT", `/experiments/${id}/archive`, { archived });
  await set(!archived_s);
  toast(archived_s ? "Unarchived" : "Archived", { undo: () => set(Boolean(archived_s)).then(again) });
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

const rename = ({ id, name }) =>
  ask("Rename", [h("label", {}, "Name", h("input", { name: "name", value: name, autocomplete: "off" }))], {
    action: "Rename",
    check: fields => send("PUT", `/experiments/${id}/name`, fields),
  });

function setTags(experiment) {
  return ask(
    "Tags",
    [
      h(
        "label",
        {},
        "Words, with spaces between them",
        h("input", { name: "tags", value: tagsOf(experiment).join(" "), autocomplete: "off" }),
      ),
    ],
    {
      action: "Set",
      check: ({ tags }) => {
        const wanted = tags.split(/\s+/).filter(Boolean);
        return send("PATCH", `/experiments/${experiment.id}/tags`, {
          add: wanted.filter(tag => !experiment.tags.includes(tag)),
          remove: tagsOf(experiment).filter(tag => !wanted.includes(tag)),
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
