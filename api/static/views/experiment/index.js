// An experiment: its answer, its state, and its tabs.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { duration, energy, money, progress, state, when } from "../../core/format.js";
import { failure, loading } from "../../core/states.js";
import { follow, painter } from "../../core/stream.js";
import { ended } from "../experiments.js";

/** Tabs by the last part of the path, in their order. */
const TABS = [
  ["runs", "Runs", () => import("./runs.js")],
  ["events", "Events", () => import("./events.js")],
];

/** Shows an experiment. */
export async function show(main, { id, tab = "runs" }, { signal }) {
  const context = { id: Number(id), experiment: await get(`/experiments/${id}`, {}, { signal }), onChange: (call) => listeners.add(call), onEvent: (call) => heard.add(call) };
  const listeners = new Set(), heard = new Set();
  const head = h("div"), panel = h("section", { class: "panel", "aria-busy": "true" }, loading());
  const tabs = h("nav", { class: "tabs", "aria-label": "Parts of the experiment" }, TABS.map(([name, title]) =>
    h("a", { href: `/experiments/${id}/${name}`, "aria-current": name === tab ? "page" : null }, title)));
  const draw = painter(() => replace(head, header(context.experiment)), signal);
  replace(main, head, tabs, panel);
  replace(head, header(context.experiment));
  const found = TABS.find(([name]) => name === tab) || TABS[0];
  try {
    await (await found[2]()).show(panel, context, { signal });
  } catch (error) {
    if (error.name !== "AbortError") replace(panel, failure(error));
  }
  panel.setAttribute("aria-busy", "false");
  const changed = (kind, data) => { listeners.forEach((call) => call(kind, data)); draw(); };
  follow(`/api/v1/experiments/${id}/stream`, {
    experiment: (data) => { Object.assign(context.experiment, data); changed("experiment", data); },
    run: (data) => changed("run", data),
    event: (data) => changed("event", data),
    end: async (data) => { Object.assign(context.experiment, data, await get(`/experiments/${id}`, {}, { signal }).catch(() => ({}))); changed("end", data); },
  }, { signal });
  return { title: context.experiment.name };
}

function header(experiment) {
  const done = ended(experiment.run_states);
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  const until = experiment.ended_s || Date.now() / 1000;
  return [
    h("p", { class: "quiet" }, h("a", { href: "/" }, "Experiments"), ` / ${experiment.id}`),
    h("h1", {}, experiment.name),
    h("p", {}, state(experiment.state), " ", progress(done, experiment.run_count, experiment.state), ` ${done} of ${experiment.run_count} runs ended`),
    h("dl", { class: "facts" }, fact("owner", experiment.owner), fact("project", experiment.project), fact("submitted", when(experiment.created_s)),
      experiment.started_s ? fact("time", duration(until - experiment.started_s)) : null,
      experiment.totals ? [fact("cost", money(experiment.totals.cost_usd)), fact("energy", energy(experiment.totals.energy_kwh))] : null,
      experiment.waiting && experiment.state === "queued" ? fact("waits", experiment.waiting.reason) : null),
    experiment.failure_message ? h("p", { class: "card pad problem" }, `${experiment.failure_class}: ${experiment.failure_message}`) : null,
  ];
}
