// Predictions for the test part: wrong ones first, by label and confidence, with confusion and calibration.

import { ApiError, get } from "../../core/api.js";
import { announce, h, replace } from "../../core/dom.js";
import { count, number, numeric, percent } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty } from "../../core/states.js";
import { html, render, useEffect, useState } from "../../vendor/preact.js";

const PAGE = 25,
  MOST_IN_MATRIX = 30,
  MOST_LIKELY = 5;
const ORDERS = [
  ["worst", "worst first"],
  ["sure", "most confident first"],
  ["unsure", "least confident first"],
  ["file", "as in the file"],
];

/** Words of a text that tags are of: those between spaces, or words and marks; null = neither are as many. */
export function words(text, tags) {
  return [text.split(" "), text.match(/[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]/gu) ?? []].find(
    found => found.length === tags,
  );
}

/** Stretches of equal labels of BIO tags: [first word, past the last, label], and null for those outside. */
export function stretches(tags) {
  const found = [];
  tags.forEach((tag, place) => {
    const label = tag === "O" ? null : tag.slice(2),
      last = found.at(-1);
    if (last && last[2] === label && !tag.startsWith("B-")) last[1] = place + 1;
    else found.push([place, place + 1, label]);
  });
  return found;
}

const isTags = value =>
  Array.isArray(value) && value.length > 0 && value.every(tag => /^(O|[BI]-.+)$/.test(tag));

/** A label, labels, a number or an answer. */
function Value({ value }) {
  if (Array.isArray(value))
    return value.length
      ? html`<span class="labels">${value.map(one => html`<span>${String(one)}</span>`)}</span>`
      : html`<i class="quiet">none</i>`;
  if (typeof value === "number") return number(value, "", 6);
  return value === "" || value === null ? html`<i class="quiet">none</i>` : String(value);
}

function Tagged({ text, tags }) {
  const of = words(text, tags.length);
  if (!of) return html`<${Value} value=${tags} />`;
  return stretches(tags).map(([from, to, label]) =>
    label
      ? html`<mark class="entity">${of.slice(from, to).join(" ")} <small>${label}</small></mark
          >${" "}`
      : `${of.slice(from, to).join(" ")} `,
  );
}

function Texts({ unit, asTokens }) {
  const rows = asTokens && unit.tokens.length ? unit.tokens : unit.texts;
  if (!rows.length) return html`<span class="quiet">${unit.unit}</span>`;
  return html`<div class="texts">
    ${rows.map(
      row =>
        html`<p>
          ${
            asTokens && unit.tokens.length
              ? row.map(token => html`<span class="token">${token}</span>`)
              : row.map((text, place) => html`${place ? html`<br />` : null}${text}`)
          }
        </p>`,
    )}
  </div>`;
}

function Likely({ probabilities }) {
  if (probabilities === null || typeof probabilities !== "object") return null;
  const named = Object.entries(probabilities);
  const most = Array.isArray(probabilities) ? named : named.sort((a, b) => b[1] - a[1]);
  return html`<ol class="likely">
    ${most
      .slice(0, MOST_LIKELY)
      .map(
        ([label, share]) =>
          html`<li><span>${label}</span> <span class="num">${percent(share, 1)}</span></li>`,
      )}
  </ol>`;
}

function Unit({ unit, summary, asTokens }) {
  const tagged = isTags(unit.truth) && isTags(unit.prediction) && unit.texts.length === 1,
    right = summary.can_be_right && unit.error === 0;
  const shown = value =>
    tagged ? html`<${Tagged} text=${unit.texts[0][0]} tags=${value} />` : html`<${Value} value=${value} />`;
  return html`<tr>
    <td>
      ${
        summary.can_be_right
          ? html`<span class=${right ? "good" : "bad"}>${right ? "✓ right" : "✗ wrong"}</span>`
          : number(numeric(unit.error))
      }
    </td>
    <td data-title="true">${shown(unit.truth)}</td>
    <td data-title="predicted">${shown(unit.prediction)}</td>
    ${
      summary.reliability.length
        ? html`<td class="num" data-title="confidence">
            ${
              unit.confidence === null
                ? "–"
                : html`<details>
                    <summary>${percent(unit.confidence, 1)}</summary>
                    <${Likely} probabilities=${unit.probabilities} />
                  </details>`
            }
          </td>`
        : null
    }
    <td class="wide">
      ${
        tagged && !asTokens
          ? html`<span class="quiet">${unit.unit}</span>`
          : html`<${Texts} unit=${unit} asTokens=${asTokens} />`
      }
    </td>
  </tr>`;
}

function Confusion({ summary, view, choose }) {
  const { labels, true: trues, predicted, hits, confusion } = summary;
  if (confusion.length && labels.length <= MOST_IN_MATRIX) {
    return html`<div class="card scrolls" tabindex="0" role="region" aria-label="Confusion matrix">
      <table class="confusion">
        <caption>
          Rows are true labels, columns predicted ones; a number shows its predictions.
        </caption>
        <thead>
          <tr>
            <th scope="col">true \\ predicted</th>
            ${labels.map(label => html`<th scope="col" class="num">${label}</th>`)}
            <th scope="col" class="num">recall</th>
          </tr>
        </thead>
        <tbody>
          ${labels.map(
            (label, row) =>
              html`<tr>
                <th scope="row">${label}</th>
                ${labels.map((guess, column) => {
                  const of = confusion[row][column],
                    chosen = view.label === label && view.predicted === guess;
                  return html`<td
                    class=${`num ${row === column ? "diagonal" : "off"}`}
                    style=${{ "--share": String(trues[row] ? of / trues[row] : 0) }}
                  >
                    <button
                      type="button"
                      class="link"
                      aria-pressed=${String(chosen)}
                      aria-label=${`${count(of)} of ${label} predicted as ${guess}`}
                      onClick=${() => choose(chosen ? { label: "", predicted: "" } : { label, predicted: guess })}
                    >
                      ${count(of)}
                    </button>
                  </td>`;
                })}
                <td class="num">${trues[row] ? percent(hits[row] / trues[row], 1) : "–"}</td>
              </tr>`,
          )}
        </tbody>
        <tfoot>
          <tr>
            <th scope="row">precision</th>
            ${labels.map((_, column) => html`<td class="num">${predicted[column] ? percent(hits[column] / predicted[column], 1) : "–"}</td>`)}
            <td></td>
          </tr>
        </tfoot>
      </table>
    </div>`;
  }
  const rows = labels
    .map((label, place) => ({ label, true: trues[place], predicted: predicted[place], hits: hits[place] }))
    .sort((a, b) => b.true + b.predicted - 2 * b.hits - (a.true + a.predicted - 2 * a.hits));
  return html`<div class="card scrolls" tabindex="0" role="region" aria-label="Labels">
    <table>
      <caption>
        The label with the most mistakes first.
      </caption>
      <thead>
        <tr>
          <th scope="col">Label</th>
          ${["True", "Predicted", "Both", "Precision", "Recall"].map(one => html`<th scope="col" class="num">${one}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.slice(0, MOST_IN_MATRIX).map(
          row =>
            html`<tr>
              <th scope="row">${row.label}</th>
              <td class="num">
                <button
                  type="button"
                  class="link"
                  aria-label=${`${count(row.true)} true ${row.label}`}
                  onClick=${() => choose({ label: row.label, predicted: "" })}
                >
                  ${count(row.true)}
                </button>
              </td>
              <td class="num">
                <button
                  type="button"
                  class="link"
                  aria-label=${`${count(row.predicted)} predicted ${row.label}`}
                  onClick=${() => choose({ label: "", predicted: row.label })}
                >
                  ${count(row.predicted)}
                </button>
              </td>
              <td class="num">${count(row.hits)}</td>
              <td class="num">${row.predicted ? percent(row.hits / row.predicted, 1) : "–"}</td>
              <td class="num">${row.true ? percent(row.hits / row.true, 1) : "–"}</td>
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

function Reliability({ bins, error }) {
  const size = 200,
    left = 34,
    most = Math.max(...bins.map(one => one.decisions)),
    step = size / 15;
  const at = share => size - share * size;
  return html`<figure class="card pad reliability">
    <svg
      viewBox=${`0 0 ${size + left + 8} ${size + 34}`}
      role="img"
      aria-label="Share that is right, by confidence"
    >
      <g transform=${`translate(${left} 4)`}>
        ${[0, 0.5, 1].map(
          share =>
            html`<g>
              <line class="grid" x1="0" x2=${size} y1=${at(share)} y2=${at(share)} />
              <text x="-4" y=${at(share) + 4} text-anchor="end">${share}</text>
              <text x=${share * size} y=${size + 14} text-anchor="middle">${share}</text>
            </g>`,
        )}
        <line class="ideal" x1="0" y1=${size} x2=${size} y2="0" />
        ${bins.map(
          one =>
            html`<rect
              x=${Math.floor(Math.min(one.confidence * 15, 14)) * step + 1}
              y=${at(one.accuracy)}
              width=${step - 2}
              height=${Math.max(1, one.accuracy * size)}
              fill-opacity=${0.35 + (0.65 * one.decisions) / most}
            >
              <title>
                ${`${count(one.decisions)} decisions with confidence ${percent(one.confidence, 1)}: ${percent(one.accuracy, 1)} right`}
              </title>
            </rect>`,
        )}
        <text x=${size / 2} y=${size + 28} text-anchor="middle">confidence</text>
      </g>
    </svg>
    <figcaption>
      <p>
        Expected calibration error ${number(error, "", 3)}: how far confidence is from the share that is
        right, on average. Darker bars have more decisions; on the dashed line both are equal.
      </p>
      <details class="as-table">
        <summary>As a table</summary>
        <table>
          <thead>
            <tr>
              ${["Confidence", "Right", "Decisions"].map(one => html`<th scope="col" class="num">${one}</th>`)}
            </tr>
          </thead>
          <tbody>
            ${bins.map(
              one =>
                html`<tr>
                  <td class="num">${percent(one.confidence, 1)}</td>
                  <td class="num">${percent(one.accuracy, 1)}</td>
                  <td class="num">${count(one.decisions)}</td>
                </tr>`,
            )}
          </tbody>
        </table>
      </details>
    </figcaption>
  </figure>`;
}

function Chosen({ label, value, options, onChange }) {
  return html`<label>
    ${label}${" "}
    <select value=${value} onChange=${event => onChange(event.target.value)}>
      ${options.map(([name, text]) => html`<option value=${name} selected=${name === value}>${text}</option>`)}
    </select>
  </label>`;
}

const placeOf = (number, pages, { total, looked_through: looked }, units) =>
  `page ${count(number)} of ${count(pages)}, ${count(total)} ${total === 1 ? "prediction" : "predictions"}` +
  (looked < units ? ` of the first ${count(looked)} of ${count(units)}` : "");

function Predictions({ id, summary, signal }) {
  const [view, setView] = useState(() => {
    const asked = query();
    return {
      order: asked.get("order") || "worst",
      label: asked.get("label") || "",
      predicted: asked.get("predicted") || "",
      wrong: asked.get("wrong") || "",
      page: Math.max(1, Number(asked.get("page")) || 1),
    };
  });
  const [asTokens, setTokens] = useState(false);
  const [found, setFound] = useState({ page: null, error: null });
  const choose = change => setView({ ...view, page: 1, ...change });
  useEffect(() => {
    setQuery({
      ...view,
      order: view.order === "worst" ? null : view.order,
      page: view.page > 1 ? view.page : null,
    });
    let stale = false;
    const { page, ...parameters } = view;
    get(
      `/runs/${id}/predictions/rows`,
      { ...parameters, offset: (page - 1) * PAGE, limit: PAGE },
      { signal },
    ).then(
      answer => {
        if (stale) return;
        setFound({ page: answer, error: null });
        announce(`${count(answer.total)} predictions`);
      },
      error => {
        if (!stale && error.name !== "AbortError") setFound({ page: null, error });
      },
    );
    return () => {
      stale = true;
    };
  }, [view]);
  const { page, error } = found,
    labels = [["", "any"], ...summary.labels.map(label => [label, label])];
  const orders = summary.reliability.length ? ORDERS : ORDERS.filter(([name]) => !name.endsWith("sure"));
  const pages = page ? Math.max(1, Math.ceil(page.total / PAGE)) : 1;
  return html`<div class="predictions">
    ${
      summary.labels.length || summary.reliability.length
        ? html`<div class="judged">
            ${
              summary.labels.length
                ? html`<section>
                    <h2>Confusion</h2>
                    <${Confusion} summary=${summary} view=${view} choose=${choose} />
                  </section>`
                : null
            }
            ${
              summary.reliability.length
                ? html`<section>
                    <h2>Calibration</h2>
                    <${Reliability} bins=${summary.reliability} error=${summary.calibration_error} />
                  </section>`
                : null
            }
          </div>`
        : null
    }
    <h2>Predictions</h2>
    <div class="tools">
      <${Chosen} label="order" value=${view.order} options=${orders} onChange=${order => choose({ order })} />
      ${
        summary.labels.length
          ? html`<${Chosen}
                label="true label"
                value=${view.label}
                options=${labels}
                onChange=${label => choose({ label })}
              />
              <${Chosen}
                label="predicted label"
                value=${view.predicted}
                options=${labels}
                onChange=${predicted => choose({ predicted })}
              />`
          : null
      }
      ${
        summary.can_be_right
          ? html`<${Chosen}
              label="show"
              value=${view.wrong}
              options=${[
                ["", "all"],
                ["true", "only wrong"],
                ["false", "only right"],
              ]}
              onChange=${wrong => choose({ wrong })}
            />`
          : null
      }
      <label>
        <input
          type="checkbox"
          checked=${asTokens}
          onChange=${event => setTokens(event.target.checked)}
        />${" "} tokens
      </label>
    </div>
    ${error ? html`<p class="card pad problem" role="alert">${error.message}</p>` : null}
    ${
      page
        ? html`<div class="card scrolls units" tabindex="0" role="region" aria-label="Predictions">
              <table>
                <thead>
                  <tr>
                    <th scope="col">${summary.can_be_right ? "Right" : "Error"}</th>
                    <th scope="col">True</th>
                    <th scope="col">Predicted</th>
                    ${summary.reliability.length ? html`<th scope="col" class="num">Confidence</th>` : null}
                    <th scope="col">Text</th>
                  </tr>
                </thead>
                <tbody>
                  ${page.items.map(
                    unit =>
                      html`<${Unit} key=${unit.unit} unit=${unit} summary=${summary} asTokens=${asTokens} />`,
                  )}
                </tbody>
              </table>
            </div>
            <p class="tools">
              <button
                type="button"
                disabled=${view.page <= 1}
                onClick=${() => choose({ page: view.page - 1 })}
              >
                Previous
              </button>
              <span>${placeOf(view.page, pages, page, summary.units)}</span>
              <button
                type="button"
                disabled=${view.page >= pages}
                onClick=${() => choose({ page: view.page + 1 })}
              >
                Next
              </button>
            </p>
            ${
              page.items.length && !page.items.some(unit => unit.texts.length)
                ? html`<p class="quiet">
                    Texts are shown where the service reads the run's data and its files have not changed
                    since.
                  </p>`
                : null
            }`
        : null
    }
  </div>`;
}

export async function show(panel, context, { signal }) {
  let summary;
  try {
    summary = await get(`/runs/${context.id}/predictions/summary`, {}, { signal });
  } catch (error) {
    if (!(error instanceof ApiError) || error.slug !== "no-predictions") throw error;
    replace(panel, empty(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`));
    return;
  }
  const place = h("div");
  replace(panel, place);
  render(html`<${Predictions} id=${context.id} summary=${summary} signal=${signal} />`, place);
  signal.addEventListener("abort", () => render(null, place));
}
