// An experiment: its state and what can be done, the answer, then its tabs.

import { get, whoami } from "../../core/api.js";
import { h, Made, replace } from "../../core/dom.js";
import { duration, ENDED, energy, mass, money, relative, state, when } from "../../core/format.js";
import { markdown } from "../../core/markdown.js";
import { failure, loading } from "../../core/states.js";
import { follow, painter, rarely } from "../../core/stream.js";
import { html, render } from "../../vendor/preact.js";
import { facts, jobLink, runsByState } from "../parts.js";
import { Star, tagsOf } from "../manage.js";
import { startsIn, WhyItWaits } from "../starts.js";
import { Actions } from "./actions.js";
import { Answer } from "./answer.js";

/** Tabs in their groups, by the last part of the path. */
/** @type {Object<string, [string, string, () => Promise<{show: Function}>][]>} */
const TABS = {
  Answers: [
    ["compare", "Compare", () => import("./compare.js")],
    ["frontier", "Frontier", () => import("./frontier.js")],
    ["effects", "Effects", () => import("./effects.js")],
    ["scores", "Scores", () => import("./scores.js")],
  ],
  Runs: [
    ["runs", "Runs", () => import("./runs.js")],
    ["curves", "Curves", () => import("./curves.js")],
    ["parallel", "Parallel", () => import("./parallel.js")],
  ],
  Details: [
    ["money", "Time and money", () => import("./money.js")],
    ["events", "Events", () => import("./events.js")],
    ["spec", "Spec", () => import("./spec.js")],
  ],
};

const MANY_RUNS = 1000,
  COMPARED_MS = 10000;

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
    panel = h("section", { class: "panel", "aria-busy": "true" }, loading());
  const all = Object.values(TABS).flat(),
    found = all.find(([name]) => name === tab) || all.find(([name]) => name === "runs");
  let retried = () => {};
  const again = async () => {
    Object.assign(experiment, await get(`/experiments/${id}`, {}, { signal }));
    draw();
    retried();
  };
  // Of many runs it takes seconds to compare them: what was asked for comes first.
  const many = experiment.run_count > MANY_RUNS;
  let turn = many ? 0 : 1;
  const draw = () =>
    render(
      html`<${Head} ...${{ experiment, who, cluster, again, turn, signal }} /><${Tabs} id=${id} current=${found[0]} />`,
      head,
    );
  const compare = () => {
    turn += 1;
    draw();
  };
  signal.addEventListener("abort", () => render(null, head));
  replace(main, head, panel);
  draw();
  head.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  try {
    await (await found[2]()).show(panel, context, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    replace(panel, failure(error));
  }
  panel.setAttribute("aria-busy", "false");
  if (many) compare();
  const paint = painter(draw, signal),
    later = rarely(compare, COMPARED_MS, signal);
  const changed = (kind, data) => {
    listeners.forEach(call => call(kind, data));
    paint();
  };
  // One that has ended changes no more: its events and the state of each run would only cost time.
  let ended = ENDED.has(experiment.state);
  const connect = () => {
    ended = false;
    follow(
      `/api/v1/experiments/${id}/stream`,
      {
        experiment: data => {
          Object.assign(experiment, data);
          changed("experiment", data);
        },
        run: data => {
          changed("run", data);
          if (ENDED.has(data.run.state)) later();
        },
        event: data => changed("event", data),
        end: async data => {
          ended = true;
          Object.assign(experiment, data, await get(`/experiments/${id}`, {}, { signal }).catch(() => ({})));
          changed("end", data);
          compare();
          retried();
        },
      },
      { signal },
    );
  };
  // A retry begins an experiment again whose stream has ended.
  retried = () => {
    if (ended && !ENDED.has(experiment.state)) connect();
  };
  if (!ended) connect();
  return { title: experiment.name };
}

/** Name, state and actions in a line; the answer, what it costs and everything else about it in another. */
function Head({ experiment, who, cluster, again, turn, signal }) {
  const { id, name, notes, waiting, failure_message } = experiment;
  const waits = waiting && experiment.state === "queued";
  return html`<div class="top">
      <p class="quiet"><a href="/">Experiments</a> / ${id}</p>
      <h1>${name}</h1>
      <${Star} ...${{ experiment, who, changed: again }} />
      <${Made} nodes=${[state(experiment.state), " ", runsByState(experiment)]} />
      ${tagsOf(experiment).map(tag => html`<span class="chip" key=${tag}>${tag}</span>`)}
      <${Actions} ...${{ experiment, who, again }} />
    </div>
    <div class="top second">
      <${Answer} ...${{ experiment, turn, signal }} />
      ${
        waits &&
        html`<dl class="facts">
        <div><dt>starts</dt><dd><${Made} nodes=${startsIn(waiting.start)} /></dd></div>
        <div><dt>waits</dt><dd><${WhyItWaits} ...${{ ...waiting, owner: experiment.owner, project: experiment.project }} /></dd></div>
      </dl>`
      }
      ${
        notes &&
        html`<details class="menu end">
        <summary class="button">Notes</summary>
        <div class="card pad wide notes"><${Made} nodes=${markdown(notes)} /></div>
      </details>`
      }
      <details class="menu end about">
        <summary class="quiet">${summary(experiment)}</summary>
        <div class="card pad"><${Made} nodes=${about(experiment, cluster)} /></div>
      </details>
    </div>
    ${failure_message && html`<p class="card pad problem">${experiment.failure_class}: ${failure_message}</p>`}`;
}

const lasted = ({ started_s, ended_s }) => duration((ended_s || Date.now() / 1000) - started_s);

/** Whose it is, how long it took and what it cost, in a few words. */
const summary = experiment =>
  [
    experiment.owner,
    experiment.started_s ? lasted(experiment) : relative(experiment.created_s),
    experiment.totals ? money(experiment.totals.cost_usd) : null,
  ]
    .filter(Boolean)
    .join(" · ");

function about(experiment, cluster) {
  const { study, totals } = experiment,
    job = jobLink(cluster, experiment);
  return facts([
    ["owner", experiment.owner],
    ["project", h("a", { href: `/projects/${encodeURIComponent(experiment.project)}` }, experiment.project)],
    study && ["part", `${study.part} of study ${study.id}: ${study.name}`],
    ["submitted", when(experiment.created_s)],
    experiment.started_s && ["time", lasted(experiment)],
    totals && ["cost_usd", money(totals.cost_usd)],
    totals && ["energy_kwh", energy(totals.energy_kwh)],
    totals?.co2_kg && ["co2_kg", mass(totals.co2_kg)],
    job && ["Ray", job],
  ]);
}

/** The tabs in their groups. */
const Tabs = ({ id, current }) =>
  html`<nav class="tabs" aria-label="Parts of the experiment">
    ${Object.entries(TABS).map(
      ([group, tabs]) =>
        html`<span role="group" aria-label=${group} key=${group}>
          <span class="quiet" aria-hidden="true">${group}</span>
          ${tabs.map(
            ([name, title]) =>
              html`<a href=${`/experiments/${id}/${name}`} aria-current=${name === current ? "page" : null}>${title}</a>`,
          )}
        </span>`,
    )}
  </nav>`;
