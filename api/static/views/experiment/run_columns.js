// The columns of the table of runs: what there is, which of them are shown, and where and how wide each is.

import { h } from "../../core/dom.js";
import { count, metric, number, numeric, progress, state } from "../../core/format.js";

/** The name of an axis for filters and orders. */
export const axisKey = axis => (/^[\w.]+$/.test(axis) ? axis : `axis."${axis}"`);

/** Numbers that are no figures: their mean means nothing. */
const NAMES = new Set(
  "id experiment_id index seed repeat attempt reused_from first_attempt best_step checkpoint_step".split(" "),
);
const IN_UNITS = /_(usd|kwh|kg|time_s)$/,
  WIDER = 88; // A mean has its spread behind it.
const HIDDEN = new Set(["point", "latest", "experiment_id", "starred"]);
/** Shown unless others were chosen. */
const FIRST = ["train_loss", "score", "total_time_s", "cost_usd", "energy_kwh"];
const SHOWN_IF_ANY = ["co2_kg"];

const words = value =>
  Array.isArray(value) ? value.join(", ") : value === null || value === undefined ? "" : String(value);

/** A difference with its sign, in the units of what it is a difference of. */
export function signed(difference, format) {
  if (!Number.isFinite(difference)) return "–";
  return `${difference > 0 ? "+" : difference < 0 ? "−" : "±"}${format(Math.abs(difference))}`;
}

/**
 * All columns that runs have, by key.
 * @param {any[]} runs some of them
 * @param {{baseline: () => any, percent: () => boolean}} compared `baseline` is the run that figures are compared with, or null
 * @param {{controls: (run: any) => any, name: (run: any) => any}} cells what those cells hold
 * @returns {Map<string, any>} columns: `value` is a figure of a run, `format` its text, `csv` its name in exports
 */
export function allColumns(runs, { baseline, percent }, { controls, name }) {
  const axes = [...new Set(runs.flatMap(run => Object.keys(run.point)))];
  const headlines = new Set(runs.map(run => run.headline).filter(Boolean));
  const headline = headlines.size === 1 ? [...headlines][0] : "score";
  const isNumber = (field, of) => runs.some(run => Number.isFinite(numeric(of(run)))) && !NAMES.has(field);
  const figure = (key, value, more = {}) => {
    const format = more.format || (given => metric(key, given));
    return {
      key,
      title: key,
      csv: key,
      numeric: true,
      width: 120,
      sortable: true,
      figure: true,
      value,
      format,
      spread: given => (IN_UNITS.test(key) ? format(given) : number(given, "", 2)),
      render: run => {
        const base = baseline(),
          own = value(run);
        if (!base || base.id === run.id) return format(own);
        return difference(own, value(base), format, percent());
      },
      ...more,
    };
  };
  const columns = [
    {
      key: "row",
      title: h("span", { class: "unseen" }, "Curve, star and menu"),
      width: 104,
      fixed: true,
      render: controls,
    },
    {
      key: "id",
      title: "id",
      numeric: true,
      width: 70,
      render: run => h("a", { href: `/runs/${run.id}` }, run.id),
    },
    { key: "name", title: "name", width: 170, render: name },
    ...axes.map(axis => ({
      key: axisKey(axis),
      csv: `axis.${axis}`,
      title: axis,
      width: 150,
      axis: true,
      numeric: runs.every(run => typeof (run.point[axis] ?? 0) === "number"),
      render: run => words(run.point[axis]),
    })),
    { key: "seed", title: "seed", numeric: true, width: 64, render: run => run.seed },
    { key: "repeat", title: "repeat", numeric: true, width: 80, render: run => run.repeat },
    {
      key: "state",
      title: "state",
      width: 130,
      render: run =>
        h(
          "span",
          { title: run.failure_message || null },
          state(run.state),
          run.reused_from ? ` = run ${run.reused_from}` : "",
        ),
    },
    {
      key: "step",
      title: "step",
      width: 230,
      render: run => [
        progress(
          run.state === "succeeded" ? 1 : run.step,
          run.state === "succeeded" ? 1 : run.total_steps || 1,
          run.state,
        ),
        ` ${count(run.step)}${run.total_steps ? ` / ${count(run.total_steps)}` : ""}`,
      ],
    },
    figure("train_loss", run => run.train_loss ?? run.latest?.loss?.value),
    figure(headline, run => run.score, { csv: "score" }),
    {
      key: "tags",
      title: "tags",
      width: 160,
      render: run => run.tags.map(tag => [h("span", { class: "chip" }, tag), " "]),
    },
    {
      key: "notes",
      title: "notes",
      width: 220,
      render: run => h("span", { title: run.notes || null }, run.notes),
    },
  ];
  const known = new Map(columns.map(column => [column.key, { csv: column.key, sortable: true, ...column }]));
  Object.assign(known.get("row"), { sortable: false, csv: null });
  for (const field of Object.keys(runs[0] || {})) {
    if (HIDDEN.has(field) || known.has(field)) continue;
    const value = run => run[field];
    if (isNumber(field, value) || FIRST.includes(field)) known.set(field, figure(field, value));
    else
      known.set(field, {
        key: field,
        title: field,
        csv: field,
        sortable: true,
        numeric: NAMES.has(field),
        width: NAMES.has(field) ? 104 : 150,
        render: run => h("span", { title: words(run[field]) || null }, words(run[field])),
      });
  }
  return known;
}

/** What is shown of all columns where no others were chosen. */
export function firstColumns(known, runs) {
  const used = field => runs.some(run => run[field]?.length);
  const keys = [
    ...["row", "id", used("name") && "name"],
    ...[...known.values()].filter(column => column.axis).map(column => column.key),
    ...["seed", runs.some(run => run.repeat) && "repeat", "state", "step"],
    ...FIRST.map(field => (field === "score" ? headlineOf(known) : field)),
    ...SHOWN_IF_ANY.filter(field => runs.some(run => Number.isFinite(numeric(run[field])))),
    ...["tags", "notes"].filter(used),
  ];
  return keys.map(key => known.get(key)).filter(Boolean);
}

const headlineOf = known => [...known.values()].find(column => column.csv === "score").key;

/** A difference to the baseline, with the value itself as a tooltip. */
export function difference(own, base, format, percent) {
  const away = numeric(own) - numeric(base);
  const text = percent
    ? signed((100 * away) / Math.abs(numeric(base)), share => `${share.toFixed(1)} %`)
    : null;
  return h("span", { title: format(own), class: "difference" }, text ?? signed(away, format));
}

/** The columns as the address has them: `!` before those that stay in view, `~` and the width behind those that have one. */
export const written = columns =>
  columns
    .filter(column => !column.fixed)
    .map(
      ({ key, pinned, width, usual }) =>
        `${pinned ? "!" : ""}${encodeURIComponent(key)}${width === usual ? "" : `~${width}`}`,
    )
    .join(",");

/** The columns that an address names, those that stay in view first; null where it names none that there are. */
export function read(text, known) {
  const chosen = (text || "").split(",").flatMap(one => {
    const [, pinned, key, width] = /^(!?)([^~]*)(?:~(\d+))?$/.exec(one) || [];
    let column;
    try {
      column = known.get(decodeURIComponent(key || ""));
    } catch {
      column = null;
    }
    if (!column || column.fixed) return [];
    return [{ ...column, pinned: Boolean(pinned), width: width ? Number(width) : column.width }];
  });
  const once = chosen.filter((column, at) => chosen.findIndex(other => other.key === column.key) === at);
  return once.length ? once : null;
}

/**
 * Columns in the order in which a table shows them: its controls, then those that stay in view, then the others.
 * Figures of groups are wider, unless the reader gave them a width.
 */
export function arranged(columns, known, grouped = false) {
  const own = columns.filter(column => !column.fixed);
  const pinned = own.some(column => column.pinned);
  return [
    { ...known.get("row"), pinned },
    ...own.filter(column => column.pinned),
    ...own.filter(column => !column.pinned),
  ].map(column => {
    const { width } = known.get(column.key),
      usual = width + (grouped && column.figure ? WIDER : 0);
    return { ...column, usual, width: [width, width + WIDER].includes(column.width) ? usual : column.width };
  });
}
