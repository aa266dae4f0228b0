// Users and service accounts; for administrators.

import { get, send } from "../core/api.js";
import { act, ask, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { choice, field, shortTable, tick } from "./parts.js";

export async function show(main, parameters, { signal }) {
  const area = h("div"),
    search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search people",
      value: query().get("q") || "",
    });
  let users = [];
  const change = (name, body) => send("PATCH", `/users/${encodeURIComponent(name)}`, body).then(read);
  const draw = () => {
    const word = search.value.trim().toLowerCase();
    setQuery({ q: word });
    replace(
      area,
      shortTable(
        "People",
        [
          ["Name", one => h("b", {}, one.name)],
          ["Kind", one => one.kind],
          ["E-mail", one => one.email || "–", "wide"],
          ["Administrator", one => (one.administrator ? "yes" : "no")],
          ["Added", one => when(one.created_s)],
          ["Disabled", one => (one.disabled_s ? h("span", { class: "bad" }, when(one.disabled_s)) : "no")],
          [
            "",
            one =>
              h(
                "span",
                { class: "actions" },
                h(
                  "button",
                  { type: "button", "aria-label": `Change ${one.name}`, onclick: () => edit(one) },
                  "Change",
                ),
                h(
                  "button",
                  {
                    type: "button",
                    "aria-label": `${one.disabled_s ? "Enable" : "Disable"} ${one.name}`,
                    onclick: event =>
                      act(event.currentTarget, async () => {
                        const disabled = !one.disabled_s;
                        await change(one.name, { disabled });
                        toast(
                          `${one.name} is ${disabled ? "disabled: their tokens and sessions are refused" : "enabled"}`,
                          { undo: () => change(one.name, { disabled: !disabled }) },
                        );
                      }),
                  },
                  one.disabled_s ? "Enable" : "Disable",
                ),
              ),
          ],
        ],
        users.filter(one => `${one.name} ${one.email || ""}`.toLowerCase().includes(word)),
        "No one has that name.",
      ),
    );
  };
  async function read() {
    ({ items: users } = await get("/users", {}, { signal }));
    draw();
  }
  const edit = one =>
    ask(
      `Change ${one.name}`,
      [
        field(
          "E-mail",
          h("input", { name: "email", type: "email", value: one.email || "", maxlength: 255 }),
          "Where messages go; empty = nowhere.",
        ),
        tick("Administrator: may do everything", "administrator", one.administrator),
      ],
      {
        action: "Save",
        check: ({ email, administrator }) =>
          change(one.name, { email, administrator: Boolean(administrator) }),
      },
    );
  const add = () =>
    ask(
      "Add a user",
      [
        field(
          "Name",
          h("input", { name: "name", required: true, maxlength: 100, autocomplete: "off" }),
          "Letters, digits and . _ @ -; experiments have it as owner.",
        ),
        field(
          "Kind",
          choice(
            "kind",
            [
              ["person", "person"],
              ["service", "service account"],
            ],
            "person",
          ),
        ),
        field("E-mail", h("input", { name: "email", type: "email", maxlength: 255 })),
        tick("Administrator: may do everything", "administrator"),
      ],
      {
        action: "Add",
        check: async ({ name, kind, email, administrator }) => {
          await send("POST", "/users", {
            name,
            kind,
            email: email || null,
            administrator: Boolean(administrator),
          });
          await read();
          toast(`${name} is added, a member of project default`);
        },
      },
    );

  await read();
  search.addEventListener("input", draw, { signal });
  replace(
    main,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "People"),
      h(
        "div",
        { class: "tools" },
        h("button", { type: "button", class: "primary", onclick: add }, "Add a user"),
      ),
    ),
    h("div", { class: "tools" }, h("span", { class: "grow" }, search)),
    area,
  );
  return { title: "People" };
}
