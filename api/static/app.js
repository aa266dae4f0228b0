// Starts the application: its pages, the header, and what the router shows by itself.

import { ApiError, administers, logOut, whoami } from "./core/api.js";
import { announce, h, replace } from "./core/dom.js";
import { act, toast } from "./core/dialog.js";
import { focusRows, isTyping, listen } from "./core/keys.js";
import { go, open, route, start } from "./core/router.js";
import { failed, loading, missing } from "./core/states.js";
import { showLive } from "./core/stream.js";
import { THEMES, chooseTheme, chosenTheme } from "./theme.js";

const main = document.getElementById("main");

/** Pages in the header: path, title, and who sees them. */
/** @type {[string, string, ((who: any) => boolean)?][]} */
const PAGES = [
  ["/", "Experiments"],
  ["/queue", "Queue"],
  ["/new", "New"],
  ["/dashboards", "Dashboards"],
  ["/guide", "Guide"],
  ["/hardware", "Hardware"],
  ["/projects", "Projects"],
  ["/people", "People", administers],
  ["/tokens", "Tokens", who => who.via !== "open"],
  ["/audit", "Audit", administers],
];

route("/", () => import("./views/experiments.js"));
route("/compare/runs", () => import("./views/run_diff.js"));
route("/compare", () => import("./views/compare.js"));
route("/experiments/:id/:tab?", () => import("./views/experiment/index.js"));
route("/runs/:id/:tab?", () => import("./views/run/index.js"));
route("/queue", () => import("./views/queue.js"));
route("/new", () => import("./views/new.js"));
route("/guide", () => import("./views/guide.js"));
route("/hardware", () => import("./views/hardware.js"));
route("/projects/:name?", () => import("./views/projects.js"));
route("/people", () => import("./views/people.js"));
route("/tokens", () => import("./views/tokens.js"));
route("/audit", () => import("./views/audit.js"));
route("/deleted", () => import("./views/deleted.js"));
route("/dashboards/:id?", () => import("./views/dashboards.js"));
route("/embed/:id?", () => import("./views/embed.js"));
route("/account", () => import("./views/account.js"));

function markPage() {
  for (const link of document.querySelectorAll("#pages a")) {
    const path = link.getAttribute("href");
    const own =
      path === "/"
        ? /^\/($|experiments|runs|compare|deleted)/.test(location.pathname)
        : location.pathname.startsWith(path);
    if (own) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (own) link.scrollIntoView({ block: "nearest", inline: "center" });
  }
}

function showTheme() {
  const button = document.getElementById("theme");
  const next = () => THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
  const name = () => {
    button.textContent = { system: "◐", light: "☀", dark: "☾" }[chosenTheme()];
    button.setAttribute("aria-label", `Theme: ${chosenTheme()}; change to ${next()}`);
    button.title = `Theme: ${chosenTheme()}`;
  };
  chooseTheme(chosenTheme());
  name();
  button.addEventListener("click", () => {
    chooseTheme(next());
    name();
  });
}

const pagesOf = who => PAGES.filter(([, , seen]) => !seen || seen(who));

/** Opens the command palette, whose script is loaded for the first time it is wanted. */
async function find() {
  const [palette, who] = await Promise.all([import("./core/palette.js"), whoami()]);
  const entries = [...pagesOf(who), ["/account", "Account"], ["/deleted", "Deleted experiments"]];
  palette.open(
    [
      ...entries.map(([path, title]) => palette.page(title, path)),
      { kind: "Action", title: "Change the theme", run: () => document.getElementById("theme").click() },
      { kind: "Page", title: "API", run: () => location.assign("/docs") },
    ],
    who,
  );
}

async function showReader() {
  const who = await whoami();
  replace(
    document.getElementById("pages"),
    pagesOf(who).map(([path, title]) => h("a", { href: path }, title)),
    h("a", { href: "/docs" }, "API"),
  );
  const name = document.getElementById("who"),
    out = document.getElementById("out");
  name.hidden = false;
  name.textContent = who.via === "open" ? "Account" : who.user;
  out.hidden = who.via !== "session";
  out.addEventListener("click", () => act(out, logOut));
  markPage();
}

/** Addresses of the page before it had paths, as in mails that were sent then. */
function fromOldAddress() {
  const old = /^#\/(experiments\/\d+|queue|account)?$/.exec(location.hash);
  if (old) history.replaceState(null, "", `/${old[1] || ""}`);
}

const complain = error => toast(error.message, { problem: true });
document.getElementById("find").addEventListener("click", () => find().catch(complain));
document.getElementById("to-rows").addEventListener("click", event => {
  event.preventDefault();
  focusRows();
});
listen();
showTheme();
fromOldAddress();
addEventListener("hashchange", () => {
  if (/^#\//.test(location.hash)) {
    fromOldAddress();
    open();
  }
});
showReader().catch(error => announce(error.message));
let first = true;
start(main, {
  loading: area => {
    showLive("");
    replace(area, loading());
    markPage();
  },
  missing: area => {
    replace(area, missing());
    return { title: "Not found" };
  },
  failed: (area, error, retry) =>
    replace(area, error instanceof ApiError && error.status === 404 ? missing() : failed(error, retry)),
  opened: title => {
    document.title = title ? `${title} · Stillhouse` : "Stillhouse";
    markPage();
    if (!first) {
      main.focus({ preventScroll: true });
      scrollTo(0, 0);
      announce(document.title);
    }
    first = false;
  },
});

// A menu closes on Escape, on a choice, and on a click elsewhere; a dialog that it opened is not elsewhere.
const openMenus = () => /** @type {HTMLDetailsElement[]} */ ([...document.querySelectorAll(".menu[open]")]);
document.addEventListener("click", event => {
  const place = /** @type {Element} */ (event.target);
  for (const menu of openMenus())
    if (!(menu.contains(place) || place.closest("dialog")) || place.closest(".menu > .list > :is(a, button)"))
      menu.open = false;
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  for (const menu of openMenus()) {
    menu.open = false;
    if (menu.contains(document.activeElement)) menu.querySelector("summary").focus();
  }
});
document.addEventListener("keydown", event => {
  if ((event.ctrlKey || event.metaKey) && event.key === "k") {
    event.preventDefault();
    find().catch(complain);
    return;
  }
  if (event.key !== "/" || isTyping()) return;
  /** @type {HTMLInputElement} */
  const search = main.querySelector('input[type="search"]');
  if (search) {
    event.preventDefault();
    search.focus();
  } else if (location.pathname !== "/") {
    event.preventDefault();
    go("/");
  }
});
