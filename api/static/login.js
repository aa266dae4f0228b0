// Logging in with a token or at the provider, and back to where one came from.

import { change, returnPath, whoami } from "./session.js";

const byId = id => /** @type {any} */ (document.getElementById(id));
const parameters = new URLSearchParams(location.search);
const back = returnPath(parameters.get("return"));

function fail(message) {
  byId("problem").textContent = message;
  byId("problem").hidden = false;
}

function explain(problem, host) {
  const provider = host || "The provider";
  const known = {
    "provider-unavailable": `${provider} does not answer; try again later, or log in with a token.`,
    "provider-refused": `${provider} did not confirm who you are; try again.`,
    "provider-late": "The login took too long or began in another browser; try again.",
    "account-disabled": "Your account is disabled; ask an administrator to enable it.",
  };
  if (Object.hasOwn(known, problem)) fail(known[problem]);
}

async function begin() {
  const options = await (await fetch("/login/options")).json();
  if (!options.required) {
    byId("open").hidden = false;
    return;
  }
  const problem = parameters.get("problem");
  if (!problem && (await whoami())) {
    location.replace(back);
    return;
  }
  if (problem) explain(problem, options.provider);
  if (options.provider) {
    byId("host").textContent = options.provider;
    byId("leave").href = `/login/oidc?return=${encodeURIComponent(back)}`;
    byId("provider").hidden = false;
  }
  byId("form").hidden = false;
  if (!options.provider) byId("token").focus();
}

byId("form").addEventListener("submit", async event => {
  event.preventDefault();
  byId("problem").hidden = true;
  byId("enter").disabled = true;
  try {
    await change("POST", "/login/token", { token: byId("token").value.trim() });
    location.replace(back);
  } catch (error) {
    fail(error.message);
    byId("enter").disabled = false;
    byId("token").select();
  }
});
begin().catch(error => fail(error.message));
