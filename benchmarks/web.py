"""The web application in Chromium, against 10,000 experiments, one of 10,000 runs, and 10 million points.

    python -m benchmarks.web [--rounds N] [--live-s SECONDS]

The last line is one JSON object. Milliseconds are medians from the start of a navigation until a page is
drawn, unless something else is said.

- `experiments_ms`: the list of 10,000 experiments.
- `experiment_10k_runs_ms`: an experiment with 10,000 runs, its table of runs drawn.
- `curves_200_runs_ms`: the losses of 200 runs with 10,000 steps each, drawn.
- `first_figure_script_ms`: CPU time of scripts, from an empty cache until the means of those runs are drawn.
- `slow3g_curves_s`: seconds from an empty cache until these means are drawn, at 400 ms and 400 kbit/s.
- `scroll_fps`: frames per second while the table of 10,000 runs scrolls.
- `jump_10k_ms`: from a jump in that table, to the end, back or anywhere, until the rows there are drawn.
- `live_curve_frame_ms_p95`: curves of eight runs that report twice a second: the longest frame of each half
  second, of which 95% over 10 minutes are shorter than this.
- `heap_mib_after_1h`: memory of the page's script after as many updates of a running experiment as come in an
  hour, one every half second, sent as fast as the server can.
- `js_kib`: size of the application's scripts as they are sent, compressed, without plotly; `js_kib_plain` is
  their size as they are written, with comments. `js_kib_largest_page` is what the page with the most loads.
- `api_cpu_share_20_viewers`: CPU seconds of the API per second while 20 browsers show an experiment of
  eight runs, each of which reports four times a second.
"""

from __future__ import annotations

import gzip
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from playwright.sync_api import Browser, Page, Request, sync_playwright

from api.routes.pages import paths as page_paths
from benchmarks.growth import trained
from benchmarks.live import api_process, reporting, started
from benchmarks.options import Benchmark
from benchmarks.store import installation
from service.config.settings import Settings
from service.db import schema
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from tests.browser.devtools import browser_path

TARGETS = {
    "experiments_ms": 600.0,
    "experiment_10k_runs_ms": 1000.0,
    "curves_200_runs_ms": 1500.0,
    "scroll_fps": 50.0,
    "heap_mib_after_1h": 60.0,
    "js_kib": 180.0,
    "api_cpu_share_20_viewers": 0.3,
    "jump_10k_ms": 400.0,
    "live_curve_frame_ms_p95": 50.0,
    "first_figure_script_ms": 300.0,
    "slow3g_curves_s": 8.0,
}
BENCHMARK = Benchmark(
    "web",
    __doc__,
    fields=tuple(TARGETS),
    also=("targets", "js_kib_plain", "js_kib_largest_page"),
)
STATIC = Path(__file__).parent.parent / "api" / "static"
_HOUR_OF_UPDATES = 7_200
_SLOW_3G = {"offline": False, "latency": 400, "downloadThroughput": 50_000, "uploadThroughput": 50_000}
"""Milliseconds, and bytes per second."""
_CURVES = "[data-drawn=true]"
_WATCH = """
() => {
  window.drawnMs = null;
  const look = () => {
    const main = document.getElementById("main");
    const plotted = !SELECTOR || document.querySelector(SELECTOR);
    if (main?.getAttribute("aria-busy") === "false" && plotted) window.drawnMs = performance.now();
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}
"""
"""Notes when a page is drawn: what it waits for besides `main` is put in the place of SELECTOR."""
_SCROLL = """
async (seconds) => {
  const box = document.querySelector(".table-scroll");
  let frames = 0;
  const begin = performance.now();
  while (performance.now() - begin < 1000 * seconds) {
    box.scrollTop += 120;
    await new Promise(requestAnimationFrame);
    frames += 1;
  }
  return 1000 * frames / (performance.now() - begin);
}
"""
_JUMP = """
async share => {
  const box = document.querySelector(".table-scroll");
  const { left, top, width, height } = box.getBoundingClientRect();
  const row = () => document.elementFromPoint(left + width / 2, top + height / 2)?.closest("tr");
  const before = row()?.textContent;
  const begin = performance.now();
  box.scrollTop = share * (box.scrollHeight - box.clientHeight);
  while (!row()?.querySelector('a[href^="/runs/"]') || row().textContent === before) {
    if (performance.now() - begin > 60_000) return NaN;
    await new Promise(requestAnimationFrame);
  }
  return performance.now() - begin;
}
"""
_FRAMES = """
() => {
  window.longest = [];
  let last = performance.now(), until = last + 500, most = 0;
  const next = now => {
    most = Math.max(most, now - last);
    last = now;
    if (now >= until) {
      window.longest.push(most);
      until = now + 500;
      most = 0;
    }
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}
"""


def fill(store: Store, smoke: bool) -> tuple[int, int]:
    """Returns the ids of an experiment of 10,000 runs and of one whose 200 runs have 10 million points."""
    wide = _ended(store, "wide", 30 if smoke else 10_000, 0, 0)
    curved = _ended(store, "curves", 4 if smoke else 200, 2 if smoke else 5, 50 if smoke else 10_000)
    spec = validate({"name": "small", "task": {"name": "imdb"}})
    small, _ = store.submissions.submit(NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench"))
    store.requests.cancel(small.id)  # None waits: later ones are claimed at once.
    store.database.write(lambda connection: _repeat(connection, small.id, 2 if smoke else 9_997))
    return wide, curved


def _repeat(connection: sa.Connection, experiment_id: int, count: int) -> None:
    """Copies an experiment of one run again and again."""
    experiments, runs = schema.experiments, schema.runs
    one = dict(
        connection.execute(sa.select(experiments).where(experiments.c.id == experiment_id)).one()._mapping
    )
    of = dict(connection.execute(sa.select(runs).where(runs.c.experiment_id == experiment_id)).one()._mapping)
    del of["id"]
    ids = range(experiment_id + 1, experiment_id + 1 + count)
    connection.execute(sa.insert(experiments), [{**one, "id": id, "name": f"small {id}"} for id in ids])
    connection.execute(sa.insert(runs), [{**of, "experiment_id": id} for id in ids])


def _ended(store: Store, name: str, runs: int, names: int, steps: int) -> int:
    spec = validate({"name": name, "task": {"name": "imdb"}, "seeds": list(range(runs))})
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench")
    )
    Queue(store).claim("bench", lease_s=36_000)
    store.drivers.started(experiment.id, 1, "bench", 0)
    if names:
        for run in trained(store, experiment, names, steps):
            store.attempts.finish_run(run, 1, RunState.succeeded)
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    return experiment.id


@contextmanager
def _page(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1440, "height": 900}) as context:
        yield context.new_page()


def drawn_ms(page: Page, url: str, rounds: int, plotted: str = "") -> float:
    """Median time from navigation to drawn; the first visit, which fills the caches, does not count."""
    page.add_init_script(f"({_WATCH.replace('SELECTOR', repr(plotted))})()")
    times = []
    for number in range(rounds + 1):
        page.goto(url)
        page.wait_for_function("() => window.drawnMs !== null", timeout=60_000)
        if number:
            times.append(float(page.evaluate("window.drawnMs")))
    return statistics.median(times)


def visits(browser: Browser, url: str, wide: int, curved: int, rounds: int, smoke: bool) -> dict[str, float]:
    """Opens each of the three pages again and again, and scrolls the long table."""
    found = {}
    with _page(browser) as page:
        found["experiments_ms"] = drawn_ms(page, f"{url}/", rounds)
    with _page(browser) as page:
        found["experiment_10k_runs_ms"] = drawn_ms(page, f"{url}/experiments/{wide}/runs", rounds)
        found["scroll_fps"] = float(page.evaluate(_SCROLL, 0.3 if smoke else 5.0))
        jumps = [1.0, 0.0, *(number * 0.37 % 1 for number in range(1, 2 + rounds))]
        found["jump_10k_ms"] = statistics.median(float(page.evaluate(_JUMP, share)) for share in jumps)
    address = f"{url}/experiments/{curved}/curves?metric=m0&by=run&max_curves=200"
    with _page(browser) as page:
        found["curves_200_runs_ms"] = drawn_ms(page, address, rounds, _CURVES)
    address = f"{url}/experiments/{curved}/curves?metric=m0"
    first = [first_visit(browser, address, slow=False)[0] for _ in range(rounds)]
    found["first_figure_script_ms"] = statistics.median(first)
    slow = [first_visit(browser, address, slow=not smoke)[1] for _ in range(min(3, rounds))]
    found["slow3g_curves_s"] = statistics.median(slow)
    return found


def first_visit(browser: Browser, url: str, *, slow: bool) -> tuple[float, float]:
    """Opens curves with an empty cache; returns scripts' CPU time in ms, and the seconds until drawn."""
    with _page(browser) as page:
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        if slow:
            session.send("Network.enable")
            session.send("Network.emulateNetworkConditions", _SLOW_3G)
        begin = time.perf_counter()
        page.goto(url, wait_until="commit", timeout=120_000)
        page.wait_for_selector(_CURVES, state="attached", timeout=120_000)
        seconds = time.perf_counter() - begin
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        return 1000 * float(metrics["ScriptDuration"]), seconds


def live_frame_ms(browser: Browser, settings: Settings, seconds: float) -> float:
    """95th percentile over half seconds of the longest frame while the curves of eight runs grow."""
    with closing(Store.open(settings)) as store, api_process(settings) as (url, _), _page(browser) as page:
        experiment, runs = started(store, 8)
        with reporting(store, runs, 0.5):
            _arrive(page, f"{url}/experiments/{experiment}/curves?metric=loss&by=run")
            page.wait_for_selector(_CURVES, state="attached", timeout=60_000)
            page.evaluate(_FRAMES)
            time.sleep(seconds)
            longest = sorted(page.evaluate("window.longest"))
    return float(longest[int(0.95 * len(longest))])


def largest_page_kib(browser: Browser, url: str, wide: int, curved: int) -> float:
    """KiB of scripts of the page that loads most of them, each from an empty cache, without plotly."""
    own = {"id": str(wide), "tab": "runs", "name": "default"}
    paths = {path.format_map(own) for path, _ in page_paths()} | {f"/experiments/{curved}/curves"}
    return max(_scripts_kib(browser, url + path) for path in paths)


def _scripts_kib(browser: Browser, url: str) -> float:
    with _page(browser) as page:
        loaded: list[Request] = []
        page.on("requestfinished", lambda request: loaded.append(request))
        page.goto(url)
        page.wait_for_selector("main[aria-busy=false]", state="attached")
        page.wait_for_timeout(1000)  # What is loaded once a page is drawn, such as an editor.
        scripts = [one for one in loaded if one.resource_type == "script" and "plotly" not in one.url]
        return sum(one.sizes()["responseBodySize"] for one in scripts) / 1024


def viewers(browser: Browser, settings: Settings, smoke: bool) -> float:
    """CPU share of the API with 20 browsers at one running experiment."""
    count, seconds = (2, 1.0) if smoke else (20, 10.0)
    with closing(Store.open(settings)) as store, api_process(settings) as (url, process):
        experiment, runs = started(store, 8)
        with reporting(store, runs):
            contexts = [browser.new_context() for _ in range(count)]
            for context in contexts:  # Each has connections of its own, as another person's browser.
                context.new_page().goto(f"{url}/experiments/{experiment}")
            time.sleep(seconds / 5)
            before, begin = sum(process.cpu_times()[:2]), time.perf_counter()
            time.sleep(seconds)
            share = (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - begin)
            for context in contexts:
                context.close()
    return share


def heap_after_an_hour(browser: Browser, settings: Settings, smoke: bool) -> float:
    """MiB of the page's script after an hour of updates, with all that can be freed freed."""
    updates = 20 if smoke else _HOUR_OF_UPDATES
    pace_s = 0.05 if smoke else 0.01
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(settings, port, pace_s))
    server.start()
    try:
        with closing(Store.open(settings)) as store, _page(browser) as page:
            experiment, runs = started(store, 8)
            url = f"http://127.0.0.1:{port}/experiments/{experiment}/curves"
            _arrive(page, url)
            page.evaluate(
                "(path) => { window.updates = 0;"
                " new EventSource(path).addEventListener('run', () => updates++); }",
                f"/api/v1/experiments/{experiment}/stream",
            )
            with reporting(store, runs, pace_s):
                page.wait_for_function(f"() => window.updates >= 8 * {updates}", timeout=900_000, polling=500)
            return _heap_mib(page)
    finally:
        server.terminate()
        server.join()


def _arrive(page: Page, url: str) -> None:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            page.goto(url)
            page.wait_for_selector("main[aria-busy=false]", state="attached")
            return
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _heap_mib(page: Page) -> float:
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.enable")
    session.send("HeapProfiler.collectGarbage")
    return float(page.evaluate("performance.memory.usedJSHeapSize")) / 2**20


def _serve(settings: Settings, port: int, interval_s: float) -> None:
    """Serves the application with streams that send more often than every half second."""
    import uvicorn

    from api.app import create_app
    from api.stream import Streams

    app = create_app(settings.model_copy(update={"port": port}))
    app.state.streams = Streams(app.state.store, interval_s)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", ws="none")


def script_kib() -> dict[str, float]:
    """Sizes of all scripts of the application, as they are sent and as they are written."""
    written = [path.read_bytes() for path in STATIC.rglob("*.js")]
    return {
        "js_kib": sum(len(gzip.compress(content)) for content in written) / 1024,
        "js_kib_plain": sum(map(len, written)) / 1024,
    }


def main() -> None:
    """Measures, and prints one JSON object as the last line."""
    parser = BENCHMARK.parser()
    parser.size("--rounds", 7, smoke=1, help="visits of each page")
    parser.size("--live-s", 600.0, smoke=2.0, help="seconds for which live curves are watched")
    given = parser.parse_args()
    path = browser_path()
    if path is None:
        sys.exit("no chromium is installed; install Debian's package chromium")
    figures: dict[str, Any] = {"targets": TARGETS, **script_kib()}
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        with installation(None) as settings:
            with closing(Store.open(settings)) as store:
                wide, curved = fill(store, given.smoke)
            with api_process(settings) as (url, _):
                figures |= visits(browser, url, wide, curved, given.rounds, given.smoke)
                figures["js_kib_largest_page"] = largest_page_kib(browser, url, wide, curved)
            figures["api_cpu_share_20_viewers"] = viewers(browser, settings, given.smoke)
        with installation(None) as settings:
            figures["live_curve_frame_ms_p95"] = live_frame_ms(browser, settings, given.live_s)
        with installation(None) as settings:
            figures["heap_mib_after_1h"] = heap_after_an_hour(browser, settings, given.smoke)
        browser.close()
    BENCHMARK.report(figures, given)


if __name__ == "__main__":
    main()
