"""One run in the browser: its tabs, a log that is followed and searched, live curves, cancel and retry."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, Page, expect

from api.app import create_app
from service.config.settings import Settings
from service.domain.records import LogLine, MeasurementRow, Placement, Run
from service.domain.states import RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.specs.models import checkpoints_folder
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from tests.api.test_traces import write_trace
from tests.browser.conftest import HOSTILE, profile, ready
from tests.serving import serving
from trainers.errors import FailureClass

pytestmark = pytest.mark.slow


def written(store: Store, settings: Settings) -> Run:
    """A run at work, with everything that a run can show."""
    document = {"name": "shown", "task": {"name": "imdb"}, "telemetry": {"trace_steps": 3}}
    spec = validate(document)
    new, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text=json.dumps(document), owner="ada")
    )
    Queue(store).claim("scheduler", lease_s=3600)
    store.drivers.started(new.id, 1, "driver", 0)
    now = time.time()
    (run,) = store.runs.all_of(new.id)
    store.drivers.record_placements(
        new.id, 1, [Placement("g", "cpu", 1, 2, 0.1, 10.0, now - 60, now - 50, None, now)]
    )
    first = store.attempts.open(run.id, 1, placement="g")
    facts = {
        "torch": "2.13.0",
        "worker_node": "node-a",
        "encoder_parity": {"largest_difference": 1e-6, "tolerance": 1e-4},
    }
    store.attempts.run_started(run.id, first, total_steps=60, resumed_from_step=0, facts=facts)
    steps = list(range(1, 31))
    lines = [
        LogLine(run.id, first, n, now + n, "warning" if n == 700 else "info", f"step {n} of many")
        for n in range(1, 901)
    ]
    lines[499] = LogLine(run.id, first, 500, now + 500, "error", f"a needle {HOSTILE}")
    measured = [
        MeasurementRow(
            run.id, first, "window_energy_kwh", 0.001 * n, "kWh", "sampled", "device:0", now + n, now + n + 1
        )
        for n in range(1, 6)
    ]
    measured += [
        MeasurementRow(
            run.id, first, f"{kind}_ms_per_step", 1.5, "ms", "counter", f"{kind}:{HOSTILE}", now, now + 1
        )
        for kind in ("kernel", "operator")
    ]
    measured += [
        MeasurementRow(run.id, first, name, value, "1", "counter", f"{worker}kernel:gemm", now, now + 1)
        for name, value in (("kernel_ms_per_step", 2.5), ("grid_size", 640.0), ("sm_throughput_pct", 71.0))
        for worker in ("", "worker:1:")
    ]
    store.recording.record(
        RecordBatch(
            points=[
                PointBatch(run.id, first, "loss", steps, [1 / n for n in steps], [now + n for n in steps])
            ],
            logs=lines,
            measurements=measured,
        )
    )
    write_trace(checkpoints_folder(settings, new.id, run.id))
    return store.runs.get(run.id)


@pytest.fixture
def run(app: FastAPI, settings: Settings) -> Run:
    return written(app.state.store, settings)


@pytest.fixture(scope="module")
def looked_upon(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[str]:
    """URL of a run of a server for tests that only look."""
    settings = Settings(data_dir=tmp_path_factory.mktemp("run"))
    shutil.copy(sqlite_template, settings.data_dir / "stillhouse.db")
    app = create_app(settings)
    run = written(app.state.store, settings)
    with serving(app) as url:
        yield f"{url}/runs/{run.id}"


@pytest.fixture(scope="module")
def context(chromium: Browser) -> Iterator[BrowserContext]:
    """One for all tests: scripts of plots are large, and nothing here is kept in a profile."""
    with profile(chromium) as context:
        yield context


@pytest.mark.parametrize("tab", ["", "curves", "logs", "profile", "counters", "files", "config"])
def test_every_tab_stands_up(page: Page, looked_upon: str, tab: str) -> None:
    page.goto(f"{looked_upon}/{tab}".rstrip("/"))
    ready(page)
    expect(page.get_by_role("navigation", name="Parts of the run").locator("[aria-current]")).to_have_count(1)
    assert page.locator("main img").count() == 0


def test_kernels_of_each_worker_are_a_table(page: Page, looked_upon: str) -> None:
    page.goto(f"{looked_upon}/profile")
    ready(page)
    first = page.get_by_role("table", name="Kernels of worker 0")
    expect(first.get_by_role("row")).to_have_text(
        ["kernelms/stepgridSM %", "gemm2.564071", f"{HOSTILE}1.5--"]
    )
    expect(page.get_by_role("table", name="Kernels of worker 1").get_by_role("row")).to_have_count(2)


def test_the_log_follows_is_searched_and_leads_to_a_line(
    page: Page, app: FastAPI, site: str, run: Run
) -> None:
    store: Store = app.state.store
    page.goto(f"{site}/runs/{run.id}/logs")
    ready(page)
    log = page.get_by_role("log")
    expect(log.get_by_text("step 900 of many")).to_be_visible()
    expect(page.locator("#live")).to_have_text("live")
    store.recording.record(
        RecordBatch(logs=[LogLine(run.id, 1, 901, time.time(), "info", "a line that came just now")])
    )
    expect(log.get_by_text("a line that came just now")).to_be_visible()
    page.get_by_role("button", name="Earlier lines").click()
    expect(log.get_by_text("step 120 of many")).to_have_count(1)
    page.get_by_label("Search the log").fill("NEEDLE")
    expect(log.locator("li")).to_have_count(1)
    expect(log.locator("mark")).to_have_text("needle")
    assert "search=NEEDLE" in page.url
    log.get_by_role("link").click()
    expect(log.locator(".here")).to_contain_text("a needle")
    expect(log.get_by_text("step 499 of many")).to_be_visible()
    page.reload()
    ready(page)
    expect(log.locator(".here")).to_be_in_viewport()


def test_an_attempt_that_was_preempted_is_not_called_failed(
    page: Page, app: FastAPI, site: str, run: Run
) -> None:
    failure = (FailureClass.preempted, "gave its devices back")
    app.state.store.attempts.finish_run(run.id, 1, RunState.failed, failure=failure)
    page.goto(f"{site}/runs/{run.id}")
    ready(page)
    attempt = page.get_by_role("table", name="Attempts").get_by_role("row").nth(1)
    expect(attempt).to_contain_text("preempted")
    expect(attempt).to_contain_text("gave its devices back")
    expect(attempt).not_to_contain_text("failed")


def test_a_search_finds_lines_of_earlier_attempts_and_says_of_which(
    page: Page, app: FastAPI, site: str, run: Run, looked_at: Callable[[str], None]
) -> None:
    store: Store = app.state.store
    store.attempts.finish_run(run.id, 1, RunState.queued, retry_delay_s=0.0)
    second = store.attempts.open(run.id, 1)
    store.attempts.run_started(run.id, second, total_steps=60, resumed_from_step=0, facts={})
    line = LogLine(run.id, second, 1, time.time(), "info", "a second needle")
    store.recording.record(RecordBatch(logs=[line]))
    page.goto(f"{site}/runs/{run.id}/logs?attempt=2")
    ready(page)
    log = page.get_by_role("log")
    expect(log.locator("li")).to_have_count(1)
    page.get_by_label("Search the log").fill("needle")
    expect(log.locator("li")).to_have_count(2)
    expect(log.locator("li").first).to_contain_text("attempt 1")
    expect(log.locator("li").last).to_contain_text("attempt 2")
    expect(page.get_by_text("2 lines with “needle” in attempts 1, 2")).to_be_visible()
    expect(page.get_by_label("Attempt", exact=True)).to_be_disabled()
    looked_at("run-logs-search")
    store.recording.record(
        RecordBatch(logs=[LogLine(run.id, second, 2, time.time(), "info", "needle, live")])
    )
    expect(log.locator("li")).to_have_count(3)
    log.get_by_role("link").first.click()
    expect(log.locator(".here")).to_contain_text("a needle")
    expect(log.get_by_text("step 499 of many")).to_be_visible()
    expect(page.get_by_label("Attempt", exact=True)).to_have_value("1")


def test_curves_grow_while_one_looks(page: Page, app: FastAPI, site: str, run: Run) -> None:
    store: Store = app.state.store
    page.goto(f"{site}/runs/{run.id}/curves?metric=loss")
    ready(page)
    page.wait_for_selector("[data-metric=loss][data-drawn=true]")
    now = time.time()
    store.recording.record(RecordBatch(points=[PointBatch(run.id, 1, "accuracy", [31], [0.75], [now])]))
    expect(page.get_by_label("Add a metric")).to_contain_text("accuracy")
    page.get_by_label("Add a metric").select_option("accuracy")
    page.wait_for_selector("[data-metric=accuracy][data-drawn=true]")
    assert "metric=loss&metric=accuracy" in page.url
    page.get_by_label("smoothing").fill("0.9")
    expect(page.locator("[data-metric=loss] .note")).to_contain_text("exponential moving average")


def test_a_run_is_cancelled_after_a_question_and_retried(
    page: Page, app: FastAPI, site: str, run: Run
) -> None:
    store: Store = app.state.store
    page.goto(f"{site}/runs/{run.id}")
    ready(page)
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel", exact=True).click()
    assert store.runs.get(run.id).cancel_requested_s is None
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("cancelling")).to_be_visible()
    assert store.runs.get(run.id).cancel_requested_s is not None
    store.attempts.finish_run(run.id, 1, RunState.cancelled)
    expect(page.locator("main .state.cancelled").first).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("main .state.queued").first).to_be_visible()


def test_a_page_goes_on_when_its_server_is_back(
    page: Page, app: FastAPI, settings: Settings, run: Run
) -> None:
    with serving(app) as url:
        page.goto(f"{url}/runs/{run.id}/logs")
        ready(page)
        expect(page.locator("#live")).to_have_text("live")
    expect(page.locator("#live")).to_contain_text("reconnecting")
    again = create_app(settings)
    line = LogLine(run.id, 1, 901, time.time(), "info", "written while the server was away")
    again.state.store.recording.record(RecordBatch(logs=[line]))
    with serving(again, int(url.rpartition(":")[2])):
        expect(page.locator("#live")).to_have_text("live")
        expect(page.get_by_role("log")).to_contain_text("written while the server was away")
        page.goto("about:blank")


def test_checkpoints_and_configuration_are_listed(
    page: Page, site: str, settings: Settings, run: Run, tmp_path: Path
) -> None:
    from tests.api.test_run_files import save

    save(checkpoints_folder(settings, run.experiment_id, run.id), 1, 20)
    page.goto(f"{site}/runs/{run.id}/files")
    ready(page)
    expect(page.get_by_role("table", name="Checkpoints")).to_contain_text("attempt-000001/step-00000020")
    page.get_by_role("link", name="Configuration", exact=True).click()
    ready(page)
    expect(page.get_by_role("table", name="Configuration")).to_contain_text("telemetry.trace_steps")
    expect(page.get_by_role("table", name="Record")).to_contain_text("2.13.0")
    expect(page.get_by_role("table", name="encoder_parity")).to_contain_text("tolerance")
