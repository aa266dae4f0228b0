// An experiment: the answer first, then its state and what can be done, then its tabs.

import { get, whoami } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { duration, energy, mass, money, state, when } from "../../core/format.js";
import { markdown } from "../../core/markdown.js";
import { failure, loading } from "../../core/states.js";
import { follow, painter } from "../../core/stream.js";
import { jobLink, runsByState } from "../parts.js";
import { actions } from "./actions.js";
import { answer } from "./answer.js";
import { startsIn, whyItWaits } from "../starts.js";

/** Tabs by the last part of the path, in their order. */
/** @type {[string, string, () => Promise<{show: Function}>][]} */
const TABS = [
  ["runs", "Runs", () => import("./runs.js")],
  ["curves", "Curves", () => import("./curves.js")],
  ["compare", "Compare", () => import("./compare.js")],
  ["frontier", "Frontier", () => import("./frontier.js")],
  ["effects", "Effects", () => import("./effects.js")],
  ["parallel", "Parallel", () => import("./parallel.js")],
  ["scores", "Scores", () => import("./scores.js")],
  ["money", "Time and money", () => import("./money.js")],
  ["events", "Events", () => import("./events.js")],
  ["spec", "Spec", () => import("./spec.js")],
];

const MANY_RUNS = 1000;

/** Shows an experiment. */
export async function show(main, { id, tab = "runs" }, { signal }) {
  const [experiment, who, cluster] = await Promise.all([
    get(`/experiments/${id}`, {}, { signal }),
    whoami(),
    get("/cluster", {}, { signal }).catch(() => ({})),
  ]);
  const listeners = new Set();
  const context = { id: Number(id), experiment, onChange: call => listeners.add(call) };
  const head = h("div"),
    does = h("div"),
    said = h("div"),
    panel = h("section", { class: "panel", "aria-busy": "true" }, loading());
  const found = TABS.find(([name]) => name === tab) || TABS[0];
  const tabs = h(
    "nav",
    { class: "tabs", "aria-label": "Parts of the experiment" },
    TABS.map(([name, title]) =>
      h(
        "a",
        { href: `/experiments/${id}/${name}`, "aria-current": name === found[0] ? "page" : null },
        title,
      ),
    ),
  );
  const again = async () => {
    Object.assign(experiment, await get(`/experiments/${id}`, {}, { signal }));
    draw();
  };
  const draw = () => {
    replace(head, header(experiment, cluster));
    replace(does, actions(experiment, who, again));
  };
  replace(main, head, said, does, tabs, panel);
  draw();
  // Of many runs it takes seconds to compare them: what was asked for comes first.
  const many = experiment.run_count > MANY_RUNS;
  if (!many) answer(said, experiment, signal);
  try {
    await (await found[2]()).show(panel, context, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    replace(panel, failure(error));
  }
  panel.setAttribute("aria-busy", "false");
  if (many) answer(said, experiment, signal);
  const paint = painter(draw, signal);
  const changed = (kind, data) => {
    listeners.forEach(call => call(kind, data));
    paint();
  };
  follow(
    `/api/v1/experiments/${id}/stream`,
    {
      experiment: data => {
        Object.assign(experiment, data);
        changed("experiment", data);
      },
      run: data => changed("run", data),
      event: data => changed("event", data),
      end: async data => {
        Object.assign(experiment, data, await get(`/experiments/${id}`, {}, { signal }).catch(() => ({})));
        changed("end", data);
        answer(said, experiment, signal);
      },
    },
    { signal },
  );
  return { title: experiment.name };
}

function header(experiment, cluster) {
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const until = experiment.ended_s || Date.now() / 1000;
  return [
    h("p", { class: "quiet" }, h("a", { href: "/" }, "Experiments"), ` / ${experiment.id}`),
    h("h1", {}, experiment.name),
    h("p", {}, state(experiment.state), " ", runsByState(experiment)),
    h(
      "dl",
      { class: "facts" },
      fact("owner", experiment.owner),
      fact(
        "project",
        h("a", { href: `/projects/${encodeURIComponent(experiment.project)}` }, experiment.project),
      ),
      experiment.study
        ? fact("part", `${experiment.study.part} of study ${experiment.study.id}: ${experiment.study.name}`)
        : null,
      fact("submitted", when(experiment.created_s)),
      experiment.started_s ? fact("time", duration(until - experiment.started_s)) : null,
      experiment.totals
        ? [
            fact("cost", money(experiment.totals.cost_usd)),
            fact("energy", energy(experiment.totals.energy_kwh)),
            !experiment.totals.co2_kg ? null : fact("CO2", mass(experiment.totals.co2_kg)),
          ]
        : null,
      jobLink(cluster, experiment) ? fact("Ray", jobLink(cluster, experiment)) : null,
      experiment.waiting && experiment.state === "queued"
        ? [
            fact("starts", startsIn(experiment.waiting.start)),
            fact(
              "waits",
              whyItWaits(
                experiment.waiting.reason,
                experiment.waiting.start,
                experiment.owner,
                experiment.project,
              ),
            ),
          ]
        : null,
    ),
    experiment.tags.length
      ? h(
          "p",
          {},
          experiment.tags.map(tag => [h("span", { class: "chip" }, tag), " "]),
        )
      : null,
    experiment.notes ? h("div", { class: "notes" }, markdown(experiment.notes)) : null,
    experiment.failure_message
      ? h("p", { class: "card pad problem" }, `${experiment.failure_class}: ${experiment.failure_message}`)
      : null,
  ];
}
