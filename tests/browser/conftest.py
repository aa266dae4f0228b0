"""A browser, a server with experiments in it, and what every page must stand up to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from api.app import create_app
from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, ProgressRow, RecordBatch, Store
from tests.browser.devtools import browser_path
from tests.serving import serving

WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 360, "height": 740}
HOSTILE = "<img src=x onerror=alert(1)>\"'&\u202e\u0000".replace("\u0000", "")
SERIOUS = ("serious", "critical")
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)
OF_COLOURS = ("color-contrast", "link-in-text-block")
"""Rules of axe whose findings depend on the colour scheme."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show failures as Python does: pytest parses sources, which Python 3.11 may not in a greenlet."""
    option = item.config.option
    before, option.tbstyle = option.tbstyle, "native"
    try:
        return (yield)
    finally:
        option.tbstyle = before


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The installed browser, without a screen; its loop runs in this thread, so it ends with the module."""
    path = browser_path()
    if path is None:
        pytest.skip("no chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    """Of an installation without people: everything is allowed."""
    (tmp_path / "data").mkdir()
    shutil.copy(sqlite_template, tmp_path / "data" / "stillhouse.db")
    return Settings(data_dir=tmp_path / "data")


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    """The application; its store is `app.state.store`."""
    return create_app(settings)


@pytest.fixture
def site(app: FastAPI) -> Iterator[str]:
    """URL of a server of the application."""
    with serving(app) as url:
        yield url


@contextmanager
def profile(chromium: Browser) -> Iterator[BrowserContext]:
    """A browser profile, in one time zone and language wherever the tests run."""
    with chromium.new_context(viewport=WIDE, timezone_id="Europe/Berlin", locale="en-GB") as context:
        context.set_default_timeout(PATIENCE_MS)
        yield context


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    """A profile for each test, with an empty cache."""
    with profile(chromium) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab; the test fails if a script throws, or the page's policy blocks something."""
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda message: (
            problems.append(message.text)
            if message.type == "error" and "Failed to load resource" not in message.text
            else None
        ),
    )
    yield page
    page.close()
    assert not problems, problems


def ready(page: Page) -> None:
    """Waits until the page is drawn."""
    page.wait_for_selector("main[aria-busy='false']", state="attached")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")


def menu(page: Page, words: str) -> None:
    """Opens or closes a menu, by words on its button."""
    page.locator(".menu > summary", has_text=words).click()


def fits(page: Page) -> None:
    """Checks that the page itself is not wider than the screen; tables may scroll in their own box."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.url


def no_serious_findings(page: Page, *rules: str) -> None:
    """Checks the page with axe; by some rules, or by all."""
    chosen = {"runOnly": {"type": "rule", "values": rules}} if rules else {}
    found = Axe().run(page, options={"resultTypes": ["violations"], **chosen}).response["violations"]
    bad = [each for each in found if each["impact"] in SERIOUS]
    assert not bad, [
        (each["id"], [node["html"][:200] for node in each["nodes"]][:3], each["help"]) for each in bad
    ]


@pytest.fixture
def looked_at(page: Page) -> Callable[[str], None]:
    """Checks the page as it is in light and dark, wide and narrow.

    With SCREENSHOTS set to a folder, it keeps a picture of each there.
    """
    folder = os.environ.get("SCREENSHOTS")

    def look(name: str) -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for size, viewport in (("wide", WIDE), ("narrow", NARROW)):
                page.set_viewport_size(viewport)
                page.wait_for_timeout(50)
                ready(page)  # A figure may be read again for another width.
                fits(page)
                if folder:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=Path(folder) / f"{name}-{scheme}-{size}.png", full_page=True)
            no_serious_findings(page, *(OF_COLOURS if scheme == "dark" else ()))
        page.emulate_media(color_scheme="light")
        page.set_viewport_size(WIDE)

    return look


@pytest.fixture
def seeded(app: FastAPI) -> dict[str, int]:
    """Experiments by what they are: `done` and `running` with eight runs each, `queued`, `hostile`."""
    store: Store = app.state.store
    ids = {"done": trained(store, done=True), "running": trained(store, done=False)}
    waiting = validate({"name": "waiting", "task": {"name": "imdb"}})
    ids["queued"] = store.submissions.submit(
        NewExperiment(waiting, list(waiting.runs()), spec_text="", owner="ada")
    )[0].id
    hostile = validate({"name": "hostile", "description": HOSTILE, "task": {"name": "imdb"}})
    ids["hostile"] = store.submissions.submit(
        NewExperiment(hostile, list(hostile.runs()), spec_text=HOSTILE, owner=HOSTILE)
    )[0].id
    return ids


def trained(store: Store, *, done: bool, changes: dict[str, Any] | None = None) -> int:
    """Submits four configurations with two seeds each, and records 60 steps of curves for each run."""
    document = {
        "name": "precision" if done else "precision again",
        "task": {"name": "imdb"},
        "search": {"axes": {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32]}},
        "seeds": [0, 1],
        **(changes or {}),
    }
    spec = validate(document)
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="name: precision\n", owner="ada")
    )
    Queue(store).claim("scheduler", lease_s=3600)
    store.drivers.started(experiment.id, 1, "driver", 0)
    runs = store.runs.all_of(experiment.id)
    for run in runs:
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=60, resumed_from_step=0, facts={})
        steps = list(range(1, 61))
        better = 0.02 * (run.point["precision"] == "fp32") + 0.01 * run.seed
        store.recording.record(
            RecordBatch(
                points=[
                    PointBatch(
                        run.id, attempt, "loss", steps, [0.7 / step**0.3 - better for step in steps],
                        [1e9 + step for step in steps],
                    ),
                    PointBatch(
                        run.id, attempt, "accuracy", [20, 40, 60],
                        [0.6 + better, 0.7 + better, 0.8 + better], [1e9 + 20, 1e9 + 40, 1e9 + 60],
                    ),
                ],
                progress=[ProgressRow(run.id, attempt, 60, 60, "training")],
            )
        )  # fmt: skip
        if done:
            store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    if done:
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    return experiment.id
