// Where things are in a YAML text: a lenient outline with positions. The server alone judges what is valid.

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
 *   items?: any[]}} Outline
 *
 * @param {string} text
 * @returns {Outline} its outline: nodes {kind: map|list|scalar|empty, start, end, flow, entries|items|text}.
 * An entry is {key, start, keyEnd, value}; positions are those of characters.
 */
export function outline(text) {
  const lines = [];
  for (let at = 0; at <= text.length;) {
    const end = text.indexOf("\n", at) < 0 ? text.length : text.indexOf("\n", at);
    lines.push({ at, end, column: text.slice(at, end).search(/\S|$/) });
    at = end + 1;
  }
  let row = 0;
  const content = line => text.slice(line.at + line.column, line.end);
  const skip = () => {
    while (row < lines.length && /^(#|---\s*$|$)/.test(content(lines[row]))) row += 1;
  };
  const isItem = line => /^-(\s|$)/.test(content(line));
  const empty = at => ({ kind: "empty", start: at, end: at });

  function block(least) {
    skip();
    if (row >= lines.length || lines[row].column < least) return null;
    const { column } = lines[row];
    if (isItem(lines[row])) return list(column);
    return KEY.test(content(lines[row])) ? map(column) : inline(lines[row].at + column, column);
  }

  function list(column) {
    const node = { kind: "list", flow: false, start: lines[row].at + column, end: 0, items: [] };
    for (skip(); row < lines.length && lines[row].column === column && isItem(lines[row]); skip()) {
      const line = lines[row],
        dash = line.at + column;
      const rest = text.slice(dash + 1, line.end),
        first = rest.search(/\S/);
      let item;
      if (first < 0 || rest[first] === "#") {
        row += 1;
        item = block(column + 1) || empty(dash + 1);
      } else {
        line.column = column + 1 + first;
        item = block(line.column) || empty(dash + 1);
      }
      node.items.push({ ...item, dash });
      node.end = item.end;
    }
    return node;
  }

  function map(column) {
    const node = { kind: "map", flow: false, start: lines[row].at + column, end: 0, column, entries: [] };
    for (skip(); row < lines.length && lines[row].column === column && !isItem(lines[row]); skip()) {
      const line = lines[row],
        start = line.at + column,
        found = KEY.exec(content(line));
      if (!found) {
        row += 1;
        continue;
      }
      const colon = start + found[0].length,
        rest = text.slice(colon, line.end),
        first = rest.search(/\S/);
      let value;
      if (first < 0 || rest[first] === "#") {
        row += 1;
        skip();
        const item = row < lines.length && lines[row].column === column && isItem(lines[row]);
        value = (item ? list(column) : block(column + 1)) || empty(colon);
      } else value = inline(colon + first, column);
      node.entries.push({ key: unquoted(found[1]), start, keyEnd: start + found[1].length, value });
      node.end = value.end;
    }
    return node;
  }

  /** A value that begins within a line: a flow collection, a quoted or plain scalar, or a block scalar. */
  function inline(at, column) {
    const mark = text[at];
    /** @type {Outline} */
    let node;
    if (mark === "[" || mark === "{") node = flow(at);
    else if (mark === '"' || mark === "'") node = quoted(at);
    else {
      const line = lines[row],
        comment = text.slice(at, line.end).search(/\s#/);
      const end = comment < 0 ? line.end : at + comment;
      node = { kind: "scalar", start: at, end: at + text.slice(at, end).trimEnd().length };
      if (mark === "|" || mark === ">") {
        row += 1;
        while (
          row < lines.length &&
          (lines[row].column > column || lines[row].at + lines[row].column === lines[row].end)
        )
          node.end = lines[row++].end;
        return { ...node, text: text.slice(at, node.end) };
      }
      node.text = text.slice(at, node.end);
    }
    while (row < lines.length && lines[row].at <= node.end) row += 1;
    return node;
  }

  function quoted(at) {
    const found = text[at] === '"' ? /"(?:[^"\\]|\\.)*"?/sy : /'(?:[^']|'')*'?/sy;
    found.lastIndex = at;
    const raw = found.exec(text)[0];
    return { kind: "scalar", start: at, end: at + raw.length, text: unquoted(raw) };
  }

  const gap = at => {
    const blank = /(?:\s|(?<=\s)#[^\n]*)*/y;
    blank.lastIndex = at;
    blank.exec(text);
    return blank.lastIndex;
  };

  /** @returns {Outline} */
  function flow(at) {
    if (text[at] === '"' || text[at] === "'") return quoted(at);
    if (text[at] !== "[" && text[at] !== "{") {
      const plain = /(?:(?!\s#|:(?=\s))[^,[\]{}\n])*/y;
      plain.lastIndex = at;
      const raw = plain.exec(text)[0].trimEnd();
      return { kind: "scalar", start: at, end: at + raw.length, text: raw };
    }
    const close = text[at] === "[" ? "]" : "}";
    const node = { kind: close === "]" ? "list" : "map", flow: true, start: at, end: 0 };
    const found = (node[close === "]" ? "items" : "entries"] = []);
    let here = gap(at + 1);
    while (here < text.length && text[here] !== close) {
      const before = here,
        part = flow(here);
      here = gap(part.end);
      if (close === "}") {
        let value = empty(part.end);
        if (text[here] === ":") {
          value = flow(gap(here + 1));
          here = gap(value.end);
        }
        found.push({ key: part.text ?? "", start: part.start, keyEnd: part.end, value });
      } else found.push(part);
      if (text[here] === ",") here = gap(here + 1);
      else if (here === before || text[here] !== close) break;
    }
    return { ...node, end: Math.min(text[here] === close ? here + 1 : here, text.length) };
  }

  return block(0) || { kind: "map", flow: false, start: 0, end: text.length, column: 0, entries: [] };
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
