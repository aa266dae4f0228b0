// What a run did over time: its attempts, and where the time and the money went.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { count, duration, energy, money, number, numeric, percent, state, when } from "../../core/format.js";
import { empty } from "../../core/states.js";
import { section, shortTable } from "../parts.js";

/** Parts of a run's time by the names of its summary, in the order of a step. */
const PARTS = [
  ["setup_time_s", "set-up"],
  ["data_wait_time_s", "waiting for data"],
  ["forward_time_s", "forward"],
  ["backward_time_s", "backward"],
  ["optimizer_time_s", "optimizer"],
  ["bubble_time_s", "pipeline bubble"],
  ["communication_time_s", "communication"],
  ["checkpoint_time_s", "checkpoints"],
  ["validation_time_s", "validation"],
  ["test_time_s", "test"],
  ["profiling_time_s", "profiling"],
  ["preparation_time_s", "preparation"],
  ["warm_up_time_s", "warm-up"],
  ["restart_time_s", "restarts"],
  ["lost_since_checkpoint_time_s", "lost work"],
];

const toneOf = place => `tone-${place % 8}${place % 16 > 7 ? " striped" : ""}`;

/** Bars next to each other, each as long as its share; the table below says the same. */
export function shares(label, parts, write) {
  const all = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  return [
    h(
      "div",
      {
        class: "bar",
        role: "img",
        "aria-label": `${label}: ${parts.map(([name, value]) => `${name} ${write(value)}`).join(", ")}`,
      },
      parts.map(([name, value], place) =>
        h("span", {
          class: toneOf(place),
          title: `${name}: ${write(value)}, ${percent(value / all)}`,
          style: { "flex-grow": String(value / all) },
        }),
      ),
    ),
    h(
      "ul",
      { class: "legend" },
      parts.map(([name, value], place) =>
        h(
          "li",
          {},
          h("span", { class: `swatch ${toneOf(place)}`, "aria-hidden": "true" }),
          `${name} `,
          h("b", {}, write(value)),
          h("span", { class: "quiet" }, ` ${percent(value / all, 1)}`),
        ),
      ),
    ),
  ];
}

/** An attempt's class of failure, which its state leaves open: one that was preempted is stored as failed. */
const outcome = attempt => attempt.failure_class ?? attempt.state;
const kinds = attempt => `${attempt.state} ${attempt.failure_class ?? ""}`;

/** Attempts on one line of time, from the submission on. */
function timeline(run, attempts, experiment) {
  const now = Date.now() / 1000,
    begin = Math.min(experiment.created_s, ...attempts.map(one => one.started_s)),
    end = Math.max(...attempts.map(one => one.ended_s || now), begin + 1);
  const place = second => `${(100 * (second - begin)) / (end - begin)}%`;
  return h(
    "div",
    {
      class: "timeline card",
      role: "img",
      "aria-label": `${attempts.length} attempts from ${new Date(begin * 1000).toLocaleString()} on, over ${duration(end - begin)}`,
    },
    attempts.map(one =>
      h(
        "span",
        {
          class: `span ${kinds(one)}`,
          style: {
            left: place(one.started_s),
            width: `max(6px, ${(100 * ((one.ended_s || now) - one.started_s)) / (end - begin)}%)`,
          },
          title: `attempt ${one.number}: ${outcome(one)}, ${duration((one.ended_s || now) - one.started_s)}`,
        },
        one.number,
      ),
    ),
    h("span", { class: "quiet from" }, when(begin)),
    h("span", { class: "quiet to" }, run.ended_s ? when(end) : "now"),
  );
}

export async function show(panel, context, { signal }) {
  const own = h("div");
  async function draw() {
    const [{ items: attempts }, account, { values }] = await Promise.all([
      get(`/runs/${context.id}/attempts`, {}, { signal }),
      get(`/runs/${context.id}/ledger`, {}, { signal }),
      get(`/runs/${context.id}/summary`, {}, { signal }),
    ]);
    const { run } = context,
      { total } = account;
    const positive = (/** @type {[string, number][]} */ rows) => rows.filter(([, value]) => value > 0);
    const parts = positive(PARTS.map(([name, title]) => [title, numeric(values[name])]));
    const charged = positive([
      ["kept", Math.max(0, numeric(total.time_s) - numeric(total.lost_s) - numeric(total.overhead_s))],
      ["overhead", numeric(total.overhead_s)],
      ["lost", numeric(total.lost_s)],
    ]);
    const energies = Object.entries(total.energy_kwh)
      .map(([source, kwh]) => `${energy(kwh)} ${source}`)
      .join(", ");
    const byAttempt = new Map(account.charges.map(one => [one.attempt, one]));
    const rest = Object.entries(values)
      .filter(([name]) => !PARTS.some(([part]) => part === name))
      .sort();
    replace(
      own,
      section(
        "Attempts",
        attempts.length
          ? [
              timeline(run, attempts, context.experiment),
              shortTable(
                "Attempts",
                [
                  ["#", one => one.number, "num"],
                  ["State", one => state(outcome(one), kinds(one))],
                  ["Started", one => when(one.started_s)],
                  ["Time", one => duration((one.ended_s || Date.now() / 1000) - one.started_s), "num"],
                  [
                    "From step",
                    one => (one.resumed_from_step === null ? "–" : count(one.resumed_from_step)),
                    "num",
                  ],
                  ["To step", one => count(one.last_step), "num"],
                  ["Node", one => one.node || "–"],
                  ["Workers", one => one.workers, "num"],
                  ["Charged", one => money(byAttempt.get(one.number)?.cost_usd), "num"],
                  ["Lost", one => duration(byAttempt.get(one.number)?.lost_s ?? 0), "num"],
                  ["Reason", one => one.failure_message ?? "", "wide"],
                ],
                attempts,
              ),
            ]
          : empty("It has not started yet."),
      ),
      parts.length
        ? section(
            "Where the time went",
            h("p", { class: "quiet" }, "As rank 0 saw it, over the whole run."),
            h("div", { class: "card pad" }, shares("Time by part", parts, duration)),
          )
        : null,
      attempts.length
        ? section(
            "Charged",
            h(
              "div",
              { class: "card pad" },
              shares("Charged time", charged, duration),
              h(
                "p",
                {},
                `${money(total.cost_usd)} with overhead${Number.isFinite(numeric(run.cost_usd)) ? `; the run itself cost ${money(run.cost_usd)}` : ""}. ${duration(numeric(total.device_hours) * 3600)} of device time${energies ? `, ${energies}` : ""}`,
                numeric(total.lost_usd) > 0 ? `; of that ${money(total.lost_usd)} is lost work` : "",
                ".",
              ),
            ),
          )
        : null,
      rest.length
        ? h(
            "details",
            {},
            h("summary", {}, `All ${rest.length} figures`),
            shortTable(
              "Figures",
              [
                ["Name", ([name]) => h("code", {}, name)],
                [
                  "Value",
                  ([, value]) => (typeof value === "number" ? number(value, "", 6) : String(value ?? "–")),
                  "num wide",
                ],
              ],
              rest,
            ),
          )
        : null,
    );
  }
  replace(panel, own);
  await draw();
  let known = `${context.run.state} ${context.run.attempt}`;
  context.on("run", run => {
    const now = `${run.state} ${run.attempt}`;
    if (now !== known) {
      known = now;
      draw().catch(() => {});
    }
  });
}
