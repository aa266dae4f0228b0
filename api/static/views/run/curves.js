// Live curves of one run: any of its metrics, by step or time.

import { get } from "../../core/api.js";
import { h, replace } from "../../core/dom.js";
import { query, setQuery } from "../../core/router.js";
import { empty } from "../../core/states.js";
import { choice } from "../parts.js";
import { extended, figure, lineFigure, titled } from "./series.js";

const MOST_POINTS = 1000,
  REDRAW_MS = 1000,
  MOST_METRICS = 6;

/** The metrics that say most, of those that there are. */
export const telling = (names, headline) =>
  [...new Set(["loss", headline, "validation_loss", "learning_rate"])].filter(name => names.includes(name));

export async function show(panel, context, { signal }) {
  const early = [],
    series = {};
  /** @type {(fresh: any) => void} */
  let take = fresh => void early.push(fresh);
  context.on("points", fresh => take(fresh)); // What comes while the points are read is not left out.
  const read = async () =>
    Object.assign(
      series,
      (await get(`/runs/${context.id}/points`, { max_points: MOST_POINTS }, { signal })).series,
    );
  await read();
  const asked = query();
  const view = {
    metrics: asked.getAll("metric"),
    x: asked.get("x") || "step",
    smooth: Number(asked.get("smooth")) || 0,
    log: asked.get("log") === "yes",
  };
  const tools = h("div", { class: "tools" }),
    area = h("div", { class: "grid plots" });
  let timer;
  signal.addEventListener("abort", () => clearTimeout(timer));

  const set = change => {
    Object.assign(view, change);
    setQuery({
      metric: view.metrics,
      x: view.x === "step" ? null : view.x,
      smooth: view.smooth || null,
      log: view.log ? "yes" : null,
    });
    drawTools();
    return drawPlots();
  };
  const names = () => Object.keys(series).sort();
  const chosen = () => {
    const own = view.metrics.filter(name => series[name]);
    return own.length
      ? own
      : telling(names(), context.run.headline)
          .slice(0, 2)
          .concat(names())
          .slice(0, 2)
          .filter((name, i, all) => all.indexOf(name) === i);
  };

  function drawTools() {
    const shown = chosen(),
      left = names().filter(name => !shown.includes(name));
    replace(
      tools,
      shown.map(name =>
        h(
          "span",
          { class: "chip" },
          name,
          shown.length > 1
            ? h(
                "button",
                {
                  type: "button",
                  "aria-label": `Leave out ${name}`,
                  onclick: () => set({ metrics: shown.filter(one => one !== name) }),
                },
                "×",
              )
            : null,
        ),
      ),
      left.length && shown.length < MOST_METRICS
        ? choice("add", [["", "Add a metric …"], ...left.map(name => [name, titled(name)])], "", {
            "aria-label": "Add a metric",
            onchange: event => set({ metrics: [...shown, event.target.value] }),
          })
        : null,
      h(
        "label",
        {},
        "by ",
        choice(
          "x",
          [
            ["step", "step"],
            ["time", "time"],
          ],
          view.x,
          { onchange: event => set({ x: event.target.value }) },
        ),
      ),
      h(
        "label",
        {},
        "smoothing ",
        choice(
          "smooth",
          [
            ["0", "none"],
            ["0.6", "0.6"],
            ["0.9", "0.9"],
            ["0.97", "0.97"],
          ],
          String(view.smooth),
          { onchange: event => set({ smooth: Number(event.target.value) }) },
        ),
      ),
      h(
        "label",
        {},
        h("input", {
          type: "checkbox",
          checked: view.log,
          onchange: event => set({ log: event.target.checked }),
        }),
        " logarithmic",
      ),
    );
  }

  async function drawPlots() {
    const shown = chosen();
    if (!shown.length) {
      replace(area, empty("It has reported no points yet."));
      return;
    }
    const nodes = shown.map(
      name =>
        [...area.children].find(node => node.dataset.metric === name) ||
        h(
          "section",
          { class: "card pad", "data-metric": name, "aria-label": titled(name) },
          h("h2", {}, titled(name)),
          h("div", { class: "figure-place" }),
          h("p", { class: "quiet note" }),
        ),
    );
    if (nodes.length !== area.children.length || nodes.some((node, place) => area.children[place] !== node))
      replace(area, nodes);
    await Promise.all(
      shown.map((name, place) => {
        const one = series[name];
        nodes[place].querySelector(".note").textContent = [
          one.bucket_steps ? `Each ${one.bucket_steps} steps: least and greatest value.` : "",
          view.smooth ? `Bold: exponential mean of weight ${view.smooth}; faint: as reported.` : "",
        ]
          .filter(Boolean)
          .join(" ");
        return figure(
          nodes[place].querySelector(".figure-place"),
          lineFigure(name, one, { ...view, started: context.run.started_s }),
        );
      }),
    );
  }

  replace(panel, tools, area);
  drawTools();
  take = fresh => {
    const before = names().length;
    for (const [name, points] of Object.entries(fresh)) series[name] = extended(series[name], points);
    if (names().length !== before) drawTools();
    timer ||= setTimeout(() => {
      timer = null;
      if (!signal.aborted) drawPlots();
    }, REDRAW_MS);
  };
  early.forEach(take);
  context.on("again", () => read().then(drawPlots, () => {}));
  await drawPlots();
}
