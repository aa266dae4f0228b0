// The list of experiments: searched, filtered and ordered by the server, followed as they change.

import { get } from "../core/api.js";
import { debounced, h, replace } from "../core/dom.js";
import { duration, EXPERIMENT_STATES, money, relative, state, when } from "../core/format.js";
import { go, query, setQuery } from "../core/router.js";
import { empty, failure } from "../core/states.js";
import { followAll, rarely } from "../core/stream.js";
import { VirtualTable } from "../core/table.js";
import { every, runsByState } from "./parts.js";
import { savedViews } from "./saved.js";

const READ_AGAIN_MS = 3000,
  TICK_S = 10,
  PAGE = 200,
  KEPT_COLUMNS = "stillhouse-experiment-columns";

const lasted = one => (one.started_s ? (one.ended_s || Date.now() / 1000) - one.started_s : null);

/** All columns; those marked `first` are shown unless others were chosen. */
const COLUMNS = [
  { key: "id", title: "id", numeric: true, width: 70, sortable: true, first: true, render: one => one.id },
  {
    key: "name",
    title: "name",
    width: 250,
    sortable: true,
    first: true,
    render: one => h("a", { href: `/experiments/${one.id}`, title: one.name }, one.name),
  },
  { key: "state", title: "state", width: 120, sortable: true, first: true, render: one => state(one.state) },
  {
    key: "runs",
    title: "runs",
    width: 270,
    first: true,
    render: runsByState,
  },
  { key: "project", title: "project", width: 120, sortable: true, first: true, render: one => one.project },
  { key: "owner", title: "owner", width: 120, sortable: true, first: true, render: one => one.owner },
  {
    key: "tags",
    title: "tags",
    width: 160,
    first: true,
    render: one => one.tags.map(tag => [h("span", { class: "chip" }, tag), " "]),
  },
  {
    key: "created_s",
    title: "submitted",
    width: 130,
    sortable: true,
    first: true,
    render: one =>
      h("time", { title: new Date(one.created_s * 1000).toISOString() }, relative(one.created_s)),
  },
  {
    key: "time",
    title: "time",
    numeric: true,
    width: 110,
    first: true,
    render: one => duration(lasted(one)),
  },
  { key: "ended_s", title: "ended", width: 140, sortable: true, render: one => when(one.ended_s) },
  {
    key: "priority",
    title: "priority",
    numeric: true,
    width: 90,
    sortable: true,
    render: one => one.priority,
  },
  { key: "pool", title: "pool", width: 110, render: one => one.pool },
  {
    key: "failure",
    title: "failure",
    width: 220,
    render: one => h("span", { title: one.failure_message || null }, one.failure_class || ""),
  },
  {
    key: "cost",
    title: "cost so far",
    numeric: true,
    width: 130,
    costs: true,
    render: one => money(one.cost?.so_far_usd),
  },
  {
    key: "rest",
    title: "forecast of the rest",
    numeric: true,
    width: 160,
    costs: true,
    render: one => money(one.cost?.rest_usd),
  },
  {
    key: "notes",
    title: "notes",
    width: 260,
    render: one => h("span", { title: one.notes || null }, one.notes),
  },
];

function chosenColumns() {
  const names = query().get("columns")?.split(",") || localStorage.getItem(KEPT_COLUMNS)?.split(",");
  const chosen = COLUMNS.filter(column => (names ? names.includes(column.key) : column.first));
  return chosen.length ? chosen : COLUMNS.filter(column => column.first);
}

/** The filter of the address: what was typed, and the state that was chosen. */
function filterOf(parameters) {
  const typed = (parameters.get("filter") || "").trim(),
    chosen = parameters.get("state");
  const words =
    typed && !/[=<>]|\b(like|in|is)\b/i.test(typed) ? `name LIKE '%${typed.replaceAll("'", "''")}%'` : typed;
  return [words, chosen ? `state = '${chosen}'` : ""].filter(Boolean).join(" and ");
}

/** Shows the list. */
export async function show(main, _parameters, { signal }) {
  let tokens = [null],
    orders = query().get("order_by"),
    rows = [],
    full = false;
  const note = h("div"),
    pager = h("p", { class: "tools" });
  const compare = h("a", { class: "button", hidden: true }, "Compare");
  const table = new VirtualTable({
    label: "Experiments",
    columns: chosenColumns(),
    key: one => one.id,
    sorted: sortedBy(orders),
    onSort: (key, descending) => {
      orders = `${key} ${descending ? "desc" : "asc"}`;
      table.setSorted(sortedBy(orders));
      changed({ order_by: orders });
    },
    onSelect: keys => {
      compare.hidden = keys.size < 2;
      compare.href = `/compare?ids=${[...keys].join(",")}`;
      compare.textContent = `Compare ${keys.size}`;
    },
  });
  const read = () =>
    get(
      "/experiments",
      {
        page_size: PAGE,
        page_token: tokens.at(-1),
        filter: filterOf(query()),
        order_by: orders,
        costs: table.columns.some(column => column.costs) || null,
      },
      { signal },
    );
  const draw = page => {
    const filtered = Boolean(filterOf(query()));
    rows = page.items;
    full = Boolean(page.next_page_token);
    table.setRows(rows);
    table.node.hidden = !page.items.length;
    replace(
      note,
      page.items.length
        ? null
        : filtered
          ? empty(
              "No experiment matches.",
              h("button", { type: "button", onclick: () => go("/") }, "Show all"),
            )
          : empty(
              "Nothing submitted yet.",
              h("a", { class: "button primary", href: "/new" }, "Write an experiment"),
            ),
    );
    replace(
      pager,
      tokens.length > 1
        ? h(
            "button",
            {
              type: "button",
              onclick: () => {
                tokens.pop();
                refresh();
              },
            },
            "Back",
          )
        : null,
      page.next_page_token
        ? h(
            "button",
            {
              type: "button",
              onclick: () => {
                tokens.push(page.next_page_token);
                refresh();
              },
            },
            "Further",
          )
        : null,
    );
  };
  const refresh = () =>
    read().then(draw, error => {
      if (error.name !== "AbortError") {
        table.node.hidden = true;
        replace(note, failure(error, refresh));
      }
    });
  const changed = changes => {
    setQuery(changes);
    tokens = [null];
    refresh();
  };
  const first = await read().catch(error => {
    if (error.name === "AbortError" || error.status !== 400) throw error;
    return error;
  });
  replace(
    main,
    h("h1", {}, "Experiments"),
    tools({ changed, refresh, table, signal }),
    h("p", { class: "tools" }, compare),
    note,
    table.node,
    pager,
  );
  if (first instanceof Error) {
    table.node.hidden = true;
    replace(note, failure(first));
  } else draw(first);
  const again = rarely(refresh, READ_AGAIN_MS, signal);
  const changedOne = one => {
    const place = rows.findIndex(({ id }) => id === one.id);
    if (place >= 0) {
      rows[place] = one;
      table.update(one);
    }
    if (tokens.length > 1) return;
    // Where the server decides what is listed in which order, it has to be asked again.
    if (orders || filterOf(query()) || (place < 0 && (!full || one.id > rows.at(-1).id))) again();
  };
  const costsChanged = costs => {
    for (const one of rows)
      if (costs[one.id]) {
        one.cost = costs[one.id];
        table.update(one);
      }
  };
  followAll(
    {
      experiment: changedOne,
      costs: costsChanged,
      deleted: ({ id }) => {
        if (rows.some(one => one.id === id)) again();
      },
    },
    again,
    signal,
  );
  every(
    TICK_S,
    async () => {
      if (!table.node.contains(document.activeElement)) table.redraw();
    },
    signal,
  ); // Times go on.
  return { title: "Experiments" };
}

function sortedBy(orders) {
  const [key, direction] = (orders || "").split(" ");
  return key ? { key, descending: direction === "desc" } : null;
}

function tools({ changed, refresh, table, signal }) {
  const typed = debounced(event => changed({ filter: event.target.value }), 300, signal);
  const current = () => {
    const parameters = query();
    parameters.set("columns", table.columns.map(column => column.key).join(","));
    return parameters;
  };
  return h(
    "div",
    { class: "tools" },
    savedViews(current, signal),
    h(
      "label",
      { class: "field grow" },
      "Search, or filter like owner = 'ada' and created_s > 0",
      h("input", {
        type: "search",
        value: query().get("filter") || "",
        placeholder: "name",
        oninput: typed,
        spellcheck: "false",
      }),
    ),
    h(
      "label",
      { class: "field" },
      "State",
      h(
        "select",
        { onchange: event => changed({ state: event.target.value }) },
        h("option", { value: "" }, "any"),
        EXPERIMENT_STATES.map(name =>
          h("option", { value: name, selected: query().get("state") === name }, name),
        ),
      ),
    ),
    h(
      "details",
      { class: "columns" },
      h("summary", {}, "Columns"),
      COLUMNS.map(column =>
        h(
          "label",
          {},
          h("input", {
            type: "checkbox",
            value: column.key,
            checked: table.columns.includes(column),
            onchange: event => {
              const boxes = [...event.target.closest("details").querySelectorAll("input")];
              const names = boxes.filter(box => box.checked).map(box => box.value);
              localStorage.setItem(KEPT_COLUMNS, names.join(","));
              setQuery({ columns: names.join(",") });
              table.setColumns(chosenColumns());
              if (table.columns.some(column => column.costs)) refresh();
            },
          }),
          ` ${column.title}`,
        ),
      ),
    ),
  );
}
