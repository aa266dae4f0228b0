// What a run leaves behind: checkpoints, model card, downloads.

import { ApiError, get, getText } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { bytes, count, when } from "../../core/format.js";
import { code, download, section, shortTable } from "../parts.js";

const table = saved =>
  shortTable(
    "Checkpoints",
    [
      ["Step", one => [count(one.step), one.best ? h("span", { class: "chip" }, "best") : null], "num"],
      ["Attempt", one => one.attempt, "num"],
      ["Saved", one => when(one.saved_s)],
      ["Size", one => bytes(one.size_bytes), "num"],
      ["Whole", one => (one.problem ? h("span", { class: "bad" }, one.problem) : "yes"), "wide"],
      ["Folder", one => h("code", {}, one.path), "wide"],
    ],
    saved,
    "It has saved no checkpoint that is on this machine.",
  );

export async function show(panel, context, { signal }) {
  const base = `/api/v1/runs/${context.id}`,
    card = h("div"),
    checkpoints = h("div");
  const refused = error => {
    if (error instanceof ApiError && error.status === 409) return h("p", { class: "quiet" }, error.message);
    throw error;
  };
  const cardOf = checkpoint =>
    getText(`/runs/${context.id}/model-card`, { checkpoint }, { signal, accept: "text/markdown" });
  const read = async () => {
    const [saved, text] = await Promise.all([
      get(`/runs/${context.id}/checkpoints`, {}, { signal }).catch(refused),
      cardOf("best")
        .catch(() => cardOf("last"))
        .catch(refused),
    ]);
    replace(checkpoints, saved.items ? table(saved.items) : saved);
    replace(card, typeof text === "string" ? code(text, "Model card") : text);
    return typeof text === "string";
  };
  const model = await read();
  replace(
    panel,
    section(
      "Downloads",
      h(
        "p",
        { class: "tools" },
        model
          ? [
              download(`${base}/model`, "Model (best)"),
              download(`${base}/model?checkpoint=last`, "Model (last)"),
            ]
          : null,
        context.run.state === "succeeded"
          ? [
              download(`${base}/predictions?format=parquet`, "Predictions (Parquet)"),
              download(`${base}/predictions?format=jsonl`, "Predictions (JSON lines)"),
            ]
          : null,
        download(`${base}/points`, "Points (JSON)"),
        download(`${base}/measurements`, "Measurements (JSON)"),
        download(`${base}/config`, "Configuration (JSON)"),
      ),
    ),
    section("Checkpoints", checkpoints),
    section("Model card", card),
  );
  let step = context.run.checkpoint_step;
  context.on("run", run => {
    if (run.checkpoint_step !== step) {
      step = run.checkpoint_step;
      read().catch(() => {});
    }
  });
}
