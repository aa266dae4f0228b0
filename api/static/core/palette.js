// The command palette: experiments, runs, pages, people and the actions of the present page, by their names.

import { html, render, useEffect, useState } from "../vendor/preact.js";
import { administers, get } from "./api.js";
import { h } from "./dom.js";
import { go } from "./router.js";

const WAIT_MS = 120,
  MOST_FOUND = 8;

/**
 * @typedef {Object} Entry
 * @property {string} kind
 * @property {string} title
 * @property {() => any} run
 */

const leads = (kind, title, path) => ({ kind, title, run: () => go(path) });
const fits = (title, typed) => {
  const text = title.toLowerCase();
  return typed
    .toLowerCase()
    .split(/\s+/)
    .every(word => text.includes(word));
};

/** What the present page offers, read from its menu of actions and its tabs. */
function offered() {
  const acts = /** @type {HTMLElement[]} */ ([
    ...document.querySelectorAll("main [data-actions] :is(button, a)"),
  ]);
  const tabs = /** @type {HTMLAnchorElement[]} */ ([...document.querySelectorAll("main .tabs a")]);
  return [
    ...acts.map(node => ({ kind: "Action", title: node.textContent.trim(), run: () => node.click() })),
    ...tabs.map(node => ({ kind: "On this page", title: node.textContent.trim(), run: () => node.click() })),
  ];
}

const quoted = text => `'${text.replaceAll("'", "''")}'`;

/** What the API finds; parts that one may not read are left out. */
async function found(typed, who, signal) {
  const words = typed.trim(),
    number = /^(?:run:?\s*)?(\d{1,15})$/i.exec(words)?.[1];
  const ask = (path, parameters = {}) =>
    get(path, parameters, { signal }).catch(error => {
      if (error.name === "AbortError") throw error;
      return { items: [] };
    });
  const pattern = quoted(`%${words}%`);
  const named = `name ILIKE ${pattern} or owner ILIKE ${pattern} or tags ILIKE ${pattern}`;
  const filter = words && (number ? `${named} or id = ${number}` : named);
  const [experiments, runs, people, projects] = await Promise.all([
    ask("/experiments", { filter, page_size: MOST_FOUND }),
    number
      ? get(`/runs/${number}`, {}, { signal }).then(
          run => [run],
          () => [],
        )
      : [],
    words && administers(who) ? ask("/users") : { items: [] },
    words ? ask("/projects") : { items: [] },
  ]);
  const owners = new Set([...people.items.map(one => one.name), ...experiments.items.map(one => one.owner)]);
  return [
    ...runs.map(run => leads("Run", `run:${run.id} of experiment ${run.experiment_id}`, `/runs/${run.id}`)),
    ...[...owners]
      .filter(name => words && name.toLowerCase().startsWith(words.toLowerCase()))
      .slice(0, MOST_FOUND)
      .map(name => leads("Person", name, `/?filter=${encodeURIComponent(`owner = ${quoted(name)}`)}`)),
    ...projects.items
      .filter(one => fits(one.name, words))
      .slice(0, MOST_FOUND)
      .map(one => leads("Project", one.name, `/projects/${encodeURIComponent(one.name)}`)),
    ...experiments.items.map(one => leads("Experiment", `${one.id} ${one.name}`, `/experiments/${one.id}`)),
  ];
}

function Palette({ own, who, close }) {
  const [typed, setTyped] = useState(""),
    [hits, setHits] = useState([]),
    [at, setAt] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    const search = () =>
      found(typed, who, stop.signal).then(setHits, error => {
        if (error.name !== "AbortError") setHits([]);
      });
    const timer = setTimeout(search, typed ? WAIT_MS : 0);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [typed]);
  const entries = [...own.filter(one => fits(one.title, typed)), ...hits],
    chosen = Math.min(at, entries.length - 1);
  useEffect(() => {
    document.getElementById(`entry-${chosen}`)?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const take = entry => {
    close();
    entry.run();
  };
  const pressed = event => {
    const to = { ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: chosen + 8, PageUp: chosen - 8 }[
      event.key
    ];
    if (to !== undefined) setAt(Math.max(0, Math.min(entries.length - 1, to)));
    else if (event.key === "Enter" && entries[chosen]) take(entries[chosen]);
    else return;
    event.preventDefault();
  };
  return html`<input
      type="text" role="combobox" aria-label="Find experiments, runs, pages, people and actions"
      aria-expanded="true" aria-controls="entries" aria-autocomplete="list"
      aria-activedescendant=${chosen >= 0 ? `entry-${chosen}` : null}
      placeholder="Name, run:ID, page, person or action" autocomplete="off" spellcheck="false" autofocus
      value=${typed}
      onInput=${event => {
        setTyped(event.target.value);
        setAt(0);
      }}
      onKeyDown=${pressed}
    />
    <ul role="listbox" id="entries" aria-label="Found">
      ${entries.map(
        (entry, index) =>
          html`<li
            role="option" id=${`entry-${index}`} aria-selected=${String(index === chosen)}
            onClick=${() => take(entry)}
          ><span>${entry.title}</span><span class="quiet">${entry.kind}</span></li>`,
      )}
    </ul>
    <p class="quiet" role="status">${entries.length ? `${entries.length} found` : "Nothing found."}</p>`;
}

/**
 * Opens the palette.
 * @param {Entry[]} entries of the application: its pages and what works on each
 * @param {Object} who uses it
 */
export function open(entries, who) {
  if (document.querySelector("dialog[open]")) return;
  const own = [...offered(), ...entries];
  const dialog = h("dialog", {
    class: "palette",
    "aria-label": "Find",
    onclose: () => {
      render(null, dialog);
      dialog.remove();
    },
    onclick: event => {
      if (event.target === dialog) dialog.close();
    },
  });
  document.body.append(dialog);
  render(html`<${Palette} own=${own} who=${who} close=${() => dialog.close()} />`, dialog);
  dialog.showModal();
}

/** A page of the application as an entry. */
export const page = (title, path) => leads("Page", title, path);
