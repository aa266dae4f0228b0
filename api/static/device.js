// A device asks to be let in: shows what asks, from where, and sends the decision.

import { change, logInAgain, whoami } from "./session.js";

const byId = id => /** @type {any} */ (document.getElementById(id));
const show = (id, shown) => {
  byId(id).hidden = !shown;
};
const may = {
  read: "read",
  submit: "read and submit",
  operate: "read, submit and manage",
  admin: "everything, administration included",
};
let asked = null;

function fail(error) {
  if (error.status === 401) {
    logInAgain();
    return;
  }
  byId("problem").textContent = error.message;
  show("problem", true);
}

async function look(code) {
  show("problem", false);
  const path = `/api/v1/device-logins/${encodeURIComponent(code)}`;
  const grant = await change("GET", path);
  asked = path;
  byId("shown").textContent = grant.user_code;
  byId("name").textContent = grant.name;
  byId("address").textContent = grant.from_address || "unknown";
  byId("when").textContent = new Date(grant.created_s * 1000).toLocaleTimeString();
  byId("scope").textContent = may[grant.scope];
  show("form", false);
  show("asked", true);
  byId("deny").focus();
}

async function decide(approve) {
  await change("POST", `${asked}/decision`, { approve });
  show("asked", false);
  byId("done").textContent = approve
    ? "The device is logged in; you can close this page."
    : "The device was turned away.";
  show("done", true);
}

byId("form").addEventListener("submit", event => {
  event.preventDefault();
  look(byId("code").value.trim()).catch(fail);
});
byId("approve").addEventListener("click", () => decide(true).catch(fail));
byId("deny").addEventListener("click", () => decide(false).catch(fail));

async function begin() {
  if (!(await whoami())) {
    logInAgain();
    return;
  }
  const code = new URLSearchParams(location.search).get("user_code");
  if (code) {
    byId("code").value = code;
    await look(code);
  } else byId("code").focus();
}
begin().catch(fail);
