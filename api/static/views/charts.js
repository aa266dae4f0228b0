// What pages with charts of lines share: their controls, and what of them is in the address.

import { ChartGroup } from "../core/chart_group.js";
import { h } from "../core/dom.js";
import { query, setQuery } from "../core/router.js";

/** A slider with its value; `oninput` follows it, `onchange` is called when it is let go. */
export function slider(label, value, { oninput, onchange, ...attributes }) {
  const said = h("span", { class: "value", "aria-hidden": "true" }, value);
  const moved = event => {
    said.textContent = event.target.value;
    oninput(Number(event.target.value));
  };
  return h(
    "label",
    { class: "field slider" },
    h("span", {}, `${label} `, said),
    h("input", {
      type: "range",
      "aria-label": label,
      ...attributes,
      value, // After the range, to which it is fitted.
      oninput: moved,
      onchange: event => onchange(Number(event.target.value)),
    }),
  );
}

/** The chosen metrics, each of which can be left out again, and a list of those that can be added. */
export function metricChips(shown, left, set) {
  return [
    shown.map(name =>
      h(
        "span",
        { class: "chip" },
        name,
        shown.length > 1
          ? h(
              "button",
              {
                type: "button",
                "aria-label": `Leave out ${name}`,
                onclick: () => set(shown.filter(one => one !== name)),
              },
              "×",
            )
          : null,
      ),
    ),
    left.length && shown.length < MOST_METRICS
      ? h(
          "label",
          { class: "field" },
          "add",
          h(
            "select",
            { "aria-label": "Add a metric", onchange: event => set([...shown, event.target.value]) },
            [["", "a metric …"], ...left].map(([value, title]) => h("option", { value }, title)),
          ),
        )
      : null,
  ];
}

const MOST_METRICS = 8;

/** Charts that share what is in the address: zoom, hidden lines, two marks. */
export function addressedGroup() {
  const given = query(),
    pair = name => (given.get(name) || "").split("~").filter(Boolean).map(Number).filter(Number.isFinite);
  const zoom = pair("zoom");
  return new ChartGroup(
    {
      zoom: zoom.length === 2 && zoom[0] < zoom[1] ? /** @type {[number, number]} */ (zoom) : null,
      hidden: given.getAll("hidden"),
      marks: pair("marks").slice(0, 2),
    },
    ({ zoom, hidden, marks }) =>
      setQuery({
        zoom: zoom?.map(end => Number(end.toPrecision(6))).join("~"),
        hidden: [...hidden],
        marks: marks.join("~"),
      }),
  );
}
