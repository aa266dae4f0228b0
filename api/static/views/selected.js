// What can be done with the experiments that are selected in the list.

import { hasScope, send } from "../core/api.js";
import { act, confirm, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { count } from "../core/format.js";
import { askTags } from "./experiment/run_actions.js";

const of = number => `${count(number)} experiment${number === 1 ? "" : "s"}`;

/**
 * The bar; `node` is its element, `draw(ids)` brings it up to date.
 * @param {Object} options
 * @param {any} options.who reads the list
 * @param {() => Promise<any>} options.again reads the list again
 * @param {() => void} options.clear selects none
 */
export function selectedBar({ who, again, clear }) {
  const node = h("div", {
    class: "tools selection",
    hidden: true,
    role: "group",
    "aria-label": "Selected experiments",
  });
  /** One request for each; those that are refused are said, and the others are done. */
  const each = (button, ids, word, request) =>
    act(button, async () => {
      const refused = [];
      for (const id of ids) await request(id).catch(error => refused.push(`${id}: ${error.message}`));
      await again();
      if (refused.length < ids.length) toast(`${word} ${of(ids.length - refused.length)}`);
      if (refused.length) toast(`Refused for ${refused.join("; ")}`, { problem: true });
      return refused;
    });
  function draw(selected) {
    const ids = [...selected];
    node.hidden = !ids.length;
    const button = (title, work, more = {}) =>
      h("button", { type: "button", onclick: event => work(event.currentTarget), ...more }, title);
    const sure = (title, text, action) => confirm(`${title} ${of(ids.length)}?`, text, action);
    replace(
      node,
      h("strong", {}, `${of(ids.length)} selected`),
      ids.length > 1
        ? h("a", { class: "button", href: `/compare?ids=${ids.join(",")}` }, `Compare ${ids.length}`)
        : null,
      hasScope(who, "submit") && [
        button("Stop", async at => {
          if (await sure("Stop", "Those that have ended stay as they are.", "Stop them"))
            await each(at, ids, "Stopped", id => send("POST", `/experiments/${id}/cancel`));
        }),
        button("Tag …", async at => {
          const tags = await askTags(of(ids.length));
          if (tags) await each(at, ids, "Tagged", id => send("PATCH", `/experiments/${id}/tags`, tags));
        }),
        button("Archive", at =>
          each(at, ids, "Archived", id => send("PUT", `/experiments/${id}/archive`, { archived: true })),
        ),
        button(
          "Delete",
          async at => {
            const text = "They can be restored for some time, under Deleted in the list of experiments.";
            if (!(await sure("Delete", text, "Delete them"))) return;
            const refused = await each(at, ids, "Deleted", id => send("DELETE", `/experiments/${id}`));
            if (!refused?.length) clear();
          },
          { class: "danger" },
        ),
      ],
      button("Select none", clear),
    );
  }
  return { node, draw };
}
