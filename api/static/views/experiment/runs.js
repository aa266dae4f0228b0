// The runs of an experiment: sorted, filtered and grouped by the server, read as they come into view, live.

import { address, get, getText, mayManage, send, whoami } from "../../core/api.js";
import { act, toast } from "../../core/dialog.js";
import { debounced, h, replace } from "../../core/dom.js";
import { ENDED, RUN_STATES } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { empty, failure } from "../../core/states.js";
import { rarely } from "../../core/stream.js";
import { swatch } from "../../core/swatch.js";
import { VirtualTable } from "../../core/table.js";
import { filterInput } from "../parts.js";
import { savedViews } from "../saved.js";
import { editRun, openMenu, selectionBar } from "./run_actions.js";
import { allColumns, arranged, firstColumns, read, written } from "./run_columns.js";
import { columnsPanel } from "./run_columns_panel.js";
import { groupCells, groupSelects, ordered } from "./run_groups.js";

const PAGE = 200,
  NEED_MS = 60,
  GROUPS_MS = 5000,
  MOST_KEYS = 3;
const GROUPED_BY = ["seed", "state", "task", "student", "hardware", "failure_class", "name"];

const listed = name => (query().get(name) || "").split(",").filter(Boolean);

/** Shows the table. */
export async function show(panel, { id, experiment, onChange }, { signal }) {
  const may = mayManage(await whoami(), experiment);
  const path = `/experiments/${id}`;
  let known = [], // Runs by their place in the server's order
    offsets = new Map(), // and their places
    slots = [], // What rows show: a run that is kept on top, a group, or such a place
    placeOf = [],
    kept = [],
    groups = null,
    matching = 0,
    baseline = null,
    turn = 0;
  const reading = new Map(); // Pages that are being read, with what ends that
  const pinned = new Set(listed("pin").map(Number)),
    hidden = new Set(listed("hide").map(Number)),
    open = new Set();
  const note = h("div");
  const keys = () => listed("group").slice(0, MOST_KEYS);
  const typed = () => query().get("filter");
  /** What the runs are grouped by, in its direction, and what they are sorted by in each group. */
  const byNow = () => {
    const order = query().get("order_by") || "";
    return keys().map(key => (order.startsWith(`${key} `) ? order : key));
  };
  const orderNow = () => [...new Set([...byNow(), query().get("order_by")])].filter(Boolean).join(", ");
  const filterNow = () => {
    if (!pinned.size || keys().length) return typed();
    return `id NOT IN (${[...pinned].join(", ")})${typed() ? ` and (${typed()})` : ""}`;
  };
  const ask = (offset, stop = signal) =>
    get(
      `${path}/runs`,
      { page_size: PAGE, offset, filter: filterNow(), order_by: orderNow() },
      { signal: stop },
    );
  const figures = () => table.columns.filter(column => column.figure);
  const askGroups = async () => {
    if (!keys().length) return null;
    const wanted = figures().map(column => column.key);
    const { items } = await get(
      `${path}/runs/groups`,
      { by: byNow().join(", "), filter: filterNow(), figures: wanted.join(",") },
      { signal },
    );
    return items.map(group => ({ ...group, key: `group ${JSON.stringify(group.values)}` }));
  };
  const put = (runs, offset) =>
    runs.forEach((run, index) => {
      known[offset + index] = run;
      offsets.set(run.id, offset + index);
    });

  function draw() {
    slots = [...kept];
    const add = (from, size) => {
      for (let offset = from; offset < from + size; offset++) slots.push(offset);
    };
    if (!groups) add(0, matching);
    else
      for (const group of ordered(groups, table.sorted)) {
        slots.push(group);
        if (open.has(group.key)) add(group.offset, group.count);
      }
    placeOf = [];
    slots.forEach((slot, place) => {
      if (typeof slot === "number") placeOf[slot] = place;
    });
    table.setRows(
      slots.map(slot => (typeof slot === "number" ? known[slot] : slot)),
      slots.length,
      kept.length + matching,
    );
    table.node.hidden = !slots.length;
    replace(note, slots.length ? null : empty(typed() ? "No run matches." : "This experiment has no runs."));
    tools();
  }
  const readPage = async number => {
    const mine = turn,
      stop = new AbortController();
    reading.set(number, stop);
    try {
      const page = await ask(number * PAGE, AbortSignal.any([signal, stop.signal]));
      if (mine !== turn) return;
      const changed = page.total !== matching;
      put(page.items, number * PAGE);
      matching = page.total;
      reading.delete(number); // Before drawing, which may need this page again.
      if (changed) draw();
      else {
        page.items.forEach((run, index) => {
          const place = placeOf[number * PAGE + index];
          if (place !== undefined) table.rows[place] = run;
        });
        table.setRows(table.rows, slots.length, kept.length + matching);
      }
    } catch (error) {
      if (error.name !== "AbortError" && mine === turn)
        replace(
          note,
          failure(error, () => restart()),
        );
    } finally {
      if (reading.get(number) === stop) reading.delete(number);
    }
  };
  // The pages in view, wherever that is; those that were passed meanwhile are not waited for.
  const need = debounced(
    (from, end) => {
      const wanted = new Set();
      for (const slot of slots.slice(from, end))
        if (typeof slot === "number" && !known[slot]) wanted.add(Math.floor(slot / PAGE));
      for (const [number, stop] of reading) {
        if (wanted.has(number)) continue;
        stop.abort();
        reading.delete(number);
      }
      for (const number of wanted) if (!reading.has(number)) readPage(number);
    },
    NEED_MS,
    signal,
  );
  /** Reads the list again, from its beginning or from where it is scrolled to. */
  const restart = async ({ stay = false } = {}) => {
    const mine = ++turn;
    for (const stop of reading.values()) stop.abort();
    reading.clear();
    try {
      const [page, grouped, top] = await Promise.all([
        ask(0),
        askGroups(),
        pinned.size && !keys().length
          ? get(
              `${path}/runs`,
              { page_size: pinned.size, filter: `id IN (${[...pinned].join(", ")})` },
              { signal },
            )
          : { items: [] },
      ]);
      if (mine !== turn) return;
      [known, offsets, kept, groups, matching] = [[], new Map(), top.items, grouped, page.total];
      put(page.items, 0);
      if (!stay) table.node.scrollTop = 0;
      draw();
    } catch (error) {
      if (error.name === "AbortError" || mine !== turn) return;
      table.node.hidden = true;
      replace(
        note,
        failure(error, () => restart()),
      );
    }
  };
  const changed = (changes, options) => {
    setQuery(changes);
    if ("group" in changes) table.setColumns(columnsNow());
    return restart(options);
  };
  const replaced = run => {
    const offset = offsets.get(run.id),
      place = offset === undefined ? kept.findIndex(one => one.id === run.id) : placeOf[offset];
    if (offset !== undefined) known[offset] = run;
    else if (place >= 0) kept[place] = slots[place] = run;
    if (!(place >= 0)) return;
    table.rows[place] = run;
    table.update(run);
  };

  function controls(run) {
    const shown = !hidden.has(run.id);
    return h(
      "span",
      { class: "row-controls" },
      h(
        "button",
        {
          type: "button",
          class: "sorts",
          "aria-pressed": String(shown),
          "aria-label": `Curve of run ${run.id}`,
          title: shown ? "Hide its curve" : "Show its curve",
          onclick: () => {
            hide([run.id], shown);
            replaced(run);
          },
        },
        swatch(run.index, shown),
      ),
      h(
        "button",
        {
          type: "button",
          class: "sorts",
          disabled: !may,
          "aria-pressed": String(run.starred),
          "aria-label": `Star run ${run.id}`,
          title: run.starred ? "Starred" : "Star it",
          onclick: event =>
            act(event.currentTarget, async () => {
              replaced({
                ...run,
                ...(await send("PATCH", `/runs/${run.id}/marks`, { starred: !run.starred })),
              });
            }),
        },
        run.starred ? "★" : "☆",
      ),
      h(
        "button",
        {
          type: "button",
          class: "sorts",
          "aria-haspopup": "menu",
          "aria-label": `Menu of run ${run.id}`,
          onclick: event => openMenu(event.currentTarget, menuOf(run)),
        },
        "⋯",
      ),
    );
  }
  /** @returns {([string, () => any] | null)[]} */
  const menuOf = run => [
    may ? ["Name, tags and notes …", () => edit(run)] : null,
    [
      pinned.has(run.id) ? "Do not keep at the top" : "Keep at the top",
      () => {
        pinned[pinned.has(run.id) ? "delete" : "add"](run.id);
        return changed({ pin: [...pinned].join(",") });
      },
    ],
    [
      baseline?.id === run.id ? "Compare with no baseline" : "Use as baseline",
      () => {
        baseline = baseline?.id === run.id ? null : run;
        setQuery({ baseline: baseline?.id, difference: baseline && query().get("difference") });
        redraw();
      },
    ],
    may && !ENDED.has(run.state) ? ["Cancel", () => one(run, "cancel")] : null,
    may && ENDED.has(run.state) && run.state !== "succeeded" ? ["Retry", () => one(run, "retry")] : null,
  ];
  const one = async (run, verb) => {
    try {
      replaced({ ...run, ...(await send("POST", `/runs/${run.id}/${verb}`)) });
    } catch (error) {
      toast(error.message, { problem: true });
    }
  };
  const edit = async run => {
    const after = await editRun(run);
    if (after) replaced({ ...run, ...after });
  };
  const name = run =>
    may
      ? h(
          "button",
          {
            type: "button",
            class: "sorts",
            title: run.name || "Name it",
            "aria-label": `Name of run ${run.id}: ${run.name || "none"}`,
            onclick: () => edit(run),
          },
          run.name || h("span", { class: "quiet" }, "+"),
        )
      : run.name;

  const first = await ask(0).catch(error => {
    if (error.status !== 400) throw error;
    return error;
  });
  const sample =
    first instanceof Error ? (await get(`${path}/runs`, { page_size: 50 }, { signal })).items : first.items;
  const all = allColumns(
    sample,
    { baseline: () => baseline, percent: () => query().get("difference") === "percent" },
    { controls, name },
  );
  const columnsNow = () =>
    arranged(read(query().get("columns"), all) || firstColumns(all, sample), all, keys().length > 0);
  const hide = (ids, away) => {
    for (const run of ids) hidden[away ? "add" : "delete"](run);
    setQuery({ hide: [...hidden].join(",") });
    tools();
  };
  const redraw = () => {
    table.redraw();
    tools();
  };
  const laidOut = columns => {
    setQuery({ columns: written(arranged(columns, all, keys().length > 0)) });
    const asked = new Set(figures().map(column => column.key));
    table.setColumns(columnsNow());
    tools();
    if (groups && figures().some(column => !asked.has(column.key))) restart({ stay: true });
  };

  const cells = (row, columns) =>
    row.states &&
    groupCells(row, columns, {
      keys: keys(),
      baseline,
      percent: query().get("difference") === "percent",
      open: open.has(row.key),
      selected: Boolean(row.ids?.every(run => table.selected.has(run))),
      onSelect: box => selectGroup(row, box),
      onOpen: () => {
        open[open.has(row.key) ? "delete" : "add"](row.key);
        draw();
        table.update(row);
      },
    });
  async function selectGroup(group, box) {
    group.ids = [];
    await act(box, async () => {
      for (let offset = group.offset; offset < group.offset + group.count; offset += PAGE) {
        const { items } = await ask(offset);
        for (const run of items.slice(0, group.offset + group.count - offset)) group.ids.push(run.id);
      }
    });
    for (const run of group.ids) table.selected[box.checked ? "add" : "delete"](run);
    table.select(table.selected);
    table.onSelect(table.selected);
  }

  const bar = selectionBar({
    path,
    may,
    again: () => restart({ stay: true }),
    hide: ids => {
      hide(ids, true);
      table.redraw();
    },
    clear: () => {
      table.select([]);
      bar.draw(table.selected);
    },
  });
  const table = new VirtualTable({
    label: "Runs",
    key: row => row.id ?? row.key,
    columns: columnsNow(),
    sorted: sortedBy(query().get("order_by")),
    need,
    cells,
    rowClass: row =>
      [
        row.states ? "group" : "",
        pinned.has(row.id) ? "pinned" : "",
        baseline && row.id === baseline.id ? "baseline" : "",
        hidden.has(row.id) ? "away" : "",
      ]
        .join(" ")
        .trim(),
    onLayout: laidOut,
    onSelect: selected => bar.draw(selected),
    onSelectAll: async everything => {
      // A list of ids of all that match, loaded or not.
      const parameters = { format: "csv", columns: "id", filter: typed() };
      const ids = everything
        ? (await getText(`${path}/export`, parameters, { signal })).trim().split(/\s+/)
        : [];
      table.select(ids.slice(1).map(Number));
      bar.draw(table.selected);
    },
    onSort: (key, descending) => {
      table.setSorted({ key, descending });
      changed({ order_by: `${key} ${descending ? "desc" : "asc"}` });
    },
  });
  const filtered = debounced(event => changed({ filter: event.target.value.trim() }), 300, signal);
  const axes = [...all.values()].filter(column => column.axis).map(column => column.key);
  const grouping = h("span", { class: "tools group-by" });
  const compared = h("span", { hidden: true });
  const exported = h("a", { class: "button", download: true }, "CSV"),
    curves = h("a", { class: "button" }, "Curves"),
    folds = h("button", { type: "button" });
  const chooser = columnsPanel({
    all: [...all.values()].filter(column => !column.fixed),
    columns: () => table.columns.filter(column => !column.fixed),
    onChange: laidOut,
    reset: () => {
      setQuery({ columns: null });
      table.setColumns(columnsNow());
      restart({ stay: true });
    },
  });

  /** Brings what depends on the address and the columns up to date. */
  function tools() {
    replace(
      grouping,
      groupSelects(keys(), [...axes, ...GROUPED_BY], MOST_KEYS, chosen => {
        open.clear();
        changed({ group: chosen.join(",") });
      }),
    );
    folds.hidden = !groups?.length;
    folds.textContent = open.size ? "Collapse all" : "Expand all";
    const percent = query().get("difference") === "percent";
    compared.hidden = !baseline;
    replace(
      compared,
      baseline &&
        h("span", { class: "chip" }, [
          h("span", {}, "Baseline: ", h("a", { href: `/runs/${baseline.id}` }, `run ${baseline.id}`)),
          h(
            "button",
            {
              type: "button",
              "aria-pressed": String(percent),
              "aria-label": "Differences in percent",
              onclick: () => {
                setQuery({ difference: percent ? null : "percent" });
                redraw();
              },
            },
            "%",
          ),
          h(
            "button",
            {
              type: "button",
              "aria-label": "Compare with no baseline",
              onclick: () => {
                baseline = null;
                setQuery({ baseline: null, difference: null });
                redraw();
              },
            },
            "×",
          ),
        ]),
    );
    const columns = table.columns.filter(column => column.csv).map(column => column.csv);
    exported.href = address(`${path}/export`, {
      format: "csv",
      columns: columns.join(","),
      filter: typed(),
      order_by: orderNow(),
    });
    const shown = new URLSearchParams({ by: "run" });
    if (typed()) shown.set("filter", typed());
    if (hidden.size) shown.set("hide", [...hidden].join(","));
    curves.href = `${path}/curves?${shown}`;
    curves.textContent = hidden.size ? `Curves, ${hidden.size} hidden` : "Curves";
    chooser.draw();
  }
  folds.onclick = () => {
    if (open.size) open.clear();
    else for (const group of groups) open.add(group.key);
    draw();
    table.redraw();
  };
  const current = () => {
    const parameters = query();
    parameters.set("table", "runs");
    parameters.set("columns", written(table.columns));
    return parameters;
  };
  const baselineId = Number(query().get("baseline"));
  if (baselineId) baseline = await get(`/runs/${baselineId}`, {}, { signal }).catch(() => null);
  replace(
    panel,
    h(
      "div",
      { class: "tools of-runs" },
      savedViews(current, signal, { table: "runs", path: `${path}/runs` }),
      h(
        "label",
        { class: "field grow" },
        "Filter, such as failed, starred, tag = best or accuracy > 0.9",
        filterInput(typed() || "", filtered, words(sample, axes)),
      ),
      grouping,
      folds,
      chooser.node,
      compared,
      curves,
      exported,
    ),
    bar.node,
    note,
    table.node,
  );
  if (first instanceof Error) {
    table.node.hidden = true;
    replace(note, failure(first));
    tools();
  } else if (pinned.size || keys().length) await restart();
  else {
    put(first.items, 0);
    matching = first.total;
    draw();
  }
  addEventListener("theme", () => table.redraw(), { signal }); // The two blues change places.
  const regroup = rarely(() => groups && restart({ stay: true }), GROUPS_MS, signal);
  onChange((kind, data) => {
    if (kind !== "run") return;
    const offset = offsets.get(data.run.id);
    const before = known[offset] || kept.find(run => run.id === data.run.id);
    if (before) replaced({ ...data.run, latest: { ...before.latest, ...data.latest } });
    if (groups) regroup();
  });
}

/** What a filter may hold: fields of runs and axes, and the values that some of them have. */
function words(runs, axes) {
  const values = name =>
    [...new Set(runs.flatMap(run => run.point[name] ?? run[name] ?? []))].filter(Boolean).map(String);
  const fields = Object.keys(runs[0] || {}).filter(name => name !== "point" && name !== "latest");
  return {
    names: [...axes, ...fields, "tag"],
    values: name => (name === "state" ? RUN_STATES : values(name === "tag" ? "tags" : name)),
  };
}

function sortedBy(order) {
  const [key, direction] = (order || "").split(" ");
  return key ? { key, descending: direction === "desc" } : null;
}
