// Lines of charts as numbers: colours, smoothing, outliers, ranges and paths. Nothing here touches the page.

/**
 * @typedef {{name: string, colour: number, runs?: number[], x: number[], y: (number|null)[],
 *   low?: (number|null)[], high?: (number|null)[]}} Line
 */

/** The palette of the API's figures (`service/output/plots/plot.py`). */
export const COLOURS = [
  "#0072B2",
  "#E69F00",
  "#009E73",
  "#CC79A7",
  "#56B4E9",
  "#D55E00",
  "#8C8C8C",
  "#9467BD",
  "#A65628",
  "#66A61E",
  "#E7298A",
  "#17A2A8",
  "#B59B00",
  "#7A68FF",
  "#E06C75",
  "#4C7F5F",
];
const DASHES = [[], [8, 4], [2, 3], [8, 3, 2, 3]];
const SWAPPED = { 0: 4, 4: 0 };
const FAR = 3;

/** How the line of a number is drawn; no two of the first 64 are alike, and no two of the first 16 share a colour. */
export function lineStyle(number, dark = false) {
  const place = number % COLOURS.length;
  // Dark blue on a dark page is hard to see: the two blues change places there.
  return {
    colour: COLOURS[dark ? (SWAPPED[place] ?? place) : place],
    dash: DASHES[Math.floor(number / COLOURS.length) % DASHES.length],
  };
}

/**
 * The exponential moving average of values, of which `weight` is the share that earlier ones keep; the start is not
 * pulled towards 0, and what is not a number is left out.
 */
export function smoothed(values, weight) {
  if (!weight) return values;
  let total = 0,
    norm = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    total = weight * total + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return total / norm;
  });
}

/** The first place in sorted numbers that is not less than `x`. */
function from(xs, x) {
  let low = 0,
    high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The place of the number nearest to `x` in sorted numbers; -1 if there is none. */
export function nearest(xs, x) {
  const place = from(xs, x);
  if (place === xs.length) return xs.length - 1;
  return place > 0 && x - xs[place - 1] <= xs[place] - x ? place - 1 : place;
}

/** The values of lines in a range of x, as they are drawn: those that are numbers, and positive on a logarithmic axis. */
export function* valuesWithin(lines, [first, last], log = false) {
  for (const { x, y } of lines) {
    for (let place = from(x, first); place < x.length && x[place] <= last; place++) {
      const value = y[place];
      if (Number.isFinite(value) && (!log || value > 0)) yield value;
    }
  }
}

const quantile = (sorted, share) => {
  const place = share * (sorted.length - 1),
    below = Math.floor(place);
  return sorted[below] + (place - below) * ((sorted[below + 1] ?? sorted[below]) - sorted[below]);
};

/**
 * Bounds beyond which a value is an outlier: three interquartile ranges outside the middle half, of logarithms on a
 * logarithmic axis. Null where half of the values are the same.
 * @returns {[number, number] | null}
 */
export function fences(values, log = false) {
  const sorted = [...values].map(value => (log ? Math.log(value) : value)).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const [low, high] = [quantile(sorted, 0.25), quantile(sorted, 0.75)],
    range = FAR * (high - low);
  if (range <= 0) return null;
  const back = value => (log ? Math.exp(value) : value);
  return [back(low - range), back(high + range)];
}

/**
 * What is left out of a chart by bounds, in words; empty if nothing is.
 * @param {Iterable<number>} values
 * @param {[number, number]} bounds
 * @param {(value: number) => string} text
 */
export function leftOut(values, [low, high], text = value => String(value)) {
  let below = 0,
    above = 0;
  for (const value of values) {
    if (value < low) below++;
    if (value > high) above++;
  }
  const said = (count, where) => `${count} ${count === 1 ? "point" : "points"} ${where}`;
  const parts = [
    above ? said(above, `above ${text(high)}`) : "",
    below ? said(below, `below ${text(low)}`) : "",
  ].filter(Boolean);
  return parts.length ? `${parts.join(" and ")} ${above + below === 1 ? "is" : "are"} not shown.` : "";
}

/**
 * The range of an axis around what is drawn, with room at both ends.
 * @returns {[number, number]}
 */
export function padded(low, high, log = false) {
  if (!(low <= high)) return log ? [0.1, 1] : [0, 1];
  if (log) {
    const room = low === high ? 2 : (high / low) ** 0.05;
    return [low / room, high * room];
  }
  const room = low === high ? Math.abs(low) * 0.1 || 0.5 : (high - low) * 0.05;
  return [low - room, high + room];
}

/**
 * The range of x over all lines, positive ones alone on a logarithmic axis.
 * @returns {[number, number]}
 */
export function spread(lines, log = false) {
  let low = Infinity,
    high = -Infinity;
  for (const { x } of lines) {
    const first = log ? from(x, Number.MIN_VALUE) : 0;
    if (first >= x.length) continue;
    low = Math.min(low, x[first]);
    high = Math.max(high, x.at(-1));
  }
  if (low > high) return log ? [1, 10] : [0, 1];
  if (low < high) return [low, high];
  return log ? [low / 2, high * 2] : [low - 1, high + 1];
}

/** Round numbers between the ends of a logarithmic axis: 1, 2 and 5 of each decade, powers alone over many decades. */
export function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 1) {
    // Less than a decade has round numbers in equal steps.
    const raw = (high - low) / 4,
      power = 10 ** Math.floor(Math.log10(raw)),
      step = [1, 2, 5, 10].map(digit => digit * power).find(one => one >= raw);
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, place) =>
      Number(((first + place) * step).toPrecision(12)),
    );
  }
  const digits = decades <= 3 ? [1, 2, 5] : [1],
    every = Math.ceil(decades / 8),
    found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1)
    if (power % every === 0)
      for (const digit of digits) found.push(Number((digit * 10 ** power).toPrecision(12)));
  return found.filter(tick => tick >= low && tick <= high);
}

/** Writes a path as SVG does, with the two calls of Path2D that `stroke` and `area` make. */
export class SvgPath {
  #parts = [];
  moveTo(x, y) {
    this.#parts.push(`M${round(x)} ${round(y)}`);
  }
  lineTo(x, y) {
    this.#parts.push(`L${round(x)} ${round(y)}`);
  }
  closePath() {
    this.#parts.push("Z");
  }
  toString() {
    return this.#parts.join("");
  }
}

const round = value => Math.round(value * 100) / 100;

/**
 * Draws a line with a pen: Path2D or SvgPath. Of the points in one column of pixels only the first, the least, the
 * greatest and the last are drawn, which look like all of them. What is not a number leaves a gap.
 */
export function stroke(pen, { x, y }, across, up, [first, last]) {
  let column = null,
    open = false;
  const flush = () => {
    if (!column) return;
    for (const at of column.only ? [column.only] : [column.first, column.least, column.most, column.last])
      pen.lineTo(at[0], at[1]);
    column = null;
  };
  // One point beyond each end leads the line out of the chart.
  const end = Math.min(x.length, from(x, last) + 2);
  for (let place = Math.max(0, from(x, first) - 1); place < end; place++) {
    const value = y[place],
      point = Number.isFinite(value) ? [across(x[place]), up(value)] : null;
    if (!point || !Number.isFinite(point[0]) || !Number.isFinite(point[1])) {
      flush();
      open = false;
    } else if (!open) {
      pen.moveTo(point[0], point[1]);
      open = true;
    } else {
      const at = Math.round(point[0]);
      if (!column || column.at !== at) {
        flush();
        column = { at, only: point, first: point, least: point, most: point, last: point };
      } else {
        column.only = null;
        column.last = point;
        if (point[1] < column.least[1]) column.least = point;
        if (point[1] > column.most[1]) column.most = point;
      }
    }
  }
  flush();
}

/** Draws the band of a line as closed areas, one for each stretch without a gap. */
export function area(pen, { x, low, high }, across, up) {
  let stretch = [];
  const close = () => {
    if (stretch.length > 1) {
      stretch.forEach(([at, , top], place) => (place ? pen.lineTo(at, top) : pen.moveTo(at, top)));
      for (const [at, bottom] of stretch.reverse()) pen.lineTo(at, bottom);
      pen.closePath();
    }
    stretch = [];
  };
  x.forEach((at, place) => {
    const point = [across(at), up(low[place]), up(high[place])];
    if (low[place] === null || high[place] === null || !point.every(Number.isFinite)) close();
    else stretch.push(point);
  });
  close();
}

/**
 * Adds to columns of numbers, of which the one called `key` is sorted; what is at or after the first of the new ones is
 * replaced, as an attempt does that resumed before.
 */
export function append(columns, key, fresh) {
  const place = from(columns[key], fresh[key][0]);
  for (const [name, values] of Object.entries(fresh)) {
    columns[name].length = place;
    columns[name].push(...values);
  }
}

/** Values of lines at two places of the x axis, and what lies between them. */
export function between(lines, [a, b]) {
  return lines
    .filter(line => line.x.length)
    .map(line => {
      const [one, other] = [a, b].map(x => {
        const place = nearest(line.x, x);
        return { x: line.x[place], y: line.y[place] };
      });
      const known = Number.isFinite(one.y) && Number.isFinite(other.y);
      return { line, a: one, b: other, difference: known ? other.y - one.y : NaN };
    });
}
