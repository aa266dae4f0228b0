// Who is logged in: shown in the header, sent along with every change, asked for again when it has ended.

let session = null;

const here = () => location.pathname + location.search + location.hash;

/** Goes to the login page, and back here afterwards; never resolves. */
export function logInAgain() {
  location.assign(`/login?return=${encodeURIComponent(here())}`);
  return new Promise(() => {});
}

/** A path of this server from a parameter, or the start page: never another host. */
export function returnPath(text) {
  if (!text || !/^\/(?![/\\])[^\\\x00-\x20\x7f]*$/.test(text)) return "/";
  const url = new URL(text, location.origin);
  return url.origin === location.origin && !url.pathname.startsWith("/login")
    ? url.pathname + url.search + url.hash
    : "/";
}

/** The answer to GET /api/v1/whoami, or null where nobody is logged in. */
export async function whoami() {
  const answer = await fetch("/api/v1/whoami", { headers: { Accept: "application/json" } });
  if (answer.status === 401) return null;
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.detail || answer.statusText);
  session = body;
  return body;
}

/** Changes something; the session's own header shows that this page asks, not another site's. */
export async function change(method, path, body) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (session && session.csrf) headers["Stillhouse-CSRF"] = session.csrf;
  const answer = await fetch(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await answer.text();
  const content = text ? JSON.parse(text) : null;
  if (!answer.ok)
    throw Object.assign(new Error((content && content.detail) || answer.statusText), {
      status: answer.status,
    });
  return content;
}

async function logOut() {
  const { provider } = await change("POST", "/logout");
  location.assign(provider || "/login");
}

async function showAccount() {
  const area = document.getElementById("account");
  if (!area) return;
  const found = await whoami();
  if (!found || found.via === "open") return;
  document.getElementById("who").textContent = found.user;
  const out = document.getElementById("out");
  out.hidden = found.via !== "session";
  out.addEventListener("click", () =>
    logOut().catch(error => {
      document.getElementById("live").textContent = error.message;
    }),
  );
  area.hidden = false;
}
showAccount().catch(error => {
  document.getElementById("live").textContent = error.message;
});
