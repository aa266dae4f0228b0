// Bundles the libraries of the web page into api/static/vendor/: `npm run vendor`, after package.json or an entry changed.

import { readFileSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const ROOT = fileURLToPath(new URL("..", import.meta.url));
const FOLDER = `${ROOT}api/static/vendor/`;

/** What the page's modules import from each file; its types as well. */
const ENTRIES = {
    preact: `
export * from "preact";
export * from "preact/hooks";
export { html } from "htm/preact";
`,
    uplot: `
export { default } from "uplot";
`,
    codemirror: `
export { Compartment, EditorState, Prec, RangeSetBuilder, StateEffect, StateField, Transaction } from "@codemirror/state";
export {
  Decoration, EditorView, ViewPlugin, drawSelection, highlightActiveLine, highlightActiveLineGutter, hoverTooltip,
  keymap, lineNumbers, placeholder, tooltips,
} from "@codemirror/view";
export { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
export {
  HighlightStyle, bracketMatching, foldGutter, foldKeymap, indentOnInput, indentUnit, syntaxHighlighting, syntaxTree,
} from "@codemirror/language";
export { highlightSelectionMatches, searchKeymap } from "@codemirror/search";
export {
  acceptCompletion, autocompletion, closeBrackets, closeBracketsKeymap, completionKeymap, startCompletion,
} from "@codemirror/autocomplete";
export { forceLinting, lintGutter, lintKeymap, linter, setDiagnostics } from "@codemirror/lint";
export { yaml } from "@codemirror/lang-yaml";
export { tags } from "@lezer/highlight";
`,
};

const manifest = name => JSON.parse(readFileSync(`${ROOT}node_modules/${name}/package.json`, "utf8"));

async function bundle(name, entry) {
    const { outputFiles, metafile } = await build({
        stdin: { contents: entry, resolveDir: ROOT },
        absWorkingDir: ROOT,
        bundle: true,
        format: "esm",
        target: "es2022",
        minify: true,
        legalComments: "none",
        metafile: true,
        write: false,
    });
    // What tree shaking leaves nothing of is not a part.
    const [{ inputs }] = Object.values(metafile.outputs);
    const packages = Object.keys(inputs)
        .filter(path => inputs[path].bytesInOutput && path.includes("node_modules/"))
        .map(path => /.*node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)[1]);
    const parts = [...new Set(packages)].sort();
    const header = `/*! ${parts.map(part => `${part} ${manifest(part).version}`).join(", ")} */\n`;
    return { parts, file: `${name}.js`, text: header + outputFiles[0].text };
}

function licences(parts) {
    const texts = parts.map(part => {
        const { license, version } = manifest(part);
        const text = readFileSync(`${ROOT}node_modules/${part}/LICENSE`, "utf8").trim();
        return `${part} ${version} (${license})\n${"=".repeat(72)}\n${text}\n`;
    });
    return `The scripts in this folder are made from these packages.\n\n${texts.join("\n\n")}`;
}

/** The files of the folder by name, as the installed packages make them. */
export async function made() {
    const bundles = await Promise.all(Object.entries(ENTRIES).map(each => bundle(...each)));
    const parts = [...new Set(bundles.flatMap(each => each.parts))].sort();
    return {
        ...Object.fromEntries(bundles.map(({ file, text }) => [file, text])),
        ...Object.fromEntries(
            Object.entries(ENTRIES).map(([name, entry]) => [`${name}.d.ts`, entry.trimStart()]),
        ),
        "uplot.css": readFileSync(`${ROOT}node_modules/uplot/dist/uPlot.min.css`, "utf8"),
        "LICENSES.txt": licences(parts),
    };
}

if (process.argv[1] === fileURLToPath(import.meta.url))
    for (const [name, text] of Object.entries(await made())) writeFileSync(FOLDER + name, text);
