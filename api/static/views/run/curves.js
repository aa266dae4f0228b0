// Live curves of one run: any of its metrics by step or time, and its devices below on the same axis.

import { get } from "../../core/api.js";
import { chart } from "../../core/chart.js";
import { h, replace } from "../../core/dom.js";
import { query, setQuery } from "../../core/router.js";
import { empty } from "../../core/states.js";
import { addressedGroup, metricChips, slider } from "../charts.js";
import { seldom, select, tick } from "../figures.js";
import { AXES, chartOf, columns, devicePanels, grow, titled } from "./series.js";

const MOST_POINTS = 1000,
  DEVICES_MS = 10_000;

/** The metrics that say most, of those that there are. */
const telling = (names, headline) =>
  [...new Set(["loss", headline, "validation_loss", "learning_rate"])].filter(name => names.includes(name));

export async function show(panel, context, { signal }) {
  const early = [],
    started = context.run.started_s || 0;
  let series = {},
    measured = [];
  /** @type {(fresh: any) => void} */
  let take = fresh => void early.push(fresh);
  context.on("points", fresh => take(fresh)); // What comes while the points are read is not left out.
  const measure = async () => {
    measured = (await get(`/runs/${context.id}/measurements`, {}, { signal })).items;
  };
  const read = async () => {
    const points = get(`/runs/${context.id}/points`, { max_points: MOST_POINTS }, { signal });
    const [{ series: found }] = await Promise.all([points, measure()]);
    series = Object.fromEntries(Object.entries(found).map(([name, one]) => [name, columns(one, started)]));
  };
  await read();
  const asked = query(),
    group = addressedGroup();
  const view = {
    metrics: asked.getAll("metric"),
    x: AXES[asked.get("x")] ? asked.get("x") : "step",
    smooth: Number(asked.get("smooth")) || 0,
    logX: asked.get("logx") === "yes",
    logY: asked.get("log") === "yes",
    outliers: asked.get("outliers") === "hidden",
    devices: asked.get("devices") !== "no",
  };
  const tools = h("div", { class: "tools choices" }),
    area = h("div", { class: "charts" }),
    devices = h("section", { class: "charts", "aria-label": "Devices" });

  const set = change => {
    Object.assign(view, change);
    setQuery({
      metric: view.metrics,
      x: view.x === "step" ? null : view.x,
      smooth: view.smooth || null,
      logx: view.logX ? "yes" : null,
      log: view.logY ? "yes" : null,
      outliers: view.outliers ? "hidden" : null,
      devices: view.devices ? null : "no",
    });
    drawTools();
    draw();
  };
  const names = () => Object.keys(series).sort();
  const chosen = () => {
    const own = view.metrics.filter(name => series[name]);
    return own.length
      ? own
      : [...new Set([...telling(names(), context.run.headline).slice(0, 2), ...names()])].slice(0, 2);
  };

  function drawTools() {
    const shown = chosen(),
      left = names().filter(name => !shown.includes(name));
    const held = [...tools.querySelectorAll("input, select, button")].indexOf(document.activeElement);
    replace(
      tools,
      metricChips(
        shown,
        left.map(name => [name, titled(name)]),
        metrics => set({ metrics }),
      ),
      select("by", Object.keys(AXES), view.x, x => {
        group.set({ zoom: null, marks: [] }); // They were places on another axis.
        set({ x });
      }),
      slider("smoothing", view.smooth, {
        min: 0,
        max: 0.99,
        step: 0.01,
        oninput: smooth => {
          view.smooth = smooth;
          draw();
        },
        onchange: smooth => set({ smooth }),
      }),
      tick("log x", view.logX, logX => set({ logX })),
      tick("log y", view.logY, logY => set({ logY })),
      tick("hide outliers", view.outliers, outliers => set({ outliers })),
      tick("devices", view.devices, devices => set({ devices })),
    );
    if (held >= 0) tools.querySelectorAll("input, select, button")[held]?.focus();
  }

  /** Charts in a place, in order; those that were there before are kept. */
  function fill(place, items, settings) {
    const nodes = items.map(
      ({ key }) =>
        [...place.children].find(node => node.dataset.metric === key) ||
        h("figure", { class: "card pad", "data-metric": key }),
    );
    if (nodes.length !== place.children.length || nodes.some((node, at) => place.children[at] !== node))
      replace(place, nodes);
    items.forEach(({ data }, at) => chart(nodes[at], data, settings, group));
  }

  function draw() {
    const shown = chosen(),
      { smooth, logX, logY, outliers } = view;
    if (!shown.length) {
      replace(area, empty("It has reported no points yet."));
      return;
    }
    fill(
      area,
      shown.map(name => ({ key: name, data: chartOf(name, series[name], view.x) })),
      { smooth, logX, logY, outliers, height: shown.length > 2 ? 240 : 300 },
    );
    const panels = view.devices ? devicePanels(measured, series, view.x, started) : [];
    devices.hidden = !panels.length;
    fill(
      devices,
      panels.map(data => ({ key: data.title, data })),
      { logX, height: 150 },
    );
  }

  replace(panel, h("h2", { class: "unseen" }, "Curves"), tools, area, devices);
  drawTools();
  const later = seldom(() => measure().then(draw, () => {}), DEVICES_MS, signal);
  take = fresh => {
    const before = names().length;
    for (const [name, points] of Object.entries(fresh)) {
      if (series[name]) grow(series[name], points, started);
      else series[name] = columns(points, started);
    }
    if (names().length !== before) {
      drawTools();
      draw();
    }
    for (const one of group.charts) one.grown();
    later();
  };
  early.forEach(take);
  context.on("again", () => read().then(draw, () => {}));
  draw();
}
