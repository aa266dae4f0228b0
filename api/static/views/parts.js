// Small parts that several pages share.

import { h, made, Made } from "../core/dom.js";
import { count, RUN_STATES } from "../core/format.js";
import { html } from "../vendor/preact.js";

/** What a cell holds: of `h`, or of preact. */
const cell = value =>
  [value].flat(Infinity).some(one => one instanceof Node) ? html`<${Made} nodes=${value} />` : value;

/**
 * A table of few rows.
 * @param {Object} properties
 * @param {string} properties.caption for people who do not see it
 * @param {Array} properties.columns [title, draw(row), class]
 * @param {Array} properties.rows
 * @param {string} [properties.none] what to say where there are no rows
 * @param {(row: any) => any} [properties.id] tells rows apart that are drawn again
 */
export function ShortTable({ caption, columns, rows, none = "None.", id }) {
  if (!rows.length) return html`<p class="quiet">${none}</p>`;
  return html`<div class="card scrolls" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption class="unseen">
        ${caption}
      </caption>
      <thead>
        <tr>
          ${columns.map(
            ([title, , kind]) =>
              html`<th scope="col" class=${kind}>${title || html`<span class="unseen">Actions</span>`}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          row =>
            html`<tr key=${id?.(row)}>
              ${columns.map(([, draw, kind]) => html`<td class=${kind}>${cell(draw(row))}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A table of few rows, as an element; see `ShortTable`. */
export const shortTable = (caption, columns, rows, none = undefined) =>
  made(html`<${ShortTable} ...${{ caption, columns, rows, none }} />`);

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

export { filterInput } from "./filter.js";

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
