"""A newcomer's first minutes with the service as `stillhouse up` runs it; and a server that restarts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from service.config.settings import Settings
from service.store import Store
from tests.browser.conftest import ready, trained
from trainers.data.synthetic import write_corpus

pytestmark = pytest.mark.slow

MINUTE_MS = 60_000


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
        process.communicate(timeout=60)


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
    editor = page.get_by_test_id("spec")
    editor.fill(editor.input_value().replace("[16, 32]", "[16]"))
    page.get_by_role("button", name="Submit").click(timeout=MINUTE_MS)
    page.wait_for_url(re.compile(r"/experiments/1"))
    ready(page)
    expect(page.locator("main .state.running").first).to_be_visible(timeout=2 * MINUTE_MS)

    page.goto(f"{service}/new?copy=1")
    ready(page)
    page.get_by_role("button", name="Submit").click(timeout=MINUTE_MS)
    page.wait_for_url(re.compile(r"/experiments/2"))
    ready(page)
    page.get_by_role("button", name=re.compile("^Cancel ")).click()
    page.get_by_role("button", name="Cancel the experiment").click()
    expect(page.locator("main .state").first).to_have_text("cancelled", timeout=MINUTE_MS)

    page.goto(f"{service}/experiments/1")
    expect(page.locator("main .state").first).to_have_text("succeeded", timeout=4 * MINUTE_MS)
    expect(page.get_by_label("Answer")).to_contain_text("Use precision", timeout=MINUTE_MS)
    looked_at("answer")


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
        expect(live).to_have_text("live", timeout=30_000)
        expect(page.get_by_role("table", name="Events")).to_contain_text("pause")
    finally:
        server.kill()
        server.wait()
        store.close()
