"use strict";
// Lines over steps as one SVG: axes with round numbers, gaps where a value is not finite.

const SVG = "http://www.w3.org/2000/svg";
// Okabe and Ito's palette without yellow: told apart by colour-blind readers, on light and dark.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f"];

function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function ticks(low, high, count) {
  const rough = (high - low || Math.abs(high) || 1) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(value);
  return values;
}

const short = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });

/** Draw series [{steps, values}] into an SVG element; `label` says what the values are. */
function drawChart(target, series, label) {
  const width = target.clientWidth || 1000, height = 270, left = 62, right = 14, top = 14, bottom = 38;
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren();
  const points = series.flatMap((one) => one.steps.map((step, i) => [step, one.values[i]]))
    .filter(([, value]) => Number.isFinite(value));
  if (!points.length) {
    target.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no points yet"));
    return;
  }
  const bounds = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const [x0, x1] = bounds(points.map((p) => p[0]));
  let [y0, y1] = bounds(points.map((p) => p[1]));
  const margin = (y1 - y0 || Math.abs(y1) || 1) * 0.06;
  y0 -= margin; y1 += margin;
  const x = (step) => left + (width - left - right) * (x1 === x0 ? 0.5 : (step - x0) / (x1 - x0));
  const y = (value) => height - bottom - (height - top - bottom) * (value - y0) / (y1 - y0);
  for (const value of ticks(y0, y1, 5)) {
    target.append(
      svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(x0, x1, 8)) {
    if (!Number.isInteger(step)) continue;
    target.append(svg("text", { x: x(step), y: height - bottom + 18, "text-anchor": "middle" }, step.toLocaleString("en")));
  }
  target.append(svg("text", { x: width - right, y: height - 4, "text-anchor": "end" }, "step"),
    svg("text", { x: 0, y: 11 }, label));
  series.forEach((one, number) => {
    let path = "", open = false;
    one.steps.forEach((step, i) => {
      const value = one.values[i];
      if (!Number.isFinite(value)) { open = false; return; }
      path += `${open ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      open = true;
    });
    target.append(svg("path", { d: path, stroke: COLOURS[number % COLOURS.length] }));
  });
}
