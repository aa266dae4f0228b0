// The data of a run, as its files have it: what each part holds, and samples of it.

import { get } from "../../core/api.js";
import { h, replace, svg } from "../../core/dom.js";
import { count, percent } from "../../core/format.js";
import { empty, loading } from "../../core/states.js";
import { facts, section, shortTable } from "../parts.js";

const WIDTH = 480,
  HEIGHT = 120;

/** Lengths as bars; those beyond what the run cuts stand out. */
function lengths(bars, limit) {
  const most = Math.max(...bars.map(([, number]) => number)),
    width = WIDTH / bars.length;
  return svg(
    "svg",
    {
      class: "lengths",
      viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`,
      role: "img",
      "aria-label": `Lengths of up to ${count(bars.at(-1)[0])} tokens`,
    },
    bars.map(([end, number], place) =>
      svg(
        "rect",
        {
          class: end > limit ? "cut" : "",
          x: place * width + 1,
          y: HEIGHT - (HEIGHT * number) / most,
          width: width - 2,
          height: (HEIGHT * number) / most,
        },
        svg("title", {}, `up to ${count(end)} tokens: ${count(number)} examples`),
      ),
    ),
    svg("text", { x: 0, y: HEIGHT + 14 }, "0"),
    svg("text", { x: WIDTH, y: HEIGHT + 14, "text-anchor": "end" }, `${count(bars.at(-1)[0])} tokens`),
  );
}

function labels(field, numbers) {
  const rows = Object.entries(numbers),
    all = rows.reduce((sum, [, number]) => sum + number, 0),
    most = Math.max(...rows.map(([, number]) => number));
  return [
    h("h4", {}, "Labels in ", h("code", {}, field)),
    h(
      "ol",
      { class: "ranked", "aria-label": `Labels in ${field}` },
      rows.map(([label, number]) =>
        h(
          "li",
          {},
          h("span", { class: "name", title: label }, label),
          h("span", {
            class: "length",
            "aria-hidden": "true",
            style: { width: `${(100 * number) / most}%` },
          }),
          h("span", { class: "num" }, `${count(number)} (${percent(number / all, 1)})`),
        ),
      ),
    ),
  ];
}

const written = value => (typeof value === "string" ? value : JSON.stringify(value));

function part(name, of, limit) {
  const beyond = of.lengths.filter(([end]) => end > limit).length;
  return section(
    `${name} part`,
    facts([
      ["rows", `${count(of.rows)}${of.whole ? "" : ", more were not read"}`],
      ["usable", count(of.usable)],
      ["duplicates", count(of.duplicates)],
      ...Object.entries(of.percentiles).map(([share, tokens]) => [
        share === "100" ? "longest" : `${share}% have up to`,
        `${count(tokens)} tokens`,
      ]),
    ]),
    of.remarks.map(remark => h("p", { class: "card pad problem" }, remark)),
    h(
      "div",
      { class: "grid plots" },
      of.lengths.length
        ? h(
            "div",
            { class: "card pad" },
            h("h3", {}, "Lengths"),
            lengths(of.lengths, limit),
            beyond
              ? h("p", { class: "quiet" }, `In red: beyond the ${count(limit)} tokens that the run reads.`)
              : null,
          )
        : null,
      Object.keys(of.labels).length
        ? h(
            "div",
            { class: "card pad" },
            h("h3", {}, "Labels"),
            Object.entries(of.labels).map(([field, numbers]) => labels(field, numbers)),
          )
        : null,
    ),
    h("h3", {}, "Samples"),
    shortTable(
      `Samples of the ${name} part`,
      [
        [
          "Label",
          one =>
            Object.values(one.labels).map(value =>
              h("span", { class: "chip" }, written(value).slice(0, 200)),
            ),
        ],
        ["Text", one => one.texts.map(text => h("p", { class: "sample" }, text)), "wide"],
        ["Where", one => h("code", {}, one.where), "wide"],
      ],
      of.samples,
    ),
  );
}

export async function show(panel, context, { signal }) {
  replace(panel, loading("Reading the data"));
  const data = await get(`/runs/${context.id}/data`, {}, { signal });
  if (data.problem) {
    replace(panel, empty(`The data cannot be shown: ${data.problem}.`));
    return;
  }
  const shared = Object.entries(data.shared);
  replace(
    panel,
    h(
      "p",
      { class: "quiet" },
      `What its files hold now, before the run divides them or draws from them; tokens are ${data.token_count}.`,
    ),
    shared.length
      ? facts(
          shared.map(([names, number]) => [
            `in ${names}`,
            number ? h("b", { class: "bad" }, count(number)) : "none",
          ]),
        )
      : null,
    Object.entries(data.parts).map(([name, of]) => part(name, of, data.max_length)),
  );
}
