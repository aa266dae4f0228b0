// What tabs with figures share: choices that live in the address, and a figure that follows them.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { ENDED } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { empty, failure, loading } from "../core/states.js";

/** The experiments of a tab: one, or those that are compared. */
export const idsOf = context => context.ids || [context.id];

/** Asks a question of a tab's experiments; what was asked a moment ago, as before a brush, is not asked again. */
export async function ask(context, question, parameters, { signal }) {
  const [first, ...also] = idsOf(context),
    key = JSON.stringify([question, parameters]);
  context.answers ||= new Map();
  if (!context.answers.has(key)) {
    const answer = await get(`/experiments/${first}/${question}`, { ...parameters, also }, { signal });
    if (context.answers.size >= MOST_KEPT) context.answers.delete(context.answers.keys().next().value);
    context.answers.set(key, answer);
  }
  return context.answers.get(key);
}

const MOST_KEPT = 6;

/** What can be drawn of a tab's experiments; asked for once. */
export function choices(context, options) {
  context.choices ||= ask(context, "figures", {}, options).catch(error => {
    context.choices = null;
    throw error;
  });
  return context.choices;
}

/** The choices in the address: fields with their defaults, lists where the default is one. */
export function chosen(fields) {
  const given = query();
  return Object.fromEntries(
    Object.entries(fields).map(([name, plain]) => [
      name,
      Array.isArray(plain) ? (given.has(name) ? given.getAll(name) : plain) : (given.get(name) ?? plain),
    ]),
  );
}

/** Writes choices into the address; those that are as by default are left out. */
export function kept(view, fields) {
  setQuery(
    Object.fromEntries(
      Object.entries(view).map(([name, value]) => [
        name,
        JSON.stringify(value) === JSON.stringify(fields[name]) ? null : value,
      ]),
    ),
  );
}

/** A labelled list to choose from; options are [value, title] or values. */
export function select(label, options, value, onchange) {
  const all = options.map(option => (Array.isArray(option) ? option : [option, option]));
  if (value && !all.some(([one]) => one === value)) all.push([value, value]);
  return h(
    "label",
    { class: "field" },
    label,
    h(
      "select",
      { "aria-label": label, onchange: event => onchange(event.target.value) },
      all.map(([one, title]) => h("option", { value: one, selected: one === value }, title)),
    ),
  );
}

/** A labelled field; `onchange` is called with its text when it is left or Enter is pressed. */
export const field = (label, value, onchange, attributes = {}) =>
  h(
    "label",
    { class: "field" },
    label,
    h("input", {
      type: "text",
      "aria-label": label,
      value,
      onchange: event => onchange(event.target.value.trim()),
      ...attributes,
    }),
  );

/** A labelled box to tick. */
export const tick = (label, checked, onchange) =>
  h(
    "label",
    { class: "tick" },
    h("input", { type: "checkbox", checked, onchange: event => onchange(event.target.checked) }),
    ` ${label}`,
  );

/** Metrics as options, with their units. */
export const metricOptions = metrics =>
  metrics.map(({ name, title, unit }) => [
    name,
    unit && unit !== "1" && !unit.startsWith("share") ? `${title} (${unit})` : title,
  ]);

/** The field of a filter of runs. */
export const filterField = (view, set) =>
  field("filter", view.filter, filter => set({ filter }), {
    class: "filter",
    placeholder: "precision = bf16 and seed < 3",
    spellcheck: "false",
  });

/** Links to runs: the first ones, and all of them in the table of runs. */
export function runLinks(context, runs, most = 8) {
  const [first, ...more] = idsOf(context);
  const all =
    !more.length && runs.length > 1 && runs.length <= 200
      ? h(
          "a",
          { href: `/experiments/${first}/runs?filter=${encodeURIComponent(`id IN (${runs.join(", ")})`)}` },
          "in the table",
        )
      : null;
  return [
    runs.slice(0, most).map(run => [h("a", { href: `/runs/${run}` }, `run:${run}`), " "]),
    runs.length > most ? `and ${runs.length - most} more ` : "",
    all,
  ];
}

/**
 * Shows figures that follow choices.
 * @param {HTMLElement} panel
 * @param {Object} context of the tab
 * @param {{fields: Object, tools: Function, draw: Function, signal: AbortSignal, below?: Node, plots?: boolean}} options
 *   `plots`: they are Plotly's, whose script is read while the server answers; `tools(view, set, choices)` returns the controls; `draw(view, area, {signal, set, refresh})` asks and draws; the signal is aborted by the next choice,
 *   `refresh` shows the controls anew
 * @returns {Promise<{view: Object, again: (how?: {quiet?: boolean}) => Promise<void>}>} `again` reads and draws again with the
 *   same choices; quietly, what is shown is not dimmed meanwhile
 */
export async function board(panel, context, { fields, tools, draw, signal, below = null, plots = false }) {
  const view = chosen(fields);
  const area = h("div", { class: "figures" }, loading()),
    bar = h("div", { class: "tools choices" });
  let asked = new AbortController();
  signal.addEventListener("abort", () => asked.abort());
  if (plots) import("../core/figure.js").then(({ plotly }) => plotly()).catch(() => {});
  let known = null;
  const refresh = () => {
    const held = focused(bar);
    if (known) replace(bar, tools(view, set, known));
    refocus(bar, held);
  };
  const set = change => {
    Object.assign(view, change);
    kept(view, fields);
    refresh();
    return again();
  };
  const again = async ({ quiet = false } = {}) => {
    asked.abort();
    asked = new AbortController();
    const mine = asked.signal;
    if (!quiet) area.setAttribute("aria-busy", "true");
    try {
      await draw(view, area, { signal: mine, set, refresh });
    } catch (error) {
      if (error.name === "AbortError" || mine.aborted) return;
      replace(
        area,
        error.slug === "no-answer"
          ? empty(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`)
          : failure(error, again),
      );
    }
    if (!mine.aborted) area.setAttribute("aria-busy", "false");
  };
  replace(panel, bar, area, below);
  const listed = choices(context, { signal }).then(found => {
    known = found;
    refresh();
  });
  await Promise.all([listed, again()]);
  return {
    view,
    again: how => {
      context.answers?.clear();
      return again(how);
    },
  };
}

const controls = "input, select, button";
const focused = bar => [...bar.querySelectorAll(controls)].indexOf(document.activeElement);
const refocus = (bar, place) => {
  if (place >= 0) bar.querySelectorAll(controls)[place]?.focus();
};

/** Asks for a figure and draws it in an area, in the place of whatever else was there. */
export async function drawFigure(
  context,
  area,
  kind,
  parameters,
  { signal, options = {}, change = one => one, place = "only" },
) {
  const one = change(await ask(context, `figures/${kind}`, parameters, { signal }));
  const { figure } = await import("../core/figure.js");
  if (signal.aborted) return null;
  const id = `figure-${place}`;
  let container = area.querySelector(`[id="${id}"]`);
  if (!container) {
    if (place === "only") area.replaceChildren();
    container = h("figure", { class: "card pad", id });
    area.append(container);
  }
  await figure(container, one, { captioned: true, ...options });
  return one;
}

/** Calls at most once in so many milliseconds, at the end; not while the page is hidden. */
export function seldom(call, wait, signal) {
  let timer = null;
  signal.addEventListener("abort", () => clearTimeout(timer));
  let busy = false;
  const turn = async () => {
    timer = null;
    if (document.hidden || busy) return later(); // A slow answer is waited for, not asked for again.
    busy = true;
    try {
      await call();
    } finally {
      busy = false;
    }
  };
  const later = () => {
    timer ||= setTimeout(turn, wait);
  };
  return later;
}

/** Draws anew after runs have ended, at most every ten seconds. */
export function whenRunsEnd(context, again, signal) {
  const later = seldom(again, 10000, signal);
  context.onChange?.((kind, data) => {
    if (kind === "end" || (kind === "run" && ENDED.has(data.run.state))) later();
  });
}
