// Tokens: one's own, and everyone's for administrators. A secret is shown once.

import { administers, get, hasScope, send, whoami } from "../core/api.js";
import { act, ask, confirm, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { relative, when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { choice, field, shortTable } from "./parts.js";

const SCOPES = [
  ["read", "read: look at everything one sees"],
  ["submit", "submit: also submit, and manage one's own"],
  ["operate", "operate: also what the role allows with others'"],
  ["admin", "admin: also administration"],
];
const LIFETIMES = [
  ["12h", "12 hours"],
  ["30d", "30 days"],
  ["90d", "90 days"],
  ["52w", "a year"],
  ["", "until it is revoked"],
];

const stateOf = one =>
  one.revoked_s
    ? `revoked ${relative(one.revoked_s)}`
    : one.expires_s && one.expires_s < Date.now() / 1000
      ? `expired ${relative(one.expires_s)}`
      : "works";

/** Lists tokens in a panel, with what may be done with them. */
export async function drawTokens(panel, who, { everyone = false, signal }) {
  const read = async () => {
    const { items } = await get("/tokens", { everyone: everyone || null }, { signal });
    replace(
      panel,
      shortTable(
        "Tokens",
        [
          everyone ? ["User", one => one.user] : ["Name", one => one.name],
          everyone ? ["Name", one => one.name] : ["Begins with", one => h("code", {}, one.prefix)],
          ["Scope", one => one.scope],
          ["Project", one => one.project || "all"],
          ["Created", one => when(one.created_s)],
          ["Expires", one => when(one.expires_s)],
          ["Last used", one => (one.last_used_s ? relative(one.last_used_s) : "never")],
          ["State", one => h("span", { class: stateOf(one) === "works" ? "good" : "quiet" }, stateOf(one))],
          [
            "",
            one =>
              stateOf(one) === "works" && hasScope(who, "submit")
                ? h(
                    "button",
                    {
                      type: "button",
                      class: "danger",
                      "aria-label": `Revoke ${one.name}`,
                      onclick: event =>
                        act(event.currentTarget, async () => {
                          if (
                            !(await confirm(
                              `Revoke ${one.name}?`,
                              "It stops working at once, everywhere, for good.",
                              "Revoke the token",
                            ))
                          )
                            return;
                          await send("DELETE", `/tokens/${one.id}`);
                          toast(`${one.name} is revoked`);
                          await read();
                        }),
                    },
                    "Revoke",
                  )
                : null,
          ],
        ],
        items,
        "There are no tokens yet.",
      ),
    );
  };
  await read();
  return read;
}

/** Shows a secret this once, to be copied. */
export async function showSecret(title, text, about = "") {
  const secret = h("input", {
    name: "secret",
    value: text,
    readonly: true,
    class: "mono",
    "aria-label": title,
  });
  await ask(
    title,
    [
      h("p", {}, `${about} Copy it now; it is not shown again.`.trim()),
      secret,
      h(
        "button",
        {
          type: "button",
          onclick: async () => {
            secret.select();
            await navigator.clipboard?.writeText(text);
            toast("Copied");
          },
        },
        "Copy",
      ),
    ],
    { action: "Done" },
  );
}

/** Asks what a token shall be, creates it, and shows its secret this once. */
export async function createToken(who, projects) {
  const scopes = SCOPES.filter(([scope]) => hasScope(who, scope)),
    own = who.restricted_to
      ? [[who.restricted_to, who.restricted_to]]
      : [["", "all"], ...projects.map(({ name }) => [name, name])];
  const made = await ask(
    "Create a token",
    [
      field(
        "Name",
        h("input", { name: "name", required: true, maxlength: 100, autocomplete: "off" }),
        "Where it will be, such as laptop or ci.",
      ),
      field(
        "Scope",
        choice("scope", scopes, scopes.some(([scope]) => scope === "submit") ? "submit" : "read"),
      ),
      field("Only for project", choice("project", own, own[0][0])),
      field("Works for", choice("expires", LIFETIMES, "90d")),
      administers(who) && who.via !== "open"
        ? field(
            "User",
            h("input", { name: "user", placeholder: who.user, maxlength: 100, autocomplete: "off" }),
          )
        : null,
    ],
    {
      action: "Create",
      check: ({ name, scope, project, expires, user }) =>
        send("POST", "/tokens", {
          name,
          scope,
          project: project || null,
          expires: expires || null,
          user: user || null,
        }),
    },
  );
  if (!made) return null;
  await showSecret(`Token ${made.name}`, made.secret);
  return made;
}

export async function show(main, parameters, { signal }) {
  const [who, projects] = await Promise.all([whoami(), get("/projects", {}, { signal })]);
  const everyone = administers(who) && query().get("everyone") === "yes",
    panel = h("div");
  const read = await drawTokens(panel, who, { everyone, signal });
  replace(
    main,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Tokens"),
      hasScope(who, "submit")
        ? h(
            "div",
            { class: "tools" },
            h(
              "button",
              {
                type: "button",
                class: "primary",
                onclick: async () => {
                  if (await createToken(who, projects.items)) await read();
                },
              },
              "Create a token",
            ),
          )
        : null,
    ),
    administers(who)
      ? h(
          "div",
          { class: "tools" },
          h(
            "label",
            {},
            h("input", {
              type: "checkbox",
              checked: everyone,
              onchange: event => {
                setQuery({ everyone: event.target.checked ? "yes" : null });
                show(main, parameters, { signal });
              },
            }),
            " of all users",
          ),
        )
      : null,
    panel,
  );
  return { title: "Tokens" };
}
