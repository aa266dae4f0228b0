// Dashboards: chosen figures over a filter of experiments and runs, for oneself or for a project. A draft is in the
// address; what is saved is a view of the kind `dashboard`.

import { get, hasRole, hasScope, send, whoami } from "../core/api.js";
import { act, ask, confirm, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { go, query } from "../core/router.js";
import { empty, missing } from "../core/states.js";
import { field, metricOptions, select } from "./figures.js";
import { asQuery, drawPanels, written } from "./panels.js";
import { choice, field as labelled, shortTable } from "./parts.js";

const KIND = "dashboard";
const NEW_PANEL = "figure=curve";

export async function show(main, { id }, { signal }) {
  if (id === "draft") return edit(main, signal);
  const [who, { items }] = await Promise.all([whoami(), get("/views", { kind: KIND }, { signal })]);
  if (id === undefined) return list(main, who, items);
  const found = items.find(one => String(one.id) === id);
  if (!found) {
    replace(main, missing());
    return { title: "Not found" };
  }
  return saved(main, who, found, signal);
}

const whose = (who, one) =>
  [one.owner === who.user ? "yours" : `by ${one.owner}`, one.shared ? `shared with ${one.project}` : ""]
    .filter(Boolean)
    .join(", ");

function list(main, who, items) {
  const create = h("a", { class: "button primary", href: "/dashboards/draft" }, "New dashboard");
  replace(
    main,
    h("div", { class: "head" }, h("h1", {}, "Dashboards"), hasScope(who, "submit") ? create : null),
    items.length
      ? shortTable(
          "Dashboards",
          [
            ["Name", one => h("a", { href: `/dashboards/${one.id}` }, one.name)],
            ["Of", one => whose(who, one)],
            ["Figures", one => written(new URLSearchParams(one.query)).panels.length, "num"],
          ],
          items,
        )
      : empty("No dashboard is saved yet. It shows figures of your choice, over a filter of experiments."),
  );
  return { title: "Dashboards" };
}

async function saved(main, who, one, signal) {
  const area = h("div", { class: "dashboard" }),
    own = one.owner === who.user;
  const draft = new URLSearchParams(one.query);
  draft.set("name", one.name);
  if (one.project) draft.set("project", one.project);
  const remove = event =>
    act(event.currentTarget, async () => {
      const others = one.shared ? ` It also goes for everyone else in ${one.project}.` : "";
      if (
        !(await confirm(
          `Delete the dashboard ${one.name}?`,
          `Experiments stay as they are.${others}`,
          "Delete",
        ))
      )
        return;
      await send("DELETE", `/views/${one.id}`);
      toast(`${one.name} is deleted`);
      go("/dashboards");
    });
  replace(
    main,
    h("p", { class: "quiet crumbs" }, h("a", { href: "/dashboards" }, "Dashboards"), ` / ${one.name}`),
    h(
      "div",
      { class: "head" },
      h("h1", {}, one.name),
      h(
        "div",
        { class: "tools" },
        hasScope(who, "submit")
          ? h("a", { class: "button", href: `/dashboards/draft?${draft}` }, own ? "Edit" : "Copy")
          : null,
        h("a", { class: "button", href: `/embed/${one.id}` }, "Without head"),
        hasScope(who, "submit") && (own || hasRole(who, one.project, "maintainer"))
          ? h("button", { type: "button", class: "danger", onclick: remove }, "Delete")
          : null,
      ),
    ),
    h("p", { class: "quiet" }, whose(who, one)),
    area,
  );
  await drawPanels(area, written(new URLSearchParams(one.query)), signal);
  return { title: one.name };
}

/** Draws the dashboard of the address, with what changes it; each change is in the address. */
async function edit(main, signal) {
  const given = query(),
    name = given.get("name") || "",
    project = given.get("project") || "",
    dashboard = written(given);
  if (!dashboard.panels.length) dashboard.panels = [NEW_PANEL];
  const area = h("div", { class: "dashboard" });
  const set = change => {
    const next = new URLSearchParams(asQuery({ ...dashboard, ...change }));
    if (name) next.set("name", name);
    if (project) next.set("project", project);
    go(`/dashboards/draft?${next}`, { replace: true });
  };
  const put = (at, panel) => set({ panels: dashboard.panels.with(at, panel) });
  const move = (at, by) => {
    const panels = [...dashboard.panels];
    [panels[at], panels[at + by]] = [panels[at + by], panels[at]];
    set({ panels });
  };
  const tools = (panel, at, known) =>
    panelTools(panel, at, known, dashboard.panels.length, { put, move, set, dashboard });
  const keep = event =>
    act(event.currentTarget, async () => {
      const who = await whoami(),
        { items } = await get("/projects", {}, { signal });
      const projects = items.filter(one => !one.archived_s && hasRole(who, one.name, "member"));
      const found = await ask(
        "Save the dashboard",
        [
          labelled(
            "Name",
            h("input", { name: "name", value: name, required: true, maxlength: 80, autocomplete: "off" }),
            "A dashboard of yours with this name is replaced.",
          ),
          labelled(
            "For",
            choice(
              "project",
              [["", "only me"], ...projects.map(one => [one.name, `everyone in ${one.name}`])],
              projects.some(one => one.name === project) ? project : "",
            ),
          ),
        ],
        {
          action: "Save",
          check: fields =>
            send("POST", "/views", {
              kind: KIND,
              name: fields.name,
              query: asQuery(dashboard),
              project: fields.project || null,
              shared: Boolean(fields.project),
            }),
        },
      );
      if (found) go(`/dashboards/${found.id}`);
    });
  replace(
    main,
    h("p", { class: "quiet crumbs" }, h("a", { href: "/dashboards" }, "Dashboards"), ` / ${name || "new"}`),
    h(
      "div",
      { class: "head" },
      h("h1", {}, name || "New dashboard"),
      h(
        "div",
        { class: "tools" },
        h("button", { type: "button", class: "primary", onclick: keep }, "Save as …"),
      ),
    ),
    h(
      "div",
      { class: "tools choices" },
      field("experiments", dashboard.experiments, experiments => set({ experiments }), {
        class: "filter",
        placeholder: "project = 'nlp' and state = 'succeeded'",
        spellcheck: "false",
      }),
      field("runs", dashboard.filter, filter => set({ filter }), {
        class: "filter",
        placeholder: "precision = bf16 and seed < 3",
        spellcheck: "false",
      }),
      h(
        "button",
        { type: "button", onclick: () => set({ panels: [...dashboard.panels, NEW_PANEL] }) },
        "Add a figure",
      ),
    ),
    area,
  );
  await drawPanels(area, dashboard, signal, tools);
  return { title: name || "New dashboard" };
}

/** Which figure a panel shows, of what, and where it stands. */
function panelTools(panel, at, known, count, { put, move, set, dashboard }) {
  const given = new URLSearchParams(panel),
    name = given.get("figure"),
    kinds = known.figures.filter(one => one.form !== "axes"),
    kind = kinds.find(one => one.id === name);
  const changed = (field, values) => {
    const next = new URLSearchParams(field === "figure" ? "" : panel);
    next.delete(field);
    for (const value of values) if (value) next.append(field, value);
    put(at, next.toString());
  };
  const list = (field, options, label = field) =>
    kind?.reads.includes(field)
      ? select(label, [["", "default"], ...options], given.get(field) || "", value => changed(field, [value]))
      : null;
  const button = (text, label, onclick) =>
    h("button", { type: "button", "aria-label": `${label} figure ${at + 1}`, onclick }, text);
  return h(
    "div",
    { class: "tools choices" },
    select(
      `figure ${at + 1}`,
      kinds.map(one => [one.id, one.title]),
      name,
      value => changed("figure", [value]),
    ),
    list("metric", metricOptions(kind?.form === "lines" ? known.points : known.metrics)),
    list("x", ["step", "time", "tokens", "cost", "energy"], "over"),
    list(
      "by",
      [
        ["cell", "configurations (means)"],
        ["run", "single runs"],
      ],
      "lines",
    ),
    at ? button("↑", "Move up", () => move(at, -1)) : null,
    at < count - 1 ? button("↓", "Move down", () => move(at, 1)) : null,
    count > 1
      ? button("×", "Remove", () => set({ panels: dashboard.panels.filter((_, other) => other !== at) }))
      : null,
  );
}
