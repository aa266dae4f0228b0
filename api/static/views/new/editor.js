// The text of a spec in CodeMirror: completion and help from the schema, problems at their line, search, undo, folding.

import {
  EditorState,
  EditorView,
  HighlightStyle,
  acceptCompletion,
  autocompletion,
  bracketMatching,
  closeBrackets,
  closeBracketsKeymap,
  completionKeymap,
  defaultKeymap,
  drawSelection,
  foldGutter,
  foldKeymap,
  highlightActiveLine,
  highlightActiveLineGutter,
  highlightSelectionMatches,
  history,
  historyKeymap,
  indentOnInput,
  indentWithTab,
  keymap,
  lineNumbers,
  lintGutter,
  lintKeymap,
  searchKeymap,
  setDiagnostics,
  startCompletion,
  syntaxHighlighting,
  tags,
  yaml,
} from "../../vendor/codemirror.js";
import { h } from "../../core/dom.js";
import { context, outline } from "./yaml.js";

const MOST_OPTIONS = 40;

const THEME = EditorView.theme({
  "&": { height: "100%", backgroundColor: "var(--card)", color: "var(--ink)", fontSize: "13px" },
  "&.cm-focused": { outline: "none" },
  ".cm-scroller": {
    fontFamily: 'ui-monospace, "SF Mono", Menlo, Consolas, monospace',
    lineHeight: "20px",
    overflow: "auto",
  },
  ".cm-content": { padding: "10px 0", caretColor: "var(--ink)" },
  ".cm-cursor": { borderLeftColor: "var(--ink)" },
  ".cm-gutters": { backgroundColor: "var(--raised)", color: "var(--quiet)", border: "none" },
  ".cm-activeLine, .cm-activeLineGutter": {
    backgroundColor: "color-mix(in srgb, var(--accent) 7%, transparent)",
  },
  "&.cm-focused > .cm-scroller > .cm-selectionLayer .cm-selectionBackground, .cm-selectionBackground": {
    background: "color-mix(in srgb, var(--accent) 30%, transparent)",
  },
  ".cm-selectionMatch": { backgroundColor: "color-mix(in srgb, var(--accent) 18%, transparent)" },
  ".cm-tooltip, .cm-panels": {
    backgroundColor: "var(--card)",
    color: "var(--ink)",
    border: "1px solid var(--line)",
    fontFamily: "system-ui, sans-serif",
  },
  ".cm-tooltip-autocomplete > ul": { fontFamily: "inherit", maxHeight: "14rem" },
  ".cm-tooltip-autocomplete > ul > li": { padding: "0.15rem 0.5rem" },
  ".cm-tooltip-autocomplete > ul > li[aria-selected]": { background: "var(--mark)", color: "var(--ink)" },
  ".cm-completionDetail": { color: "var(--quiet)", fontStyle: "normal" },
  ".cm-completionInfo": { maxWidth: "22rem" },
  ".cm-diagnostic-error": { borderLeftColor: "var(--bad)" },
  ".cm-lintRange-error": {
    backgroundImage: "none",
    textDecoration: "underline wavy var(--bad)",
    textUnderlineOffset: "3px",
  },
  ".cm-textfield": { backgroundColor: "var(--card)", color: "var(--ink)", borderColor: "var(--line)" },
  ".cm-button": { backgroundImage: "none", backgroundColor: "var(--raised)", color: "var(--ink)" },
  ".cm-foldPlaceholder": { backgroundColor: "var(--raised)", color: "var(--quiet)", border: "none" },
});
const INK = HighlightStyle.define([
  { tag: tags.definition(tags.propertyName), color: "var(--accent)" },
  { tag: tags.comment, color: "var(--quiet)", fontStyle: "italic" },
  { tag: tags.string, color: "var(--good)" },
]);

/** What completing a name writes: its colon, and for a section the line that follows; the cursor goes to `at`. */
function opened({ name, section }, here, column) {
  if (here.path.join(".") === "search.axes") return { insert: `${name}: []`, at: name.length + 3 };
  const insert = section && !here.flow ? `${name}:\n${" ".repeat(column + 2)}` : `${name}: `;
  return { insert, at: insert.length };
}

/** An editor; `onChange(text)` after each change. The text is what `value` is, and nothing else. */
export class Editor {
  constructor(schema, { onChange, onHelp, signal }) {
    this.schema = schema;
    this.onHelp = onHelp;
    this.root = outline("");
    this.invalid = false;
    this.node = h("div", { class: "editor" });
    // In a shadow root its styles are style sheets made by script, which the page's policy lets pass.
    const shadow = this.node.attachShadow({ mode: "open" });
    shadow.append(
      h(
        "p",
        { id: "keys", hidden: true },
        "Control and Space list completions. F8 goes to the next problem, Control and F searches. Tab indents; ",
        "press Escape, then Tab, to leave the editor.",
      ),
    );
    this.view = new EditorView({
      root: shadow,
      parent: shadow,
      extensions: [
        lineNumbers(),
        lintGutter(),
        foldGutter(),
        history(),
        drawSelection(),
        EditorState.allowMultipleSelections.of(true),
        indentOnInput(),
        bracketMatching(),
        closeBrackets(),
        highlightActiveLine(),
        highlightActiveLineGutter(),
        highlightSelectionMatches(),
        yaml(),
        syntaxHighlighting(INK),
        autocompletion({
          override: [at => this.completions(at)],
          icons: false,
          maxRenderedOptions: MOST_OPTIONS,
        }),
        keymap.of([
          { key: "Tab", run: acceptCompletion },
          ...closeBracketsKeymap,
          ...completionKeymap,
          ...searchKeymap,
          ...lintKeymap,
          ...foldKeymap,
          ...historyKeymap,
          ...defaultKeymap,
          indentWithTab,
        ]),
        THEME,
        EditorView.contentAttributes.of(() => ({
          tabindex: "0",
          "aria-label": "Spec, YAML",
          "aria-describedby": "keys",
          "aria-invalid": String(this.invalid),
          "data-testid": "spec",
        })),
        EditorView.updateListener.of(update => {
          if (update.docChanged) {
            this.root = outline(this.value);
            onChange(this.value);
          }
          if (update.docChanged || update.selectionSet) this.help();
        }),
      ],
    });
    signal.addEventListener("abort", () => this.view.destroy());
  }

  get value() {
    return this.view.state.doc.toString();
  }

  /** Makes the text another: what both begin and end with stays, and so do the cursor there and the history. */
  set value(text) {
    const before = this.value,
      most = Math.min(before.length, text.length);
    let start = 0,
      same = 0;
    while (start < most && before[start] === text[start]) start += 1;
    while (same < most - start && before.at(-1 - same) === text.at(-1 - same)) same += 1;
    this.edit(start, before.length - same, text.slice(start, text.length - same));
  }

  /** Replaces a part of the text, as one step that can be undone. */
  edit(from, to, insert) {
    this.view.dispatch({ changes: { from, to, insert }, userEvent: "input.form" });
  }

  /** Marks parts of the text, [{start, end, message}], with what is wrong there. */
  mark(problems) {
    this.invalid = problems.length > 0;
    const { length } = this.view.state.doc;
    const diagnostics = problems
      .map(({ start, end, message }) => ({
        from: Math.min(start, length),
        to: Math.min(end, length),
        severity: "error",
        message,
      }))
      .sort((a, b) => a.from - b.from);
    this.view.dispatch(setDiagnostics(this.view.state, /** @type {any} */ (diagnostics)));
  }

  /** Selects a part, in the middle of what is seen. */
  go(anchor, length = 0) {
    this.view.focus();
    const effects = EditorView.scrollIntoView(anchor, { y: "center" });
    this.view.dispatch({ selection: { anchor, head: anchor + length }, effects });
  }

  lineOf(position) {
    return this.view.state.doc.lineAt(Math.min(position, this.view.state.doc.length)).number;
  }

  /** Describes the field at the cursor. */
  help() {
    const text = this.value,
      here = context(text, this.root, this.view.state.selection.main.head);
    const key = here?.part === "key" ? /^[\w.-]*/.exec(text.slice(here.from))[0] : null; // All of it, wherever in it the cursor is.
    const path = key ? [...here.path, key] : (here?.path ?? []);
    const dotted =
      path[0] === "search" && path[1] === "axes" && path.length > 2
        ? path.slice(2).join(".").split(".")
        : path;
    const field = dotted.length ? this.schema.field(dotted) : null;
    this.onHelp(field ? this.schema.described(dotted.join("."), field) : null);
  }

  completions({ state, pos, explicit }) {
    const text = state.doc.toString(),
      here = context(text, outline(text), pos);
    if (!here || (!explicit && !here.word) || /^[\w.]/.test(text.slice(pos, pos + 1))) return null;
    const options =
      here.part === "key"
        ? this.schema
            .keys(here.path)
            .filter(one => one.name === here.word || !this.keysNear(here.path).has(one.name))
            .map(one => this.option(one, here))
        : this.schema.values(here.path).map(label => ({ label }));
    if (!explicit && options.length === 1 && options[0].label === here.word) return null;
    return { from: here.from, options, validFor: /^[\w.-]*$/ };
  }

  option(field, here) {
    return {
      label: field.name,
      detail: field.type.slice(0, 40),
      info: field.text ? () => h("p", {}, field.text) : undefined,
      apply: (view, _, from, to) => {
        const line = view.state.doc.lineAt(from),
          follows = /^\s*:/.test(line.text.slice(to - line.from));
        const { insert, at } = follows
          ? { insert: field.name, at: field.name.length }
          : opened(field, here, from - line.from);
        view.dispatch({
          changes: { from, to, insert },
          selection: { anchor: from + at },
          userEvent: "input.complete",
        });
        if (!field.section && !follows) startCompletion(view);
      },
    };
  }

  keysNear(path) {
    let node = this.root;
    for (const key of path) node = node?.entries?.find(entry => entry.key === key)?.value;
    return new Set((node?.entries || []).map(entry => entry.key));
  }
}
