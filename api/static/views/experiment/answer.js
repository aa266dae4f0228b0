// Which configuration to use, and how sure that is: what the experiment was made for.

import { get } from "../../core/api.js";
import { metric, point } from "../../core/format.js";
import { html, useLayoutEffect, useState } from "../../vendor/preact.js";
import { ShortTable } from "../parts.js";

/** The best configuration with each value of an axis. */
const Each = ({ of: { axis, choices, left_out, text } }) => {
  const others = ({ winner_point }) =>
    point(Object.fromEntries(Object.entries(winner_point).filter(([name]) => name !== axis)));
  const columns = [
    [axis, ([, one]) => String(one.winner_point[axis])],
    ["Use", ([, one]) => others(one), "wide"],
    ["Figure", ([, one]) => `${one.objective} ${metric(one.objective, one.value)}`],
  ];
  return html`<p>${text}</p>
    <${ShortTable} caption=${`The best for each ${axis}`} columns=${columns} rows=${Object.entries(choices)} />
    <details>
      <summary>How sure each is</summary>
      <ul>${Object.entries(choices).map(([value, one]) => html`<li>${`${value}: ${one.sure}`}</li>`)}</ul>
    </details>
    ${Object.entries(left_out).map(([of, why]) => html`<p class="quiet">${`${of}: ${why}`}</p>`)}`;
};

const capital = text => `${text[0].toUpperCase()}${text.slice(1)}`;

/**
 * The recommendation in a line, with its reasons in a panel, once a run has a result; before that, nothing.
 * @param {Object} properties
 * @param {Object} properties.experiment
 * @param {number} properties.turn asks again when it changes; not yet while it is 0
 * @param {AbortSignal} properties.signal
 */
export function Answer({ experiment: { id, run_states }, turn, signal }) {
  const [per, setPer] = useState(""),
    [found, setFound] = useState(null),
    [problem, setProblem] = useState("");
  const asks = Boolean(turn && (run_states.succeeded || run_states.stopped));
  const [busy, setBusy] = useState(asks);
  useLayoutEffect(() => {
    if (!asks) return undefined;
    const stop = new AbortController();
    setBusy(true);
    get(
      `/experiments/${id}/recommend`,
      { per: per || null },
      { signal: AbortSignal.any([signal, stop.signal]) },
    )
      .then(
        answer => {
          setFound(answer);
          setProblem("");
        },
        error => {
          if (error.name === "AbortError") throw error;
          setProblem(error.message);
        },
      )
      .then(() => setBusy(false))
      .catch(() => {});
    return () => stop.abort();
  }, [asks, turn, per]);
  if (!found && !problem && !busy) return null;
  const axes = Object.keys(found?.winner_point || {});
  return html`<section class="answer" aria-label="Answer" aria-busy=${busy}>
    ${
      problem
        ? html`<p class="quiet">No recommendation: ${problem}</p>`
        : !found
          ? html`<p class="quiet">Comparing the configurations …</p>`
          : html`<p>
              <span class="strong">Use ${point(found.winner_point)}</span>${
                found.value === null ? "" : `: ${found.objective} ${metric(found.objective, found.value)}`
              }
              <span class="quiet">${` · ${found.sure.split(",")[0]}`}</span>
            </p>
            <details class="menu">
              <summary class="button">Why</summary>
              <div class="card pad wide">
                <p class="strong">${capital(found.sure)}.</p>
                <p>${found.text}</p>
                ${found.notes.length > 0 && html`<ul>${found.notes.map(note => html`<li>${note}</li>`)}</ul>`}
                ${
                  axes.length > 1 &&
                  html`<label class="field">the best for each
                  <select value=${per} onChange=${event => setPer(event.target.value)}>
                    <option value="">–</option>
                    ${axes.map(axis => html`<option value=${axis}>${axis}</option>`)}
                  </select></label>`
                }
                ${found.per && html`<${Each} of=${found.per} />`}
              </div>
            </details>`
    }
  </section>`;
}
