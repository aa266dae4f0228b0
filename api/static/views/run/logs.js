// The log of a run: its last lines, which follow; earlier ones on demand; and a search over all attempts.

import { get } from "../../core/api.js";
import { debounced, h, replace } from "../../core/dom.js";
import { count, ENDED } from "../../core/format.js";
import { query, setQuery } from "../../core/router.js";
import { choice } from "../parts.js";

const PAGE = 400,
  MOST_KEPT = 4000,
  MOST_FOUND = 500,
  NEWEST = Number.MAX_SAFE_INTEGER;

const STREAMS = [
  ["", "all lines"],
  ["log", "the run's own lines"],
  ["stdout", "stdout"],
  ["stderr", "stderr"],
];

/** A text with the places marked that a search found. */
function marked(text, wanted) {
  if (!wanted) return [text];
  const parts = [],
    small = text.toLowerCase(),
    word = wanted.toLowerCase();
  let from = 0;
  for (let at = small.indexOf(word); at >= 0; at = small.indexOf(word, from)) {
    parts.push(text.slice(from, at), h("mark", {}, text.slice(at, at + word.length)));
    from = at + word.length;
  }
  return [...parts, text.slice(from)];
}

export async function show(panel, context, { signal }) {
  const asked = query(),
    path = `/runs/${context.id}/logs`;
  const view = {
    search: asked.get("search") || "",
    attempt: asked.get("attempt") || "",
    stream: asked.get("stream") || "",
    line: Number(asked.get("line")) || 0,
    follow: !asked.get("line"),
  };
  let lines = [],
    first = 0,
    waiting = [],
    ready = false,
    reached = false;
  context.on("log", line => (ready ? taken([line]) : waiting.push(line)));

  const list = h("ol"),
    box = h(
      "div",
      { class: "log", tabindex: "0", role: "log", "aria-label": "Log of the run", "aria-live": "off" },
      list,
    );
  const note = h("span", { class: "quiet", role: "status" });
  const search = h("input", {
    type: "search",
    placeholder: "Search the log",
    "aria-label": "Search the log",
    value: view.search,
    maxlength: 200,
  });
  const follows = h("input", { type: "checkbox", checked: view.follow });
  const earlier = h("button", { type: "button" }, "Earlier lines");
  const attempts = choice("attempt", [["", "all attempts"]], "", { "aria-label": "Attempt" });
  const streams = choice("stream", STREAMS, view.stream, { "aria-label": "Lines of" });
  const ending = h("p", { class: "quiet log-end" });
  // What one looks for may be why an earlier attempt ended.
  const attempt = () => (view.search ? "" : view.attempt);
  const several = () => context.run.attempt > 1;
  const parameters = more => ({
    attempt: attempt(),
    contains: view.search,
    stream: view.stream,
    ...more,
  });

  function drawAttempts() {
    for (let number = attempts.options.length; number <= context.run.attempt; number++)
      attempts.append(h("option", { value: number }, `attempt ${number}`));
    attempts.hidden = !several();
    attempts.disabled = Boolean(view.search);
    attempts.title = view.search ? "A search looks through all attempts" : "";
    attempts.value = attempt();
  }

  const time = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const row = line =>
    h(
      "li",
      { id: `line-${line.cursor}`, class: `${line.level} ${line.cursor === view.line ? "here" : ""}` },
      h(
        "a",
        {
          class: "at",
          href: `?line=${line.cursor}`,
          title: `${new Date(line.at_s * 1000).toLocaleString()}: show the lines around this one`,
          onclick: event => {
            event.preventDefault();
            around(line.cursor);
          },
        },
        time.format(new Date(line.at_s * 1000)),
      ),
      several() && !attempt() ? h("span", { class: "attempt" }, `attempt ${line.attempt}`) : null,
      h(
        "span",
        { class: "level" },
        line.stream === "log" ? (line.level === "info" ? "" : line.level) : line.stream,
      ),
      h("span", { class: "message" }, marked(line.message, view.search)),
    );

  function drawEnd() {
    const { run } = context,
      why = run.failure_message ? `: ${run.failure_class}, ${run.failure_message}` : "";
    ending.hidden = !ENDED.has(run.state);
    ending.textContent = `The run ${run.state === "cancelled" ? "was" : "has"} ${run.state}${run.ended_s ? ` at ${time.format(new Date(run.ended_s * 1000))}` : ""}, after ${count(run.step)} steps${why}.`;
  }

  function told() {
    const found = [...new Set(lines.map(line => line.attempt))],
      where =
        several() && found.length ? ` in attempt${found.length === 1 ? "" : "s"} ${found.join(", ")}` : "";
    note.textContent = view.search
      ? `${count(lines.length)} line${lines.length === 1 ? "" : "s"} with “${view.search}”${where}${reached ? "" : ", the last ones"}`
      : lines.length
        ? ""
        : view.stream
          ? "There are no such lines."
          : ENDED.has(context.run.state)
            ? "This run wrote no lines."
            : "No lines yet.";
    earlier.hidden = reached || !lines.length;
  }

  function taken(fresh) {
    const last = lines.at(-1)?.cursor ?? -1;
    const wanted = fresh.filter(
      line =>
        line.cursor > last &&
        (!attempt() || String(line.attempt) === attempt()) &&
        (!view.stream || line.stream === view.stream) &&
        (!view.search || line.message.toLowerCase().includes(view.search.toLowerCase())),
    );
    if (!wanted.length || (view.line && !view.follow)) return;
    lines.push(...wanted);
    list.append(...wanted.map(row));
    while (lines.length > MOST_KEPT && view.follow) {
      lines.shift();
      list.firstChild.remove();
      reached = false;
    }
    told();
    if (view.follow) box.scrollTop = box.scrollHeight;
  }

  async function load() {
    ready = false;
    const mine = ++first;
    box.setAttribute("aria-busy", "true");
    drawAttempts();
    let items;
    const limit = view.search ? MOST_FOUND : PAGE;
    if (view.line && !view.search) {
      const [before, after] = await Promise.all([
        get(path, parameters({ before: view.line + 1, limit: PAGE / 2 }), { signal }),
        get(path, parameters({ after: view.line, limit: PAGE / 2 }), { signal }),
      ]);
      items = [...before.items, ...after.items];
      reached = before.items.length < PAGE / 2;
    } else {
      ({ items } = await get(path, parameters({ before: NEWEST, limit }), { signal }));
      reached = items.length < limit;
    }
    if (mine !== first) return;
    lines = items;
    replace(list, lines.map(row));
    box.setAttribute("aria-busy", "false");
    ready = true;
    const missed = waiting;
    waiting = [];
    taken(missed);
    told();
    const here = view.line && list.querySelector(".here");
    if (here) box.scrollTop = here.offsetTop - box.clientHeight / 2;
    else box.scrollTop = box.scrollHeight;
  }

  function around(cursor) {
    // Around a line that was found, whichever attempt was shown before.
    const own = String(Math.floor(cursor / 2 ** 32));
    Object.assign(view, {
      line: cursor,
      search: "",
      stream: "",
      follow: false,
      attempt: view.attempt && own,
    });
    search.value = streams.value = "";
    follows.checked = false;
    setQuery({ line: cursor, search: null, stream: null, attempt: view.attempt });
    return load();
  }

  earlier.addEventListener(
    "click",
    async () => {
      const { items } = await get(path, parameters({ before: lines[0].cursor, limit: PAGE }), { signal });
      const from = box.scrollHeight - box.scrollTop;
      lines.unshift(...items);
      list.prepend(...items.map(row));
      box.scrollTop = box.scrollHeight - from;
      reached = items.length < PAGE;
      told();
    },
    { signal },
  );
  const again = debounced(load, 250, signal);
  search.addEventListener(
    "input",
    () => {
      view.search = search.value;
      view.line = 0;
      setQuery({ search: view.search, line: null });
      again();
    },
    { signal },
  );
  streams.addEventListener(
    "change",
    () => {
      view.stream = streams.value;
      setQuery({ stream: view.stream });
      load();
    },
    { signal },
  );
  attempts.addEventListener(
    "change",
    () => {
      view.attempt = attempts.value;
      setQuery({ attempt: view.attempt });
      load();
    },
    { signal },
  );
  follows.addEventListener(
    "change",
    () => {
      view.follow = follows.checked;
      if (!view.follow) return;
      if (view.line) {
        view.line = 0;
        setQuery({ line: null });
        load();
      } else box.scrollTop = box.scrollHeight;
    },
    { signal },
  );
  box.addEventListener(
    "scroll",
    () => {
      const end = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
      if (ready && view.follow && !end) {
        view.follow = false;
        follows.checked = false;
      }
    },
    { signal, passive: true },
  );
  context.on("run", () => {
    drawAttempts();
    drawEnd();
  });
  drawEnd();
  context.on("again", () => {
    if (!view.line) load().catch(() => {});
  });

  await load();
  replace(
    panel,
    h(
      "div",
      { class: "tools" },
      h("span", { class: "grow" }, search),
      streams,
      attempts,
      h("label", {}, follows, " follow"),
      note,
    ),
    earlier,
    box,
    ending,
  );
  const here = view.line && list.querySelector(".here");
  if (here) box.scrollTop = here.offsetTop - box.clientHeight / 2;
  else box.scrollTop = box.scrollHeight;
}
