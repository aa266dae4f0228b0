// Numbers with units, durations, and times in the reader's zone.

import { h } from "./dom.js";

const NOTHING = "–";

/** A number that the API gave, which writes those that JSON lacks as text; NaN where there is none. */
export const numeric = value =>
  value === null || value === undefined || value === ""
    ? NaN
    : value === "Infinity"
      ? Infinity
      : value === "-Infinity"
        ? -Infinity
        : Number(value);

const shown = new Map();

function formatter(digits, most) {
  const key = `${digits}/${most}`;
  if (!shown.has(key))
    shown.set(
      key,
      new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: most }),
    );
  return shown.get(key);
}

/** A number to so many significant digits, with its unit. */
export function number(value, unit = "", digits = 4) {
  const given = numeric(value);
  if (Number.isNaN(given)) return value === "NaN" ? "NaN" : NOTHING;
  const size = Math.abs(given);
  let text;
  if (!Number.isFinite(given)) text = given > 0 ? "∞" : "−∞";
  else if (size !== 0 && (size < 1e-4 || size >= 1e9)) text = given.toExponential(digits - 1);
  else text = formatter(0, Math.max(0, digits - 1 - Math.floor(Math.log10(size || 1)))).format(given);
  return unit ? `${text} ${unit}` : text;
}

/** A count with separators. */
export const count = value =>
  Number.isFinite(numeric(value)) ? formatter(0, 0).format(numeric(value)) : NOTHING;

/** A share as percent. */
export const percent = (share, digits = 0) =>
  Number.isFinite(numeric(share)) ? `${formatter(digits, digits).format(100 * numeric(share))} %` : NOTHING;

/** A duration in its two largest units. */
export function duration(seconds) {
  const given = numeric(seconds);
  if (Number.isNaN(given)) return NOTHING;
  if (!Number.isFinite(given)) return "∞";
  if (given < 60) return `${formatter(given < 10 ? 1 : 0, given < 10 ? 1 : 0).format(given)} s`;
  const minutes = Math.round(given / 60);
  if (given < 3600) return `${Math.floor(given / 60)} min ${Math.floor(given % 60)} s`;
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** US dollars; small amounts to three digits, never with an exponent. */
export function money(usd) {
  const given = numeric(usd);
  if (!Number.isFinite(given)) return NOTHING;
  const sign = given < 0 ? "−" : "",
    size = Math.abs(given),
    digits = size && size < 1 ? Math.min(20, 2 - Math.floor(Math.log10(size))) : 2;
  return `${sign}$${formatter(2, digits).format(size)}`;
}

/** Energy in kWh or Wh. */
export function energy(kwh) {
  const given = numeric(kwh);
  if (!Number.isFinite(given)) return NOTHING;
  return given !== 0 && Math.abs(given) < 0.1 ? number(1000 * given, "Wh", 3) : number(given, "kWh", 3);
}

/** Mass in kg or g. */
export function mass(kg) {
  const given = numeric(kg);
  if (!Number.isFinite(given)) return NOTHING;
  return given !== 0 && Math.abs(given) < 0.1 ? number(1000 * given, "g", 3) : number(given, "kg", 3);
}

/** A metric's value in the unit that its name ends in. */
export function metric(name, value) {
  if (name.endsWith("_usd")) return money(value);
  if (name.endsWith("_kwh")) return energy(value);
  if (name.endsWith("_kg")) return mass(value);
  if (name.endsWith("_time_s")) return duration(value);
  return number(value);
}

/** Bytes in MiB or GiB. */
export function bytes(value) {
  const given = numeric(value);
  if (!Number.isFinite(given)) return NOTHING;
  if (given < 2 ** 20) return number(given / 2 ** 10, "KiB", 3);
  return given < 2 ** 30 ? number(given / 2 ** 20, "MiB", 3) : number(given / 2 ** 30, "GiB", 3);
}

const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(undefined, {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
});

/** A time element: the reader's zone in short, all of it in the tooltip; nothing where there is none. */
export function when(seconds) {
  if (!seconds) return NOTHING;
  const date = new Date(seconds * 1000);
  return h(
    "time",
    { datetime: date.toISOString(), title: `${moment.format(date)} (${date.toISOString()})` },
    short.format(date),
  );
}

const relativeTo = new Intl.RelativeTimeFormat("en", { numeric: "auto" });

/** How long ago or ahead a time is, in words. */
export function relative(seconds, now = Date.now() / 1000) {
  if (!seconds) return NOTHING;
  const away = seconds - now,
    size = Math.abs(away);
  /** @type {[Intl.RelativeTimeFormatUnit, number][]} */
  const units = [
    ["day", 86400],
    ["hour", 3600],
    ["minute", 60],
  ];
  for (const [unit, length] of units) {
    if (size >= length) return relativeTo.format(Math.round(away / length), unit);
  }
  return relativeTo.format(Math.round(away), "second");
}

/** States of runs, in the order in which they are counted. */
export const RUN_STATES = [
  "succeeded",
  "stopped",
  "failed",
  "cancelled",
  "running",
  "starting",
  "paused",
  "queued",
];

/** States of experiments, in the order of their life. */
export const EXPERIMENT_STATES = [
  "queued",
  "starting",
  "running",
  "paused",
  "succeeded",
  "incomplete",
  "failed",
  "cancelled",
];

/** States that experiments and runs end in. */
export const ENDED = new Set(["succeeded", "incomplete", "stopped", "failed", "cancelled"]);

/** A state with its mark; the mark has a shape of its own, for those who cannot tell the colours. */
export const state = (name, kind = name) => h("span", { class: `state ${kind}` }, name);

/** How much of something is done. */
export const progress = (done, all, kind = "") =>
  h("progress", {
    value: Math.min(done, all),
    max: Math.max(all, 1),
    class: kind,
    "aria-label": `${done} of ${all}`,
  });

/** The point of a grid in words: "precision bf16, batch 32". */
export const point = values =>
  Object.entries(values)
    .map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`)
    .join(", ") || "base";
