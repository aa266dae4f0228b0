// What can be done with runs of a table: one by its menu, or all that are selected.

import { send } from "../../core/api.js";
import { act, ask, confirm, toast } from "../../core/dialog.js";
import { h, replace } from "../../core/dom.js";
import { count } from "../../core/format.js";
import { field, tick } from "../parts.js";

const AT_ONCE = 200; // Runs that one request changes
const MOST_COMPARED = 12,
  MOST_HIDDEN = 200;

const runsOf = number => `${count(number)} run${number === 1 ? "" : "s"}`;
const tagsOf = text => text.split(/\s+/).filter(Boolean);

/**
 * Opens a menu below a button.
 * @param {HTMLElement} button
 * @param {([string, () => any] | null)[]} items words and what they do
 */
export function openMenu(button, items) {
  const menu = h(
    "div",
    { class: "row-menu card", popover: "auto", role: "menu" },
    items.filter(Boolean).map(([text, work]) =>
      h(
        "button",
        {
          type: "button",
          role: "menuitem",
          onclick: () => {
            menu.hidePopover();
            work();
          },
        },
        text,
      ),
    ),
  );
  const places = [...menu.children];
  menu.addEventListener("keydown", event => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const at = places.indexOf(document.activeElement) + by;
    /** @type {HTMLElement} */ (places[(at + places.length) % places.length]).focus();
  });
  menu.addEventListener("toggle", event => {
    if (/** @type {any} */ (event).newState === "closed") menu.remove();
  });
  document.getElementById("main").append(menu);
  menu.showPopover();
  const { left, bottom } = button.getBoundingClientRect();
  menu.style.setProperty("left", `${Math.max(8, Math.min(left, innerWidth - menu.offsetWidth - 8))}px`);
  menu.style.setProperty("top", `${Math.min(bottom + 2, innerHeight - menu.offsetHeight - 8)}px`);
  /** @type {HTMLElement} */ (places[0])?.focus();
}

/** Asks for a run's name, tags and notes; resolves to the run as it is then, to null if nothing was changed. */
export function editRun(run) {
  return ask(
    `Run ${run.id}`,
    [
      field("Name", h("input", { name: "name", value: run.name, maxlength: 200, autocomplete: "off" })),
      field(
        "Tags",
        h("input", { name: "tags", value: run.tags.join(" "), autocomplete: "off" }),
        "Words, with spaces between them",
      ),
      field("Notes", h("textarea", { name: "notes", rows: 5, maxlength: 4000 }, run.notes)),
    ],
    {
      action: "Save",
      check: ({ name, tags, notes }) =>
        send("PATCH", `/runs/${run.id}/marks`, {
          name: name.trim(),
          notes,
          add: tagsOf(tags),
          remove: run.tags.filter(tag => !tagsOf(tags).includes(tag)),
        }),
    },
  );
}

/**
 * What can be done with the selected runs; `node` is its element, `draw(selected)` brings it up to date.
 * @param {Object} options
 * @param {string} options.path of the experiment
 * @param {boolean} options.may whether the reader may change runs
 * @param {() => Promise<any>} options.again reads the table again
 * @param {(ids: number[]) => void} options.hide hides the curves of runs
 * @param {() => void} options.clear selects none
 */
export function selectionBar({ path, may, again, hide, clear }) {
  const node = h("div", {
    class: "tools selection",
    hidden: true,
    role: "group",
    "aria-label": "Selected runs",
  });
  const each = (ids, button, method, place, body, counts = _run => true) =>
    act(button, async () => {
      const title = button.textContent;
      let changed = 0;
      try {
        for (let at = 0; at < ids.length; at += AT_ONCE) {
          if (ids.length > AT_ONCE) button.textContent = `${title} ${count(at)} of ${count(ids.length)} …`;
          const some = ids.slice(at, at + AT_ONCE);
          const { items } = await send(method, `${path}/runs${place}`, { ids: some, ...body });
          changed += items.filter(counts).length;
        }
      } finally {
        button.textContent = title;
        await again();
      }
      return changed;
    });
  const draw = selected => {
    const ids = [...selected];
    node.hidden = !ids.length;
    const button = (title, work, more = {}) =>
      h("button", { type: "button", onclick: event => work(event.currentTarget), ...more }, title);
    const done = async (word, work) => {
      const changed = await work;
      if (changed !== undefined) toast(`${word} ${runsOf(changed)}`);
    };
    replace(
      node,
      h("strong", {}, `${runsOf(ids.length)} selected`),
      may && [
        button("Cancel", async at => {
          if (
            await confirm(
              `Cancel ${runsOf(ids.length)}?`,
              "Runs that have ended stay as they are. Those that are cancelled can be retried.",
              "Cancel the runs",
            )
          )
            await done(
              "Cancelled",
              each(ids, at, "POST", "/cancel", {}, run => run.cancel_requested_s),
            );
        }),
        button(
          "Retry",
          at =>
            done(
              "Retried",
              each(ids, at, "POST", "/retry", {}, run => run.state === "queued"),
            ),
          {
            title: "Queue again what failed, was stopped or was cancelled",
          },
        ),
        button("Star", at => done("Starred", each(ids, at, "PATCH", "", { starred: true }))),
        button("Tag …", at => tag(ids, body => done("Tagged", each(ids, at, "PATCH", "", body)))),
      ],
      ids.length > 1 && ids.length <= MOST_COMPARED
        ? h("a", { class: "button", href: `/compare/runs?ids=${ids.join(",")}` }, `Compare ${ids.length}`)
        : null,
      ids.length <= MOST_HIDDEN ? button("Hide curves", () => hide(ids)) : null,
      button("Select none", clear),
    );
  };
  return { node, draw };
}

/**
 * Asks which tags to add and to take away; resolves to null where it is closed.
 * @param {string} what gets them
 * @param {any[]} more fields
 */
export async function askTags(what, more = []) {
  const fields = await ask(
    `Tag ${what}`,
    [
      field("Add", h("input", { name: "add", autocomplete: "off" }), "Words, with spaces between them"),
      field("Take away", h("input", { name: "remove", autocomplete: "off" })),
      ...more,
    ],
    { action: "Tag" },
  );
  return fields && { ...fields, add: tagsOf(fields.add), remove: tagsOf(fields.remove) };
}

async function tag(ids, work) {
  const fields = await askTags(runsOf(ids.length), [tick("Star them too", "starred")]);
  if (fields) await work({ ...fields, starred: fields.starred ? true : null });
}
