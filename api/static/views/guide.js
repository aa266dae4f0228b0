// Guidelines from finished experiments: what each axis did, by task and hardware, with what the claims rest on.

import { get } from "../core/api.js";
import { h, replace } from "../core/dom.js";
import { when } from "../core/format.js";
import { query, setQuery } from "../core/router.js";
import { empty, failure } from "../core/states.js";
import { field } from "./figures.js";
import { shortTable } from "./parts.js";

const change = share => `${share > 0 ? "+" : ""}${(100 * share).toFixed(1)}%`;
const range = (low, high, text) =>
  low === null ? "–" : low === high ? text(low) : `${text(low)} to ${text(high)}`;

/** The verdict with the values' names; where experiments differ, how many say what. */
function found({ finding, counts, a_point, b_point }, axis) {
  const [a, b] = [a_point, b_point].map(of => String(of[axis]));
  const several = Object.entries(counts).filter(([, many]) => many);
  const named = word => word.replace(/^A is/, `${a} is`).replace(/^B is/, `${b} is`);
  const kind = / is better$/.test(finding) ? "good" : finding === "equivalent" ? null : "quiet";
  return h(
    "span",
    { class: kind },
    named(finding),
    several.length > 1 ? ` (${several.map(([word, many]) => `${named(word)}: ${many}`).join(", ")})` : "",
  );
}

const links = evidence =>
  evidence.map(({ experiment_id: id, depends_on: others }) => [
    h("a", { href: `/experiments/${id}/compare` }, `${id}`),
    others.length ? ` depends on ${others.join(", ")} ` : " ",
  ]);

/** Shows the guidelines of the experiments that one sees, of one project if the address names one. */
export async function show(main, parameters, { signal }) {
  const place = h("div", { "aria-live": "polite" });
  const draw = async project => {
    place.setAttribute("aria-busy", "true");
    let guide;
    try {
      guide = await get("/guide", { project: project || null }, { signal });
    } catch (error) {
      if (error.name === "AbortError") return;
      replace(
        place,
        error.slug === "no-answer"
          ? empty(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`)
          : failure(error, () => draw(project)),
      );
      place.setAttribute("aria-busy", "false");
      return;
    }
    const groups = new Map();
    for (const one of guide.guidelines) {
      const key = [one.axis, one.task, one.hardware].join("\n");
      groups.set(key, [...(groups.get(key) || []), one]);
    }
    replace(
      place,
      [...groups].map(([key, of]) => {
        const [axis, task, hardware] = key.split("\n");
        const title = `${axis}: ${task} on ${hardware || "unknown hardware"}`;
        return h(
          "section",
          {},
          h("h2", {}, title),
          shortTable(
            title,
            [
              ["A", one => String(one.a_point[axis])],
              ["B", one => String(one.b_point[axis])],
              ["Figure", one => one.metric.name],
              ["Finding", one => found(one, axis), "wide"],
              ["A against B", one => range(one.smallest, one.largest, change), "num"],
              ["Seeds", one => range(one.seeds_fewest, one.seeds_most, String), "num"],
              ["Experiments", one => links(one.evidence)],
            ],
            of,
          ),
        );
      }),
      guide.sources.length
        ? h(
            "section",
            {},
            h("h2", {}, "What it rests on"),
            shortTable(
              "Experiments",
              [
                [
                  "Experiment",
                  one => h("a", { href: `/experiments/${one.id}` }, `${one.id} ${one.name}`),
                  "wide",
                ],
                ["Ended", one => (one.ended_s === null ? "–" : when(one.ended_s))],
                ["Runs", one => `${one.runs} of ${one.planned}`, "num"],
                ["Seeds", one => one.seeds, "num"],
                ["Models and devices", one => [...one.models, ...one.devices].join(", "), "wide"],
                ["Disturbed", one => one.disturbed || "–", "num"],
                ["Energy", one => one.energy.join(", ") || "–"],
              ],
              guide.sources,
            ),
          )
        : null,
      [...guide.notes, ...Object.entries(guide.left_out).map(([of, why]) => `${of}: ${why}`)].map(note =>
        h("p", { class: "quiet" }, note),
      ),
    );
    place.setAttribute("aria-busy", "false");
  };
  const project = query().get("project") || "";
  replace(
    main,
    h("h1", {}, "Guide"),
    h(
      "p",
      { class: "quiet" },
      "What finished experiments claim about each axis. A claim holds for its task, hardware and model; a difference is ",
      "relative, the smallest and the largest that an experiment measured.",
    ),
    h(
      "div",
      { class: "tools" },
      field("project", project, name => {
        setQuery({ project: name || null });
        return draw(name);
      }),
    ),
    place,
  );
  await draw(project);
  return { title: "Guide" };
}
