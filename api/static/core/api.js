// Requests to the API, and who makes them.

/** What the API refused: `status`, `slug` of the problem's kind, `title`, `detail`, and `errors` of single fields. */
export class ApiError extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `the server answered ${status}`);
    this.status = status;
    this.slug = (problem.type || "").split("/").pop();
    this.title = problem.title || "";
    this.detail = this.message;
    this.errors = problem.errors || [];
  }
}

/** Goes to the login page, and back here afterwards; never resolves. */
export function logInAgain() {
  location.assign(`/login?return=${encodeURIComponent(location.pathname + location.search)}`);
  return new Promise(() => {});
}

/** The path of a resource with its query: arrays repeat a parameter; null, undefined and "" are left out. */
export function address(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") query.append(name, one);
    }
  }
  const text = query.toString();
  return `/api/v1${path}${text ? `?${text}` : ""}`;
}

/** Why nothing answers: this machine has no network, or the server does not run. */
export const unreachable = () =>
  new ApiError(
    0,
    navigator.onLine
      ? {
          title: "The server does not answer",
          detail: "It may be restarting; this page tries again by itself.",
        }
      : { title: "You are offline", detail: "This page continues once there is a network again." },
  );

async function asked(path, options) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw unreachable();
  }
  if (answer.status === 401) return logInAgain();
  if (answer.ok) return answer;
  const text = await answer.text();
  let problem;
  try {
    problem = JSON.parse(text);
  } catch {
    problem = { detail: text.slice(0, 500) || answer.statusText };
  }
  throw new ApiError(answer.status, problem);
}

/** The JSON at a path of the API, such as "/experiments". */
export async function get(path, parameters = {}, /** @type {{signal?: AbortSignal}} */ { signal } = {}) {
  return (await asked(address(path, parameters), { signal, headers: { Accept: "application/json" } })).json();
}

/**
 * The text at a path of the API.
 * @param {string} path
 * @param {Object} parameters
 * @param {{signal?: AbortSignal, accept?: string}} options
 */
export async function getText(path, parameters = {}, { signal, accept = "text/plain" } = {}) {
  return (await asked(address(path, parameters), { signal, headers: { Accept: accept } })).text();
}

/**
 * Changes something.
 * @param {string} method POST, PUT, PATCH or DELETE
 * @param {string} path of the API
 * @param {any} [body] JSON; a string is sent as it is, as a spec, and so is a blob
 * @param {{signal?: AbortSignal, headers?: Object, parameters?: Object}} options
 * @returns the JSON of the answer, or null where it has none
 */
export async function send(method, path, body, { signal, headers = {}, parameters = {} } = {}) {
  const { csrf } = await whoami();
  const sent = { Accept: "application/json", ...headers };
  if (body !== undefined)
    sent["Content-Type"] ||= typeof body === "string" ? "application/yaml" : "application/json";
  if (csrf) sent["Stillhouse-CSRF"] = csrf;
  const whole = body === undefined || typeof body === "string" || body instanceof Blob;
  const content = whole ? body : JSON.stringify(body);
  const answer = await asked(address(path, parameters), { method, signal, headers: sent, body: content });
  const text = await answer.text();
  return text ? JSON.parse(text) : null;
}

let known = null;

/** Who is asking: user, scope, roles by project, administrator, and how they logged in; asked for once. */
export function whoami() {
  known ||= get("/whoami").catch(error => {
    known = null;
    throw error;
  });
  return known;
}

const SCOPES = ["read", "submit", "operate", "admin"];
const ROLES = ["viewer", "member", "maintainer"];

/** Whether someone's scope is at least the one given. */
export const hasScope = (who, scope) =>
  who.via === "open" || SCOPES.indexOf(who.scope) >= SCOPES.indexOf(scope);

/** Whether someone administers the installation. */
export const administers = who => who.via === "open" || (who.administrator && who.scope === "admin");

/** Whether someone has at least a role in a project. */
export const hasRole = (who, project, role) =>
  who.via === "open" || administers(who) || ROLES.indexOf(who.roles[project]) >= ROLES.indexOf(role);

/** Whether someone may pause, cancel, retry or delete an experiment; the server decides in any case. */
export function mayManage(who, experiment) {
  if (experiment.owner === who.user)
    return hasScope(who, "submit") && hasRole(who, experiment.project, "member");
  return hasScope(who, "operate") && hasRole(who, experiment.project, "maintainer");
}

/** Logs out, and goes to the login page or to the provider's. */
export async function logOut() {
  const { csrf } = await whoami();
  const answer = await asked("/logout", {
    method: "POST",
    headers: { Accept: "application/json", ...(csrf ? { "Stillhouse-CSRF": csrf } : {}) },
  });
  const text = await answer.text();
  location.assign((text && JSON.parse(text).provider) || "/login");
}
