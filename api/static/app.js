// Starts the application: its pages, the header, and what the router shows by itself.

import { ApiError, administers, logOut, whoami } from "./core/api.js";
import { announce, h, replace } from "./core/dom.js";
import { act } from "./core/dialog.js";
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
  ["/guide", "Guide"],
  ["/hardware", "Hardware"],
  ["/projects", "Projects"],
  ["/people", "People", administers],
  ["/tokens", "Tokens", who => who.via !== "open"],
  ["/audit", "Audit", administers],
];

route("/", () => import("./views/experiments.js"));
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

async function showReader() {
  const who = await whoami();
  replace(
    document.getElementById("pages"),
    PAGES.filter(([, , seen]) => !seen || seen(who)).map(([path, title]) => h("a", { href: path }, title)),
    h("a", { href: "/docs" }, "API"),
  );
  const name = document.getElementById("who"),
    out = document.getElementById("out");
  name.hidden = who.via === "open";
  name.textContent = who.user;
  out.hidden = who.via !== "session";
  out.addEventListener("click", () => act(out, logOut));
  markPage();
}

/** Addresses of the page before it had paths, as in mails that were sent then. */
function fromOldAddress() {
  const old = /^#\/(experiments\/\d+|queue|account)?$/.exec(location.hash);
  if (old) history.replaceState(null, "", `/${old[1] || ""}`);
}

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
document.addEventListener("keydown", event => {
  if (event.key !== "/" || /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName || "")) return;
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
