// What a view shows instead of its content: loading, empty, failed, not allowed, missing.

import { ApiError } from "./api.js";
import { h, replace } from "./dom.js";

/** While something is read; it shows after a moment, so that fast answers do not flicker. */
export const loading = (what = "Loading") => h("p", { class: "loading quiet", role: "status" }, `${what} …`);

/** Where there is nothing yet, and what to do about it. */
export const empty = (text, ...action) =>
  h("div", { class: "card pad empty" }, h("p", {}, text), action.length ? h("p", {}, action) : null);

/** What went wrong, with a button that tries again. */
export function failed(error, retry) {
  if (error instanceof ApiError && error.status === 403) return forbidden(error);
  const node = h(
    "div",
    { class: "card pad problem", role: "alert" },
    h("p", { class: "strong" }, error.title || "This did not work"),
    h("p", {}, error.message),
    retry ? h("p", {}, h("button", { type: "button", onclick: () => retry() }, "Try again")) : null,
  );
  if (retry && error instanceof ApiError && error.status === 0) whenReachable(node, retry);
  return node;
}

/** Tries again as soon as the server answers, while what went wrong is still shown. */
function whenReachable(node, retry) {
  const timer = setInterval(async () => {
    if (!node.isConnected) return clearInterval(timer);
    const answer = await fetch("/healthz", { cache: "no-store" }).catch(() => null);
    if (!answer?.ok || !node.isConnected) return;
    clearInterval(timer);
    retry();
  }, RETRY_MS);
}

const RETRY_MS = 2000;

/** What one may not see or do, and who can change that. */
export const forbidden = error =>
  h(
    "div",
    { class: "card pad forbidden", role: "alert" },
    h("p", { class: "strong" }, "You are not allowed to see this"),
    h("p", {}, error.message),
    h("p", {}, h("a", { href: "/" }, "Back to the experiments")),
  );

/** A page that does not exist, or that one does not see. */
export const missing = () =>
  h(
    "div",
    { class: "card pad empty" },
    h("h1", {}, "This page does not exist"),
    h("p", {}, "It may have been deleted, or be part of a project that you are not a member of."),
    h("p", {}, h("a", { href: "/" }, "Back to the experiments")),
  );

/** The node for an error of a view: a missing page for 404, otherwise what went wrong. */
export const failure = (error, retry) =>
  error instanceof ApiError && error.status === 404 ? missing() : failed(error, retry);

/**
 * Shows that something is being read in a panel, then draws it; a failure is shown in its place, with a way to try again.
 * @param {HTMLElement} panel
 * @param {() => any} read
 * @param {(value: any) => Node | Node[]} draw
 * @param {AbortSignal} signal nothing is drawn after it
 */
export async function view(panel, read, draw, signal) {
  panel.setAttribute("aria-busy", "true");
  if (!panel.hasChildNodes()) replace(panel, loading());
  try {
    const value = await read();
    if (signal?.aborted) return;
    replace(panel, draw(value));
  } catch (error) {
    if (error.name === "AbortError" || signal?.aborted) return;
    replace(
      panel,
      failure(error, () => view(panel, read, draw, signal)),
    );
  }
  panel.setAttribute("aria-busy", "false");
}
