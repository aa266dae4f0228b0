"""Dashboards: made of figures over a filter, saved for a project, linked to, and shown in a frame."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from fastapi import FastAPI
from playwright.sync_api import BrowserContext, Page, expect

from api.app import create_app
from benchmarks.simulated import open_store, sweep
from service.config.settings import Settings
from service.domain.records import ViewKind
from tests.browser.conftest import ready
from tests.serving import serving

pytestmark = pytest.mark.slow

QUERY = (
    "experiments=state+%3D+%27succeeded%27&filter=seed+%3C+2"
    "&panel=figure%3Dcurve%26metric%3Dloss&panel=figure%3Dmoney"
)


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    """Of an installation with a sweep."""
    (tmp_path / "data").mkdir()
    shutil.copy(sqlite_template, tmp_path / "data" / "stillhouse.db")
    settings = Settings(data_dir=tmp_path / "data")
    store, clock = open_store(settings)
    sweep(store, clock, seeds=2)
    store.close()
    return settings


@pytest.fixture
def saved(app: FastAPI) -> str:
    """Path of a saved dashboard, after its page's."""
    view = app.state.store.views.save(
        "ada", "the week", QUERY, kind=ViewKind.dashboard, project="default", shared=True
    )
    return str(view.id)


@pytest.fixture
def frame() -> Iterator[Callable[[str], str]]:
    """A page on an origin of its own that shows an address in a frame."""
    shown: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f'<!doctype html><iframe src="{shown[-1]}" width="900" height="700">'.encode()
            self.send_response(200 if self.path == "/" else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()

    def show(address: str) -> str:
        shown.append(address)
        return f"http://127.0.0.1:{server.server_port}/"

    yield show
    server.shutdown()
    server.server_close()


def drawn(page: Page) -> None:
    ready(page)
    page.wait_for_selector("figure[data-drawn]")
    page.wait_for_selector("figure:not([data-drawn])", state="detached")


def test_a_dashboard_is_made_saved_shared_and_deleted(
    page: Page, site: str, looked_at: Callable[[str], None]
) -> None:
    page.goto(site)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Dashboards").click()
    expect(page.get_by_text("No dashboard is saved yet.")).to_be_visible()
    page.get_by_role("link", name="New dashboard").click()
    drawn(page)
    page.get_by_label("runs", exact=True).fill("precision = 'bf16'")
    page.get_by_label("runs", exact=True).press("Enter")
    expect(page.get_by_role("list", name="Lines").locator("button[data-line]")).to_have_count(6)
    page.get_by_label("metric").select_option("accuracy")
    expect(page.locator("figure h2")).to_have_text(["accuracy"])
    page.get_by_role("button", name="Add a figure").click()
    page.get_by_label("figure 2", exact=True).select_option("money")
    expect(page.locator("figure svg.main-svg").first).to_be_visible()
    page.get_by_role("button", name="Move up figure 2").click()
    expect(page.get_by_label("figure 1", exact=True)).to_have_value("money")
    looked_at("dashboard-draft")
    page.get_by_role("button", name="Save as").click()
    page.get_by_role("dialog").get_by_label("Name").fill("bf16 at a glance")
    page.get_by_role("dialog").get_by_label("For").select_option("default")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    page.wait_for_url(re.compile(r"/dashboards/\d+$"))
    expect(page.get_by_role("heading", name="bf16 at a glance")).to_be_visible()
    expect(page.get_by_text("shared with default")).to_be_visible()
    drawn(page)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No dashboard is saved yet.")).to_be_visible()


def test_a_link_to_a_dashboard_shows_it_to_those_of_its_project(
    page: Page, site: str, saved: str, looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/dashboards/{saved}")
    drawn(page)
    expect(page.get_by_text("by ada, shared with default")).to_be_visible()
    expect(page.locator("figure")).to_have_count(2)
    expect(page.get_by_role("link", name=re.compile("^1 precision by batch"))).to_be_visible()
    looked_at("dashboard")
    page.goto(f"{site}/dashboards/999")
    expect(page.get_by_role("heading", name="This page does not exist")).to_be_visible()


def test_a_filter_without_experiments_says_so(page: Page, site: str) -> None:
    page.goto(f"{site}/dashboards/draft?experiments=id+%3D+99")
    ready(page)
    expect(page.get_by_text("No experiment matches the filter of experiments.")).to_be_visible()


def test_an_embedded_dashboard_has_no_head_and_its_links_leave_the_frame(
    page: Page, settings: Settings, frame: Callable[[str], str]
) -> None:
    wiki = frame("about:blank")
    allowed = Settings(data_dir=settings.data_dir, embed_origins=wiki.rstrip("/"))
    app = create_app(allowed)
    view = app.state.store.views.save(
        "ada", "the week", QUERY, kind=ViewKind.dashboard, project="default", shared=True
    )
    with serving(app) as url:
        page.goto(frame(f"{url}/embed/{view.id}"))
        inside = page.frame_locator("iframe")
        expect(inside.get_by_role("heading", name="the week")).to_be_visible()
        expect(inside.locator("figure[data-drawn]")).to_have_count(2)
        expect(inside.get_by_role("navigation", name="Pages")).to_be_hidden()
        with page.context.expect_page() as opened:
            inside.get_by_role("link", name=re.compile("^1 precision by batch")).click()
        opened.value.wait_for_url(re.compile("/experiments/1$"))
        opened.value.close()
        expect(inside.get_by_role("heading", name="the week")).to_be_visible()


def test_a_single_figure_is_embedded_by_its_address(page: Page, site: str) -> None:
    page.goto(f"{site}/embed?experiments=id+%3D+1&panel=figure%3Dcurve%26metric%3Dloss")
    drawn(page)
    expect(page.locator("figure h2")).to_have_text(["loss"])
    expect(page.get_by_role("navigation", name="Pages")).to_be_hidden()


def test_a_frame_of_another_origin_is_refused_unless_it_is_named(
    context: BrowserContext, site: str, saved: str, frame: Callable[[str], str]
) -> None:
    page = context.new_page()
    with page.expect_console_message(lambda message: "frame-ancestors" in message.text):
        page.goto(frame(f"{site}/embed/{saved}"))
    page.close()
