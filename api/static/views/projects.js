// Projects that one sees, and one project with its members.

import { administers, get, hasRole, hasScope, send, whoami } from "../core/api.js";
import { act, ask, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { count, when } from "../core/format.js";
import { go } from "../core/router.js";
import { choice, facts, field, section, shortTable, tick } from "./parts.js";

const ROLES = [
  ["viewer", "viewer: sees"],
  ["member", "member: submits, manages own"],
  ["maintainer", "maintainer: manages all, and members"],
];
const path = name => `/projects/${encodeURIComponent(name)}`;

export async function show(main, { name }, { signal }) {
  const who = await whoami();
  return name ? one(main, name, who, signal) : all(main, who, signal);
}

async function all(main, who, signal) {
  const { items } = await get("/projects", {}, { signal });
  const add = () =>
    ask(
      "Create a project",
      [
        field(
          "Name",
          h("input", {
            name: "name",
            required: true,
            maxlength: 63,
            pattern: "[a-z0-9][a-z0-9._\\-]*",
            autocomplete: "off",
          }),
          "Small letters, digits and . _ -; specs have it as project.",
        ),
        field("Title", h("input", { name: "title" })),
        tick("Visible to all users", "visible"),
      ],
      {
        action: "Create",
        check: async ({ name, title, visible }) => {
          await send("POST", "/projects", { name, title, visible_to_all: Boolean(visible) });
          go(path(name));
        },
      },
    );
  replace(
    main,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Projects"),
      administers(who)
        ? h(
            "div",
            { class: "tools" },
            h("button", { type: "button", class: "primary", onclick: add }, "Create a project"),
          )
        : null,
    ),
    shortTable(
      "Projects",
      [
        ["Name", one => h("a", { href: path(one.name) }, one.name)],
        ["Title", one => one.title, "wide"],
        [
          "Your role",
          one =>
            who.via === "open" ? "–" : who.roles[one.name] || (who.administrator ? "administrator" : "–"),
        ],
        ["Visible to", one => (one.visible_to_all ? "all users" : "members")],
        ["Created", one => when(one.created_s)],
        ["State", one => (one.archived_s ? "archived" : "open")],
      ],
      items,
      "You are not a member of any project; ask an administrator.",
    ),
  );
  return { title: "Projects" };
}

async function one(main, name, who, signal) {
  let project;
  const manages = hasRole(who, name, "maintainer") && hasScope(who, "operate");
  const put = async (method, more, body) => {
    project = await send(method, `${path(name)}${more}`, body);
    draw();
  };
  const role = (user, wanted) => put("PUT", `/members/${encodeURIComponent(user)}`, { role: wanted });

  const member = one =>
    manages
      ? choice("role", ROLES, one.role, {
          "aria-label": `Role of ${one.user}`,
          onchange: event =>
            act(event.target, async () => {
              const before = one.role;
              await role(one.user, event.target.value);
              toast(`${one.user} is ${event.target.value}`, { undo: () => role(one.user, before) });
            }),
        })
      : one.role;
  const leaves = one =>
    manages
      ? h(
          "button",
          {
            type: "button",
            "aria-label": `Remove ${one.user}`,
            onclick: event =>
              act(event.currentTarget, async () => {
                await put("DELETE", `/members/${encodeURIComponent(one.user)}`);
                toast(`${one.user} is not a member any more`, { undo: () => role(one.user, one.role) });
              }),
          },
          "Remove",
        )
      : null;
  const add = () =>
    ask(
      "Add a member",
      [
        field("User", h("input", { name: "user", required: true, maxlength: 100, autocomplete: "off" })),
        field("Role", choice("role", ROLES, "member")),
      ],
      { action: "Add", check: ({ user, role: wanted }) => role(user, wanted) },
    );
  const edit = () =>
    ask(
      `Change ${name}`,
      [
        field("Title", h("input", { name: "title", value: project.title })),
        field("Notes", h("textarea", { name: "notes", rows: 5, maxlength: 4000 }, project.notes)),
        tick("Visible to all users", "visible", project.visible_to_all),
      ],
      {
        action: "Save",
        check: ({ title, notes, visible }) =>
          put("PATCH", "", { title, notes, visible_to_all: Boolean(visible) }),
      },
    );
  const archive = archived => put("PUT", "/archive", { archived });

  function draw() {
    const filter = `project = '${name}'`,
      limits = Object.entries(project.settings);
    replace(
      main,
      h("p", { class: "quiet crumbs" }, h("a", { href: "/projects" }, "Projects"), ` / ${name}`),
      h(
        "div",
        { class: "head" },
        h("h1", {}, project.title || name),
        manages
          ? h(
              "div",
              { class: "tools" },
              h("button", { type: "button", onclick: edit }, "Change"),
              h(
                "button",
                {
                  type: "button",
                  onclick: event =>
                    act(event.currentTarget, async () => {
                      const archived = !project.archived_s;
                      await archive(archived);
                      toast(
                        archived ? `${name} takes no new experiments` : `${name} takes experiments again`,
                        { undo: () => archive(!archived) },
                      );
                    }),
                },
                project.archived_s ? "Open again" : "Archive",
              ),
            )
          : null,
      ),
      facts([
        ["name", name],
        ["visible to", project.visible_to_all ? "all users" : "members"],
        ["created", when(project.created_s)],
        project.archived_s ? ["archived", when(project.archived_s)] : null,
        ["members", count(project.members.length)],
        ["experiments", h("a", { href: `/?filter=${encodeURIComponent(filter)}` }, "list")],
        ["queue", h("a", { href: `/queue?project=${encodeURIComponent(name)}` }, "what waits")],
      ]),
      project.notes ? h("p", { class: "card pad notes-text" }, project.notes) : null,
      section(
        "Members",
        shortTable(
          "Members",
          [
            ["User", one => one.user],
            ["Role", member],
            ["", leaves],
          ],
          project.members,
          "It has no members yet.",
        ),
        manages ? h("p", {}, h("button", { type: "button", onclick: add }, "Add a member")) : null,
      ),
      limits.length
        ? section(
            "Shares and limits",
            shortTable(
              "Shares and limits",
              [
                ["Setting", ([key]) => h("code", {}, key)],
                [
                  "Value",
                  ([, value]) => (typeof value === "object" ? JSON.stringify(value) : String(value)),
                  "wide",
                ],
              ],
              limits,
            ),
          )
        : null,
    );
  }
  project = await get(path(name), {}, { signal });
  draw();
  return { title: `Project ${name}` };
}
