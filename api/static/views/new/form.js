// The common fields of a spec as a form. The text stays the truth: a change edits the field's line, and the form is read from it.

import { html, render } from "../../vendor/preact.js";
import { edits } from "./axes.js";
import { at, drop, edited, outline, put, written } from "./yaml.js";

const MOST_BOXES = 6; // Values of a field that are boxes to tick; more are typed

/**
 * What the form has, in order; all else that is known of a field is in the schema.
 * @type {{path: string, label: string, varies?: boolean, list?: boolean, instead?: string}[]}
 * `varies`: several values become an axis; `list`: it is a list itself; `instead`: the field that it excludes.
 */
export const FIELDS = [
  { path: "task.name", label: "Task" },
  { path: "task.path", label: "Data" },
  { path: "task.max_length", label: "Longest text, in tokens" },
  { path: "model.name", label: "Model", varies: true },
  { path: "precision", label: "Precision", varies: true },
  { path: "batch.global_size", label: "Batch size", varies: true },
  { path: "optimizer.name", label: "Optimizer", varies: true },
  { path: "optimizer.learning_rate", label: "Learning rate", varies: true },
  { path: "length.epochs", label: "Epochs", instead: "length.steps" },
  { path: "length.steps", label: "Steps", instead: "length.epochs" },
  { path: "hardware", label: "Hardware", varies: true },
  { path: "seeds", label: "Seeds", list: true },
  { path: "budget.cost_usd", label: "Budget, USD" },
  { path: "budget.hours", label: "Budget, device hours" },
];

const keysOf = path => path.split("."),
  axisOf = path => ["search", "axes", path];
const axisAt = (root, path) => at(root, `search.axes.${path}`);

/** The values that a text gives a field; null where they are of a kind that only the text can show. */
export function valuesOf(root, { path, varies, list }) {
  const axis = varies ? axisAt(root, path) : null,
    node = axis ?? at(root, path);
  if (!node || node.kind === "empty") return [];
  if (node.kind === "scalar") return [node.text];
  if (node.kind === "list" && (axis || list) && node.items.every(item => item.kind === "scalar"))
    return node.items.map(item => item.text);
  return null;
}

/** The text with another list at a path: values are taken out and added, so that all else in it stays. */
function relisted(text, path, values) {
  for (let number = at(outline(text), path).items.length - 1; number >= 0; number--) {
    const node = at(outline(text), path);
    if (!values.includes(node.items[number].text)) text = edited(text, edits.remove(text, node, number));
  }
  for (const value of values) {
    const node = at(outline(text), path);
    if (!node.items.some(item => item.text === value)) text = edited(text, edits.add(text, node, value));
  }
  return text;
}

/** The text in which a field has values; without any it is left out. */
export function withValues(text, { path, varies, list, instead }, values) {
  const without = (from, keys) => {
    const edit = drop(from, outline(from), keys);
    return edit ? edited(from, edit) : from;
  };
  const set = (from, keys, raw) => edited(from, put(from, outline(from), keys, raw));
  const flow = `[${values.map(written).join(", ")}]`;
  if (!values.length) return without(varies ? without(text, axisOf(path)) : text, keysOf(path));
  if (varies && values.length > 1) {
    const listed = axisAt(outline(text), path)?.kind === "list";
    const next = listed ? relisted(text, `search.axes.${path}`, values) : set(text, axisOf(path), flow);
    return without(next, keysOf(path));
  }
  if (list)
    return at(outline(text), path)?.kind === "list"
      ? relisted(text, path, values)
      : set(text, keysOf(path), flow);
  const next = set(text, keysOf(path), written(values[0]));
  return varies ? without(next, axisOf(path)) : instead ? without(next, keysOf(instead)) : next;
}

const split = (field, typed) =>
  field.varies || field.list
    ? [...new Set(typed.split(",").map(one => one.trim()))].filter(Boolean)
    : [typed.trim()].filter(Boolean);

function Field({ field, root, schema, change }) {
  const { path, label, varies, list } = field,
    values = valuesOf(root, field),
    known = schema.field(keysOf(path)),
    choices = schema.choices(keysOf(path)),
    id = `field-${path}`,
    initial = known?.default ?? "";
  const title = (known?.description || "").split("\n", 1)[0];
  if (!values)
    return html`<label class="field" title=${title}>${label}<input readonly value="in the text" /></label>`;
  if (varies && choices && choices.length <= MOST_BOXES) {
    const toggle = (value, on) =>
      change(field, on ? [...values, value] : values.filter(other => other !== value));
    return html`<fieldset class="field" title=${title}>
      <legend>${label}</legend>
      ${choices.map(
        value =>
          html`<label
            ><input
              type="checkbox"
              checked=${values.includes(value)}
              onChange=${event => toggle(value, event.target.checked)}
            />${value}</label
          >`,
      )}
      ${values.length ? null : html`<span class="quiet">default: ${initial}</span>`}
    </fieldset>`;
  }
  const set = event => change(field, split(field, event.target.value));
  if (choices)
    return html`<label class="field" title=${title}
      >${label}<select onChange=${set} value=${values[0] ?? ""}>
        <option value="">${initial ? `default: ${initial}` : "–"}</option>
        ${choices.map(value => html`<option value=${value} selected=${value === values[0]}>${value}</option>`)}
      </select></label
    >`;
  const offered = schema.values(keysOf(path)).filter(value => value !== "null");
  return html`<label class="field" title=${title}
    >${label}<input
      value=${values.join(", ")}
      placeholder=${initial === "" ? "" : `default: ${initial}`}
      list=${offered.length ? id : undefined}
      spellcheck="false"
      autocomplete="off"
      onChange=${set}
    />${varies || list ? html`<span class="quiet hint">several: with commas</span>` : null}${
      offered.length
        ? html`<datalist id=${id}>${offered.map(value => html`<option value=${value} />`)}</datalist>`
        : null
    }</label
  >`;
}

/** Draws the form of a text; `write(text)` gets the text that a change makes of it. */
export function drawForm(panel, { text, root, schema, write }) {
  const change = (field, values) => write(withValues(text, field, values));
  render(
    html`<form class="common" onSubmit=${event => event.preventDefault()}>
      ${FIELDS.map(field => html`<${Field} key=${field.path} ...${{ field, root, schema, change }} />`)}
    </form>`,
    panel,
  );
}
