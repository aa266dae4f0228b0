// What waits and why, what runs, who holds which devices, and buttons for what one may manage.

import { get, whoami } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { count, duration, money, percent, progress, relative, state, when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { empty, failed } from "../core/states.js";
import { followAll, rarely } from "../core/stream.js";
import { choice, every, runsByState, section, shortTable } from "./parts.js";
import { startsIn, whyItWaits } from "./starts.js";
import { priorityOf, manageButtons } from "./manage.js";

const READ_AGAIN_MS = 3000,
  TICK_S = 60,
  PAGE = 50,
  MOST_CELLS = 256,
  MOST_ACTIVE = 100;
const OWN_RESOURCE = /^(node:|accelerator_type:|memory$|object_store_memory$)/;

const tone = experiment => (experiment ? `tone-${experiment.id % 8}` : "tone-hidden");
const link = experiment =>
  h("a", { href: `/experiments/${experiment.id}` }, `${experiment.id} ${experiment.name}`);

/** The devices of a node as cells: held ones in the colour of their experiment, the others free or used otherwise. */
function cells(node, resource, held, kinds) {
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
  return h(
    "div",
    { class: "resource" },
    h("span", { class: "quiet" }, words),
    total <= MOST_CELLS
      ? h(
          "span",
          {
            class: "cells",
            role: "img",
            "aria-label": `${words}; ${own.map(one => `${one.devices} held by ${one.experiment ? one.experiment.name : "another project"}`).join(", ") || "none held"}`,
          },
          filled.map(one =>
            h("i", {
              class: tone(one.experiment),
              title: one.experiment
                ? `${one.experiment.id} ${one.experiment.name} of ${one.experiment.owner}${one.run_id ? `, run ${one.run_id}` : ""}`
                : "held by a project that you do not see",
            }),
          ),
          Array.from({ length: other }, () => h("i", { class: "tone-other", title: "in use" })),
          Array.from({ length: Math.max(0, total - filled.length - other) }, () => h("i", { title: "free" })),
        )
      : progress(total - free, total),
  );
}

function map(cluster, held, kinds) {
  if (!cluster.nodes.length)
    return empty(cluster.at_s ? "The cluster has no nodes." : "No scheduler has looked at a cluster yet.");
  const placed = new Map(
    cluster.nodes.map(node => [node, held.filter(one => one.node === node.name || one.node === node.id)]),
  );
  const known = new Set([...placed.values()].flat()),
    elsewhere = held.filter(one => !known.has(one));
  if (cluster.nodes.length === 1) placed.set(cluster.nodes[0], held); // It cannot be another.
  return [
    h(
      "p",
      { class: "quiet" },
      `As the scheduler saw it ${relative(cluster.at_s)}.`,
      cluster.reachable ? "" : " Ray does not answer now.",
      " ",
      cluster.dashboard_url
        ? h("a", { href: cluster.dashboard_url, rel: "noopener", target: "_blank" }, "Ray dashboard")
        : null,
    ),
    h(
      "div",
      { class: "grid" },
      cluster.nodes.map(node =>
        h(
          "div",
          { class: "card pad node" },
          h("h3", {}, node.name, node.alive ? null : h("span", { class: "bad" }, " does not answer")),
          Object.keys(node.resources)
            .filter(name => !OWN_RESOURCE.test(name) && node.resources[name] >= 1)
            .map(name => cells(node, name, placed.get(node), kinds)),
        ),
      ),
    ),
    shortTable(
      "Who holds devices",
      [
        [
          "Devices",
          one =>
            h(
              "span",
              {},
              h("i", { class: `swatch ${tone(one.experiment)}`, "aria-hidden": "true" }),
              ` ${+one.devices.toFixed(2)} × ${one.hardware}`,
            ),
        ],
        [
          "Experiment",
          one =>
            one.experiment
              ? link(one.experiment)
              : h("span", { class: "quiet" }, "of a project that you do not see"),
          "wide",
        ],
        ["Run", one => (one.run_id ? h("a", { href: `/runs/${one.run_id}` }, one.run_id) : "–"), "num"],
        ["Owner", one => one.experiment?.owner ?? "–"],
        ["Project", one => one.experiment?.project ?? "–"],
        ["Node", one => one.node ?? "–"],
        ["Held for", one => duration(Date.now() / 1000 - one.since_s), "num"],
      ],
      held,
      "Nothing is held.",
    ),
    elsewhere.length && cluster.nodes.length > 1
      ? h(
          "p",
          { class: "quiet" },
          `${elsewhere.length} placement${elsewhere.length === 1 ? " is" : "s are"} on nodes that are not known yet.`,
        )
      : null,
  ];
}

const devices = by =>
  Object.entries(by || {})
    .map(([name, many]) => `${+many.toFixed(2)} × ${name}`)
    .join(", ") || "–";

/** What each project may count on, holds and waits for. */
function byProject(known, held, waiting, active, kinds) {
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
  return shortTable(
    "Projects",
    [
      ["Project", one => h("a", { href: `/projects/${encodeURIComponent(one.name)}` }, one.name)],
      ["Weight", one => one.settings.weight ?? 1, "num"],
      ["Guaranteed", one => devices(one.settings.guaranteed)],
      ["Ceiling", one => devices(one.settings.ceiling)],
      ["Holds", one => devices(one.holds)],
      ["Of what is held", one => (all ? percent(one.usd / all) : "–"), "num"],
      ["Price", one => `${money(one.usd)}/h`, "num"],
      ["Running", one => count(one.running), "num"],
      ["Waiting", one => count(one.waiting), "num"],
    ],
    rows,
    "You see no project.",
  );
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
    if (
      main.querySelector("dialog[open]") ||
      (area.contains(document.activeElement) && document.activeElement.matches("select"))
    ) {
      again();
      return;
    } // Someone chooses.
    const [queue, cluster, { items: held }, active, paused, over] = found,
      chosen = query().get("project") || "";
    for (const one of [...active.items, ...paused.items, ...queue.items.map(entry => entry.experiment)])
      if (one) projects.add(one.project);
    const lacking = new Map(
      queue.at_work.filter(one => one.experiment).map(one => [one.experiment.id, one.reason]),
    );
    const wanted = one => !chosen || one?.project === chosen,
      focus = document.activeElement?.getAttribute("aria-label");
    replace(
      tools,
      projects.size > 1 || chosen
        ? h(
            "label",
            {},
            "project ",
            choice("project", [["", "all"], ...[...projects].sort()], chosen, {
              onchange: event => {
                setQuery({ project: event.target.value });
                draw();
              },
            }),
          )
        : null,
      h(
        "span",
        { class: "quiet" },
        queue.schedulers_alive.length ? `Schedulers: ${queue.schedulers_alive.join(", ")}` : "",
      ),
    );
    const acts = ["", one => manageButtons(one, who, draw)],
      runs = ["Runs", runsByState, "wide"];
    const common = [
      ["Experiment", link, "wide"],
      ["Project", one => one.project],
      ["Owner", one => one.owner],
    ];
    replace(
      area,
      queue.schedulers_alive.length
        ? null
        : h(
            "p",
            { class: "card pad problem" },
            "No scheduler is running, so nothing will start. Start one with ",
            h("code", {}, "stillhouse scheduler"),
            ".",
          ),
      section(
        `Waiting (${count(queue.total)})`,
        shortTable(
          "Waiting experiments, the next one first",
          [
            ["#", one => one.position, "num"],
            [
              "Experiment",
              one =>
                one.experiment ? link(one.experiment) : h("span", { class: "quiet" }, "of another project"),
              "wide",
            ],
            ["Project", one => one.experiment?.project ?? "–"],
            ["Owner", one => one.experiment?.owner ?? "–"],
            ["Priority", one => (one.experiment ? priorityOf(one.experiment, who, draw) : "–")],
            ["Since", one => (one.experiment ? h("span", {}, relative(one.experiment.queued_s)) : "–")],
            ["Starts", one => startsIn(one.start)],
            [
              "Why it waits",
              one => whyItWaits(one.reason, one.start, one.experiment?.owner, one.experiment?.project),
              "wide",
            ],
            ["", one => (one.experiment ? manageButtons(one.experiment, who, draw) : null)],
          ],
          queue.items.filter(one => wanted(one.experiment)),
          "Nothing is waiting.",
        ),
        h(
          "p",
          { class: "actions" },
          token
            ? h(
                "button",
                {
                  type: "button",
                  onclick: () => {
                    token = null;
                    setQuery({ page: null });
                    draw();
                  },
                },
                "First page",
              )
            : null,
          queue.next_page_token
            ? h(
                "button",
                {
                  type: "button",
                  onclick: () => {
                    token = queue.next_page_token;
                    setQuery({ page: token });
                    draw();
                  },
                },
                "Next page",
              )
            : null,
        ),
      ),
      section(
        `Running (${count(active.items.length)}${active.next_page_token ? " and more" : ""})`,
        shortTable(
          "Running experiments",
          [
            ...common,
            ["State", one => state(one.state)],
            runs,
            ["Waits for capacity", one => lacking.get(one.id) ?? "", "wide"],
            ["Started", one => when(one.started_s)],
            acts,
          ],
          active.items.filter(wanted),
          "Nothing is running.",
        ),
      ),
      paused.items.length
        ? section(
            "Paused",
            shortTable("Paused experiments", [...common, runs, acts], paused.items.filter(wanted)),
          )
        : null,
      section("Devices", map({ ...cluster, nodes: cluster.pools.flatMap(pool => pool.nodes) }, held, kinds)),
      section("Shares of the projects", byProject(known.items, held, queue.items, active.items, kinds)),
      over.items.length
        ? section(
            "Failed or cancelled lately",
            shortTable(
              "Failed or cancelled experiments",
              [
                ...common,
                ["State", one => state(one.state)],
                ["Ended", one => h("span", {}, relative(one.ended_s))],
                ["Failure", one => one.failure_message ?? "", "wide"],
                acts,
              ],
              over.items.filter(wanted),
            ),
          )
        : null,
    );
    if (focus) area.querySelector(`[aria-label="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true });
  }

  const again = rarely(draw, READ_AGAIN_MS, signal);
  await draw();
  replace(main, h("div", { class: "head" }, h("h1", {}, "Queue"), tools), problem, area);
  followAll({ queue: again, experiment: again, deleted: again }, again, signal);
  every(TICK_S, draw, signal); // Reasons that speak of time, and what each has held for.
  return { title: "Queue" };
}
