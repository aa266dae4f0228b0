// The catalogue of hardware: what each kind of device computes, draws and costs, and where the figures come from.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { money, number } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { shortTable } from "./parts.js";

const best = entry => Math.max(0, ...Object.values(entry.peak_tflops || {}));
const ORDERS = {
  price: ["price", (a, b) => a.price_usd_per_hour - b.price_usd_per_hour],
  name: ["name", (a, b) => a.name.localeCompare(b.name)],
  peak: ["peak", (a, b) => best(b) - best(a)],
  worth: ["peak per price", (a, b) => best(b) / b.price_usd_per_hour - best(a) / a.price_usd_per_hour],
};

export async function show(main, parameters, { signal }) {
  const [{ items }, cluster] = await Promise.all([
    get("/hardware", {}, { signal }),
    get("/cluster", {}, { signal }),
  ]);
  const table = h("div"),
    search = h("input", {
      type: "search",
      placeholder: "Search",
      "aria-label": "Search the hardware",
      value: query().get("q") || "",
    });
  const order = h(
    "select",
    { name: "order" },
    Object.entries(ORDERS).map(([name, [title]]) =>
      h("option", { value: name, selected: name === query().get("order") }, title),
    ),
  );
  const has = ({ totals }, entry) =>
    entry.accelerator_type
      ? totals[`accelerator_type:${entry.accelerator_type}`] > 0
      : totals.CPU > 0 && entry.device === "cpu";
  const where = entry =>
    cluster.pools
      .filter(pool => has(pool, entry))
      .map(({ pool }) =>
        h("span", { class: "chip" }, cluster.pools.length === 1 ? "in the cluster" : `in pool ${pool}`),
      );
  const draw = () => {
    const word = search.value.trim().toLowerCase();
    setQuery({ q: word, order: order.value === "price" ? null : order.value });
    const rows = items
      .filter(one => [one.name, one.device, ...one.aliases].join(" ").toLowerCase().includes(word))
      .sort(ORDERS[order.value][1]);
    replace(
      table,
      shortTable(
        "Hardware and prices",
        [
          [
            "Name",
            one => [
              h("b", {}, one.name),
              one.aliases.length ? h("span", { class: "quiet" }, ` ${one.aliases.join(", ")}`) : null,
              where(one),
            ],
            "wide",
          ],
          ["Kind", one => one.device],
          ["Price", one => `${money(one.price_usd_per_hour)}/h`, "num"],
          ["Power", one => number(one.tdp_w, "W"), "num"],
          ["Memory", one => number(one.memory_gib, "GiB"), "num"],
          ["Bandwidth", one => number(one.bandwidth_gb_s, "GB/s"), "num"],
          [
            "Peak, TFLOP/s",
            one =>
              Object.entries(one.peak_tflops || {})
                .map(([precision, value]) => `${precision} ${number(value)}`)
                .join(", ") || "–",
            "wide",
          ],
          ["Precisions", one => one.precisions.join(", "), "wide"],
          [
            "Sources",
            one =>
              h(
                "details",
                {},
                h("summary", {}, "sources"),
                h("p", {}, `Price of ${one.price_date}: ${one.price_source}`),
                h("p", {}, one.source ? `Data sheet: ${one.source}` : "No data sheet."),
                one.without_data_sheet.length
                  ? h("p", {}, `Not from a data sheet: ${one.without_data_sheet.join(", ")}`)
                  : null,
              ),
            "wide",
          ],
        ],
        rows,
        "No hardware has that name.",
      ),
    );
  };
  search.addEventListener("input", draw, { signal });
  order.addEventListener("change", draw, { signal });
  replace(
    main,
    h("h1", {}, "Hardware and prices"),
    h(
      "p",
      { class: "quiet" },
      "What specs may name as ",
      h("code", {}, "hardware"),
      ". Your own entries come from ",
      h("code", {}, "hardware.yaml"),
      " in the data folder.",
    ),
    h("div", { class: "tools" }, h("span", { class: "grow" }, search), h("label", {}, "order ", order)),
    table,
  );
  draw();
  return { title: "Hardware and prices" };
}
