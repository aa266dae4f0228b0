// Small parts that several pages share.

import { h, replace } from "../core/dom.js";
import { count, RUN_STATES } from "../core/format.js";

/**
 * A table of few rows.
 * @param {string} caption for people who do not see it
 * @param {Array} columns [title, draw(row), class]
 * @param {Array} rows
 * @param {string} none what to say where there are no rows
 */
export function shortTable(caption, columns, rows, none = "None.") {
  if (!rows.length) return h("p", { class: "quiet" }, none);
  return h(
    "div",
    { class: "card scrolls", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(([title, , kind]) =>
            h("th", { scope: "col", class: kind }, title || h("span", { class: "unseen" }, "Actions")),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map(row =>
          h(
            "tr",
            {},
            columns.map(([, draw, kind]) => h("td", { class: kind }, draw(row))),
          ),
        ),
      ),
    ),
  );
}

/** Names and values in a row. */
export const facts = pairs =>
  h(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([name, ...value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );

/** A part of a page under a heading. */
export const section = (title, ...content) => h("section", {}, h("h2", {}, title), content);

/** A field with its label, and what to know of it. */
export const field = (label, input, hint) =>
  h("label", { class: "field" }, label, input, hint ? h("span", { class: "quiet" }, hint) : null);

/** A box that is ticked or not, with its label. */
export const tick = (label, name, checked = false) =>
  h("label", {}, h("input", { type: "checkbox", name, checked }), ` ${label}`);

let lists = 0;

/**
 * A field for a filter; while a name or a value is typed, what it may be is offered.
 * @param {string} value
 * @param {(event: any) => void} oninput
 * @param {{names: string[], values: (name: string) => string[]}} words names, and the values of one of them
 * @param {Object} attributes
 */
export function filterInput(value, oninput, { names, values }, attributes = {}) {
  const list = h("datalist", { id: `words-${lists++}` });
  const offer = text => {
    const [, before, word] = /^(.*?)([\w.]*)$/s.exec(text);
    const compared = /([\w.]+)\s*(?:!=|[=<>]=?)\s*'?$/.exec(before);
    const fitting = (compared ? values(compared[1]) : names).filter(
      one => one.startsWith(word) && one !== word,
    );
    replace(
      list,
      fitting.slice(0, MOST_OFFERED).map(one => h("option", { value: before + one })),
    );
  };
  return [
    h("input", {
      type: "search",
      value,
      list: list.id,
      spellcheck: "false",
      autocomplete: "off",
      oninput: event => {
        offer(event.target.value);
        oninput(event);
      },
      ...attributes,
    }),
    list,
  ];
}

const MOST_OFFERED = 12;

/** A choice of words. */
export const choice = (name, options, chosen, more = {}) =>
  h(
    "select",
    { name, ...more },
    options.map(one => {
      const [value, text] = Array.isArray(one) ? one : [one, one];
      return h("option", { value, selected: value === chosen }, text);
    }),
  );

/** Text in a fixed font. */
export const code = (text, label) =>
  h("pre", { class: "code card pad", tabindex: "0", role: "region", "aria-label": label }, text);

/** A link that downloads. */
export const download = (path, text) => h("a", { href: path, download: "", class: "button" }, text);

/** A link to an experiment's job in the dashboard of Ray; null where there is none. */
export const jobLink = (cluster, experiment) =>
  cluster.dashboard_url && experiment.submission_id
    ? h(
        "a",
        {
          href: `${cluster.dashboard_url}/#/jobs/${encodeURIComponent(experiment.submission_id)}`,
          rel: "noopener",
          target: "_blank",
        },
        "job in the dashboard",
      )
    : null;

/** An experiment's runs by state: a bar of its states, then "188 succeeded, 12 failed" as links to those runs. */
export function runsByState({ id, run_states: counts, run_count: total }) {
  const states = RUN_STATES.filter(name => counts[name]);
  const words = states.map(name => `${count(counts[name])} ${name}`);
  return h(
    "span",
    { class: "runs-by-state" },
    h(
      "span",
      { class: "stack", role: "img", "aria-label": `${words.join(", ") || "no runs"}, of ${count(total)}` },
      states.map(name => h("i", { class: name, style: { "flex-grow": String(counts[name]) } })),
    ),
    states.map((name, place) => [
      place ? ", " : " ",
      h(
        "a",
        { class: name, href: `/experiments/${id}/runs?filter=${encodeURIComponent(`state = '${name}'`)}` },
        words[place],
      ),
    ]),
  );
}

/** Calls `draw` every few seconds while the page is seen, and at once when it is seen again. */
export function every(seconds, draw, signal) {
  const look = () => {
    if (!document.hidden && !signal.aborted) draw().catch(() => {});
  };
  const timer = setInterval(look, seconds * 1000);
  document.addEventListener("visibilitychange", look, { signal });
  signal.addEventListener("abort", () => clearInterval(timer));
}
