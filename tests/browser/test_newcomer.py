"""A newcomer's first minutes with the service as `stillhouse up` runs it; and a server that restarts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from service.config.settings import Settings
from service.store import Store
from tests.browser.conftest import menu, profile, ready, trained
from tests.browser.test_new_experiment import write
from trainers.data.synthetic import write_corpus

pytestmark = pytest.mark.slow

WAIT_MS = 150_000
DAY = """\
name: first steps
task: {name: imdb, path: demo-texts, max_length: 64}
model: {name: tiny}
length: {epochs: 1}
hardware: cpu
search: {axes: {task.path: [demo-texts, more-texts]}}
seeds: [0]
"""


def environment(**settings: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STILLHOUSE_", "RAY_"))}
    return {**kept, **{f"STILLHOUSE_{name}": value for name, value in settings.items()}}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """URL of a service of its own, with one CPU and a corpus of reviews."""
    write_corpus(tmp_path / "data" / "demo-texts", train=96, test=32, seed=0)
    process = subprocess.Popen(
        [sys.executable, "-m", "service.cli", "up", "--cpus", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(DATA_DIR=str(tmp_path / "home"), DATA_ROOTS=str(tmp_path / "data"), PORT="0"),
    )
    try:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.match(r"API +(\S+)", line)))
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)


@pytest.mark.ray
def test_a_newcomer_submits_an_example_watches_it_and_reads_the_answer(
    page: Page, service: str, looked_at: Callable[[str], None]
) -> None:
    page.goto(service)
    ready(page)
    page.get_by_role("link", name="Write an experiment").click()
    page.wait_for_url(f"{service}/new")
    page.goto(f"{service}/new?example=demo")
    ready(page)
    page.get_by_label("Batch size").fill("16")
    page.get_by_label("Batch size").press("Enter")
    page.get_by_role("button", name="Submit").click(timeout=WAIT_MS)
    page.wait_for_url(re.compile(r"/experiments/1"))
    ready(page)
    expect(page.locator("main .state.running").first).to_be_visible(timeout=2 * WAIT_MS)

    page.goto(f"{service}/new?copy=1")
    ready(page)
    page.get_by_role("button", name="Submit").click(timeout=WAIT_MS)
    page.wait_for_url(re.compile(r"/experiments/2"))
    ready(page)
    menu(page, "Actions")
    page.get_by_role("button", name=re.compile("^Cancel ")).click()
    page.get_by_role("button", name="Cancel the experiment").click()
    expect(page.locator("main .state").first).to_have_text("cancelled", timeout=WAIT_MS)

    page.goto(f"{service}/experiments/1")
    expect(page.locator("main .state").first).to_have_text("succeeded", timeout=4 * WAIT_MS)
    expect(page.get_by_label("Answer", exact=True)).to_contain_text("Use precision", timeout=WAIT_MS)
    looked_at("answer")


@pytest.mark.ray
def test_a_day_from_the_first_spec_to_a_shared_comparison(
    page: Page, service: str, tmp_path: Path, chromium: Browser
) -> None:
    """Submits, watches, retries, compares, stars, shares and prints; counts clicks and minutes."""
    began, clicks = time.monotonic(), 0

    def click(what: Locator, **how: Any) -> None:
        nonlocal clicks
        what.click(**how)
        clicks += 1

    texts, elsewhere = tmp_path / "data" / "more-texts", tmp_path / "elsewhere"
    write_corpus(texts, train=96, test=32, seed=1)
    page.goto(service)
    ready(page)
    click(page.get_by_role("link", name="Write an experiment"))
    ready(page)
    write(page, DAY)
    click(page.get_by_role("button", name="Submit"), timeout=WAIT_MS)
    page.wait_for_url(re.compile(r"/experiments/1"))
    texts.rename(elsewhere)  # As a folder that someone else moves before the run begins.
    ready(page)
    state = page.locator("main .state").first
    expect(state).to_have_text("incomplete", timeout=3 * WAIT_MS)

    click(page.locator(".runs-by-state").get_by_role("link", name="1 failed"))
    ready(page)
    expect(page.get_by_role("region", name="Runs")).to_contain_text("failed")
    click(page.get_by_role("region", name="Runs").get_by_role("link").first)
    ready(page)
    expect(page.get_by_text("'more-texts' does not exist").first).to_be_visible()
    elsewhere.rename(texts)
    page.go_back()
    ready(page)
    click(page.get_by_role("button", name="Retry 1 failed"))
    expect(state).to_have_text("succeeded", timeout=3 * WAIT_MS)

    click(page.get_by_role("navigation", name="Parts of the experiment").get_by_role("link", name="Runs"))
    ready(page)
    for run in ("1", "2"):
        click(page.get_by_label(f"Select {run}", exact=True))
    click(page.get_by_role("link", name="Compare 2"))
    ready(page)
    compared = page.get_by_role("table", name="Configuration")
    expect(compared).to_contain_text("more-texts")
    with profile(chromium) as other:
        theirs = other.new_page()
        theirs.goto(page.url)
        ready(theirs)
        expect(theirs.get_by_role("table", name="Configuration")).to_contain_text("more-texts")
    page.go_back()
    ready(page)
    click(page.get_by_role("button", name="Star run 2", exact=True))
    page.reload()
    ready(page)
    starred = page.get_by_role("button", name="Star run 2", exact=True)
    expect(starred).to_have_attribute("aria-pressed", "true")
    page.emulate_media(media="print")
    expect(page.get_by_role("columnheader", name="accuracy").first).to_be_visible()
    page.emulate_media(media="screen")
    print(f"{clicks} clicks, {(time.monotonic() - began) / 60:.1f} minutes")


def serving(settings: Settings, port: int) -> subprocess.Popen[bytes]:
    """The API in a process of its own."""
    own = environment(DATA_DIR=str(settings.data_dir), PORT=str(port))
    return subprocess.Popen([sys.executable, "-m", "api"], env=own)


def arrive(page: Page, address: str) -> None:
    """Opens a page of a server that is starting."""
    for _ in range(400):
        try:
            page.goto(address)
            return
        except Exception as error:
            assert "ERR_CONNECTION_REFUSED" in str(error)
            page.wait_for_timeout(100)
    raise AssertionError("the server did not start")


def test_a_page_outlives_a_restart_of_the_server(page: Page, settings: Settings) -> None:
    store = Store.open(settings)
    experiment = trained(store, done=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = serving(settings, port)
    try:
        arrive(page, f"http://127.0.0.1:{port}/experiments/{experiment}/events")
        ready(page)
        live = page.locator("#live")
        expect(live).to_have_text("live")
        server.kill()
        server.wait()
        expect(live).to_have_text("reconnecting …")
        store.requests.pause(experiment)
        server = serving(settings, port)
        expect(live).to_have_text("live")
        expect(page.get_by_role("table", name="Events")).to_contain_text("pause")
    finally:
        server.kill()
        server.wait()
        store.close()
