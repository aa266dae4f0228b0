// Pages have paths, and whatever of a page one would share is in its query.

import { unreachable } from "./api.js";

const routes = [];
let leave = () => {};
let turn = 0;

/**
 * Adds a page.
 * @param {string} pattern such as "/experiments/:id/:tab?"
 * @param {() => Promise<{show: Function}>} load imports the module of the page
 */
export function route(pattern, load) {
  const source = pattern.replace(/\/:(\w+)\?/g, "(?:/(?<$1>[^/]+))?").replace(/:(\w+)/g, "(?<$1>[^/]+)");
  routes.push({ expression: new RegExp(`^${source}/?$`), load });
}

/** The parameters of the address. */
export const query = () => new URLSearchParams(location.search);

/** Changes parameters of the address without leaving the page; null and "" remove one, arrays repeat it. */
export function setQuery(changes, { push = false } = {}) {
  const parameters = query();
  for (const [name, value] of Object.entries(changes)) {
    parameters.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") parameters.append(name, one);
    }
  }
  const text = parameters.toString();
  const path = location.pathname + (text ? `?${text}` : "");
  if (path !== location.pathname + location.search)
    history[push ? "pushState" : "replaceState"](push ? null : history.state, "", path);
}

/** Where the page and its tables are scrolled to, so that *Back* comes back there. */
const scrolled = () => ({
  page: scrollY,
  tables: [...area.querySelectorAll(".table-scroll")].map(node => node.scrollTop),
});

async function comeBack({ state }) {
  await open();
  if (!state?.tables) return;
  scrollTo(0, state.page);
  area
    .querySelectorAll(".table-scroll")
    .forEach((node, place) => (node.scrollTop = state.tables[place] ?? 0));
}

/** Whether the page is shown in a frame of another: it is then left for no other, which might change something. */
const embedded = () => /^\/embed(\/|$)/.test(location.pathname);

/** Goes to a page of the application. */
export function go(path, { replace = false } = {}) {
  if (embedded()) {
    window.open(path, "_blank", "noopener");
    return Promise.resolve();
  }
  if (!replace) history.replaceState(scrolled(), "");
  history[replace ? "replaceState" : "pushState"](null, "", path);
  return open();
}

/**
 * Starts: shows the page of the address, and the next ones as links are followed.
 * @param {HTMLElement} main what pages are drawn in
 * @param {{missing: Function, failed: Function, loading: Function, opened: Function}} views of the router's own states
 */
export function start(main, views) {
  area = main;
  own = views;
  history.scrollRestoration = "manual";
  document.documentElement.classList.toggle("embedded", embedded());
  addEventListener("popstate", comeBack);
  document.addEventListener("click", event => {
    /** @type {HTMLAnchorElement} */
    const anchor = /** @type {Element} */ (event.target).closest?.("a[href]");
    if (
      !anchor ||
      event.defaultPrevented ||
      event.button ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    )
      return;
    const url = new URL(anchor.href, location.href);
    if (
      url.origin !== location.origin ||
      anchor.target ||
      anchor.hasAttribute("download") ||
      !matching(url.pathname)
    )
      return;
    if (url.hash && url.pathname === location.pathname && url.search === location.search) return;
    event.preventDefault();
    go(url.pathname + url.search);
  });
  return open();
}

let area, own;

function matching(path) {
  for (const { expression, load } of routes) {
    const found = expression.exec(path);
    if (found) {
      const parameters = Object.entries(found.groups || {}).filter(([, value]) => value !== undefined);
      return {
        load,
        parameters: Object.fromEntries(parameters.map(([name, value]) => [name, decodeURIComponent(value)])),
      };
    }
  }
  return null;
}

/** Leaves the page that is shown and shows the one of the address. */
export async function open() {
  const mine = ++turn;
  leave();
  const controller = new AbortController();
  let left = null;
  leave = () => {
    controller.abort();
    left?.();
  };
  const found = matching(location.pathname);
  area.setAttribute("aria-busy", "true");
  own.loading(area);
  try {
    const shown = found
      ? await (await found.load()).show(area, found.parameters, { signal: controller.signal })
      : own.missing(area);
    if (mine !== turn) {
      shown?.leave?.();
      return;
    }
    left = shown?.leave;
    own.opened(shown?.title);
  } catch (error) {
    if (mine !== turn || error.name === "AbortError") return;
    // A module that cannot be loaded says so in the browser's words, and is not asked for again by this page.
    if (/dynamically imported|module script/.test(error.message))
      own.failed(area, unreachable(), () => location.reload());
    else own.failed(area, error, open);
    own.opened(null);
  }
  area.setAttribute("aria-busy", "false");
}
