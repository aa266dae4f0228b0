// What data hold: a file that is dropped on the page, or the dataset of the spec.

import { send } from "../../core/api.js";
import { announce, h, replace } from "../../core/dom.js";
import { count, number, percent } from "../../core/format.js";
import { shortTable } from "../parts.js";

const MOST_BYTES = 2 ** 20; // Of a request to the API
const IN_LINES = /\.(csv|tsv|jsonl)$/i; // The first lines of a larger file are enough
const MOST_LABELS = 12,
  MOST_LINES = 6;

/** What of a file is sent: all, or of a large one in lines the first of them; throws where that is not possible. */
async function sentOf(file) {
  if (file.size <= MOST_BYTES) return file;
  if (!IN_LINES.test(file.name))
    throw new Error(
      `${file.name} has ${number(file.size / MOST_BYTES, "MiB", 3)}, and only files in lines (CSV, TSV, JSONL) are read in part; ` +
        "send at most 1 MiB, or put it into a data folder of the server and name it in task.path",
    );
  const bytes = new Uint8Array(await file.slice(0, MOST_BYTES).arrayBuffer());
  return file.slice(0, bytes.lastIndexOf(10) + 1);
}

function labelsOf(counts) {
  const ordered = Object.entries(counts).sort(([, a], [, b]) => Number(b) - Number(a)),
    shown = ordered.slice(0, MOST_LABELS).map(([label, times]) => `${label} ${count(times)}`);
  return `${shown.join(", ")}${ordered.length > MOST_LABELS ? `, and ${ordered.length - MOST_LABELS} others` : ""}`;
}

const tokensAt = percentile => part => (part.lengths ? count(part.lengths.tokens[percentile]) : "–");
const FIGURES = [
  ["rows", part => `${count(part.rows)}${part.whole ? "" : "+"}`],
  ["usable", part => count(part.usable)],
  ["duplicates", part => count(part.duplicates)],
  ["tokens, median", tokensAt(50)],
  ["tokens, 99 % below", tokensAt(99)],
  ["tokens, longest", tokensAt(100)],
];

/** The parts of data as a table, their labels, and what is doubtful about them. */
export function drawData({ parts, shared = {} }, caption = "Data") {
  const each = Object.entries(parts);
  const labels = each.flatMap(([name, part]) => [
    ...Object.entries(part.labels).map(([column, counts]) => `${name}, ${column}: ${labelsOf(counts)}`),
    ...Object.entries(part.numbers).map(
      ([column, { least, mean, greatest }]) =>
        `${name}, ${column}: ${number(least)} to ${number(greatest)}, mean ${number(mean)}`,
    ),
  ]);
  const doubts = [
    ...Object.entries(shared)
      .filter(([, times]) => times)
      .map(([pair, times]) => `in ${pair}: ${count(times)} examples with the same text`),
    ...each.flatMap(([name, part]) => [...part.mistakes, ...part.remarks].map(line => `${name}: ${line}`)),
  ];
  if (doubts.length > MOST_LINES)
    doubts.splice(MOST_LINES, Infinity, `and ${doubts.length - MOST_LINES} other remarks`);
  return [
    shortTable(
      caption,
      [["Figure", ([figure]) => figure], ...each.map(([name, part]) => [name, ([, of]) => of(part), "num"])],
      each.length ? FIGURES : [],
      "No task can read this file.",
    ),
    labels.map(line => h("p", {}, line)),
    doubts.length
      ? h(
          "ul",
          { class: "notes" },
          doubts.map(line => h("li", {}, line)),
        )
      : null,
  ];
}

/** The share of a part's examples that a length cuts, where that is known. */
export function cutShare(parts, length) {
  const cut = parts.train?.lengths?.cut?.[length];
  return cut
    ? `${percent(cut, 1)} of the training texts are longer than ${length} tokens and are cut.`
    : null;
}

/**
 * A button for a file to inspect, which can also be dropped anywhere on the page; what it holds is drawn into `place`.
 * `use(text)` takes the spec that it suggests.
 */
export function inspectButton(place, { signal, use }) {
  const close = () => replace(place);
  async function look(file) {
    replace(place, h("p", { class: "quiet", "aria-busy": "true" }, `Reading ${file.name} …`));
    try {
      const body = await sentOf(file);
      const found = await send("POST", "/data/inspect", body, {
        signal,
        parameters: { name: file.name },
        headers: { "Content-Type": "application/octet-stream" },
      });
      draw(file, found, body.size < file.size);
      announce(`${file.name} is read`);
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(place, h("p", { class: "problem card pad", role: "alert" }, error.message));
    }
  }
  function draw(file, found, inPart) {
    const [best] = found.tasks,
      why = [...new Set(Object.values(found.refused))];
    replace(
      place,
      h(
        "section",
        { class: "card pad", "aria-label": `Contents of ${file.name}` },
        h("h2", {}, file.name),
        inPart ? h("p", { class: "quiet" }, "Only the first MiB of this file was read.") : null,
        best
          ? [
              h(
                "p",
                {},
                "Task: ",
                h("b", {}, best.name),
                `. Columns: ${Object.entries(found.columns)
                  .map(([name, kind]) => `${name} (${kind})`)
                  .join(", ")}.`,
              ),
              drawData(found, `Parts of ${file.name}`),
            ]
          : h(
              "ul",
              { class: "notes problem" },
              why.slice(0, MOST_LINES).map(line => h("li", {}, line)),
            ),
        h(
          "p",
          { class: "actions" },
          found.spec
            ? h(
                "button",
                { type: "button", class: "primary", onclick: () => use(found.spec) },
                "Use as draft",
              )
            : null,
          h("button", { type: "button", onclick: close }, "Close"),
        ),
        found.spec
          ? h(
              "p",
              { class: "quiet" },
              "The file is not kept. For the draft to run, put it into ",
              h("code", {}, found.put_into),
              " on the server.",
            )
          : null,
      ),
    );
  }
  const input = h("input", {
    type: "file",
    accept: ".csv,.tsv,.json,.jsonl,.parquet",
    hidden: true,
    "aria-label": "File to inspect",
    onchange: () => input.files[0] && look(input.files[0]),
  });
  const holdsFile = event => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener(
    "dragover",
    event => {
      if (holdsFile(event)) event.preventDefault();
    },
    { signal },
  );
  document.addEventListener(
    "drop",
    event => {
      if (!holdsFile(event)) return;
      event.preventDefault();
      if (event.dataTransfer.files[0]) look(event.dataTransfer.files[0]);
    },
    { signal },
  );
  return [
    input,
    h(
      "button",
      {
        type: "button",
        title:
          "CSV, TSV, JSON, JSONL or Parquet, up to 1 MiB (of larger files in lines, the first MiB is read); or drop a file here",
        onclick: () => input.click(),
      },
      "Inspect a file …",
    ),
  ];
}
