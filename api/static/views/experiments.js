// The list of experiments: searched, filtered and ordered by the server, followed as they change.

import { get, whoami } from "../core/api.js";
import { debounced, h, made, replace } from "../core/dom.js";
import { duration, EXPERIMENT_STATES, money, numeric, relative, state, when } from "../core/format.js";
import { go, query, setQuery } from "../core/router.js";
import { empty, failure } from "../core/states.js";
import { followAll, rarely } from "../core/stream.js";
import { VirtualTable } from "../core/table.js";
import { html } from "../vendor/preact.js";
import { Star, STARRED_FILTER, tagsOf } from "./manage.js";
import { every, filterInput, runsByState } from "./parts.js";
import { savedViews } from "./saved.js";
import { selectedBar } from "./selected.js";

const COST_OF = { cost: one => one.cost?.so_far_usd, rest: one => one.cost?.rest_usd },
  MOST_ORDERED = 2000;
const READ_AGAIN_MS = 3000,
  TICK_S = 10,
  PAGE = 200,
  NARROW = "(max-width: 40rem)",
  CARD_HEIGHT = 72,
  ROW_HEIGHT = 34,
  KEPT_COLUMNS = "stillhouse-experiment-columns";

/** An experiment's star, for who reads the list. */
let starOf = _one => null;

const lasted = one => (one.started_s ? (one.ended_s || Date.now() / 1000) - one.started_s : null);

/** All columns; those marked `first` are shown unless others were chosen. */
const COLUMNS = [
  { key: "id", title: "id", numeric: true, width: 70, sortable: true, first: true, render: one => one.id },
  {
    key: "name",
    title: "name",
    width: 220,
    sortable: true,
    first: true,
    render: one => [starOf(one), h("a", { href: `/experiments/${one.id}`, title: one.name }, one.name)],
  },
  { key: "state", title: "state", width: 120, sortable: true, first: true, render: one => state(one.state) },
  {
    key: "runs",
    title: "runs",
    width: 300,
    first: true,
    render: runsByState,
  },
  { key: "project", title: "project", width: 110, sortable: true, first: true, render: one => one.project },
  { key: "owner", title: "owner", width: 110, sortable: true, first: true, render: one => one.owner },
  {
    key: "tags",
    title: "tags",
    width: 160,
    first: true,
    render: one => tagsOf(one).map(tag => [h("span", { class: "chip" }, tag), " "]),
  },
  {
    key: "created_s",
    title: "created_s",
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
  { key: "ended_s", title: "ended_s", width: 140, sortable: true, render: one => when(one.ended_s) },
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
    sortable: true,
    costs: true,
    render: one => money(one.cost?.so_far_usd),
  },
  {
    key: "rest",
    title: "forecast of the rest",
    numeric: true,
    width: 170,
    sortable: true,
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

/** What a filter may hold. */
const WORDS = {
  names:
    "id name owner state priority failure_class created_s queued_s started_s ended_s project pool run_count tags notes".split(
      " ",
    ),
  values: name => (name === "state" ? EXPERIMENT_STATES : []),
};

const COMPARES = /[=<>]|\b(not\s+)?(i?like\s+['"]|in\s*\(|is\s+(not\s+)?null\b)/i;

/** The filter of the address: what was typed, and the state that was chosen. Words without a comparison are searched for. */
function filterOf(parameters) {
  const typed = (parameters.get("filter") || "").trim(),
    chosen = parameters.get("state");
  const pattern = `'%${typed.replaceAll("'", "''")}%'`;
  const words =
    typed && !COMPARES.test(typed)
      ? `(${["name", "owner", "tags"].map(column => `${column} ILIKE ${pattern}`).join(" or ")})`
      : typed && chosen
        ? `(${typed})`
        : typed;
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
    onSelect: keys => selection.draw(keys),
    onSelectAll: all => {
      table.select(all ? rows.map(one => one.id) : []);
      selection.draw(table.selected);
    },
  });
  const who = await whoami();
  const selection = selectedBar({
    who,
    again: () => refresh(),
    clear: () => {
      table.select([]);
      selection.draw(table.selected);
    },
  });
  starOf = one =>
    made(
      html`<${Star}
        ...${{ experiment: one, who, changed: now => table.update(Object.assign(one, { tags: now.tags })) }}
      />`,
    );
  const ask = more =>
    get(
      "/experiments",
      {
        page_size: PAGE,
        filter: filterOf(query()),
        costs: table.columns.some(column => column.costs) || null,
        ...more,
      },
      { signal },
    );
  const read = async () => {
    const by = COST_OF[orders?.split(" ")[0]];
    if (!by) return ask({ page_token: tokens.at(-1), order_by: orders });
    // Costs are summed from the ledger for each page, so that all have to be read to order them.
    const items = [];
    let token = null;
    do {
      const page = await ask({ page_size: MOST_ORDERED / 2, page_token: token, costs: true });
      items.push(...page.items);
      token = page.next_page_token;
    } while (token && items.length < MOST_ORDERED);
    const sign = orders.endsWith("desc") ? -1 : 1,
      least = sign * Infinity; // What has no cost comes last.
    const value = one => (Number.isFinite(numeric(by(one))) ? numeric(by(one)) : least);
    items.sort((a, b) => sign * (value(a) - value(b)) || b.id - a.id);
    return { items, next_page_token: null, cut: Boolean(token) };
  };
  const draw = page => {
    const filtered = Boolean(filterOf(query()));
    rows = page.items;
    full = Boolean(page.next_page_token);
    table.setRows(rows);
    table.node.hidden = !page.items.length;
    replace(
      note,
      page.items.length
        ? page.cut
          ? h("p", { class: "quiet" }, `The newest ${MOST_ORDERED} are in this order.`)
          : null
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
            "Previous page",
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
            "Next page",
          )
        : null,
    );
  };
  const refresh = () =>
    read().then(draw, error => {
      if (error.name !== "AbortError") {
        table.node.hidden = true;
        replace(pager);
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
    h(
      "p",
      { class: "tools" },
      h("a", { href: `/?filter=${encodeURIComponent(STARRED_FILTER)}` }, "Starred"),
      h("a", { href: "/deleted" }, "Deleted"),
    ),
    selection.node,
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
  const narrow = matchMedia(NARROW);
  const fit = () => {
    table.rowHeight = narrow.matches ? CARD_HEIGHT : ROW_HEIGHT;
    table.redraw();
  };
  table.table.classList.add("cards");
  fit();
  narrow.addEventListener("change", fit, { signal });
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
      "Search, or filter such as owner = ada and priority > 50",
      filterInput(query().get("filter") || "", typed, WORDS, { placeholder: "name, owner or tag" }),
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
