// Weights and gradients of each layer over the steps that the spec asked for: a column per step.

import { get } from "../../core/api.js";
import { h, replace, svg } from "../../core/dom.js";
import { count, number } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty } from "../../core/states.js";
import { choice } from "../parts.js";

const BINS = 64,
  WIDTH = 320,
  HEIGHT = 128,
  SHADES = 8,
  MOST_COLUMNS = 60;

/** Some of many, evenly spread, with the first and the last. */
export const spread = (all, most) =>
  all.length <= most
    ? all
    : Array.from({ length: most }, (_, place) => all[Math.round((place * (all.length - 1)) / (most - 1))]);

/**
 * What to fill with each of the shades, as the data of paths; the axis goes from -most to most.
 * @param {Array<[number, number[]]|null>} columns largest magnitude and counts of each step; null = not known
 */
export function shaded(columns, most) {
  const paths = Array.from({ length: SHADES }, () => ""),
    width = WIDTH / columns.length;
  columns.forEach((column, place) => {
    if (!column) return;
    const [own, counts] = column,
      height = most ? (HEIGHT * own) / most / BINS : HEIGHT / BINS,
      highest = Math.log1p(Math.max(...counts));
    counts.forEach((of, bin) => {
      if (!of) return;
      const shade = Math.min(SHADES - 1, Math.floor((SHADES * Math.log1p(of)) / highest)),
        y = HEIGHT / 2 + (BINS / 2 - bin - 1) * height;
      paths[shade] +=
        `M${(place * width).toFixed(1)} ${y.toFixed(2)}h${(width + 0.1).toFixed(1)}v${(height + 0.1).toFixed(2)}h-${(width + 0.1).toFixed(1)}z`;
    });
  });
  return paths;
}

function picture(layer, kind, records) {
  const columns = spread(records, MOST_COLUMNS).map(one => one.layers[layer]?.[kind] ?? null),
    known = columns.filter(Boolean),
    most = Math.max(0, ...known.map(([own]) => own)),
    last = known.at(-1);
  if (!known.length) return h("p", { class: "quiet" }, "No finite values.");
  return [
    svg(
      "svg",
      {
        class: "histogram",
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${kind} of ${layer} from ${number(-most, "", 3)} to ${number(most, "", 3)}`,
      },
      shaded(columns, most).map((path, shade) =>
        path ? svg("path", { d: path, "fill-opacity": (shade + 1) / SHADES }) : null,
      ),
    ),
    h(
      "p",
      { class: "quiet" },
      `±${number(most, "", 3)}, steps ${count(records[0].step)} to ${count(records.at(-1).step)}; at the end ±${number(last[0], "", 3)}`,
    ),
  ];
}

export async function show(panel, context, { signal }) {
  const records = await get(`/runs/${context.id}/histograms`, {}, { signal });
  if (!records.length) {
    replace(
      panel,
      empty(
        "No histograms were kept; submit it with telemetry.histogram_steps, such as 50, for weights and gradients.",
      ),
    );
    return;
  }
  const layers = [...new Set(records.flatMap(one => Object.keys(one.layers)))];
  const area = h("div", { class: "grid plots histograms" });
  const draw = kind =>
    replace(
      area,
      layers.map(layer =>
        h(
          "section",
          { class: "card pad", "aria-label": layer },
          h("h3", {}, layer),
          picture(layer, kind, records),
        ),
      ),
    );
  const asked = query().get("of") === "gradients" ? "gradients" : "weights";
  replace(
    panel,
    h(
      "div",
      { class: "tools" },
      h(
        "label",
        {},
        "of ",
        choice("of", ["weights", "gradients"], asked, {
          onchange: event => {
            setQuery({ of: event.target.value === "weights" ? null : event.target.value });
            draw(event.target.value);
          },
        }),
      ),
    ),
    h(
      "p",
      { class: "quiet" },
      "A column is a step, zero is in the middle, and a stronger colour means more values, on a logarithmic scale; as rank 0 had them.",
    ),
    area,
  );
  draw(asked);
}
