// Where things are in a YAML text, and edits of it at a field; comments and all else stay. The server alone judges it.

import { yaml } from "../../vendor/codemirror.js";

/** A key of a block mapping at the start of a line's content: group 1 is the key with its quotes. */
const KEY = /^("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#,[\]{}&*!|>'"%@`-][^#]*?|-[^\s#][^#]*?)\s*:(?=\s|$)/;

const unquoted = text => {
  if (/^'.*'$/s.test(text)) return text.slice(1, -1).replaceAll("''", "'");
  if (/^".*"$/s.test(text))
    try {
      return JSON.parse(text);
    } catch {
      return text.slice(1, -1);
    }
  return text;
};

/**
 * @typedef {{kind: string, start: number, end: number, flow?: boolean, column?: number, text?: string, entries?: any[],
 *   items?: any[], dash?: number}} Outline
 */

const PARSER = yaml().language.parser;
const COLLECTIONS = { BlockMapping: "map", FlowMapping: "map", BlockSequence: "list", FlowSequence: "list" };
const SCALARS = new Set(["Literal", "QuotedLiteral", "BlockLiteral", "Alias", "Tagged", "Anchored"]);

const empty = at => ({ kind: "empty", start: at, end: at });
const valueOf = node => {
  for (
    let child = node.lastChild;
    child && child.name !== "Key" && child.name !== ":";
    child = child.prevSibling
  )
    if (child.name in COLLECTIONS || SCALARS.has(child.name)) return child;
  return null;
};

/** The start of the line that a position is in. */
const lineStart = (text, at) => text.lastIndexOf("\n", at - 1) + 1;
export const lineEnd = (text, at) => (text.indexOf("\n", at) < 0 ? text.length : text.indexOf("\n", at));

/**
 * @param {string} text
 * @returns {Outline} its outline: nodes {kind: map|list|scalar|empty, start, end, flow, entries|items|text}.
 * An entry is {key, start, keyEnd, value}; positions are those of characters.
 */
export function outline(text) {
  const draw = node => {
    const kind = COLLECTIONS[node.name],
      flow = node.name.startsWith("Flow");
    if (!kind)
      return {
        kind: "scalar",
        start: node.from,
        end: node.to,
        text: unquoted(text.slice(node.from, node.to)),
      };
    const parts = node.getChildren(kind === "map" ? "Pair" : "Item").map(part => {
      const value = valueOf(part);
      if (kind === "list")
        return {
          ...(value ? draw(value) : empty(part.from)),
          dash: flow ? undefined : part.prevSibling?.from,
        };
      const key = part.getChild("Key") || part,
        colon = part.getChild(":");
      return {
        key: unquoted(text.slice(key.from, key.to)),
        start: part.from,
        keyEnd: key.to,
        value: value ? draw(value) : empty(colon ? colon.to : key.to),
      };
    });
    const first = kind === "map" ? parts[0]?.start : parts[0]?.dash;
    const start = flow ? node.from : (first ?? node.from);
    return {
      kind,
      flow,
      start,
      end: flow ? node.to : ((parts.at(-1)?.value ?? parts.at(-1))?.end ?? node.to),
      column: start - lineStart(text, start),
      [kind === "map" ? "entries" : "items"]: parts,
    };
  };
  for (const document of PARSER.parse(text).topNode.getChildren("Document")) {
    const value = valueOf(document);
    if (value) return draw(value);
  }
  return { kind: "map", flow: false, start: 0, end: text.length, column: 0, entries: [] };
}

/**
 * The text after an edit [start, end, replacement].
 * @param {string} text
 * @param {any[]} edit
 */
export const edited = (text, [start, end, replacement]) =>
  text.slice(0, start) + replacement + text.slice(end);

/** The entries that lead along keys as far as they are there; a key may have dots. */
function along(root, keys) {
  const found = [];
  let node = root;
  for (const key of keys) {
    const entry = node.kind === "map" ? node.entries.find(one => one.key === key) : null;
    if (!entry) break;
    found.push(entry);
    node = entry.value;
  }
  return found;
}

/** The edit that gives a field a value, written in YAML; sections that are missing come with it. */
export function put(text, root, keys, raw) {
  const found = along(root, keys),
    node = found.at(-1)?.value ?? root,
    rest = keys.slice(found.length);
  if (!rest.length) return [node.start, node.end, node.kind === "empty" ? ` ${raw}` : raw];
  const inline = rest.reduceRight(
    (value, key, place) => `${key}: ${place < rest.length - 1 ? `{${value}}` : value}`,
    raw,
  );
  if (node.kind !== "map") return [node.start, node.end, `${node.kind === "empty" ? " " : ""}{${inline}}`];
  const last = node.entries.at(-1);
  if (node.flow)
    return last ? [last.value.end, last.value.end, `, ${inline}`] : [node.start + 1, node.start + 1, inline];
  const lines = rest.map((key, place) => `${" ".repeat(node.column + 2 * place)}${key}:`).join("\n");
  if (!last) return [text.trimEnd().length, text.length, `${text.trim() ? "\n" : ""}${lines} ${raw}\n`];
  const end = lineEnd(text, last.value.end); // Behind a comment.
  return [end, end, `\n${lines} ${raw}`];
}

/** The edit that takes a field away, with the sections that would be left empty; null where there is none. */
export function drop(text, root, keys) {
  const found = along(root, keys);
  if (found.length < keys.length) return null;
  let depth = found.length - 1;
  const within = place => (place ? found[place - 1].value : root);
  while (depth && within(depth).entries.length === 1) depth -= 1;
  const { flow, entries } = within(depth),
    entry = found[depth],
    number = entries.indexOf(entry);
  if (!flow) return wholeLines(text, entry.start, entry.value.end);
  if (number + 1 < entries.length) return [entry.start, entries[number + 1].start, ""];
  return [number ? entries[number - 1].value.end : entry.start, entry.value.end, ""];
}

/** The edit that removes the lines of a part, with their line break. */
export function wholeLines(text, start, end) {
  const first = lineStart(text, start),
    next = text.indexOf("\n", end);
  return next < 0 ? [Math.max(0, first - 1), text.length, ""] : [first, next + 1, ""];
}

/** The entry, item or node at a dotted path, or the last one on the way there; `whole` = all of it was found. */
export function locate(root, path) {
  let node = root,
    place = null,
    rest = path;
  while (rest) {
    if (node.kind === "map") {
      const fits = node.entries.filter(({ key }) => rest === key || rest.startsWith(`${key}.`));
      if (!fits.length) break;
      const best = fits.reduce((a, b) => (b.key.length > a.key.length ? b : a));
      place = best;
      node = best.value;
      rest = rest.slice(best.key.length + 1);
    } else if (node.kind === "list") {
      const [digits] = rest.split(".", 1),
        item = node.items[Number(digits)];
      if (!item) break;
      place = item;
      node = item;
      rest = rest.slice(digits.length + 1);
    } else break;
  }
  return { place, node, whole: !rest };
}

/** The node at a path, or null. */
export function at(root, path) {
  const found = locate(root, path);
  return found.whole ? found.node : null;
}

/** What is being written at a position: {path, part: key|value, from, word} with the keys that lead there. */
export function context(text, root, position) {
  const inFlow = deepestFlow(root, position, []);
  if (inFlow) return flowContext(text, inFlow, position);
  const start = text.lastIndexOf("\n", position - 1) + 1,
    before = text.slice(start, position);
  if (/(^|\s)#/.test(before)) return null;
  const [, lead, rest] = /^(\s*(?:-\s+)*)(.*)$/s.exec(before);
  const path = parents(text, start, lead.length),
    found = /^(\S.*?)\s*:\s+(.*)$/s.exec(rest);
  if (found)
    return {
      path: [...path, unquoted(found[1])],
      part: "value",
      from: position - found[2].length,
      word: found[2],
    };
  return { path, part: lead.includes("-") ? "item" : "key", from: position - rest.length, word: rest };
}

function parents(text, start, indent) {
  const path = [];
  let least = indent;
  for (const line of text.slice(0, start).split("\n").slice(0, -1).reverse()) {
    const column = line.search(/\S/);
    if (column < 0 || line[column] === "#" || column >= least) continue;
    const found = KEY.exec(line.slice(column));
    least = column;
    if (found) path.unshift(unquoted(found[1]));
    if (!column) break;
  }
  return path;
}

function deepestFlow(node, position, path) {
  if (position <= node.start || position > node.end) {
    if (node.kind !== "map" && node.kind !== "list") return null;
    if (node.flow) return null;
  }
  for (const entry of node.entries || []) {
    const found = deepestFlow(entry.value, position, [...path, entry.key]);
    if (found) return found;
  }
  for (const item of node.items || []) {
    const found = deepestFlow(item, position, path);
    if (found) return found;
  }
  return node.flow && position > node.start && position < node.end ? { node, path } : null;
}

function flowContext(text, { node, path }, position) {
  const before = text.slice(node.start + 1, position),
    last = Math.max(before.lastIndexOf(","), before.lastIndexOf("\n"));
  const part = before.slice(last + 1).trimStart(),
    colon = /^(.*?)\s*:\s+(.*)$/s.exec(part);
  if (node.kind === "list") return { path, part: "item", from: position - part.length, word: part };
  if (colon)
    return {
      path: [...path, unquoted(colon[1])],
      part: "value",
      from: position - colon[2].length,
      word: colon[2],
    };
  return { path, part: "key", from: position - part.length, word: part, flow: true };
}

/** A value as YAML: as it is where that is read as what was typed, else in quotes. */
export function written(value) {
  const safe = /^(?:[A-Za-z_][\w./-]*(?::[\w./-]+)*|[-+]?[\d.][\w.+-]*|null|true|false)$/;
  return safe.test(value) ? value : JSON.stringify(value);
}
