// The code that ran: its commit, and how it differed from it.

import { get, getText } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { download, facts } from "../parts.js";

const UNTRACKED = "# untracked: ";
const KINDS = { "+": "added", "-": "removed", "@": "hunk", d: "file" };

/** A patch with its added and removed lines coloured. */
const patched = patch =>
  h(
    "pre",
    { class: "code card pad patch", tabindex: "0", role: "region", "aria-label": "Changes to the code" },
    patch.split("\n").map(line => {
      const kind = /^(\+\+\+|---) /.test(line) ? "file" : KINDS[line[0]];
      return kind ? h("span", { class: kind }, `${line}\n`) : `${line}\n`;
    }),
  );

/** The commit of the code that ran, and what was different. */
function codeThatRan(id, { git_commit: commit, git_dirty: changed }, patch) {
  const lines = patch.split("\n"),
    untracked = lines.filter(line => line.startsWith(UNTRACKED)).map(line => line.slice(UNTRACKED.length)),
    rest = lines.filter(line => !line.startsWith(UNTRACKED)).join("\n");
  if (!commit)
    return h(
      "p",
      { class: "quiet" },
      "The commit is not known: the code that ran was not in a git checkout.",
    );
  return [
    facts([
      ["commit", h("code", {}, commit)],
      ["changes", changed ? "yes" : "none"],
      untracked.length ? ["untracked", untracked.map(name => [h("code", {}, name), " "])] : null,
    ]),
    rest.trim()
      ? [h("p", { class: "tools" }, download(`/api/v1/runs/${id}/patch`, "Patch")), patched(rest)]
      : changed
        ? h("p", { class: "quiet" }, "The changes were not kept, or are not on this machine.")
        : null,
  ];
}

export async function show(panel, context, { signal }) {
  const [{ items }, patch] = await Promise.all([
    get(`/runs/${context.id}/attempts`, {}, { signal }),
    getText(`/runs/${context.id}/patch`, {}, { signal, accept: "text/x-diff" }),
  ]);
  replace(panel, codeThatRan(context.id, items.findLast(one => one.facts?.git_commit)?.facts ?? {}, patch));
}
