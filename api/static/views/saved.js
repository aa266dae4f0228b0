// The menu of saved views: a table under a name, for oneself or for a project.

import { get, hasRole, hasScope, send, whoami } from "../core/api.js";
import { ask, confirm, toast } from "../core/dialog.js";
import { h } from "../core/dom.js";
import { view as shown } from "../core/states.js";
import { choice, field } from "./parts.js";

const KEPT = ["table", "filter", "state", "order_by", "columns", "group", "baseline", "difference"];

/** What a view keeps of an address, in one order. */
function kept(parameters) {
  const found = new URLSearchParams();
  for (const name of KEPT) if (parameters.get(name)) found.set(name, parameters.get(name));
  return found.toString();
}

/**
 * A menu to choose, save, share and delete views.
 * @param {() => URLSearchParams} current what the page shows, with its columns
 * @param {AbortSignal} signal
 * @param {{table?: string, path?: string}} options which table it is, and where it is shown
 */
export function savedViews(current, signal, { table = "", path = "/" } = {}) {
  const panel = h("div", { class: "card pad" });
  const menu = h("details", { class: "menu" }, h("summary", { class: "button" }, "Views"), panel);
  const read = () => shown(panel, async () => [await whoami(), await views()], draw, signal);

  async function views() {
    const { items } = await get("/views", {}, { signal });
    return items.filter(one => (new URLSearchParams(one.query).get("table") || "") === table);
  }
  async function projects(who) {
    const { items } = await get("/projects", {}, { signal });
    return items.filter(one => !one.archived_s && hasRole(who, one.name, "member")).map(one => one.name);
  }
  async function save(who, { name = "", query = kept(current()) } = {}) {
    const saved = await ask(
      name ? `Share ${name}` : "Save this view",
      [
        name
          ? null
          : field(
              "Name",
              h("input", { name: "name", required: true, maxlength: 80, autocomplete: "off" }),
              "A view of yours with this name is replaced.",
            ),
        field(
          "For",
          choice(
            "project",
            [["", "only me"], ...(await projects(who)).map(project => [project, `everyone in ${project}`])],
            "",
          ),
        ),
      ],
      {
        action: name ? "Share" : "Save",
        check: fields =>
          send("POST", "/views", {
            name: name || fields.name,
            query,
            project: fields.project || null,
            shared: Boolean(fields.project),
          }),
      },
    );
    if (!saved) return;
    toast(saved.shared ? `${saved.name} is shared with ${saved.project}` : `${saved.name} is saved`);
    await read();
  }
  async function remove(one) {
    const others = one.shared ? ` It also goes for everyone else in ${one.project}.` : "";
    if (
      !(await confirm(
        `Delete the view ${one.name}?`,
        `What it lists stays as it is.${others}`,
        "Delete the view",
      ))
    )
      return;
    try {
      await send("DELETE", `/views/${one.id}`);
    } catch (error) {
      toast(error.message, { problem: true });
    }
    await read();
  }
  function draw([who, items]) {
    const here = kept(current()),
      writes = hasScope(who, "submit");
    const row = one => {
      const own = one.owner === who.user,
        whose = [own ? null : `by ${one.owner}`, one.shared ? `in ${one.project}` : null]
          .filter(Boolean)
          .join(" ");
      return h(
        "li",
        {},
        h(
          "a",
          { href: `${path}?${one.query}`, "aria-current": one.query === here ? "true" : null },
          one.name,
        ),
        whose ? h("span", { class: "quiet" }, ` ${whose}`) : null,
        h(
          "span",
          { class: "actions" },
          own && writes
            ? h(
                "button",
                { type: "button", "aria-label": `Share ${one.name}`, onclick: () => save(who, one) },
                "Share",
              )
            : null,
          writes && (own || hasRole(who, one.project, "maintainer"))
            ? h(
                "button",
                {
                  type: "button",
                  class: "danger",
                  "aria-label": `Delete ${one.name}`,
                  onclick: () => remove(one),
                },
                "Delete",
              )
            : null,
        ),
      );
    };
    return [
      items.length
        ? h("ul", { class: "saved" }, items.map(row))
        : h("p", { class: "quiet" }, "No views are saved yet."),
      writes ? h("p", {}, h("button", { type: "button", onclick: () => save(who) }, "Save as …")) : null,
    ];
  }
  menu.addEventListener("toggle", () => {
    if (menu.open) read();
  });
  return menu;
}
