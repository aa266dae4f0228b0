// Server-sent events: one stream per page, connected again by itself.

import { whoami } from "./api.js";

const FIRST_WAIT_MS = 1000,
  LONGEST_WAIT_MS = 15000,
  UNSEEN_MS = 60000;

/** Says in the header how live the page is: "connecting", "live", "reconnecting" or "" (nothing to follow). */
export function showLive(state) {
  const place = document.getElementById("live");
  place.dataset.state = state;
  place.textContent = state.endsWith("ing") ? `${state} …` : state;
}

/**
 * Follows a stream of the API until it ends, is closed, or the signal is aborted.
 * @param {string} path such as "/api/v1/experiments/3/stream"
 * @param {Object<string, (data: any) => void>} handlers by kind of event; `end` closes the stream
 * @param {{signal?: AbortSignal, again?: () => void}} options `again` is called after a reconnect, as events may be missing
 * @returns {() => void} closes it
 */
export function follow(path, handlers, { signal, again } = {}) {
  let source,
    timer,
    wait = FIRST_WAIT_MS,
    closed = false,
    seen = false;
  const close = () => {
    if (closed) return;
    closed = true;
    clearTimeout(timer);
    source?.close();
    showLive("");
  };
  const connect = () => {
    if (!seen) showLive("connecting");
    source = new EventSource(path);
    source.addEventListener("open", () => {
      showLive("live");
      wait = FIRST_WAIT_MS;
      if (seen) again?.();
      seen = true;
    });
    source.addEventListener("error", () => {
      if (closed) return;
      showLive("reconnecting");
      if (source.readyState !== EventSource.CLOSED) return; // The browser tries again by itself.
      whoami().catch(() => {});
      timer = setTimeout(connect, wait);
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    });
    for (const [kind, handle] of Object.entries(handlers)) {
      source.addEventListener(kind, message => {
        if (closed) return;
        if (kind === "end") close();
        handle(JSON.parse(message.data));
      });
    }
  };
  signal?.addEventListener("abort", close);
  if (!signal?.aborted) connect();
  return close;
}

/**
 * Follows everything that one sees, on a page of several experiments; not while no one has seen the page for a minute,
 * because a browser opens few connections to one server, and other tabs need them.
 * @param {{[kind: string]: (data: any) => void}} handlers of `experiment`, `deleted`, `costs` and `queue`
 * @param {() => any} read reads all again, after a reconnect or when too much has changed at a time
 */
export function followAll(handlers, read, signal) {
  const all = { experiment() {}, deleted() {}, costs() {}, queue() {}, ...handlers };
  const open = () => follow("/api/v1/stream", { ...all, many: read }, { signal, again: read });
  let close = open(),
    timer = null;
  document.addEventListener(
    "visibilitychange",
    () => {
      clearTimeout(timer);
      if (document.hidden)
        timer = setTimeout(() => {
          close?.();
          close = null;
        }, UNSEEN_MS);
      else if (!close) {
        close = open();
        read();
      }
    },
    { signal },
  );
  signal.addEventListener("abort", () => clearTimeout(timer));
}

/** Calls `read` at once, then again at most every so many milliseconds, however often the result is called; only while seen. */
export function rarely(read, wait, signal) {
  let timer = null,
    wanted = false;
  const run = () => {
    if (!wanted || timer !== null || document.hidden || signal.aborted) return;
    wanted = false;
    timer = setTimeout(() => {
      timer = null;
      run();
    }, wait);
    read();
  };
  document.addEventListener("visibilitychange", run, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  return () => {
    wanted = true;
    run();
  };
}

/** Calls `draw` at most once a frame however often the result is called; nothing is drawn after the signal. */
export function painter(draw, signal) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      if (!signal?.aborted) draw();
    });
  };
}
