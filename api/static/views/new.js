// A new experiment: its spec as text, checked while one types, and what it would run.

import { get, getText, send, whoami, hasScope } from "../core/api.js";
import { toast } from "../core/dialog.js";
import { announce, debounced, h, replace } from "../core/dom.js";
import { go, query, setQuery } from "../core/router.js";
import { failed, forbidden } from "../core/states.js";
import { drawAxes, placeOf } from "./new/axes.js";
import { Editor } from "./new/editor.js";
import { drawForm } from "./new/form.js";
import { cutShare, drawData, inspectButton } from "./new/inspect.js";
import { drawPreview } from "./new/preview.js";
import { Schema } from "./new/schema.js";
import { at, outline, written } from "./new/yaml.js";
import { choice } from "./parts.js";

const WAIT_MS = 350,
  DRAFT = "stillhouse-draft";

/** Whether a text is a study, with several experiments. */
const isStudy = text => Boolean(at(outline(text), "study"));

/** A word that names one submission; the text decides, so that sending it twice is one experiment. */
function newKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))]
    .map(byte => byte.toString(16).padStart(2, "0"))
    .join("");
}

async function beginning(examples, signal) {
  const { copy, example } = Object.fromEntries(query());
  if (copy) {
    const text = await getText(
      `/experiments/${encodeURIComponent(copy)}/spec`,
      {},
      { signal, accept: "text/yaml" },
    );
    const name = at(outline(text), "name");
    return name?.kind === "scalar"
      ? `${text.slice(0, name.start)}${written(`${name.text} copy`.slice(-100))}${text.slice(name.end)}`
      : text;
  }
  const found = examples.find(({ name }) => name === example);
  return (
    found?.text ??
    sessionStorage.getItem(DRAFT) ??
    (examples.find(({ name }) => name === "demo") || examples[0])?.text ??
    ""
  );
}

export async function show(main, parameters, { signal }) {
  const who = await whoami();
  if (!hasScope(who, "submit")) {
    replace(
      main,
      h("h1", {}, "New experiment"),
      forbidden(new Error(`Your token has scope ${who.scope}; submitting needs scope submit.`)),
    );
    return { title: "New experiment" };
  }
  const [document, { items: examples }, hardware, projects] = await Promise.all([
    get("/spec.schema.json", {}, { signal }),
    get("/examples", {}, { signal }),
    get("/hardware", {}, { signal }),
    get("/projects", {}, { signal }),
  ]);
  const schema = new Schema(document, {
    hardware: hardware.items.flatMap(({ name, aliases }) => [name, ...aliases]),
    project: projects.items.filter(one => !one.archived_s).map(({ name }) => name),
  });
  const first = await beginning(examples, signal);

  const form = h("div"),
    data = h("div", { class: "data", role: "status" }),
    holds = h("div", { class: "data" }),
    help = h("p", { class: "editor-help quiet", "aria-live": "off" }),
    problems = h("div", { class: "problems", role: "status" });
  const axes = h("div", { class: "axes" }),
    preview = h("div", { class: "preview", "aria-live": "off" });
  const submits = h("button", { type: "button", class: "primary", disabled: true }, "Submit");
  let lookedAt = null,
    checks = new AbortController(),
    key = null,
    keyFor = null;
  signal.addEventListener("abort", () => checks.abort());

  const editor = new Editor(schema, {
    signal,
    onHelp: one =>
      replace(
        help,
        one
          ? [
              h("b", {}, one.name),
              ` ${one.type}. ${one.text}`,
              one.initial !== undefined && (one.initial === null || typeof one.initial !== "object")
                ? ` Default: ${one.initial === "" ? "empty" : one.initial}.`
                : "",
            ]
          : null,
      ),
    onChange: text => {
      sessionStorage.setItem(DRAFT, text);
      const { root } = editor,
        study = isStudy(text);
      for (const panel of [form, axes]) panel.hidden = study;
      if (!study) {
        drawForm(form, { text, root, schema, write: changed => (editor.value = changed) });
        drawAxes(axes, { text, root, schema, edit: (...edit) => editor.edit(...edit) });
      }
      submits.disabled = true;
      checks.abort(); // An answer about an earlier text must not let this one be submitted.
      check(text);
    },
  });

  function showProblems(found) {
    const placed = found.map(one => ({ ...one, ...placeOf(editor.root, editor.value, one) }));
    editor.mark(placed);
    replace(
      problems,
      placed.length
        ? [
            h("p", { class: "strong" }, `${placed.length} problem${placed.length === 1 ? "" : "s"}`),
            h(
              "ul",
              {},
              placed.map(one =>
                h(
                  "li",
                  {},
                  h(
                    "button",
                    {
                      type: "button",
                      class: "link",
                      onclick: () => editor.go(one.start, one.end - one.start),
                    },
                    `Line ${editor.lineOf(one.start)}`,
                  ),
                  " ",
                  one.path ? h("code", {}, one.path) : null,
                  one.path ? ": " : "",
                  one.message,
                ),
              ),
            ),
          ]
        : null,
    );
  }

  /** Shows what the dataset holds; it is read again only when another is named. */
  async function readData({ path, max_length: longest }, mine) {
    if (!path || path.startsWith("hub:")) {
      replace(holds);
      return;
    }
    try {
      if (path !== lookedAt?.path)
        lookedAt = {
          path,
          found: await send("POST", "/data/inspect", undefined, { signal: mine, parameters: { path } }),
        };
      const { found } = lookedAt,
        cut = cutShare(found.parts, longest);
      replace(
        holds,
        h("h3", {}, `Data: ${path}`),
        drawData(found),
        cut ? h("p", { class: "quiet" }, cut) : null,
      );
    } catch (error) {
      if (!mine.aborted) replace(holds, h("p", { class: "quiet" }, `Data: ${error.message}`));
    }
  }

  const check = debounced(
    async text => {
      checks.abort();
      checks = new AbortController();
      const { signal: mine } = checks;
      if (isStudy(text)) {
        showProblems([]);
        replace(
          preview,
          h("p", { class: "quiet" }, "A study: all its parts are checked when it is submitted."),
        );
        preview.removeAttribute("aria-busy");
        submits.disabled = false;
        return;
      }
      preview.setAttribute("aria-busy", "true");
      try {
        const valid = await send("POST", "/specs/validate", text, { signal: mine });
        if (mine.aborted) return;
        showProblems([]);
        const found = await send("POST", "/specs/preview", text, {
          signal: mine,
          parameters: { page_size: 50 },
        });
        if (mine.aborted) return;
        replace(preview, drawPreview(found, { project: valid.spec.project, owner: who.user }));
        submits.disabled = false;
        await readData(valid.spec.task, mine);
      } catch (error) {
        if (mine.aborted || error.name === "AbortError") return;
        const invalid = error.status === 422 || error.status === 400;
        showProblems(
          invalid ? (error.errors.length ? error.errors : [{ path: "", message: error.message }]) : [],
        );
        replace(
          preview,
          invalid
            ? h("p", { class: "quiet" }, "The preview follows when the spec is valid.")
            : failed(error, () => check(text)),
        );
      }
      preview.removeAttribute("aria-busy");
    },
    WAIT_MS,
    signal,
  );

  submits.addEventListener(
    "click",
    async () => {
      const text = editor.value;
      if (keyFor !== text) {
        key = newKey();
        keyFor = text;
      }
      submits.disabled = true;
      try {
        const study = isStudy(text);
        const path = study ? "/studies" : "/experiments";
        const made = await send("POST", path, text, { headers: { "Idempotency-Key": key } });
        sessionStorage.removeItem(DRAFT);
        toast(`${study ? "Study" : "Experiment"} ${made.id} is submitted`);
        // Parts that need no other part have experiments.
        go(`/experiments/${study ? made.parts.find(part => part.experiment).experiment.id : made.id}`);
      } catch (error) {
        showProblems(error.errors?.length ? error.errors : [{ path: "", message: error.message }]);
        announce(error.message);
        submits.disabled = false;
      }
    },
    { signal },
  );

  const begin = choice(
    "example",
    [["", "Start from …"], ...examples.map(({ name, title }) => [name, `${name}: ${title}`])],
    query().get("example") || "",
    {
      "aria-label": "Start from an example",
      onchange: () => {
        const found = examples.find(({ name }) => name === begin.value);
        if (!found) return;
        setQuery({ example: found.name, copy: null });
        editor.value = found.text;
        editor.go(0);
      },
    },
  );
  const copied = query().get("copy");
  replace(
    main,
    h(
      "div",
      { class: "head" },
      h("h1", {}, "New experiment"),
      h(
        "div",
        { class: "tools" },
        begin,
        inspectButton(data, { signal, use: text => (editor.value = text) }),
      ),
    ),
    copied
      ? h(
          "p",
          { class: "quiet" },
          "A copy of ",
          h("a", { href: `/experiments/${encodeURIComponent(copied)}` }, `experiment ${copied}`),
          "; change what you want to be different.",
        )
      : null,
    data,
    h(
      "div",
      { class: "new-page" },
      h("section", { class: "card pad new-form" }, h("h2", {}, "Common fields"), form),
      h(
        "div",
        { class: "new-text" },
        editor.node,
        h(
          "p",
          { class: "editor-keys quiet" },
          "Ctrl+Space lists completions, Ctrl+F searches, F8 goes to the next problem; Escape, then Tab leaves the editor.",
        ),
        help,
        problems,
      ),
      h(
        "div",
        { class: "new-side" },
        h("section", { class: "card pad" }, h("h2", {}, "Axes"), axes),
        h("section", { class: "card pad" }, h("h2", {}, "Preview"), preview, holds),
        h("p", { class: "actions" }, submits),
      ),
    ),
  );
  editor.value = first;
  return { title: copied ? `Copy of experiment ${copied}` : "New experiment", leave: () => checks.abort() };
}
