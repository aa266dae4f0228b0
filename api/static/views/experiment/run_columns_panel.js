// The menu in which the columns of the table of runs are chosen, ordered, kept in view and given a width.

import { h } from "../../core/dom.js";
import { html, render } from "../../vendor/preact.js";

const WIDTHS = { min: 44, max: 900, step: 10 };

/**
 * The menu; `node` is its element, `draw` brings it up to date.
 * @param {Object} options
 * @param {any[]} options.all columns that there are
 * @param {() => any[]} options.columns those that are shown, in their order
 * @param {(columns: any[]) => void} options.onChange
 * @param {() => void} options.reset shows the usual ones
 */
export function columnsPanel({ all, columns, onChange, reset }) {
  const place = h("div", { class: "card pad" });
  const node = h(
    "details",
    { class: "menu columns-menu" },
    h("summary", { class: "button" }, "Columns"),
    place,
  );
  let sought = "";
  const changed = (key, change) =>
    onChange(columns().map(column => (column.key === key ? { ...column, ...change } : column)));
  const move = (key, by) => {
    const shown = [...columns()],
      at = shown.findIndex(column => column.key === key);
    shown.splice(at + by, 0, ...shown.splice(at, 1));
    onChange(shown);
  };
  const tick = (column, shown) =>
    html`<label
      ><input
        type="checkbox"
        checked=${shown}
        onChange=${() =>
          onChange(shown ? columns().filter(one => one.key !== column.key) : [...columns(), column])}
      />${` ${column.key}`}</label
    >`;
  const row = (column, at, shown) => {
    const beside = by => shown[at + by] && Boolean(shown[at + by].pinned) === Boolean(column.pinned);
    const arrow = (by, sign, word) =>
      html`<button
        type="button"
        aria-label=${`Move ${column.key} ${word}`}
        disabled=${!beside(by)}
        onClick=${() => move(column.key, by)}
      >
        ${sign}
      </button>`;
    return html`<li key=${column.key}>
      ${tick(column, true)}
      <span class="actions">
        ${arrow(-1, "↑", "up")}${arrow(1, "↓", "down")}
        <button
          type="button"
          aria-pressed=${String(Boolean(column.pinned))}
          aria-label=${`Keep ${column.key} in view`}
          title="Keep in view at the left"
          onClick=${() => changed(column.key, { pinned: !column.pinned })}
        >
          ⇤
        </button>
        <input
          type="number"
          ...${WIDTHS}
          aria-label=${`Width of ${column.key}`}
          value=${column.width}
          onChange=${event => changed(column.key, { width: Math.max(WIDTHS.min, Number(event.target.value)) })}
        />
      </span>
    </li>`;
  };
  const draw = () => {
    if (!node.open) return;
    const shown = columns(),
      keys = new Set(shown.map(column => column.key));
    const others = all.filter(column => !keys.has(column.key) && column.key.includes(sought));
    render(
      html`<ul class="chosen">
          ${shown.map(row)}
        </ul>
        <p><button type="button" onClick=${reset}>Usual columns</button></p>
        <label class="field"
          >More columns
          <input
            type="search"
            value=${sought}
            onInput=${event => {
              sought = event.target.value.trim();
              draw();
            }}
          />
        </label>
        <div class="others">${others.map(column => tick(column, false))}</div>`,
      place,
    );
  };
  node.addEventListener("toggle", draw);
  node.addEventListener("keydown", event => {
    if (event.key !== "Escape" || !node.open) return;
    node.open = false;
    node.querySelector("summary").focus();
  });
  return { node, draw };
}
