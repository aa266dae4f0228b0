// A saved dashboard, or the figures that the address names, without anything around them: for a frame in another page.
// Links open pages of their own (`go` in core/router.js), so that a frame never shows what changes something.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { query } from "../core/router.js";
import { empty, missing } from "../core/states.js";
import { drawPanels, written } from "./panels.js";

export async function show(main, { id }, { signal }) {
  let name = "",
    dashboard = written(query());
  if (id) {
    const { items } = await get("/views", { kind: "dashboard" }, { signal });
    const found = items.find(one => String(one.id) === id);
    if (!found) {
      replace(main, missing());
      return { title: "Not found" };
    }
    name = found.name;
    dashboard = written(new URLSearchParams(found.query));
  }
  const area = h("div", { class: "dashboard" });
  replace(main, name ? h("h1", {}, name) : h("h1", { class: "unseen" }, "Figures"), area);
  if (dashboard.panels.length) await drawPanels(area, dashboard, signal);
  else replace(area, empty("The address names no figure: give panel=figure%3Dcurve."));
  return { title: name || "Figures" };
}
