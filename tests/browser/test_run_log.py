"""The log of a run in the browser: what it wrote to stdout and stderr, and its end."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.domain.records import LogLine
from service.domain.states import RunState
from service.store import RecordBatch
from tests.api.conftest import Driver
from tests.browser.conftest import ready

pytestmark = pytest.mark.slow


def test_lines_are_chosen_by_stream_and_a_finished_run_has_an_end(
    page: Page, site: str, app: FastAPI
) -> None:
    driver = Driver(app.state.store)
    (run,) = driver.start(driver.submit(task={"name": "imdb"}))
    lines = [
        LogLine(run.id, 1, 1, 1.0, "info", "begins at step 0"),
        LogLine(run.id, 1, 2, 2.0, "info", "by a library", "stdout"),
        LogLine(run.id, 1, 3, 3.0, "warning", "a warning of a library", "stderr"),
    ]
    driver.store.recording.record(RecordBatch(logs=lines))
    failure = ("infrastructure", "the node is gone")
    driver.store.attempts.finish_run(run.id, run.attempt, RunState.failed, failure=failure)
    page.goto(f"{site}/runs/{run.id}/logs")
    ready(page)
    messages = page.get_by_role("log").locator(".message")
    expect(messages).to_have_text(["begins at step 0", "by a library", "a warning of a library"])
    expect(page.get_by_role("log").locator(".level")).to_have_text(["", "stdout", "stderr"])
    expect(page.locator(".log-end")).to_contain_text("The run has failed")
    expect(page.locator(".log-end")).to_contain_text("the node is gone")
    page.get_by_label("Lines of").select_option("stderr")
    expect(messages).to_have_text(["a warning of a library"])
    page.reload()
    ready(page)
    expect(messages).to_have_text(["a warning of a library"])
    page.get_by_label("Lines of").select_option("the run's own lines")
    expect(messages).to_have_text(["begins at step 0"])


def test_lines_of_another_stream_are_not_followed(page: Page, site: str, app: FastAPI) -> None:
    driver = Driver(app.state.store)
    (run,) = driver.start(driver.submit(task={"name": "imdb"}))
    page.goto(f"{site}/runs/{run.id}/logs?stream=stdout")
    ready(page)
    expect(page.get_by_text("There are no such lines.")).to_be_visible()
    expect(page.locator(".log-end")).to_be_hidden()
    lines = [
        LogLine(run.id, 1, 1, 1.0, "warning", "elsewhere", "stderr"),
        LogLine(run.id, 1, 2, 2.0, "info", "here", "stdout"),
    ]
    driver.store.recording.record(RecordBatch(logs=lines))
    expect(page.get_by_role("log").locator(".message")).to_have_text(["here"])
