"use strict";
// One's own sessions, and everyone's for an administrator; any of them can be ended.

function showSessions() {
  const area = document.getElementById("main");
  const note = h("p", { class: "card pad problem", role: "alert", hidden: "" });
  const draw = async () => {
    const found = session || await whoami();
    if (!found) { logInAgain(); return; }
    const lists = [await get("/sessions")];
    if (found.administrator && found.scope === "admin") lists.push(await get("/sessions?everyone=true"));
    const end = (one) => async () => {
      try { await change("DELETE", `/api/v1/sessions/${one.id}`); if (one.current) logInAgain(); else await draw(); } catch (error) { note.textContent = error.message; note.hidden = false; }
    };
    const listed = (items) => table(["user", "from", "browser", "logged in", "last used", ""], items.map((one) => row(
      one.user, one.from_address || "", h("td", { class: "wide" }, one.agent || ""), when(one.created_s), when(one.last_used_s),
      h("button", { type: "button", "aria-label": `End the session of ${one.user} from ${one.from_address || "unknown"}`, onclick: end(one) }, one.current ? "End this one" : "End"))), "None.");
    area.replaceChildren(h("h1", {}, found.user),
      h("p", { class: "quiet" }, found.administrator ? "administrator" : Object.entries(found.roles).map(([project, role]) => `${role} of ${project}`).join(", ")),
      note, h("h2", {}, "Your sessions"), listed(lists[0].items),
      ...(lists[1] ? [h("h2", {}, "Everyone's sessions"), listed(lists[1].items)] : []));
  };
  draw().catch((error) => area.replaceChildren(h("p", { class: "card pad problem", role: "alert" }, error.message)));
  return () => {};
}
