// One's own sessions, and everyone's for an administrator; any of them can be ended.

import { administers, get, logInAgain, send, whoami } from "../core/api.js";
import { act } from "../core/dialog.js";
import { h, replace } from "../core/dom.js";
import { when } from "../core/format.js";
import { empty } from "../core/states.js";
import { plainTable } from "../core/table.js";

/** Shows who is logged in, and where. */
export async function show(main, _parameters, { signal }) {
  const who = await whoami();
  const draw = async () => {
    const own = await get("/sessions", {}, { signal });
    const all = administers(who) && who.via !== "open" ? await get("/sessions", { everyone: true }, { signal }) : null;
    const end = (one) => h("button", {
      type: "button", "aria-label": `End the session of ${one.user} from ${one.from_address || "unknown"}`,
      onclick: (event) => act(event.currentTarget, async () => { await send("DELETE", `/sessions/${one.id}`); if (one.current) await logInAgain(); else await draw(); }),
    }, one.current ? "End this one" : "End");
    const listed = (label, items) => (items.length
      ? plainTable(label, ["user", "from", { title: "browser", wide: true }, "logged in", "last used", ""], items.map((one) => [one.user, one.from_address || "", one.agent || "", when(one.created_s), when(one.last_used_s), end(one)]))
      : empty("None."));
    replace(main, h("h1", {}, who.user),
      h("p", { class: "quiet" }, who.administrator ? "administrator" : Object.entries(who.roles).map(([project, role]) => `${role} of ${project}`).join(", ")),
      h("h2", {}, "Your sessions"), listed("Your sessions", own.items),
      all ? [h("h2", {}, "Everyone's sessions"), listed("Everyone's sessions", all.items)] : null);
  };
  await draw();
  return { title: "Account" };
}
