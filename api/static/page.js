"use strict";
// Three views over the API: experiments, one experiment live, the queue. All text goes in as text.

const main = document.getElementById("main"), live = document.getElementById("live");
let leave = () => {};

function h(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value); else node.setAttribute(key, value);
  }
  node.append(...children.map((child) => (child instanceof Node ? child : String(child ?? ""))));
  return node;
}

async function get(path) {
  const answer = await fetch(`/api/v1${path}`, { headers: { Accept: "application/json" } });
  if (answer.status === 401) return logInAgain();
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail || answer.statusText);
  return body;
}

const number = (value) => (value === null || value === undefined ? NaN : Number(value));
const fixed = (value, digits) => (Number.isFinite(number(value)) ? number(value).toFixed(digits) : value === null ? "" : String(value));
const state = (name) => h("span", { class: `state ${name}` }, name);
const when = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleString() : "");
function lasting(seconds) {
  if (!Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}
const bar = (done, all, kind) => h("progress", { value: done, max: Math.max(all, 1), class: kind, "aria-label": `${done} of ${all}` });
const ended = (counts) => ["succeeded", "failed", "cancelled", "stopped"].reduce((sum, name) => sum + (counts[name] || 0), 0);
const counted = (counts) => Object.entries(counts).map(([name, count]) => `${count} ${name}`).join(", ");

function table(headings, rows, empty) {
  if (!rows.length) return h("div", { class: "card pad quiet" }, empty);
  const cells = headings.map((name) => h("th", { scope: "col", class: name.startsWith("#") ? "num" : "" }, name.replace("#", "")));
  return h("div", { class: "card" }, h("table", {}, h("thead", {}, h("tr", {}, ...cells)), h("tbody", {}, ...rows)));
}
const row = (...cells) => h("tr", {}, ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : h("td", {}, cell))));
const num = (text) => h("td", { class: "num" }, text);

/** Repeat `draw` every few seconds until the view is left; a failure is shown and tried again. */
function repeat(draw, seconds) {
  let timer, gone = false;
  const turn = async () => {
    try { await draw(); live.textContent = ""; } catch (error) { live.textContent = error.message; }
    if (!gone) timer = setTimeout(turn, seconds * 1000);
  };
  turn();
  return () => { gone = true; clearTimeout(timer); };
}

function showExperiments() {
  let tokens = [null];
  const draw = async () => {
    const token = tokens[tokens.length - 1];
    const page = await get(`/experiments?page_size=50${token ? `&page_token=${encodeURIComponent(token)}` : ""}`);
    const rows = page.items.map((one) => row(
      num(one.id), h("a", { href: `#/experiments/${one.id}` }, one.name), state(one.state),
      h("span", {}, bar(ended(one.run_states), one.run_count, one.state), ` ${ended(one.run_states)} of ${one.run_count}`),
      one.owner, num(one.priority), when(one.created_s)));
    const turn = (change) => () => { change(); draw(); };
    main.replaceChildren(h("h1", {}, "Experiments"),
      h("p", { class: "quiet" }, "Newest first. Submit one with ", h("code", {}, "stillhouse submit spec.yaml"), "."),
      table(["#id", "name", "state", "runs ended", "owner", "#priority", "submitted"], rows, "Nothing submitted yet."),
      h("p", {}, ...(tokens.length > 1 ? [h("button", { onclick: turn(() => tokens.pop()) }, "Newer"), " "] : []),
        ...(page.next_page_token ? [h("button", { onclick: turn(() => tokens.push(page.next_page_token)) }, "Older")] : [])));
  };
  return repeat(draw, 3);
}

function showQueue() {
  const tokens = [null];
  const draw = async () => {
    const token = tokens[tokens.length - 1];
    const queue = await get(`/queue?page_size=50${token ? `&page_token=${encodeURIComponent(token)}` : ""}`);
    const turn = (change) => () => { change(); draw(); };
    main.replaceChildren(h("h1", {}, "Queue"),
      h("p", { class: "quiet" }, queue.schedulers_alive.length
        ? `Running schedulers: ${queue.schedulers_alive.join(", ")}`
        : "No scheduler is running, so nothing will start."),
      ...(queue.total ? [h("p", { class: "quiet" }, `${queue.total} waiting`)] : []),
      table(["#position", "experiment", "owner", "#priority", "reason"], queue.items.map((entry) => row(
        num(entry.position), ...(entry.experiment
          ? [h("a", { href: `#/experiments/${entry.experiment.id}` }, `${entry.experiment.id} ${entry.experiment.name}`),
            entry.experiment.owner, num(entry.experiment.priority)]
          : ["–", "", ""]), // Of a project that the reader does not see.
        h("td", { class: "wide" }, entry.reason))), "Nothing is waiting."),
      h("p", {}, ...(tokens.length > 1 ? [h("button", { onclick: turn(() => tokens.pop()) }, "Earlier"), " "] : []),
        ...(queue.next_page_token ? [h("button", { onclick: turn(() => tokens.push(queue.next_page_token)) }, "Later")] : [])));
  };
  return repeat(draw, 2);
}

function showExperiment(id) {
  const runs = new Map(), curves = new Map();
  let experiment, axes = [], metric = "loss", source, dirty = true, frame, closed = false;
  const head = h("div"), chart = svg("svg", { class: "chart", role: "img", "aria-label": "learning curves" });
  const legend = h("div", { class: "legend" }), list = h("div"), happened = h("div");
  const choose = h("select", { "aria-label": "metric", onchange: () => { metric = choose.value; dirty = true; } });
  const events = [];

  async function load() {
    experiment = await get(`/experiments/${id}`);
    let token = null;
    do {
      const page = await get(`/experiments/${id}/runs?page_size=500${token ? `&page_token=${encodeURIComponent(token)}` : ""}`);
      page.items.forEach((run) => runs.set(run.id, run));
      token = page.next_page_token;
    } while (token && runs.size < 2000);
    axes = [...new Set([...runs.values()].flatMap((run) => Object.keys(run.point)))];
    main.replaceChildren(head, h("h2", {}, "Learning curves"),
      h("div", { class: "card pad" }, h("div", { class: "tools" }, legend, choose), chart), h("h2", {}, "Runs"), list,
      h("h2", {}, "Events"), happened);
    await Promise.all(shown().map((run) => loadCurve(run.id)));
    follow();
    draw();
  }
  // Curves of the runs that say most: those that run now, then the first ones.
  function shown() {
    const begun = [...runs.values()].filter((run) => run.attempt > 0 || run.reused_from);
    const active = begun.filter((run) => run.state === "running");
    return [...active, ...begun.filter((run) => run.state !== "running")].slice(0, COLOURS.length).sort((a, b) => a.index - b.index);
  }
  async function loadCurve(run) {
    const { series } = await get(`/runs/${run}/points?max_points=600`);
    const kept = {};
    for (const [name, one] of Object.entries(series)) kept[name] = { steps: one.steps, values: one.values.map(number) };
    curves.set(run, kept);
  }
  function take({ run, latest }) {
    const before = runs.get(run.id);
    runs.set(run.id, run);
    if (!curves.has(run.id) || (before && before.attempt !== run.attempt)) {
      curves.set(run.id, curves.get(run.id) || {});
      loadCurve(run.id).then(() => { dirty = true; }, () => {});
    } else {
      for (const [name, point] of Object.entries(latest)) {
        const one = (curves.get(run.id)[name] ||= { steps: [], values: [] });
        if (one.steps.length && one.steps[one.steps.length - 1] >= point.step) continue;
        one.steps.push(point.step); one.values.push(number(point.value));
      }
    }
    dirty = true;
  }
  function follow() {
    source = new EventSource(`/api/v1/experiments/${id}/stream`);
    source.addEventListener("open", () => { live.textContent = "live"; });
    source.addEventListener("error", () => {
      if (!closed) live.textContent = "connecting …";
      if (source.readyState === EventSource.CLOSED) get("/whoami").catch(() => {});  // Refused: logged out?
    });
    source.addEventListener("event", (message) => { events.push(JSON.parse(message.data)); dirty = true; });
    source.addEventListener("run", (message) => take(JSON.parse(message.data)));
    source.addEventListener("experiment", (message) => { Object.assign(experiment, JSON.parse(message.data)); dirty = true; });
    source.addEventListener("end", async () => {
      source.close(); closed = true; live.textContent = "";
      try {
        experiment = await get(`/experiments/${id}`);
        (await get(`/experiments/${id}/runs?page_size=500`)).items.forEach((run) => runs.set(run.id, run));
        await Promise.all(shown().map((run) => loadCurve(run.id)));
      } catch (error) { live.textContent = error.message; }
      dirty = true;
    });
  }
  const label = (run) => [...axes.map((axis) => String(run.point[axis])), `seed ${run.seed}`].join(" · ");
  function draw() {
    frame = setTimeout(draw, 400);
    if (!dirty) return;
    dirty = false;
    const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    const until = experiment.ended_s || Date.now() / 1000;
    head.replaceChildren(h("p", { class: "quiet" }, h("a", { href: "#/" }, "Experiments"), ` / ${experiment.id}`),
      h("h1", {}, experiment.name),
      h("p", {}, state(experiment.state), "  ", bar(ended(experiment.run_states), experiment.run_count, experiment.state), ` ${counted(experiment.run_states)}`),
      h("dl", { class: "facts" }, fact("owner", experiment.owner), fact("submitted", when(experiment.created_s)),
        ...(experiment.started_s ? [fact("time", lasting(until - experiment.started_s))] : []),
        ...(experiment.totals ? [fact("cost", `${fixed(experiment.totals.cost_usd, 4)} USD`), fact("energy", `${fixed(experiment.totals.energy_kwh, 5)} kWh`)] : []),
        ...(experiment.waiting && experiment.state === "queued" ? [fact("waits", experiment.waiting.reason)] : []),
        fact("table", h("a", { href: `/api/v1/experiments/${id}/export?format=csv` }, "CSV"))),
      ...(experiment.failure_message ? [h("p", { class: "card pad problem" }, `${experiment.failure_class}: ${experiment.failure_message}`)] : []));
    const chosen = shown();
    const names = [...new Set(chosen.flatMap((run) => Object.keys(curves.get(run.id) || {})))].sort();
    if (!names.includes(metric) && names.length) metric = names.includes("loss") ? "loss" : names[0];
    choose.replaceChildren(...names.map((name) => h("option", name === metric ? { value: name, selected: "" } : { value: name }, name)));
    drawChart(chart, chosen.map((run) => (curves.get(run.id) || {})[metric] || { steps: [], values: [] }), metric);
    legend.replaceChildren(...chosen.map((run, i) => h("span", {}, svg("svg", { viewBox: "0 0 20 8" },
      svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, stroke: COLOURS[i], "stroke-width": 3 })), label(run))));
    const sorted = [...runs.values()].sort((a, b) => a.index - b.index).slice(0, 500);
    const headlines = [...new Set(sorted.map((run) => run.headline).filter(Boolean))];
    const judged = headlines.length === 1 ? headlines[0] : null;
    list.replaceChildren(table(["#run", ...axes, "#seed", "state", "progress", "#loss", judged ? `#${judged}` : "#score", "#time", "#cost, USD"], sorted.map((run) => row(
      num(run.id), ...axes.map((axis) => String(run.point[axis] ?? "")), num(run.seed),
      h("span", run.failure_message ? { title: `${run.failure_class}: ${run.failure_message}` } : {}, state(run.state), run.failure_class ? ` ${run.failure_class}` : run.reused_from ? ` = run:${run.reused_from}` : ""),
      h("span", {}, bar(run.state === "succeeded" ? 1 : run.step, run.state === "succeeded" ? 1 : run.total_steps || 1, run.state), ` ${run.step}${run.total_steps ? ` / ${run.total_steps}` : ""}`),
      num(fixed(run.train_loss, 4)), h("td", run.headline ? { class: "num", title: run.headline } : { class: "num" }, fixed(run.score, 4)), num(lasting(number(run.total_time_s))), num(fixed(run.cost_usd, 5)))), "No runs."));
    happened.replaceChildren(table(["when", "what", "#run", "message"], events.slice(-30).reverse().map((event) => row(
      new Date(event.at_s * 1000).toLocaleTimeString(), event.kind, num(event.run_id ?? ""), h("td", { class: "wide" }, event.message))), "Nothing yet."));
  }
  load().catch((error) => main.replaceChildren(h("p", { class: "card pad problem" }, error.message)));
  return () => { closed = true; clearTimeout(frame); if (source) source.close(); };
}

function show() {
  leave();
  live.textContent = "";
  const place = location.hash || "#/";
  document.querySelectorAll("nav a").forEach((link) => {
    if (link.getAttribute("href") === place) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  });
  const match = place.match(/^#\/experiments\/(\d+)$/);
  leave = match ? showExperiment(match[1]) : place === "#/queue" ? showQueue() : place === "#/account" ? showSessions() : showExperiments();
}
addEventListener("hashchange", show);
show();
