// A field for a filter, which offers the names and values that fit at the cursor.

import { h, replace } from "../core/dom.js";

const MOST_OFFERED = 12;
let lists = 0;

/**
 * What may be written at the cursor: the text before and after the word there, the words that fit, and whether one is begun.
 * @param {string} text
 * @param {number} at place of the cursor
 * @param {{names: string[], values: (name: string) => string[]}} words
 */
export function fitting(text, at, { names, values }) {
  const [, before, word] = /^(.*?)([\w.]*)$/s.exec(text.slice(0, at));
  const [, rest, after] = /^([\w.]*)(.*)$/s.exec(text.slice(at));
  const compared = /([\w.]+)\s*(?:!=|[=<>]=?)\s*'?$/.exec(before);
  const all = new Set(compared ? values(compared[1]) : names);
  const found = [...all].filter(one => one.startsWith(word) && one !== word + rest);
  return { before, after, words: found.slice(0, MOST_OFFERED), begun: Boolean(word || compared) };
}

/**
 * A field for a filter. While one types, and at the down arrow, it lists what fits at the cursor.
 * @param {string} value
 * @param {(event: any) => void} oninput
 * @param {{names: string[], values: (name: string) => string[]}} words names, and the values of one of them
 * @param {Object} attributes
 */
export function filterInput(value, oninput, words, attributes = {}) {
  const id = `words-${lists++}`;
  const list = h("ul", {
    id,
    role: "listbox",
    "aria-label": "What fits here",
    class: "offered",
    hidden: true,
  });
  const input = h("input", {
    type: "search",
    value,
    role: "combobox",
    "aria-autocomplete": "list",
    "aria-controls": id,
    "aria-expanded": "false",
    spellcheck: "false",
    autocomplete: "off",
    ...attributes,
  });
  let chosen = -1;
  const here = () => fitting(input.value, input.selectionStart, words);
  const mark = place => {
    chosen = place;
    [...list.children].forEach((node, other) => node.setAttribute("aria-selected", String(other === place)));
    if (place < 0) input.removeAttribute("aria-activedescendant");
    else input.setAttribute("aria-activedescendant", `${id}-${place}`);
  };
  const show = found => {
    list.hidden = !found.length;
    input.setAttribute("aria-expanded", String(!list.hidden));
    replace(
      list,
      found.map((word, place) =>
        h("li", { id: `${id}-${place}`, role: "option", onmousedown: event => taken(event, place) }, word),
      ),
    );
    mark(-1);
  };
  const taken = (event, place) => {
    event.preventDefault();
    const { before, after, words: found } = here();
    input.value = before + found[place] + after;
    input.setSelectionRange(before.length + found[place].length, before.length + found[place].length);
    show([]);
    oninput({ target: input });
  };
  input.addEventListener("input", event => {
    const { words: found, begun } = here();
    show(begun ? found : []);
    oninput(event);
  });
  input.addEventListener("blur", () => show([]));
  input.addEventListener("keydown", event => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (list.hidden) show(here().words);
      const count = list.children.length;
      if (count) mark((chosen + (event.key === "ArrowDown" ? 1 : chosen < 0 ? count : count - 1)) % count);
    } else if (list.hidden) return;
    else if (event.key === "Enter" && chosen >= 0) taken(event, chosen);
    else if (event.key === "Escape") {
      event.preventDefault();
      show([]);
    }
  });
  return h("span", { class: "completed" }, input, list);
}
