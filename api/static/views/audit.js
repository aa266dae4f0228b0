// Who changed what, when and from where; for administrators.

import { get } from "../core/api.js";
import { debounced, h, replace } from "../core/dom.js";
import { when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { view } from "../core/states.js";
import { choice, download, shortTable } from "./parts.js";

const PAGE = 200,
  FIELDS = [
    ["actor", "who, such as ada"],
    ["action", "action, such as token"],
    ["object", "object, such as experiment:17"],
  ];

/** How far back one looks, in days; empty = from the first row on. */
const PERIODS = [
  ["1", "last day"],
  ["7", "last week"],
  ["31", "last month"],
  ["", "all"],
];

const brief = (name, value) => (name.endsWith("_s") && typeof value === "number" ? when(value) : text(value));
const text = value =>
  value === null || value === undefined
    ? "–"
    : typeof value === "object"
      ? JSON.stringify(value)
      : String(value);

/** What changed, field by field. */
function changes({ before, after }) {
  const names = [...new Set([...Object.keys(before || {}), ...Object.keys(after || {})])];
  return names.length
    ? h(
        "ul",
        { class: "changes" },
        names.map(name =>
          h(
            "li",
            {},
            h("code", {}, name),
            ": ",
            before && name in before ? h("del", {}, brief(name, before[name])) : null,
            before && after ? " " : "",
            after && name in after ? h("ins", {}, brief(name, after[name])) : null,
          ),
        ),
      )
    : "";
}

export async function show(main, parameters, { signal }) {
  const asked = query(),
    filter = Object.fromEntries(FIELDS.map(([name]) => [name, asked.get(name) || ""]));
  let days = (asked.get("days") ?? "7").replace("all", "");
  const since = () => (days ? Math.floor(Date.now() / 1000 - 86400 * Number(days)) : null);
  let after = Number(asked.get("after")) || 0;
  const panel = h("div"),
    exports = h("span"),
    read = () => {
      replace(
        exports,
        ["jsonl", "csv"].map(format => [
          download(
            `/api/v1/audit/export?${new URLSearchParams(Object.entries({ format, ...filter, since_s: since()?.toString() }).filter(([, value]) => value))}`,
            format === "csv" ? "CSV" : "JSON lines",
          ),
          " ",
        ]),
      );
      return view(
        panel,
        () =>
          get("/audit", { ...filter, since_s: since(), after, newest_first: true, limit: PAGE }, { signal }),
        page => [
          shortTable(
            "Audit log",
            [
              ["#", one => one.id, "num"],
              ["When", one => when(one.at_s)],
              ["Who", one => one.actor],
              ["Token", one => one.token_id ?? "–"],
              ["From", one => one.address || "–"],
              ["Action", one => h("code", {}, one.action)],
              [
                "Object",
                one =>
                  one.object_kind === "experiment"
                    ? h("a", { href: `/experiments/${one.object_id}` }, `experiment ${one.object_id}`)
                    : `${one.object_kind} ${one.object_id}`,
              ],
              ["Change", changes, "wide"],
            ],
            page.items,
            "Nothing was changed that fits.",
          ),
          h(
            "p",
            { class: "actions" },
            after ? h("button", { type: "button", onclick: () => turn(0) }, "First page") : null,
            page.next_after
              ? h("button", { type: "button", onclick: () => turn(page.next_after) }, "Next page")
              : null,
          ),
        ],
        signal,
      );
    };
  const turn = to => {
    after = to;
    setQuery({ after: to || null }, { push: true });
    return read();
  };
  const again = debounced(
    () => {
      setQuery({ ...filter, days: days === "7" ? null : days || "all", after: null });
      after = 0;
      read();
    },
    300,
    signal,
  );
  await get("/audit", { limit: 1 }, { signal }); // Refused as a whole, for who may not.
  replace(
    main,
    h("div", { class: "head" }, h("h1", {}, "Audit log"), h("div", { class: "tools" }, exports)),
    h(
      "div",
      { class: "tools" },
      choice("days", PERIODS, days, {
        "aria-label": "Period",
        onchange: event => {
          days = event.target.value;
          again();
        },
      }),
      FIELDS.map(([name, hint]) =>
        h("input", {
          type: "search",
          placeholder: hint,
          "aria-label": hint,
          value: filter[name],
          maxlength: 200,
          oninput: event => {
            filter[name] = event.target.value.trim();
            again();
          },
        }),
      ),
    ),
    panel,
  );
  await read();
  return { title: "Audit log" };
}
