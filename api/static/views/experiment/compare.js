// Configurations side by side: mean and spread over seeds, and what can be claimed, in words.

import { h, replace } from "../../core/dom.js";
import { metric as inUnit, number, point } from "../../core/format.js";
import { plainTable } from "../../core/table.js";
import { ask, board, filterField, metricOptions, select, tick, whenRunsEnd } from "../figures.js";

const FIELDS = { by: [], best: "", metric: [], a: "", b: "", claims: "", sort: "", filter: "" };
const MOST_ROWS = 200,
  MOST_CLAIMS = 100;

/** Shows the table. */
export async function show(panel, context, { signal }) {
  let labels = [];
  const made = await board(panel, context, {
    fields: FIELDS,
    signal,
    tools: (view, set, known) => {
      const toggled = (list, name, on) => (on ? [...list, name] : list.filter(one => one !== name));
      const sides = [["", "–"], ...labels],
        axes = known.axes.filter(axis => axis !== view.best);
      return [
        axes.length > 1
          ? h(
              "fieldset",
              {},
              h("legend", {}, "rows by"),
              axes.map(axis =>
                tick(axis, !view.by.length || view.by.includes(axis), on => {
                  const next = toggled(view.by.length ? view.by : axes, axis, on);
                  set({ by: next.length === axes.length ? [] : next, a: "", b: "" });
                }),
              ),
            )
          : null,
        known.axes.length > 1 || view.best
          ? select("best over", [["", "–"], ...known.axes], view.best, best =>
              set({ best, by: [], a: "", b: "" }),
            )
          : null,
        select(
          "add a figure",
          [["", "…"], ...metricOptions(known.metrics)],
          "",
          name => name && set({ metric: [...new Set([...view.metric, name])] }),
        ),
        view.metric.map(name =>
          h(
            "span",
            { class: "chip" },
            name,
            h(
              "button",
              {
                type: "button",
                "aria-label": `Leave out ${name}`,
                onclick: () => set({ metric: view.metric.filter(one => one !== name) }),
              },
              "×",
            ),
          ),
        ),
        filterField(view, set),
        labels.length > 1
          ? [
              select("claim: A", sides, view.a, a => set({ a, claims: "" })),
              select("against B", sides, view.b, b => set({ b, claims: "" })),
            ]
          : null,
        tick("test every pair", view.claims === "yes", on => set({ claims: on ? "yes" : "", a: "", b: "" })),
      ];
    },
    draw: async (view, area, { signal: asked, set, refresh }) => {
      const pair = view.a && view.b && view.a !== view.b,
        best_over = view.best || null;
      const answer = await ask(
        context,
        "compare",
        {
          by: view.by,
          best_over,
          metric: view.metric,
          filter: view.filter,
          untested: "true",
          a: pair ? view.a : null,
          b: pair ? view.b : null,
          claims: view.claims === "yes" ? "true" : null,
        },
        { signal: asked },
      );
      if (asked.aborted) return;
      const table = () =>
        pair
          ? ask(
              context,
              "compare",
              {
                by: Object.keys(answer.rows[0]?.point || {}),
                best_over,
                metric: view.metric,
                filter: view.filter,
              },
              { signal: asked },
            )
          : answer;
      const whole = await table();
      if (asked.aborted) return;
      const before = labels.length;
      labels = whole.rows.slice(0, MOST_ROWS).map(row => [row.label, row.label]);
      if (labels.length !== before) refresh();
      replace(
        area,
        rows(whole, view, set),
        tuned(whole.tuning),
        notes(whole),
        claims(answer, pair || view.claims === "yes"),
      );
    },
  });
  whenRunsEnd(context, made.again, signal);
}

/** Mean with the standard deviation between seeds, to as many digits as the spread leaves. */
function spread(name, figures, best) {
  if (!figures) return "–";
  // Money, energy and mass have a unit of their size, and so no exponents.
  const text = (value, digits) =>
    /_(usd|kwh|kg)$/.test(name) ? inUnit(name, value) : number(value, "", digits);
  const digits = figures.sd
    ? Math.max(2, Math.min(6, 2 + Math.ceil(Math.log10(Math.abs(figures.mean) / figures.sd || 1))))
    : 4;
  return [
    best
      ? h("strong", {}, text(figures.mean, digits), h("abbr", { title: "best mean; not tested" }, "*"))
      : text(figures.mean, digits),
    figures.sd === null ? "" : h("span", { class: "quiet" }, ` ±${text(figures.sd, 2)}`),
    h("span", { class: "quiet" }, ` n=${figures.n}`),
  ];
}

function rows(answer, view, set) {
  const metrics = answer.metrics.map(metric => metric.name);
  const [name, descending] = [view.sort.replace(/^-/, ""), view.sort.startsWith("-")];
  const order = answer.rows.map((row, place) => ({ row, place }));
  if (metrics.includes(name))
    order.sort((one, other) => {
      const [a, b] = [one.row.figures[name]?.mean ?? Infinity, other.row.figures[name]?.mean ?? Infinity];
      return a === b ? one.place - other.place : descending ? b - a : a - b;
    });
  const heading = metric =>
    h(
      "button",
      {
        type: "button",
        class: "sorts",
        onclick: () => set({ sort: view.sort === metric ? `-${metric}` : metric }),
      },
      metric,
      view.sort.replace(/^-/, "") === metric ? (descending ? " ↓" : " ↑") : "",
    );
  const remarks = row =>
    [
      ...Object.entries(row.failures).map(([kind, count]) => `${count} ${kind}`),
      row.incomplete ? `${row.incomplete} ended early` : "",
      row.disturbed ? `${row.disturbed} disturbed` : "",
    ]
      .filter(Boolean)
      .join(", ");
  return [
    plainTable(
      "Configurations",
      [
        ...answer.axes,
        "runs",
        ...metrics.map(metric => ({ title: heading(metric), numeric: true })),
        { title: "remarks", wide: true },
      ],
      order
        .slice(0, MOST_ROWS)
        .map(({ row, place }) => [
          ...answer.axes.map(axis => String(row.point[axis])),
          `${row.finished}/${row.planned}`,
          ...metrics.map(name => spread(name, row.figures[name], answer.best[name] === place)),
          remarks(row),
        ]),
    ),
    h(
      "p",
      { class: "quiet" },
      "Mean ± standard deviation between n seeds",
      answer.agreement.length ? ", of times between n runs" : "",
      "; * is the best mean, which is not tested. ",
      order.length > MOST_ROWS
        ? `The first ${MOST_ROWS} of ${order.length} configurations; group by fewer axes or filter.`
        : "",
    ),
  ];
}

/** At which value of the nuisance axes each configuration is compared, and what chose it. */
const tuned = tuning =>
  tuning
    ? h(
        "details",
        { open: true },
        h(
          "summary",
          {},
          `Each at its best ${tuning.axes.join(", ")} by ${tuning.metric.name} on validation`,
          tuning.fresh ? ", compared over fresh seeds" : "",
        ),
        h(
          "ul",
          {},
          tuning.best.map(one =>
            h(
              "li",
              {},
              `${point(one.point)}: ${point(one.chosen)}, of ${one.tried} tried, ${one.seeds} seeds`,
            ),
          ),
          Object.entries(tuning.left_out).map(([of, why]) => h("li", {}, `${of}: ${why}`)),
        ),
      )
    : null;

const notes = answer =>
  answer.notes.length
    ? h(
        "details",
        {},
        h("summary", {}, `${answer.notes.length} note${answer.notes.length > 1 ? "s" : ""} on these numbers`),
        h(
          "ul",
          {},
          answer.notes.map(note => h("li", {}, note)),
        ),
      )
    : null;

function claims(answer, asked) {
  if (!asked)
    return h(
      "p",
      { class: "quiet" },
      "Choose two sides, or test every pair, for claims with intervals and p-values.",
    );
  if (!answer.claims.length) return h("p", { class: "quiet" }, "No claim can be made.");
  const mark = pair =>
    pair.claim ? { "A is better": "good", "B is better": "good" }[pair.claim.verdict] || null : "quiet";
  return h(
    "section",
    {},
    h("h2", {}, "Claims"),
    h(
      "ul",
      { class: "claims" },
      answer.claims
        .slice(0, MOST_CLAIMS)
        .map(pair =>
          h(
            "li",
            {},
            h("strong", { class: mark(pair) }, pair.claim ? pair.claim.verdict : "no claim"),
            ` on ${pair.metric}: `,
            pair.text,
          ),
        ),
    ),
    answer.claims.length > MOST_CLAIMS
      ? h("p", { class: "quiet" }, `The first ${MOST_CLAIMS} of ${answer.claims.length} claims.`)
      : null,
  );
}
