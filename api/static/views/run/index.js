// One run: what it is and how it stands, then its tabs; all of them share one stream.

import { get, hasScope, mayManage, send, whoami } from "../../core/api.js";
import { act, confirm, toast } from "../../core/dialog.js";
import { announce, h, replace } from "../../core/dom.js";
import {
  count,
  duration,
  ENDED,
  energy,
  mass,
  money,
  number,
  numeric,
  point,
  progress,
  relative,
  state,
  when,
} from "../../core/format.js";
import { failure, loading } from "../../core/states.js";
import { follow, painter } from "../../core/stream.js";
import { editRun } from "../experiment/run_actions.js";
import { facts, jobLink } from "../parts.js";

/** @type {[string, string, () => Promise<{show: Function}>][]} */
const TABS = [
  ["", "Overview", () => import("./overview.js")],
  ["curves", "Curves", () => import("./curves.js")],
  ["predictions", "Predictions", () => import("./predictions.js")],
  ["data", "Data", () => import("./data.js")],
  ["try", "Try it", () => import("./try.js")],
  ["logs", "Log", () => import("./logs.js")],
  ["profile", "Profile", () => import("./profile.js")],
  ["counters", "Counters", () => import("./counters.js")],
  ["histograms", "Histograms", () => import("./histograms.js")],
  ["files", "Files", () => import("./files.js")],
  ["code", "Code", () => import("./code.js")],
  ["config", "Configuration", () => import("./config.js")],
];

export async function show(main, { id, tab = "" }, { signal }) {
  const [first, who] = await Promise.all([get(`/runs/${id}`, {}, { signal }), whoami()]);
  const [experiment, cluster] = await Promise.all([
    get(`/experiments/${first.experiment_id}`, {}, { signal }),
    get("/cluster", {}, { signal }),
  ]);
  const listeners = [];
  const context = {
    id: Number(id),
    run: first,
    latest: {},
    experiment,
    who,
    on: (kind, handle) => listeners.push([kind, handle]),
  };
  const tell = (kind, data) =>
    listeners.forEach(([wanted, handle]) => {
      if (wanted === kind) handle(data);
    });

  const head = h("div"),
    panel = h("div", { class: "tab-panel" });
  const manages = mayManage(who, experiment) && hasScope(who, "submit");
  const manage = (button, action, done) =>
    act(button, async () => {
      if (
        action === "cancel" &&
        !(await confirm(
          `Cancel run ${id}?`,
          "It stops at its next step; it can be retried, from its last checkpoint.",
          "Cancel the run",
        ))
      )
        return;
      context.run = await send("POST", `/runs/${id}/${action}`);
      draw();
      tell("run", context.run);
      toast(done);
      connect();
    });

  function draw() {
    const { run } = context,
      ended = ENDED.has(run.state),
      left = remaining(run);
    const metric = run.headline && numeric(run.best_score ?? run.score);
    replace(
      head,
      h(
        "p",
        { class: "quiet crumbs" },
        h("a", { href: "/" }, "Experiments"),
        " / ",
        h("a", { href: `/experiments/${experiment.id}` }, `${experiment.id} ${experiment.name}`),
        ` / run ${run.id}`,
      ),
      h(
        "div",
        { class: "head" },
        h(
          "h1",
          {},
          run.starred ? h("span", { role: "img", "aria-label": "starred" }, "★ ") : null,
          `Run ${run.id}: ${run.name || point(run.point)}`,
        ),
        manages
          ? h(
              "div",
              { class: "tools" },
              h(
                "button",
                {
                  type: "button",
                  "aria-pressed": String(run.starred),
                  onclick: event =>
                    act(event.currentTarget, async () => {
                      context.run = await send("PATCH", `/runs/${id}/marks`, {
                        starred: !context.run.starred,
                      });
                      draw();
                    }),
                },
                "Star",
              ),
              h(
                "button",
                {
                  type: "button",
                  onclick: async () => {
                    const changed = await editRun(context.run);
                    if (!changed) return;
                    context.run = changed;
                    draw();
                  },
                },
                "Name, tags and notes",
              ),
              ended || run.cancel_requested_s
                ? null
                : h(
                    "button",
                    {
                      type: "button",
                      class: "danger",
                      onclick: event => manage(event.currentTarget, "cancel", `Run ${id} will stop`),
                    },
                    "Cancel",
                  ),
              ended && run.state !== "succeeded"
                ? h(
                    "button",
                    {
                      type: "button",
                      onclick: event => manage(event.currentTarget, "retry", `Run ${id} is queued again`),
                    },
                    "Retry",
                  )
                : null,
            )
          : null,
      ),
      h(
        "p",
        {},
        state(run.state),
        progress(
          run.state === "succeeded" ? 1 : run.step,
          run.state === "succeeded" ? 1 : run.total_steps || 1,
          run.state,
        ),
        ` ${count(run.step)}${run.total_steps ? ` of ${count(run.total_steps)}` : ""} steps`,
        run.phase && !ended ? `, ${run.phase}` : "",
        left ? h("span", { class: "quiet" }, `, about ${duration(left)} left`) : null,
        run.cancel_requested_s && !ended ? h("span", { class: "bad" }, " cancelling …") : null,
      ),
      run.name || run.tags.length
        ? h(
            "p",
            { class: "quiet" },
            run.name ? `${point(run.point)} ` : null,
            run.tags.map(tag => [h("span", { class: "chip" }, tag), " "]),
          )
        : null,
      run.notes ? h("p", { class: "notes-text" }, run.notes) : null,
      run.waits_for && !ended ? h("p", { class: "quiet" }, `Waits for ${run.waits_for}.`) : null,
      run.failure_message
        ? h("p", { class: "card pad problem" }, h("b", {}, run.failure_class), ": ", run.failure_message)
        : null,
      run.reused_from
        ? h(
            "p",
            { class: "quiet" },
            "Taken over from ",
            h("a", { href: `/runs/${run.reused_from}` }, `run ${run.reused_from}`),
            ", which has the same settings and data.",
          )
        : null,
      facts([
        ["seed", run.repeat ? `${run.seed}, repeat ${run.repeat}` : run.seed],
        ["hardware", `${run.workers > 1 ? `${run.workers} × ` : ""}${run.hardware}`],
        ["attempts", run.attempt],
        run.started_s ? ["started", when(run.started_s)] : null,
        run.started_s ? ["time", duration((run.ended_s || Date.now() / 1000) - run.started_s)] : null,
        context.latest.loss
          ? ["loss", number(context.latest.loss.value)]
          : Number.isFinite(numeric(run.train_loss))
            ? ["train_loss", number(run.train_loss)]
            : null,
        Number.isFinite(metric)
          ? [
              run.headline,
              number(metric),
              run.best_step ? h("span", { class: "quiet" }, ` at step ${count(run.best_step)}`) : null,
            ]
          : null,
        Number.isFinite(numeric(run.test_score)) ? ["test_score", number(run.test_score)] : null,
        Number.isFinite(numeric(run.cost_usd)) ? ["cost_usd", money(run.cost_usd)] : null,
        Number.isFinite(numeric(run.energy_kwh))
          ? [
              "energy_kwh",
              energy(run.energy_kwh),
              h("span", { class: "quiet" }, ` ${run.energy_provenance || ""}`),
            ]
          : null,
        Number.isFinite(numeric(run.node_energy_kwh))
          ? [
              "node_energy_kwh",
              energy(run.node_energy_kwh),
              h("span", { class: "quiet" }, ` ${run.node_energy_source || ""}`),
            ]
          : null,
        Number.isFinite(numeric(run.co2_kg)) ? ["co2_kg", mass(run.co2_kg)] : null,
        run.checkpoint_step ? ["checkpoint", `step ${count(run.checkpoint_step)}`] : null,
        run.ended_s ? ["ended", relative(run.ended_s)] : null,
        jobLink(cluster, experiment) ? ["Ray", jobLink(cluster, experiment)] : null,
        ["batch", run.global_batch_size ? count(run.global_batch_size) : "largest, not found yet"],
        ["optimizer", run.optimizer],
        ["precision", run.precision],
        ["model", run.student],
      ]),
    );
  }

  let close = null;
  const paint = painter(draw, signal);
  function connect() {
    if (close || ENDED.has(context.run.state)) return;
    const taken = ({ run, latest }) => {
      if (run.state !== context.run.state) announce(`Run ${id} is ${run.state}`);
      context.run = run;
      context.latest = latest;
      paint();
      tell("run", run);
    };
    close = follow(
      `/api/v1/runs/${id}/stream?now=true`,
      {
        run: taken,
        log: line => tell("log", line),
        points: fresh => tell("points", fresh),
        end: data => {
          close = null;
          taken(data);
          tell("end", data.run);
        },
      },
      { signal, again: () => tell("again") },
    );
  }

  draw();
  const chosen = TABS.find(([name]) => name === tab) || TABS[0];
  replace(
    main,
    head,
    h(
      "nav",
      { class: "tabs", "aria-label": "Parts of the run" },
      TABS.map(([name, title]) =>
        h(
          "a",
          {
            href: `/runs/${id}${name ? `/${name}` : ""}`,
            "aria-current": name === chosen[0] ? "page" : null,
          },
          title,
        ),
      ),
    ),
    panel,
  );
  replace(panel, loading());
  connect();
  try {
    await (await chosen[2]()).show(panel, context, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    replace(panel, failure(error, null));
  }
  return { title: `Run ${id}${chosen[0] ? `: ${chosen[1]}` : ""}` };
}

function remaining(run) {
  if (run.state !== "running" || !run.total_steps || !run.step || !run.started_s) return null;
  const each = (Date.now() / 1000 - run.started_s) / run.step;
  return each * (run.total_steps - run.step);
}
