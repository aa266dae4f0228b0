// Elements are made without markup: whatever comes from users goes in as text. What changes while it is seen is drawn
// by preact, which changes only what differs; the rest is made by `h`.

import { html, render } from "../vendor/preact.js";

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style")
      for (const [name, given] of Object.entries(value)) node.style.setProperty(name, given);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(
    ...children
      .flat(Infinity)
      .filter(child => child !== null && child !== undefined && child !== false)
      .map(child => (child instanceof Node ? child : String(child))),
  );
  return node;
}

/**
 * An element.
 * @param {string} name tag
 * @param {Object} attributes `onclick` and the like are listeners, `style` is an object of properties; null, undefined
 *   and false are left out, true is an empty attribute
 * @param {...any} children nodes, text, and arrays of them; null, undefined and false are left out
 */
export const h = (name, attributes = {}, ...children) =>
  filled(document.createElement(name), attributes, children);

/** An element of a drawing; see `h`. */
export const svg = (name, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, name), attributes, children);

/** Puts children in the place of what a node holds; see `h` for what they may be. */
export function replace(node, ...children) {
  node.replaceChildren();
  return filled(node, {}, children);
}

/** The element that preact makes of `drawn`, for what is put in by `h`. */
export function made(drawn) {
  const place = document.createDocumentFragment();
  render(drawn, place);
  return place.firstChild;
}

/**
 * What `h` made, within what preact draws; while it is equal, it stays, with its focus. Not for what has listeners.
 * @param {{nodes: any}} properties see `h` for what they may be
 */
export function Made({ nodes }) {
  const put = place => {
    if (!place) return;
    const given = h("span", {}, nodes);
    if (!given.isEqualNode(place)) place.replaceChildren(...given.childNodes);
  };
  return html`<span ref=${put} />`;
}

/** Says something to people who do not see the page; it interrupts nothing. */
export function announce(text) {
  document.getElementById("said").textContent = text;
}

/** The value of `call` once nothing has called it for so long, in milliseconds. */
export function debounced(call, wait, signal) {
  let timer;
  signal?.addEventListener("abort", () => clearTimeout(timer));
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...given), wait);
  };
}
