// The axes of a spec as chips: each change is made in the text, which stays the truth.

import { h, replace } from "../../core/dom.js";
import { at, locate, written } from "./yaml.js";

const AXES = "search.axes";

/** Edits of a text at lists and sections, as [start, end, replacement]. */
export const edits = {
  /** Adds a value to a list; what is no list becomes one. */
  add(text, node, value) {
    const word = written(value);
    if (node.kind === "empty") return [node.end, node.end, ` [${word}]`];
    if (node.kind !== "list") return [node.start, node.end, `[${text.slice(node.start, node.end)}, ${word}]`];
    const last = node.items.at(-1);
    if (!last) return [node.start + 1, node.start + 1, word];
    if (node.flow) return [last.end, last.end, `, ${word}`];
    const start = text.lastIndexOf("\n", last.dash) + 1;
    return [last.end, last.end, `\n${text.slice(start, last.dash)}- ${word}`];
  },
  /** Takes the value at a position out of a list. */
  remove(text, node, number) {
    const { items, flow } = node,
      item = items[number];
    if (!flow) return lines(text, item.dash, item.end);
    if (number + 1 < items.length) return [item.start, items[number + 1].start, ""];
    return [number ? items[number - 1].end : item.start, item.end, ""];
  },
  /** Adds an axis with its first values. */
  addAxis(text, root, name, values) {
    const entry = `${name}: [${values.map(written).join(", ")}]`,
      axes = at(root, AXES),
      search = at(root, "search");
    const inside = (node, line) => {
      const last = node.entries.at(-1);
      if (node.flow)
        return last ? [last.value.end, last.value.end, `, ${line}`] : [node.start + 1, node.start + 1, line];
      return [last.value.end, last.value.end, `\n${" ".repeat(node.column)}${line}`];
    };
    if (axes?.kind === "map" && (axes.flow || axes.entries.length)) return inside(axes, entry);
    if (axes) return [axes.start, axes.end, `${axes.kind === "empty" ? " " : ""}{${entry}}`];
    if (search?.kind === "map" && (search.flow || search.entries.length))
      return inside(
        search,
        search.flow ? `axes: {${entry}}` : `axes:\n${" ".repeat(search.column + 2)}${entry}`,
      );
    if (search) return [search.start, search.end, `${search.kind === "empty" ? " " : ""}{axes: {${entry}}}`];
    if (root.flow) return inside(root, `search: {axes: {${entry}}}`);
    return [text.trimEnd().length, text.length, `${text.trim() ? "\n" : ""}search:\n  axes:\n    ${entry}\n`];
  },
  /** Takes an axis away. */
  removeAxis(text, root, name) {
    const axes = at(root, AXES),
      number = axes.entries.findIndex(({ key }) => key === name),
      entry = axes.entries[number];
    if (axes.entries.length === 1)
      return axes.flow
        ? [axes.start, axes.end, "{}"]
        : [text.lastIndexOf(":", axes.start) + 1, axes.end, " {}"];
    if (!axes.flow) return lines(text, entry.start, entry.value.end);
    if (number + 1 < axes.entries.length) return [entry.start, axes.entries[number + 1].start, ""];
    return [axes.entries[number - 1].value.end, entry.value.end, ""];
  },
};

/** Whole lines, with their line break. */
function lines(text, start, end) {
  const first = text.lastIndexOf("\n", start - 1) + 1,
    next = text.indexOf("\n", end);
  if (next < 0) return [Math.max(0, first - 1), text.length, ""];
  return [first, next + 1, ""];
}

/** The chips of a spec: its axes, then its seeds. `edit(start, end, text)` changes the text. */
export function drawAxes(panel, { text, root, schema, edit }) {
  const group = (name, node, number, { axis }) => {
    const list = node.kind === "list" ? node.items : [],
      options = axis ? schema.values(["search", "axes", name]) : [];
    const input = h("input", {
      class: "chip-input",
      "aria-label": `Add a value to ${name}`,
      placeholder: "add",
      size: 8,
      list: `axis-values-${number}`,
    });
    const submit = event => {
      event.preventDefault();
      if (input.value.trim()) edit(...edits.add(text, node, input.value.trim()));
    };
    return h(
      "div",
      { class: "axis", role: "group", "aria-label": name },
      h("span", { class: "axis-name" }, name),
      list.map((item, place) =>
        h(
          "span",
          { class: "chip" },
          item.text ?? text.slice(item.start, item.end),
          h(
            "button",
            {
              type: "button",
              "aria-label": `Remove ${item.text ?? "value"} from ${name}`,
              onclick: () => edit(...edits.remove(text, node, place)),
            },
            "×",
          ),
        ),
      ),
      node.kind === "map"
        ? h("span", { class: "chip" }, text.slice(node.start, node.end))
        : h(
            "form",
            { class: "chip-form", onsubmit: submit },
            input,
            h(
              "datalist",
              { id: `axis-values-${number}` },
              options.map(value => h("option", { value })),
            ),
            h("button", { type: "submit", "aria-label": `Add the value to ${name}` }, "+"),
          ),
      axis
        ? h(
            "button",
            {
              type: "button",
              class: "axis-remove",
              "aria-label": `Remove axis ${name}`,
              onclick: () => edit(...edits.removeAxis(text, root, name)),
            },
            "Remove",
          )
        : null,
    );
  };
  const axes = at(root, AXES)?.entries || [],
    seeds = at(root, "seeds");
  const taken = new Set(axes.map(({ key }) => key));
  const field = h("input", {
    class: "chip-input wide",
    "aria-label": "Field of a new axis",
    placeholder: "new axis, such as precision",
    list: "axis-fields",
  });
  const addAxis = event => {
    event.preventDefault();
    const name = field.value.trim();
    if (!name || taken.has(name)) return;
    const present = at(root, name),
      initial = schema.fields().find(([known]) => known === name)?.[1].default;
    const first =
      present?.kind === "scalar"
        ? present.text
        : initial !== undefined && (initial === null || typeof initial !== "object")
          ? String(initial)
          : "";
    edit(...edits.addAxis(text, root, name, first === "" ? [] : [first]));
  };
  replace(
    panel,
    axes.map(({ key, value }, number) => group(key, value, number, { axis: true })),
    seeds ? group("seeds", seeds, axes.length, { axis: false }) : null,
    h(
      "form",
      { class: "axis chip-form", onsubmit: addAxis },
      field,
      h(
        "datalist",
        { id: "axis-fields" },
        schema
          .fields()
          .filter(([name]) => !taken.has(name))
          .map(([name, { description }]) =>
            h("option", { value: name }, (description || "").split("\n", 1)[0]),
          ),
      ),
      h("button", { type: "submit" }, "Add axis"),
    ),
  );
}

/** The values of the grid point that a message names; none where it names none. */
function pointIn(message) {
  const found = /^grid point (\{.*?\}): /.exec(message);
  try {
    return found ? JSON.parse(found[1]) : {};
  } catch {
    return {};
  }
}

/** Where a problem is in the text: position and length; the whole text where its path is not in it. */
export function placeOf(root, text, { path, message }) {
  const line = /^line (\d+)/.exec(message);
  if (line) {
    const start =
      text
        .split("\n")
        .slice(0, Number(line[1]) - 1)
        .join("\n").length + (Number(line[1]) > 1 ? 1 : 0);
    return { start, end: start + text.slice(start).split("\n", 1)[0].length, whole: true };
  }
  let found = locate(root, path);
  if (!found.whole) {
    const inAxes = locate(root, `${AXES}.${path}`);
    if (inAxes.whole) {
      const value = pointIn(message)[path],
        item = inAxes.node.items?.find(one => one.text === String(value));
      found = item ? { place: item, node: item, whole: true } : inAxes;
    }
  }
  if (!found.place) return { start: 0, end: 0, whole: false };
  return { start: found.place.start, end: found.place.keyEnd ?? found.place.end, whole: found.whole };
}
