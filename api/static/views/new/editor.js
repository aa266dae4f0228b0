// A text field with line numbers, colours, marks at lines with problems, and completion from the schema.

import { h, replace } from "../../core/dom.js";
import { context, outline } from "./yaml.js";

const MOST_OPTIONS = 40;
const TOKEN = /(#.*$)|("(?:[^"\\]|\\.)*"|'[^']*')|([-+]?\b\d[\d._]*(?:e[-+]?\d+)?\b)|\b(true|false|null)\b/gi;

function inked(line) {
  const parts = [],
    key = /^(\s*(?:-\s+)*)([^\s#:[\]{},][^#:]*?)(?=\s*:(?:\s|$))/.exec(line);
  let rest = line;
  if (key) {
    parts.push(key[1], h("span", { class: "ink-key" }, key[2]));
    rest = line.slice(key[0].length);
  }
  let last = 0;
  for (const found of rest.matchAll(TOKEN)) {
    if (found[1] && found.index > 0 && !/\s/.test(rest[found.index - 1])) continue;
    parts.push(
      rest.slice(last, found.index),
      h("span", { class: found[1] ? "ink-comment" : found[2] ? "ink-text" : "ink-value" }, found[0]),
    );
    last = found.index + found[0].length;
  }
  parts.push(rest.slice(last), "\n");
  return parts;
}

/** An editor; `onChange(text)` after each change. The text is what `value` says, and nothing else. */
export class Editor {
  constructor(schema, { onChange, onHelp, signal }) {
    this.schema = schema;
    this.onChange = onChange;
    this.onHelp = onHelp;
    this.options = [];
    this.chosen = -1;
    this.marked = new Map();
    this.input = h("textarea", {
      class: "editor-input",
      spellcheck: "false",
      autocomplete: "off",
      autocapitalize: "off",
      wrap: "off",
      rows: "24",
      "aria-label": "Spec, YAML",
      "aria-autocomplete": "list",
      "aria-controls": "completions",
      "aria-describedby": "editor-keys",
      "data-testid": "spec",
    });
    this.ink = h("pre", { class: "editor-ink", "aria-hidden": "true" });
    this.gutter = h("div", { class: "editor-gutter", "aria-hidden": "true" });
    this.list = h("ul", {
      class: "editor-list",
      id: "completions",
      role: "listbox",
      "aria-label": "Completions",
      hidden: "",
    });
    this.node = h(
      "div",
      { class: "editor" },
      this.gutter,
      h("div", { class: "editor-text" }, this.ink, this.input, this.list),
    );
    const on = (name, act) => this.input.addEventListener(name, act, { signal });
    on("input", () => this.changed(true));
    on("scroll", () => this.scrolled());
    on("keydown", event => this.pressed(event));
    on("blur", () => this.close());
    on("click", () => {
      this.close();
      this.help();
    });
    on("keyup", event => {
      if (/^(Arrow|Home|End|Page)/.test(event.key) && this.list.hidden) this.help();
    });
    this.list.addEventListener(
      "pointerdown",
      event => {
        event.preventDefault();
        const option = event.target.closest("li");
        if (option) this.accept(Number(option.dataset.number));
      },
      { signal },
    );
  }

  get value() {
    return this.input.value;
  }

  set value(text) {
    this.input.value = text;
    this.changed(false);
  }

  /** Replaces a part of the text in a way that the field can undo. */
  edit(start, end, text) {
    this.input.focus();
    this.input.setSelectionRange(start, end);
    const done =
      text === ""
        ? start === end || document.execCommand("delete")
        : document.execCommand("insertText", false, text);
    if (!done) {
      this.input.setRangeText(text, start, end, "end");
      this.changed(false);
    }
    this.close();
  }

  changed(typed) {
    this.root = outline(this.value);
    this.draw();
    if (typed) this.suggest(false);
    this.help();
    this.onChange(this.value);
  }

  draw() {
    const lines = this.value.split("\n");
    replace(
      this.ink,
      ...lines.map((line, row) =>
        h("span", { class: this.marked.has(row + 1) ? "ink-problem" : "" }, ...inked(line)),
      ),
    );
    replace(
      this.gutter,
      ...lines.map((_, row) =>
        h("span", this.marked.has(row + 1) ? { class: "bad", title: this.marked.get(row + 1) } : {}, row + 1),
      ),
    );
    this.scrolled();
  }

  scrolled() {
    this.ink.style.transform = `translate(${-this.input.scrollLeft}px, ${-this.input.scrollTop}px)`;
    this.gutter.scrollTop = this.input.scrollTop;
  }

  /** Marks lines, by number from 1, with what is wrong there. */
  mark(problems) {
    this.marked = problems;
    if (problems.size) this.input.setAttribute("aria-invalid", "true");
    else this.input.removeAttribute("aria-invalid");
    this.draw();
  }

  /** Puts the cursor at a position, in the middle of what is seen. */
  go(position, length = 0) {
    this.input.focus();
    this.input.setSelectionRange(position, position + length);
    const row = this.value.slice(0, position).split("\n").length - 1,
      height = this.measure().height;
    this.input.scrollTop = Math.max(0, row * height - this.input.clientHeight / 2);
    this.scrolled();
    this.help();
  }

  lineOf(position) {
    return this.value.slice(0, position).split("\n").length;
  }

  help() {
    const here = context(this.value, this.root, this.input.selectionStart);
    if (!here) {
      this.onHelp(null);
      return;
    }
    const key = here.part === "key" ? /^[\w.-]*/.exec(this.value.slice(here.from))[0] : null; // All of it, wherever in it the cursor is.
    const path = key ? [...here.path, key] : here.path;
    const dotted =
      path[0] === "search" && path[1] === "axes" && path.length > 2
        ? path.slice(2).join(".").split(".")
        : path;
    const field = dotted.length ? this.schema.field(dotted) : null;
    this.onHelp(field ? this.schema.described(dotted.join("."), field) : null);
  }

  suggest(asked) {
    const position = this.input.selectionStart,
      here = context(this.value, this.root, position);
    if (!here || this.input.selectionEnd !== position || (!asked && !here.word)) {
      this.close();
      return;
    }
    const after = this.value.slice(position).split("\n", 1)[0];
    if (/^[\w.]/.test(after)) {
      this.close();
      return;
    }
    const word = here.word.toLowerCase(),
      known = here.part === "key" ? this.schema.keys(here.path) : [];
    const present = new Set(this.keysNear(here.path));
    const found =
      here.part === "key"
        ? known
            .filter(({ name }) => !present.has(name) || name === here.word)
            .map(one => ({ ...one, insert: this.opened(one, here) }))
        : this.schema.values(here.path).map(name => ({ name, text: "", type: "", insert: name }));
    const fits = found.filter(({ name }) => name.toLowerCase().includes(word));
    fits.sort(
      (a, b) => Number(b.name.toLowerCase().startsWith(word)) - Number(a.name.toLowerCase().startsWith(word)),
    );
    if (!fits.length || (fits.length === 1 && fits[0].name === here.word && !asked)) {
      this.close();
      return;
    }
    this.from = here.from;
    this.open(fits.slice(0, MOST_OPTIONS));
  }

  keysNear(path) {
    let node = this.root;
    for (const key of path) node = node?.entries?.find(entry => entry.key === key)?.value;
    return (node?.entries || []).map(entry => entry.key);
  }

  /** What completing a name writes: its colon, and for a section the line that follows. */
  opened({ name, section }, here) {
    if (here.path.join(".") === "search.axes") return `${name}: []`;
    if (!section || here.flow) return `${name}: `;
    const start = this.value.lastIndexOf("\n", here.from - 1) + 1;
    return `${name}:\n${" ".repeat(here.from - start + 2)}`;
  }

  open(options) {
    this.options = options;
    this.chosen = 0;
    const { width, height } = this.measure(),
      before = this.value.slice(0, this.from).split("\n");
    replace(
      this.list,
      ...options.map((one, number) =>
        h(
          "li",
          {
            role: "option",
            id: `completion-${number}`,
            "data-number": number,
            "aria-selected": String(number === 0),
          },
          h("b", {}, one.name),
          h("span", { class: "quiet" }, one.type ? ` ${one.type.slice(0, 40)}` : ""),
        ),
      ),
    );
    this.list.hidden = false;
    const area = this.node.querySelector(".editor-text"),
      top = before.length * height + 10 - this.input.scrollTop;
    const room = area.clientHeight - top;
    this.list.style.left = `${Math.max(4, Math.min(before.at(-1).length * width + 12 - this.input.scrollLeft, area.clientWidth - this.list.offsetWidth - 8))}px`;
    this.list.style.top = `${room < this.list.offsetHeight && top > this.list.offsetHeight + height ? top - this.list.offsetHeight - height : top}px`;
    this.input.setAttribute("aria-activedescendant", "completion-0");
    this.onHelp(options[0].text ? options[0] : null);
  }

  close() {
    if (this.list.hidden) return;
    this.list.hidden = true;
    this.input.removeAttribute("aria-activedescendant");
  }

  measure() {
    if (this.measured) return this.measured;
    const probe = h("span", { class: "editor-probe" }, "0".repeat(100));
    this.ink.append(probe);
    const box = probe.getBoundingClientRect();
    probe.remove();
    const measured = { width: box.width / 100, height: parseFloat(getComputedStyle(this.input).lineHeight) };
    if (box.width) this.measured = measured;
    return measured;
  }

  pick(number) {
    const items = this.list.children;
    items[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = (number + items.length) % items.length;
    items[this.chosen].setAttribute("aria-selected", "true");
    items[this.chosen].scrollIntoView({ block: "nearest" });
    this.input.setAttribute("aria-activedescendant", items[this.chosen].id);
    this.onHelp(this.options[this.chosen].text ? this.options[this.chosen] : null);
  }

  accept(number) {
    const { insert } = this.options[number],
      position = this.input.selectionStart;
    const rest = /^\s*:/.test(this.value.slice(position).split("\n", 1)[0])
      ? insert.replace(/:[\s\S]*$/, "")
      : insert;
    this.edit(this.from, position, rest);
    if (rest.endsWith("[]"))
      this.input.setSelectionRange(this.from + rest.length - 1, this.from + rest.length - 1);
    if (/(: |\[\])$/.test(rest)) this.suggest(true);
  }

  pressed(event) {
    const open = !this.list.hidden;
    const done = () => {
      event.preventDefault();
      event.stopPropagation();
    };
    if (event.key === " " && event.ctrlKey) {
      done();
      this.suggest(true);
      return;
    }
    if (open && event.key === "ArrowDown") {
      done();
      this.pick(this.chosen + 1);
      return;
    }
    if (open && event.key === "ArrowUp") {
      done();
      this.pick(this.chosen - 1);
      return;
    }
    if (open && event.key === "Escape") {
      done();
      this.close();
      return;
    }
    if (open && (event.key === "Enter" || event.key === "Tab") && !event.shiftKey) {
      done();
      this.accept(this.chosen);
      return;
    }
    if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
      const position = this.input.selectionStart,
        start = this.value.lastIndexOf("\n", position - 1) + 1;
      const line = this.value.slice(start, position),
        lead = /^\s*/.exec(line)[0];
      if (!lead && !/:\s*$/.test(line)) return;
      done();
      this.edit(position, this.input.selectionEnd, `\n${lead}${/:\s*$/.test(line) ? "  " : ""}`);
    }
  }
}
