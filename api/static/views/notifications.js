// Subscriptions to notifications: added, tested, paused and removed; and the messages that were sent.

import { get, hasScope, send } from "../core/api.js";
import { act, ask, confirm, toast } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { relative, when } from "../core/format.js";
import { choice, field, shortTable, tick } from "./parts.js";
import { showSecret } from "./tokens.js";

const CHECK_MS = 1000,
  CHECKS = 30; // How often the outcome of a test is looked up

/** An address without what is secret in it: of a URL only the host. */
export function shownTarget(target) {
  try {
    return `${new URL(target).host}/…`;
  } catch {
    return target;
  }
}

const stateOf = one => (one.disabled_s === null ? "works" : one.disabled_because || "ended");

/** Waits for the outcome of a message, for as long as someone looks. */
async function outcome(sent, signal) {
  for (let checks = 0; checks < CHECKS && sent.answer === null; checks++) {
    await new Promise(resolve => setTimeout(resolve, CHECK_MS));
    const { items } = await get("/deliveries", { subscription: sent.subscription_id }, { signal });
    sent = items.find(({ id }) => id === sent.id) || sent;
  }
  return sent;
}

/** Lists the subscriptions of whoever looks, with what may be done with them. */
export async function drawNotifications(panel, who, projects, { signal }) {
  const choices = await get("/subscription-choices", {}, { signal }),
    list = h("div"),
    log = h("div"),
    mayChange = hasScope(who, "submit");
  const button = (one, text, run, kind) =>
    h(
      "button",
      {
        type: "button",
        class: kind,
        "aria-label": `${text} ${one.channel} ${shownTarget(one.target)}`,
        onclick: event => act(event.currentTarget, () => run().then(read)),
      },
      text,
    );
  const buttons = one => {
    const path = `/subscriptions/${one.id}`,
      of = `${one.channel} ${shownTarget(one.target)}`,
      pause = paused => send("PUT", `${path}/paused`, { paused });
    return h(
      "span",
      { class: "actions" },
      one.disabled_s === null
        ? button(one, "Test", async () => {
            const sent = await outcome(await send("POST", `${path}/test`), signal);
            const failed = sent.state !== "delivered";
            toast(
              failed
                ? `The test did not arrive: ${sent.answer || "it waits for a scheduler"}`
                : `The test arrived: ${sent.answer || "accepted"}`,
              { problem: failed },
            );
          })
        : null,
      one.disabled_s === null
        ? button(one, "Pause", () => pause(true).then(() => toast(`${of} is paused`)))
        : button(one, "Resume", async () => {
            const now = await pause(false);
            toast(
              now.disabled_s === null ? `${of} works again` : `${of} stays ended: ${now.disabled_because}`,
              { problem: now.disabled_s !== null },
            );
          }),
      button(
        one,
        "Delete",
        async () => {
          const sure = await confirm(
            `Delete ${of}?`,
            "Its delivery log is deleted too, and waiting messages are not sent.",
            "Delete the subscription",
          );
          if (!sure) return;
          await send("DELETE", path);
          toast(`${of} is deleted`);
        },
        "danger",
      ),
    );
  };
  async function read() {
    const [subscriptions, deliveries] = await Promise.all([
      get("/subscriptions", {}, { signal }),
      get("/deliveries", { page_size: 10 }, { signal }),
    ]);
    const places = new Map(
      subscriptions.items.map(one => [one.id, `${one.channel} ${shownTarget(one.target)}`]),
    );
    replace(
      list,
      shortTable(
        "Notifications",
        [
          ["By", one => one.channel],
          ["To", one => shownTarget(one.target), "wide"],
          ["Of", one => one.project || "your experiments"],
          ["When", one => one.topics.join(", ")],
          ["State", one => h("span", { class: one.disabled_s === null ? "good" : "quiet" }, stateOf(one))],
          ["", one => (mayChange ? buttons(one) : null)],
        ],
        subscriptions.items,
        "Nothing is sent to you yet.",
      ),
    );
    replace(
      log,
      deliveries.items.length
        ? h(
            "details",
            {},
            h("summary", {}, "Sent lately"),
            shortTable(
              "Messages",
              [
                ["At", one => when(one.created_s)],
                ["To", one => places.get(one.subscription_id)],
                ["What", one => one.kind],
                ["State", one => h("span", { class: one.state === "failed" ? "bad" : "" }, one.state)],
                ["Next attempt", one => (one.next_s ? relative(one.next_s) : "–")],
                ["Answer", one => one.answer || "–", "wide"],
              ],
              deliveries.items,
            ),
          )
        : null,
    );
  }
  await read();
  replace(
    panel,
    list,
    !choices.channels.some(one => !one.problem)
      ? [h("p", {}, "This server sends no messages yet."), problems(choices)]
      : null,
    mayChange && choices.channels.some(one => !one.problem)
      ? h(
          "p",
          {},
          h(
            "button",
            {
              type: "button",
              onclick: async event => {
                if (await add(choices, who, projects)) await act(event.target, read);
              },
            },
            "Add a notification",
          ),
        )
      : null,
    log,
  );
}

/** Why some ways of telling cannot be used. */
const problems = ({ channels }) =>
  channels.filter(one => one.problem).map(one => h("p", { class: "quiet" }, `${one.name}: ${one.problem}`));

/** A dialog for a new subscription; the secret of a webhook is shown only here. */
async function add({ channels, topics }, who, projects) {
  const usable = channels.filter(one => !one.problem),
    first = usable[0]?.name ?? "";
  const about = h("span", { class: "quiet" }),
    describe = name => replace(about, `It takes ${channels.find(one => one.name === name)?.described}.`);
  describe(first);
  const own = who.restricted_to
    ? [[who.restricted_to, who.restricted_to]]
    : [["", "your experiments, in every project"], ...projects.map(({ name }) => [name, `all of ${name}`])];
  const made = await ask(
    "Add a notification",
    [
      field(
        "By",
        choice(
          "channel",
          usable.map(one => one.name),
          first,
          { onchange: event => describe(event.target.value) },
        ),
      ),
      field(
        "To",
        h("input", { name: "target", required: true, maxlength: 2000, autocomplete: "off" }),
        about,
      ),
      field("Of", choice("project", own, own[0][0])),
      h(
        "fieldset",
        { class: "topics" },
        h("legend", {}, "When"),
        topics.map(one =>
          h(
            "p",
            {},
            tick(
              `${one.described}${one.of_project ? " (of a project)" : ""}`,
              `topic.${one.name}`,
              one.name === "end",
            ),
          ),
        ),
      ),
      problems({ channels }),
    ],
    {
      action: "Add",
      check: fields =>
        send("POST", "/subscriptions", {
          channel: fields.channel ?? "",
          target: fields.target.trim(),
          project: fields.project || null,
          topics: topics.map(({ name }) => name).filter(name => `topic.${name}` in fields),
        }),
    },
  );
  if (made?.secret)
    await showSecret(
      "Secret of the webhook",
      made.secret,
      "Its messages are signed with it: the receiver checks the signature.",
    );
  return made;
}
