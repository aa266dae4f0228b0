// Who changed what, when and from where; for administrators.

import { get } from "../core/api.js";
import { debounced, h, replace } from "../core/dom.js";
import { when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { view } from "../core/states.js";
import { download, shortTable } from "./parts.js";

const PAGE = 200, FIELDS = [["actor", "who, such as ada"], ["action", "action, such as token"], ["object", "object, such as experiment:17"]];

const brief = (value) => (value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));

/** What changed, field by field. */
function changes({ before, after }) {
  const names = [...new Set([...Object.keys(before || {}), ...Object.keys(after || {})])];
  return names.length ? h("ul", { class: "changes" }, names.map((name) => h("li", {}, h("code", {}, name), ": ", before && name in before ? h("del", {}, brief(before[name])) : null, before && after ? " " : "", after && name in after ? h("ins", {}, brief(after[name])) : null))) : "";
}

export async function show(main, parameters, { signal }) {
  const asked = query(), filter = Object.fromEntries(FIELDS.map(([name]) => [name, asked.get(name) || ""]));
  let after = Number(asked.get("after")) || 0;
  const panel = h("div"), exports = h("span"), read = () => {
    replace(exports, ["jsonl", "csv"].map((format) => [download(`/api/v1/audit/export?${new URLSearchParams({ format, ...Object.fromEntries(Object.entries(filter).filter(([, value]) => value)) })}`, format === "csv" ? "CSV" : "JSON lines"), " "]));
    return view(panel, () => get("/audit", { ...filter, after, limit: PAGE }, { signal }), (page) => [
      shortTable("Audit log", [["#", (one) => one.id, "num"], ["When", (one) => when(one.at_s)], ["Who", (one) => one.actor], ["With", (one) => (one.token_id ? `token ${one.token_id}` : "session")], ["From", (one) => one.address || "–"],
        ["Action", (one) => h("code", {}, one.action)], ["Object", (one) => (one.object_kind === "experiment" ? h("a", { href: `/experiments/${one.object_id}` }, `experiment ${one.object_id}`) : `${one.object_kind} ${one.object_id}`)], ["Change", changes, "wide"]], page.items, "Nothing was changed that fits."),
      h("p", { class: "actions" }, after ? h("button", { type: "button", onclick: () => turn(0) }, "First page") : null, page.next_after ? h("button", { type: "button", onclick: () => turn(page.next_after) }, "Next page") : null)], signal);
  };
  const turn = (to) => { after = to; setQuery({ after: to || null }, { push: true }); return read(); };
  const again = debounced(() => { setQuery({ ...filter, after: null }); after = 0; read(); }, 300, signal);
  const first = await get("/audit", { limit: 1 }, { signal }); // Refused as a whole, for who may not.
  replace(main, h("div", { class: "head" }, h("h1", {}, "Audit log"), h("div", { class: "tools" }, exports)), first.items.length ? h("div", { class: "tools" }, FIELDS.map(([name, hint]) => h("input", { type: "search", placeholder: hint, "aria-label": hint, value: filter[name], maxlength: 200, oninput: (event) => { filter[name] = event.target.value.trim(); again(); } }))) : null, panel);
  await read();
  return { title: "Audit log" };
}
