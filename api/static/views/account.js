// Oneself: roles, browsers that are logged in, tokens.

import { administers, get, hasScope, send, whoami } from "../core/api.js";
import { act, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { when } from "../core/format.js";
import { facts, section, shortTable } from "./parts.js";
import { drawNotifications } from "./notifications.js";
import { createToken, drawTokens } from "./tokens.js";

export async function show(main, parameters, { signal }) {
  const [who, projects] = await Promise.all([whoami(), get("/projects", {}, { signal })]);
  const own = h("div"),
    all = h("div"),
    tokens = h("div"),
    notifications = h("div"),
    sees = administers(who) && who.via !== "open";
  const list = (panel, caption, items, read) =>
    replace(
      panel,
      shortTable(
        caption,
        [
          ["User", one => one.user],
          ["From", one => one.from_address || "–"],
          ["Browser", one => one.agent || "–", "wide"],
          ["Logged in", one => when(one.created_s)],
          ["Last used", one => when(one.last_used_s)],
          [
            "",
            one =>
              h(
                "button",
                {
                  type: "button",
                  "aria-label": `End the session of ${one.user} from ${one.from_address || "unknown"}`,
                  onclick: event =>
                    act(event.currentTarget, async () => {
                      await send("DELETE", `/sessions/${one.id}`);
                      if (one.current) {
                        location.assign("/login");
                        return;
                      }
                      toast("The session has ended");
                      await read();
                    }),
                },
                one.current ? "End this one" : "End",
              ),
          ],
        ],
        items,
        "No browser is logged in.",
      ),
    );
  async function read() {
    const [mine, everyone] = await Promise.all([
      get("/sessions", {}, { signal }),
      sees ? get("/sessions", { everyone: true }, { signal }) : null,
    ]);
    list(own, "Your sessions", mine.items, read);
    if (everyone) list(all, "Everyone's sessions", everyone.items, read);
  }
  const [, again] = await Promise.all([
    read(),
    drawTokens(tokens, who, { signal }),
    drawNotifications(notifications, who, projects.items, { signal }),
  ]);
  const roles = Object.entries(who.roles)
    .map(([project, role]) => `${role} of ${project}`)
    .join(", ");
  replace(
    main,
    h("h1", {}, who.user),
    facts([
      [
        "logged in by",
        {
          open: "loopback: no login is needed here",
          session: "a session",
          token: "a token",
          proxy: "the proxy",
        }[who.via] || who.via,
      ],
      ["scope", who.scope],
      who.administrator ? ["", "administrator"] : null,
      roles ? ["roles", roles] : null,
    ]),
    section("Your notifications", notifications),
    section("Your sessions", own),
    section(
      "Your tokens",
      tokens,
      hasScope(who, "submit")
        ? h(
            "p",
            {},
            h(
              "button",
              {
                type: "button",
                onclick: async () => {
                  if (await createToken(who, projects.items)) await again();
                },
              },
              "Create a token",
            ),
          )
        : null,
    ),
    sees ? section("Everyone's sessions", all) : null,
  );
  return { title: who.user };
}
