// When what waits will start, behind whom, and what decides about it.

import { h, Made } from "../core/dom.js";
import { money, percent, when } from "../core/format.js";
import { html } from "../vendor/preact.js";

/** @type {[number, string][]} */
const UNITS = [
  [86400, "d"],
  [3600, "h"],
  [60, "min"],
  [1, "s"],
];

/** A duration as people say it, in its largest unit. */
function roughly(seconds) {
  const [size, unit] = UNITS.find(([size]) => seconds >= 2 * size) || UNITS.at(-1);
  return `${Math.round(seconds / size)} ${unit}`;
}

/** The interval in which a waiting experiment starts, from now. */
export function startsIn(start) {
  if (!start) return "–";
  if (start.earliest_s === null) return "not in sight";
  const away = seconds => roughly(Math.max(0, seconds - Date.now() / 1000));
  if (start.latest_s === null) return `in ${away(start.earliest_s)} or later`;
  const low = away(start.earliest_s),
    high = away(start.latest_s);
  return h(
    "span",
    { title: "A forecast; nine of ten starts fall into their interval." },
    low === high ? `in ${low}` : `in ${low} to ${high}`,
  );
}

const standing = (who, of) =>
  html`<p>
    ${who}: score ${of.score.toFixed(2)} (the lowest goes first). Holds devices of ${money(of.held_usd_per_hour)} an
    hour and is entitled to ${money(of.entitled_usd_per_hour)}; has had ${percent(of.used_part)} of recent use and is
    entitled to ${percent(of.entitled_part)}, with weight ${of.weight}.
  </p>`;

/** Why it waits, and on request its place, its scores and who is ahead. */
export function WhyItWaits({ reason, start, owner, project }) {
  if (!start) return reason;
  const ahead = start.place - 1;
  const place = ahead
    ? `${ahead} ${ahead === 1 ? "is" : "are"} ahead for these devices${start.ahead.length ? ": " : "."}`
    : "It is next in line for these devices.";
  return html`<details>
    <summary>${reason}</summary>
    <p>
      ${start.reason}. ${place}
      ${start.ahead.map((id, index) => [index ? ", " : "", html`<a href=${`/experiments/${id}`}>${id}</a>`])}
      ${start.ahead.length && ahead > start.ahead.length ? " and others." : ""}
    </p>
    ${standing(`Project ${project}`, start.project)} ${standing(`${owner} inside it`, start.user)}
    <p class="quiet">Forecast <${Made} nodes=${when(start.at_s)} /></p>
  </details>`;
}
