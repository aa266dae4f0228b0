// The runs of an experiment: sorted and filtered by the server, read as they come into view, live.

import { get } from "../../core/api.js";
import { debounced, h, replace } from "../../core/dom.js";
import {
  count,
  duration,
  energy,
  mass,
  money,
  number,
  numeric,
  progress,
  RUN_STATES,
  state,
} from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty, failure } from "../../core/states.js";
import { VirtualTable } from "../../core/table.js";
import { filterInput } from "../parts.js";

const PAGE = 200,
  NEED_MS = 60;

/** The name of an axis for filters and orders. */
const axisKey = axis => (/^[\w.]+$/.test(axis) ? axis : `axis."${axis}"`);

function columnsOf(axes, numbers, repeated, headline, pin, hasCo2) {
  return [
    { key: "pin", title: h("span", { class: "unseen" }, "Pin"), width: 44, render: run => pin(run) },
    {
      key: "id",
      title: "id",
      numeric: true,
      width: 70,
      sortable: true,
      render: run => h("a", { href: `/runs/${run.id}` }, run.id),
    },
    ...axes.map(axis => ({
      key: axisKey(axis),
      title: axis,
      width: 150,
      sortable: true,
      numeric: numbers.has(axis),
      render: run =>
        Array.isArray(run.point[axis]) ? run.point[axis].join(", ") : String(run.point[axis] ?? ""),
    })),
    { key: "seed", title: "seed", numeric: true, width: 64, sortable: true, render: run => run.seed },
    ...(repeated
      ? [{ key: "repeat", title: "repeat", numeric: true, sortable: true, render: run => run.repeat }]
      : []),
    {
      key: "state",
      title: "state",
      width: 130,
      sortable: true,
      render: run =>
        h(
          "span",
          { title: run.failure_message || null },
          state(run.state),
          run.reused_from ? ` = run ${run.reused_from}` : "",
        ),
    },
    {
      key: "step",
      title: "step",
      width: 230,
      sortable: true,
      render: run => [
        progress(
          run.state === "succeeded" ? 1 : run.step,
          run.state === "succeeded" ? 1 : run.total_steps || 1,
          run.state,
        ),
        ` ${count(run.step)}${run.total_steps ? ` / ${count(run.total_steps)}` : ""}`,
      ],
    },
    {
      key: "train_loss",
      title: "train_loss",
      numeric: true,
      sortable: true,
      render: run => number(run.train_loss ?? run.latest?.loss?.value),
    },
    {
      key: headline || "score",
      title: headline || "score",
      numeric: true,
      sortable: true,
      render: run => number(run.score),
    },
    {
      key: "total_time_s",
      title: "total_time_s",
      numeric: true,
      width: 120,
      sortable: true,
      render: run => duration(run.total_time_s),
    },
    {
      key: "cost_usd",
      title: "cost_usd",
      numeric: true,
      width: 120,
      sortable: true,
      render: run => money(run.cost_usd),
    },
    {
      key: "energy_kwh",
      title: "energy_kwh",
      numeric: true,
      width: 120,
      sortable: true,
      render: run => energy(run.energy_kwh),
    },
    ...(hasCo2
      ? [
          {
            key: "co2_kg",
            title: "co2_kg",
            numeric: true,
            sortable: true,
            render: run => mass(run.co2_kg),
          },
        ]
      : []),
  ];
}

/** Shows the table. */
export async function show(panel, { id, experiment, onChange }, { signal }) {
  let rows = [],
    places = new Map(),
    above = 0, // Pinned runs, which come first whatever the order.
    total = 0,
    turn = 0;
  const reading = new Map(); // Pages that are being read, with what ends that
  const pinned = new Set((query().get("pin") || "").split(",").filter(Boolean).map(Number));
  const note = h("div");
  const filterNow = () => {
    const typed = query().get("filter");
    if (!pinned.size) return typed;
    return `id NOT IN (${[...pinned].join(", ")})${typed ? ` and (${typed})` : ""}`;
  };
  const orderNow = () => [query().get("group"), query().get("order_by")].filter(Boolean).join(", ");
  const ask = (offset, stop = signal) =>
    get(
      `/experiments/${id}/runs`,
      { page_size: PAGE, offset, filter: filterNow(), order_by: orderNow() },
      { signal: stop },
    );
  const put = (runs, place) =>
    runs.forEach((run, index) => {
      rows[place + index] = run;
      places.set(run.id, place + index);
    });
  const take = (page, offset) => {
    put(page.items, above + offset);
    total = above + page.total;
  };
  const draw = () => {
    table.setRows(rows, total);
    table.node.hidden = !total;
    replace(
      note,
      total ? null : empty(query().get("filter") ? "No run matches." : "This experiment has no runs."),
    );
  };
  const readPage = async number => {
    const mine = turn,
      stop = new AbortController();
    reading.set(number, stop);
    try {
      const page = await ask(number * PAGE, AbortSignal.any([signal, stop.signal]));
      if (mine !== turn) return;
      take(page, number * PAGE);
      reading.delete(number); // Before drawing, which may need this page again.
      draw();
    } catch (error) {
      if (error.name !== "AbortError" && mine === turn) replace(note, failure(error, restart));
    } finally {
      if (reading.get(number) === stop) reading.delete(number);
    }
  };
  // The pages in view, wherever that is; those that were passed meanwhile are not waited for.
  const need = debounced(
    (from, end) => {
      const first = Math.floor(Math.max(0, from - above) / PAGE),
        last = Math.floor(Math.max(0, end - 1 - above) / PAGE);
      for (const [number, stop] of reading) {
        if (number >= first && number <= last) continue;
        stop.abort();
        reading.delete(number);
      }
      for (let number = first; number <= last; number++) if (!reading.has(number)) readPage(number);
    },
    NEED_MS,
    signal,
  );
  const restart = async () => {
    const mine = ++turn;
    for (const stop of reading.values()) stop.abort();
    reading.clear();
    try {
      const page = await ask(0);
      const { items: kept } = pinned.size
        ? await get(
            `/experiments/${id}/runs`,
            { page_size: pinned.size, filter: `id IN (${[...pinned].join(", ")})` },
            { signal },
          )
        : { items: [] };
      if (mine !== turn) return;
      [rows, places, above] = [[], new Map(), kept.length];
      table.node.scrollTop = 0;
      put(kept, 0);
      take(page, 0);
      draw();
    } catch (error) {
      if (error.name === "AbortError" || mine !== turn) return;
      table.node.hidden = true;
      replace(note, failure(error, restart));
    }
  };
  const pin = run =>
    h(
      "button",
      {
        type: "button",
        class: "sorts",
        "aria-pressed": String(pinned.has(run.id)),
        "aria-label": `Pin run ${run.id}`,
        title: "Keep at the top",
        onclick: () => {
          pinned[pinned.has(run.id) ? "delete" : "add"](run.id);
          setQuery({ pin: [...pinned].join(",") });
          restart();
        },
      },
      pinned.has(run.id) ? "★" : "☆",
    );
  const first = await ask(0).catch(error => {
    if (error.status !== 400) throw error;
    return error;
  });
  const known =
    first instanceof Error
      ? (await get(`/experiments/${id}/runs`, { page_size: 50 }, { signal })).items
      : first.items;
  const axes = [...new Set(known.flatMap(run => Object.keys(run.point)))];
  const repeated = known.some(run => run.repeat);
  const headlines = new Set(known.map(run => run.headline).filter(Boolean));
  const table = new VirtualTable({
    label: "Runs",
    key: run => run.id,
    columns: columnsOf(
      axes,
      new Set(axes.filter(axis => known.every(run => typeof (run.point[axis] ?? 0) === "number"))),
      repeated,
      headlines.size === 1 ? [...headlines][0] : null,
      pin,
      Number.isFinite(numeric(experiment.totals?.co2_kg)),
    ),
    sorted: sortedBy(query().get("order_by")),
    need,
    rowClass: run => (pinned.has(run.id) ? "pinned" : ""),
    onSort: (key, descending) => {
      setQuery({ order_by: `${key} ${descending ? "desc" : "asc"}` });
      table.setSorted({ key, descending });
      restart();
    },
  });
  const filtered = debounced(
    event => {
      setQuery({ filter: event.target.value.trim() });
      restart();
    },
    300,
    signal,
  );
  const groups = h(
    "select",
    {
      onchange: event => {
        setQuery({ group: event.target.value });
        restart();
      },
    },
    h("option", { value: "" }, "none"),
    axes.map(axis =>
      h("option", { value: axisKey(axis), selected: query().get("group") === axisKey(axis) }, axis),
    ),
  );
  replace(
    panel,
    h(
      "div",
      { class: "tools" },
      h(
        "label",
        { class: "field grow" },
        "Filter, such as failed, fp32 or accuracy > 0.9 and batch = 16",
        filterInput(query().get("filter") || "", filtered, words(known, axes)),
      ),
      h("label", { class: "field" }, "Group by", groups),
    ),
    note,
    table.node,
  );
  if (first instanceof Error) {
    table.node.hidden = true;
    replace(note, failure(first));
  } else if (pinned.size) await restart();
  else {
    take(first, 0);
    draw();
  }
  onChange((kind, data) => {
    if (kind !== "run" || !places.has(data.run.id)) return;
    const place = places.get(data.run.id);
    rows[place] = { ...data.run, latest: { ...rows[place].latest, ...data.latest } };
    table.update(rows[place]);
  });
}

/** What a filter may hold: fields of runs and axes, and the values that some of them have. */
function words(runs, axes) {
  const values = name =>
    [...new Set(runs.map(run => run.point[name] ?? run[name]))].filter(Boolean).map(String);
  const fields = Object.keys(runs[0] || {}).filter(name => name !== "point" && name !== "latest");
  return {
    names: [...axes.map(axisKey), ...fields],
    values: name => (name === "state" ? RUN_STATES : values(name)),
  };
}

function sortedBy(order) {
  const [key, direction] = (order || "").split(" ");
  return key ? { key, descending: direction === "desc" } : null;
}
