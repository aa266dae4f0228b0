// The runs of an experiment: sorted and filtered by the server, read as they come into view, live.

import { get } from "../../core/api.js";
import { debounced, h, replace } from "../../core/dom.js";
import { duration, money, number, numeric, progress, state } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty, failure } from "../../core/states.js";
import { VirtualTable } from "../../core/table.js";

const PAGE = 500;

function columnsOf(axes, repeated, headline, pin, hasCo2) {
  return [
    { key: "pin", title: "", width: 44, render: run => pin(run) },
    {
      key: "id",
      title: "run",
      numeric: true,
      width: 70,
      sortable: true,
      render: run => h("a", { href: `/runs/${run.id}` }, run.id),
    },
    ...axes.map(axis => ({
      key: axis,
      title: axis,
      width: 150,
      render: run => String(run.point[axis] ?? ""),
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
      title: "progress",
      width: 190,
      render: run => [
        progress(
          run.state === "succeeded" ? 1 : run.step,
          run.state === "succeeded" ? 1 : run.total_steps || 1,
          run.state,
        ),
        ` ${run.step}${run.total_steps ? ` / ${run.total_steps}` : ""}`,
      ],
    },
    {
      key: "train_loss",
      title: "loss",
      numeric: true,
      sortable: true,
      render: run => number(run.train_loss ?? run.latest?.loss?.value),
    },
    {
      key: "score",
      title: headline || "score",
      numeric: true,
      sortable: Boolean(headline),
      render: run => number(run.score),
    },
    {
      key: "total_time_s",
      title: "time",
      numeric: true,
      width: 120,
      sortable: true,
      render: run => duration(run.total_time_s),
    },
    {
      key: "cost_usd",
      title: "cost",
      numeric: true,
      width: 120,
      sortable: true,
      render: run => money(run.cost_usd),
    },
    {
      key: "energy_kwh",
      title: "energy",
      unit: "Wh",
      numeric: true,
      sortable: true,
      render: run => number(run.energy_kwh === null ? null : 1000 * run.energy_kwh, "", 3),
    },
    ...(hasCo2
      ? [
          {
            key: "co2_kg",
            title: "CO2",
            unit: "g",
            numeric: true,
            sortable: true,
            render: run => number(run.co2_kg === null ? null : 1000 * run.co2_kg, "", 3),
          },
        ]
      : []),
  ];
}

/** Shows the table. */
export async function show(panel, { id, experiment, onChange }, { signal }) {
  let rows = [],
    places = new Map(),
    token = null,
    reading = null,
    total = 0,
    turn = 0;
  const pinned = new Set((query().get("pin") || "").split(",").filter(Boolean).map(Number));
  const note = h("div");
  const ask = from =>
    get(
      `/experiments/${id}/runs`,
      { page_size: PAGE, page_token: from, filter: query().get("filter"), order_by: query().get("order_by") },
      { signal },
    );
  const take = page => {
    for (const run of page.items) {
      if (!places.has(run.id)) {
        places.set(run.id, rows.length);
        rows.push(run);
      }
    }
    token = page.next_page_token;
    total = token
      ? Math.max(query().get("filter") ? rows.length + 1 : experiment.run_count, rows.length)
      : rows.length;
  };
  const draw = () => {
    const axis = query().get("group");
    if (axis && !token) gather(axis);
    table.setRows(rows, total);
    table.node.hidden = !rows.length;
    replace(
      note,
      rows.length ? null : empty(query().get("filter") ? "No run matches." : "This experiment has no runs."),
    );
  };
  // Runs with one value of an axis next to each other; the server does not sort by axes.
  const gather = axis => {
    const order = [...new Set(rows.map(run => run.point[axis]))].sort((a, b) =>
      typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)),
    );
    const rank = run => (pinned.has(run.id) ? -1 : order.indexOf(run.point[axis]));
    rows.sort((a, b) => rank(a) - rank(b));
    places = new Map(rows.map((run, place) => [run.id, place]));
  };
  const readAll = async () => {
    while (token && query().get("group") && !signal.aborted) take(await ask(token));
  };
  const restart = async () => {
    const mine = ++turn;
    try {
      const page = await ask(null);
      if (mine !== turn) return;
      [rows, places] = [[], new Map()];
      table.node.scrollTop = 0;
      const kept = pinned.size
        ? (
            await get(
              `/experiments/${id}/runs`,
              { page_size: pinned.size, filter: `id IN (${[...pinned].join(", ")})` },
              { signal },
            ).catch(() => ({ items: [] }))
          ).items
        : [];
      take({ items: [...kept, ...page.items], next_page_token: page.next_page_token });
      await readAll();
      draw();
    } catch (error) {
      if (error.name === "AbortError" || mine !== turn) return;
      table.node.hidden = true;
      replace(note, failure(error, restart));
    }
  };
  const more = () => {
    const mine = turn;
    reading ||= ask(token)
      .then(
        page => {
          if (mine === turn) {
            take(page);
            draw();
          }
        },
        () => {},
      )
      .finally(() => {
        reading = null;
      });
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
  const first = await ask(null).catch(error => {
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
      repeated,
      headlines.size === 1 ? [...headlines][0] : null,
      pin,
      Number.isFinite(numeric(experiment.totals?.co2_kg)),
    ),
    sorted: sortedBy(query().get("order_by")),
    need: () => {
      if (token) more();
    },
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
    h("option", { value: "" }, "nothing"),
    axes.map(axis => h("option", { value: axis, selected: query().get("group") === axis }, axis)),
  );
  replace(
    panel,
    h(
      "div",
      { class: "tools" },
      h(
        "label",
        { class: "field grow" },
        "Filter, such as state = 'failed' or accuracy > 0.9",
        h("input", {
          type: "search",
          value: query().get("filter") || "",
          oninput: filtered,
          spellcheck: "false",
        }),
      ),
      h("label", { class: "field" }, "Together by", groups),
    ),
    note,
    table.node,
  );
  if (first instanceof Error) {
    table.node.hidden = true;
    replace(note, failure(first));
  } else if (pinned.size || query().get("group")) await restart();
  else {
    take(first);
    draw();
  }
  onChange((kind, data) => {
    if (kind !== "run" || !places.has(data.run.id)) return;
    const place = places.get(data.run.id);
    rows[place] = { ...data.run, latest: { ...rows[place].latest, ...data.latest } };
    table.update(rows[place]);
  });
}

function sortedBy(order) {
  const [key, direction] = (order || "").split(" ");
  return key ? { key, descending: direction === "desc" } : null;
}
