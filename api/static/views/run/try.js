// Texts that are typed or pasted, and what the run's model answers to each.

import { ApiError, get, send } from "../../core/api.js";
import { announce, h, replace } from "../../core/dom.js";
import { count, number, percent } from "../../core/format.js";
import { field } from "../parts.js";

const MOST_LABELS = 5;

/** A name with its probability, and a bar as long. */
const likely = (name, probability) =>
  h(
    "li",
    {},
    h("span", {}, name),
    h(
      "span",
      { class: "length", "aria-hidden": "true" },
      h("i", { style: { width: `${100 * probability}%` } }),
    ),
    h("span", { class: "num" }, percent(probability, 1)),
  );
const bars = pairs =>
  h(
    "ul",
    { class: "answer-shares" },
    pairs.map(([name, probability]) => likely(name, probability)),
  );

/** How answers are shown, by the word of the task's registry entry; `lines` are what was asked. */
const SHOWN = {
  labels: ({ prediction, probabilities }) => {
    const best = Object.entries(probabilities ?? {}).sort(([, a], [, b]) => b - a);
    const said = [prediction].flat().join(", ");
    return [h("b", {}, said || "no label"), bars(best.slice(0, MOST_LABELS))];
  },
  number: ({ prediction }) => h("b", {}, number(prediction)),
  text: ({ prediction }) => h("b", {}, prediction || "no answer"),
  tags: ({ prediction }, line) => {
    const words = line.trim().split(/\s+/);
    return words.map((word, place) => {
      const tag = prediction[place];
      return [tag && tag !== "O" ? h("mark", {}, word, h("sub", {}, ` ${tag}`)) : word, " "];
    });
  },
};

function drawAnswers(shown, answers, lines) {
  if (shown === "ranking") {
    const [{ prediction, probabilities }] = answers;
    return bars(prediction.map(place => [lines[place], probabilities[place]]));
  }
  return h(
    "ol",
    { class: "answers" },
    answers.map((one, place) => {
      const line = lines[place];
      const repeats = shown === "tags" ? null : h("p", { class: "quiet" }, line);
      return h("li", { class: "card pad" }, repeats, SHOWN[shown](one, line));
    }),
  );
}

export async function show(panel, context, { signal }) {
  const path = `/runs/${context.id}/evaluate`;
  let asks;
  try {
    asks = await get(path, {}, { signal });
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 409)) throw error;
    replace(panel, h("p", { class: "quiet" }, error.message));
    return;
  }
  const { each, shared, optional, shown, most_texts: most, longest_text: longest } = asks;
  const answers = h("div", { "aria-live": "polite" }),
    problem = h("p", { class: "problem", role: "alert" }),
    button = h("button", { type: "submit", class: "primary" }, "Evaluate");
  const area = (name, rows, required) =>
    h("textarea", { name, rows, required, maxlength: longest, spellcheck: "false" });
  const form = h(
    "form",
    {
      class: "try",
      onsubmit: async event => {
        event.preventDefault();
        const values = new FormData(form),
          lines = String(values.get(each))
            .split("\n")
            .map(line => line.trim())
            .filter(Boolean);
        problem.textContent = "";
        button.disabled = true;
        answers.setAttribute("aria-busy", "true");
        try {
          if (lines.length > most)
            throw new Error(
              `${count(lines.length)} lines are more than the ${most} of one request; paste fewer`,
            );
          const given = shared.map(name => [name, String(values.get(name)).trim()]);
          const { items } = await send(
            "POST",
            path,
            { texts: lines, shared: Object.fromEntries(given.filter(([, text]) => text)) },
            { signal },
          );
          replace(answers, drawAnswers(shown, items, lines));
          announce(`${count(items.length)} answers`);
        } catch (error) {
          if (error.name === "AbortError") return;
          replace(answers);
          problem.textContent = error.message;
        }
        answers.removeAttribute("aria-busy");
        button.disabled = false;
      },
    },
    shared.map(name =>
      field(
        name.replaceAll("_", " "),
        area(name, 3, !optional.includes(name)),
        optional.includes(name) ? "May be empty." : null,
      ),
    ),
    field(each.replaceAll("_", " "), area(each, 6, true), `One to a line, at most ${most}.`),
    h("p", { class: "actions" }, button),
    problem,
  );
  replace(
    panel,
    h(
      "p",
      { class: "quiet" },
      "The best checkpoint answers, on a CPU of the server. Nothing is kept; the first answer takes some seconds.",
    ),
    form,
    answers,
  );
}
