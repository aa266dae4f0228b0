// The axes of a spec as chips: each change is made in the text, which stays the truth.

import { html, render } from "../../vendor/preact.js";
import { at, drop, lineEnd, locate, put, wholeLines, written } from "./yaml.js";

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
    const end = lineEnd(text, last.end); // Behind a comment.
    return [end, end, `\n${text.slice(start, last.dash)}- ${word}`];
  },
  /** Takes the value at a position out of a list. */
  remove(text, node, number) {
    const { items, flow } = node,
      item = items[number];
    if (!flow) return wholeLines(text, item.dash, item.end);
    if (number + 1 < items.length) return [item.start, items[number + 1].start, ""];
    return [number ? items[number - 1].end : item.start, item.end, ""];
  },
  /** Adds an axis with its first values. */
  addAxis: (text, root, name, values) =>
    put(text, root, [...AXES.split("."), name], `[${values.map(written).join(", ")}]`),
  /** Takes an axis away. */
  removeAxis: (text, root, name) => drop(text, root, [...AXES.split("."), name]),
};

function Axis({ name, node, text, root, options, edit }) {
  const add = event => {
    event.preventDefault();
    const input = event.target.elements.value,
      value = input.value.trim();
    input.value = "";
    if (value) edit(...edits.add(text, node, value));
  };
  const items = node.kind === "list" ? node.items : [];
  return html`<div class="axis" role="group" aria-label=${name}>
    <span class="axis-name">${name}</span>
    ${items.map(
      (item, place) =>
        html`<span class="chip"
          >${item.text ?? text.slice(item.start, item.end)}
          <button
            type="button"
            aria-label=${`Remove ${item.text ?? "value"} from ${name}`}
            onClick=${() => edit(...edits.remove(text, node, place))}
          >
            ×
          </button></span
        >`,
    )}
    ${
      node.kind === "map"
        ? html`<span class="chip">${text.slice(node.start, node.end)}</span>`
        : html`<form class="chip-form" onSubmit=${add}>
            <input
              name="value"
              class="chip-input"
              aria-label=${`Add a value to ${name}`}
              placeholder="add"
              size="8"
              autocomplete="off"
              list=${`values-${name}`}
            />
            <datalist id=${`values-${name}`}>
              ${options.map(value => html`<option value=${value} />`)}
            </datalist>
            <button type="submit" aria-label=${`Add the value to ${name}`}>+</button>
          </form>`
    }
    <button
      type="button"
      class="axis-remove"
      aria-label=${`Remove axis ${name}`}
      onClick=${() => edit(...edits.removeAxis(text, root, name))}
    >
      Remove
    </button>
  </div>`;
}

/** The chips of a spec's axes. `edit(start, end, text)` changes the text. */
export function drawAxes(panel, { text, root, schema, edit }) {
  const axes = at(root, AXES)?.entries || [],
    taken = new Set(axes.map(({ key }) => key)),
    fields = schema.fields();
  const addAxis = event => {
    event.preventDefault();
    const input = event.target.elements.axis,
      name = input.value.trim();
    if (!name || taken.has(name)) return;
    input.value = "";
    const present = at(root, name),
      initial = fields.find(([known]) => known === name)?.[1].default;
    const first =
      present?.kind === "scalar"
        ? present.text
        : initial !== undefined && (initial === null || typeof initial !== "object")
          ? String(initial)
          : "";
    edit(...edits.addAxis(text, root, name, first === "" ? [] : [first]));
  };
  render(
    html`${axes.map(
      ({ key: name, value: node }) =>
        html`<${Axis}
            key=${name}
            ...${{ name, node, text, root, edit, options: schema.values(["search", "axes", name]) }}
          />`,
    )}
      <form class="axis chip-form" onSubmit=${addAxis}>
        <input
          name="axis"
          class="chip-input wide"
          aria-label="Field of a new axis"
          placeholder="new axis, such as precision"
          autocomplete="off"
          list="axis-fields"
        />
        <datalist id="axis-fields">
          ${fields
            .filter(([name]) => !taken.has(name))
            .map(
              ([name, { description }]) =>
                html`<option value=${name}>${(description || "").split("\n", 1)[0]}</option>`,
            )}
        </datalist>
        <button type="submit">Add axis</button>
      </form>`,
    panel,
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
