// Deleted experiments that can still be restored, and until when.

import { get, send } from "../core/api.js";
import { act, toast } from "../core/dialog.js";
import { count, state, when } from "../core/format.js";
import { h, replace } from "../core/dom.js";
import { go } from "../core/router.js";
import { view } from "../core/states.js";
import { shortTable } from "./parts.js";

/** Shows them. */
export async function show(main, _parameters, { signal }) {
  const panel = h("div");
  const restore = one =>
    h(
      "button",
      {
        type: "button",
        "aria-label": `Restore ${one.name}`,
        onclick: event =>
          act(event.currentTarget, async () => {
            await send("POST", `/experiments/${one.id}/restore`);
            await go(`/experiments/${one.id}`);
            toast(`Restored ${one.name}`);
          }),
      },
      "Restore",
    );
  replace(
    main,
    h("p", { class: "quiet" }, h("a", { href: "/" }, "Experiments"), " / deleted"),
    h("h1", {}, "Deleted experiments"),
    panel,
  );
  await view(
    panel,
    () => get("/deleted-experiments", {}, { signal }),
    ({ items }) =>
      shortTable(
        "Deleted experiments",
        [
          ["id", one => one.id, "num"],
          ["name", one => one.name, "wide"],
          ["state", one => state(one.state)],
          ["runs", one => count(one.run_count), "num"],
          ["project", one => one.project],
          ["owner", one => one.owner],
          ["deleted", one => when(one.deleted_s)],
          ["removed for good", one => when(one.restorable_until_s)],
          ["", restore],
        ],
        items,
        "Nothing that was deleted can be restored.",
      ),
    signal,
  );
  return { title: "Deleted experiments" };
}
