// What waits and why, what runs, who holds which devices, and buttons for what one may manage.

import { get, whoami } from "../core/api.js";
import { h, Made, replace } from "../core/dom.js";
import { count, duration, money, percent, progress, relative, state, when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { empty, failed } from "../core/states.js";
import { followAll, rarely } from "../core/stream.js";
import { html, render } from "../vendor/preact.js";
import { ManageButtons, PriorityOf } from "./manage.js";
import { every, runsByState, ShortTable } from "./parts.js";
import { startsIn, WhyItWaits } from "./starts.js";

const READ_AGAIN_MS = 3000,
  TICK_S = 60,
  PAGE = 50,
  MOST_CELLS = 256,
  MOST_ACTIVE = 100;
const OWN_RESOURCE = /^(node:|accelerator_type:|memory$|object_store_memory$)/;

const tone = experiment => (experiment ? `tone-${experiment.id % 8}` : "tone-hidden");
const link = experiment =>
  html`<a href=${`/experiments/${experiment.id}`}>${experiment.id} ${experiment.name}</a>`;
const unseen = words => html`<span class="quiet">${words}</span>`;

/** The devices of a node as cells: held ones in the colour of their experiment, the others free or used otherwise. */
function Cells({ node, resource, held, kinds }) {
  const total = Math.floor(node.resources[resource]),
    free = Math.floor(node.available[resource] ?? total);
  const own = held.filter(one =>
    kinds.get(one.hardware)?.accelerator_type ? resource !== "CPU" : resource === "CPU",
  );
  let sum = 0; // Runs that share a device hold a part of it each: a cell is filled by the first of them.
  const filled = own
      .flatMap(one =>
        Array(Math.ceil(sum + one.devices) - Math.ceil((sum += one.devices) - one.devices)).fill(one),
      )
      .slice(0, total),
    other = Math.max(0, total - free - filled.length);
  const words = `${resource}: ${count(free)} of ${count(total)} free`;
  const holders = own.map(one => `${one.devices} held by ${one.experiment?.name ?? "another project"}`);
  const whose = ({ experiment, run_id }) =>
    experiment
      ? `${experiment.id} ${experiment.name} of ${experiment.owner}${run_id ? `, run ${run_id}` : ""}`
      : "held by a project that you do not see";
  return html`<div class="resource">
    ${unseen(words)}
    ${
      total <= MOST_CELLS
        ? html`<span class="cells" role="img" aria-label=${`${words}; ${holders.join(", ") || "none held"}`}>
          ${filled.map(one => html`<i class=${tone(one.experiment)} title=${whose(one)} />`)}
          ${Array.from({ length: other }, () => html`<i class="tone-other" title="in use" />`)}
          ${Array.from({ length: Math.max(0, total - filled.length - other) }, () => html`<i title="free" />`)}
        </span>`
        : html`<${Made} nodes=${progress(total - free, total)} />`
    }
  </div>`;
}

function Devices({ cluster, held, kinds }) {
  if (!cluster.nodes.length) {
    const words = cluster.at_s ? "The cluster has no nodes." : "No scheduler has looked at a cluster yet.";
    return html`<${Made} nodes=${empty(words)} />`;
  }
  const placed = new Map(
    cluster.nodes.map(node => [node, held.filter(one => one.node === node.name || one.node === node.id)]),
  );
  const known = new Set([...placed.values()].flat()),
    elsewhere = held.filter(one => !known.has(one));
  if (cluster.nodes.length === 1) placed.set(cluster.nodes[0], held); // It cannot be another.
  const columns = [
    [
      "Devices",
      one => [
        html`<i class=${`swatch ${tone(one.experiment)}`} aria-hidden="true" />`,
        ` ${+one.devices.toFixed(2)} × ${one.hardware}`,
      ],
    ],
    [
      "Experiment",
      one => (one.experiment ? link(one.experiment) : unseen("of a project that you do not see")),
      "wide",
    ],
    ["Run", one => (one.run_id ? html`<a href=${`/runs/${one.run_id}`}>${one.run_id}</a>` : "–"), "num"],
    ["Owner", one => one.experiment?.owner ?? "–"],
    ["Project", one => one.experiment?.project ?? "–"],
    ["Node", one => one.node ?? "–"],
    ["Held for", one => duration(Date.now() / 1000 - one.since_s), "num"],
  ];
  return html`<p class="quiet">
      ${`As the scheduler saw it ${relative(cluster.at_s)}.`}
      ${cluster.reachable ? " " : " Ray does not answer now. "}
      ${
        cluster.dashboard_url &&
        html`<a href=${cluster.dashboard_url} rel="noopener" target="_blank">Ray dashboard</a>`
      }
    </p>
    <div class="grid">
      ${cluster.nodes.map(
        node =>
          html`<div class="card pad node" key=${node.id}>
            <h3>${node.name}${!node.alive && html`<span class="bad"> does not answer</span>`}</h3>
            ${node.alive && node.draining && html`<p class="bad">Drains${node.drain_deadline_s && html`, goes ${relative(node.drain_deadline_s)}`}: nothing starts here.</p>`}
            ${node.message && html`<p class="quiet">${node.message}</p>`}
            ${Object.keys(node.resources)
              .filter(name => !OWN_RESOURCE.test(name) && node.resources[name] >= 1)
              .map(
                resource =>
                  html`<${Cells} key=${resource} ...${{ node, resource, held: placed.get(node), kinds }} />`,
              )}
          </div>`,
      )}
    </div>
    <${ShortTable} caption="Who holds devices" columns=${columns} rows=${held} none="Nothing is held." />
    ${
      elsewhere.length > 0 &&
      cluster.nodes.length > 1 &&
      html`<p class="quiet">
      ${`${elsewhere.length} placement${elsewhere.length === 1 ? " is" : "s are"} on nodes that are not known yet.`}
    </p>`
    }`;
}

const devices = by =>
  Object.entries(by || {})
    .map(([name, many]) => `${+many.toFixed(2)} × ${name}`)
    .join(", ") || "–";

/** What each project may count on, holds and waits for. */
function Shares({ known, held, waiting, active, kinds }) {
  const projects = new Map(
    known
      .filter(one => !one.archived_s)
      .map(({ name, settings }) => [name, { name, settings, holds: {}, usd: 0, running: 0, waiting: 0 }]),
  );
  for (const one of held) {
    const project = projects.get(one.experiment?.project);
    if (!project) continue;
    project.holds[one.hardware] = (project.holds[one.hardware] || 0) + one.devices;
    project.usd += one.devices * (kinds.get(one.hardware)?.price_usd_per_hour ?? 0);
  }
  const add = (name, what) => {
    if (projects.has(name)) projects.get(name)[what] += 1;
  };
  active.forEach(experiment => add(experiment.project, "running"));
  waiting.forEach(({ experiment }) => add(experiment?.project, "waiting"));
  const rows = [...projects.values()].sort((a, b) => b.usd - a.usd || a.name.localeCompare(b.name)),
    all = rows.reduce((sum, one) => sum + one.usd, 0);
  const columns = [
    ["Project", one => html`<a href=${`/projects/${encodeURIComponent(one.name)}`}>${one.name}</a>`],
    ["Weight", one => one.settings.weight ?? 1, "num"],
    ["Guaranteed", one => devices(one.settings.guaranteed)],
    ["Ceiling", one => devices(one.settings.ceiling)],
    ["Holds", one => devices(one.holds)],
    ["Of what is held", one => (all ? percent(one.usd / all) : "–"), "num"],
    ["Price", one => `${money(one.usd)}/h`, "num"],
    ["Running", one => count(one.running), "num"],
    ["Waiting", one => count(one.waiting), "num"],
  ];
  return html`<${ShortTable} caption="Projects" ...${{ columns, rows, none: "You see no project." }} />`;
}

const Section = ({ title, children }) => html`<section><h2>${title}</h2>${children}</section>`;

/** What waits, runs, is paused and has failed, and who holds what. */
function Board({ found, lacking, kinds, known, who, draw, token, turnTo, chosen }) {
  const [queue, cluster, { items: held }, active, paused, over] = found;
  const wanted = one => !chosen || one?.project === chosen;
  const buttons = experiment =>
    html`<${ManageButtons} experiment=${experiment} who=${who} changed=${draw} />`;
  const common = [
    ["Experiment", link, "wide"],
    ["Project", one => one.project],
    ["Owner", one => one.owner],
  ];
  const acts = ["", buttons],
    runs = ["Runs", runsByState, "wide"],
    stateOf = ["State", one => state(one.state)];
  const waits = [
    ["#", one => one.position, "num"],
    ["Experiment", one => (one.experiment ? link(one.experiment) : unseen("of another project")), "wide"],
    ["Project", one => one.experiment?.project ?? "–"],
    ["Owner", one => one.experiment?.owner ?? "–"],
    [
      "Priority",
      one =>
        one.experiment
          ? html`<${PriorityOf} experiment=${one.experiment} who=${who} changed=${draw} />`
          : "–",
    ],
    ["Since", one => (one.experiment ? relative(one.experiment.queued_s) : "–")],
    ["Starts", one => startsIn(one.start)],
    [
      "Why it waits",
      one =>
        html`<${WhyItWaits} ...${one} owner=${one.experiment?.owner} project=${one.experiment?.project} />`,
      "wide",
    ],
    ["", one => one.experiment && buttons(one.experiment)],
  ];
  const table = (caption, columns, rows, none) =>
    html`<${ShortTable} ...${{ caption, columns, rows: rows.filter(wanted), none, id: one => one.id }} />`;
  const page = (title, next) => html`<button type="button" onClick=${() => turnTo(next)}>${title}</button>`;
  const shown = queue.items.filter(one => wanted(one.experiment));
  return html`${
    !queue.schedulers_alive.length &&
    html`<p class="card pad problem">
      No scheduler is running, so nothing will start. Start one with <code>stillhouse scheduler</code>.
    </p>`
  }
    <${Section} title=${`Waiting (${count(queue.total)})`}>
      <${ShortTable}
        caption="Waiting experiments, the next one first"
        ...${{ columns: waits, rows: shown, id: one => one.experiment?.id ?? `at ${one.position}` }}
        none="Nothing is waiting."
      />
      <p class="actions">
        ${token && page("First page", null)}
        ${queue.next_page_token && page("Next page", queue.next_page_token)}
      </p>
    <//>
    <${Section} title=${`Running (${count(active.items.length)}${active.next_page_token ? " and more" : ""})`}>
      ${table(
        "Running experiments",
        [
          ...common,
          stateOf,
          runs,
          ["Waits for capacity", one => lacking.get(one.id) ?? "", "wide"],
          ["Started", one => when(one.started_s)],
          acts,
        ],
        active.items,
        "Nothing is running.",
      )}
    <//>
    ${
      paused.items.length > 0 &&
      html`<${Section} title="Paused">${table("Paused experiments", [...common, runs, acts], paused.items)}<//>`
    }
    <${Section} title="Devices">
      <${Devices} cluster=${{ ...cluster, nodes: cluster.pools.flatMap(pool => pool.nodes) }} ...${{ held, kinds }} />
    <//>
    <${Section} title="Shares of the projects">
      <${Shares} ...${{ known, held, waiting: queue.items, active: active.items, kinds }} />
    <//>
    ${
      over.items.length > 0 &&
      html`<${Section} title="Failed or cancelled lately">
      ${table(
        "Failed or cancelled experiments",
        [
          ...common,
          stateOf,
          ["Ended", one => relative(one.ended_s)],
          ["Failure", one => one.failure_message ?? "", "wide"],
          acts,
        ],
        over.items,
      )}
    <//>`
    }`;
}

export async function show(main, parameters, { signal }) {
  const [who, hardware, known] = await Promise.all([
    whoami(),
    get("/hardware", {}, { signal }),
    get("/projects", {}, { signal }),
  ]);
  const kinds = new Map(hardware.items.map(one => [one.name, one])),
    area = h("div"),
    problem = h("div"),
    tools = h("div", { class: "tools" });
  const projects = new Set();
  let token = query().get("page") || null;

  async function draw() {
    const states = names => `state IN (${names.map(name => `'${name}'`).join(", ")})`;
    const list = (filter, parameters) =>
      get("/experiments", { filter, page_size: MOST_ACTIVE, ...parameters }, { signal });
    let found;
    try {
      found = await Promise.all([
        get("/queue", { page_size: PAGE, page_token: token }, { signal }),
        get("/cluster", {}, { signal }),
        get("/cluster/held", {}, { signal }),
        list(states(["starting", "running"])),
        list(states(["paused"])),
        list(states(["failed", "cancelled"]), { order_by: "ended_s desc", page_size: 10 }),
      ]);
      replace(problem);
    } catch (error) {
      if (error.name !== "AbortError") replace(problem, failed(error, draw));
      return;
    }
    const [queue, , , active, paused] = found,
      chosen = query().get("project") || "";
    for (const one of [...active.items, ...paused.items, ...queue.items.map(entry => entry.experiment)])
      if (one) projects.add(one.project);
    const lacking = new Map(
      queue.at_work.filter(one => one.experiment).map(one => [one.experiment.id, one.reason]),
    );
    const choose = event => {
      setQuery({ project: event.target.value });
      draw();
    };
    const turnTo = next => {
      token = next;
      setQuery({ page: token });
      draw();
    };
    render(
      html`${
        (projects.size > 1 || chosen) &&
        html`<label>project <select name="project" value=${chosen} onChange=${choose}>
          <option value="">all</option>
          ${[...projects].sort().map(name => html`<option value=${name}>${name}</option>`)}
        </select></label>`
      }
        <span class="quiet">
          ${queue.schedulers_alive.length ? `Schedulers: ${queue.schedulers_alive.join(", ")}` : ""}
        </span>`,
      tools,
    );
    render(
      html`<${Board} ...${{ found, lacking, kinds, known: known.items, who, draw, token, turnTo, chosen }} />`,
      area,
    );
  }

  const again = rarely(draw, READ_AGAIN_MS, signal);
  await draw();
  replace(main, h("div", { class: "head" }, h("h1", {}, "Queue"), tools), problem, area);
  followAll({ queue: again, experiment: again, deleted: again }, again, signal);
  every(TICK_S, draw, signal); // Reasons that speak of time, and what each has held for.
  return { title: "Queue" };
}
