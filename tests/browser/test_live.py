"""The list of experiments and the queue follow what changes, without asking every few seconds."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from api.app import create_app
from service.config.settings import Settings
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from tests.api.conftest import wait_until
from tests.browser.conftest import ready
from tests.serving import serving

pytestmark = pytest.mark.slow


def submit(store: Store, name: str, **fields: object) -> int:
    spec = validate({"name": name, "task": {"name": "imdb"}, **fields})
    return store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text=f"name: {name}\n", owner="ada")
    )[0].id


def asked(page: Page) -> list[str]:
    """Paths of the API that the page asks for from now on."""
    paths: list[str] = []
    page.on("request", lambda request: paths.append(request.url.partition("/api/v1")[2].partition("?")[0]))
    return paths


def live(page: Page) -> None:
    expect(page.locator("#live")).to_have_text("live")


def test_the_list_changes_in_place_and_is_read_again_for_what_is_new(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    store: Store = app.state.store
    paths = asked(page)
    page.goto(site)
    ready(page)
    live(page)
    rows = page.locator("table[aria-label=Experiments] tbody tr:not(.gap)")
    expect(rows).to_have_count(4)
    page.wait_for_timeout(500)  # What was submitted just before is sent once more.
    before = paths.count("/experiments")
    store.requests.cancel(seeded["queued"])
    expect(rows.filter(has_text="waiting").locator(".state")).to_have_text("cancelled")
    assert paths.count("/experiments") == before
    submit(store, "brand new")
    expect(rows.first).to_contain_text("brand new")
    store.removal.delete(seeded["done"])
    expect(rows).to_have_count(4)
    assert paths.count("/stream") == 1


def test_an_experiment_that_has_ended_is_read_and_not_followed(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    store: Store = app.state.store
    for number in range(1001):  # More than an answer holds.
        store.requests.annotate(seeded["done"], f"note {number}")
    count = len(store.experiments.events(seeded["done"], limit=10_000))
    paths = asked(page)
    page.goto(f"{site}/experiments/{seeded['done']}/events")
    ready(page)
    expect(page.get_by_role("table", name="Events")).to_have_attribute("aria-rowcount", str(count + 1))
    page.wait_for_load_state("networkidle")
    assert [path for path in paths if path.endswith("/stream")] == []


def test_a_filtered_list_is_read_again_when_something_changes(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    page.goto(f"{site}/?state=queued")
    ready(page)
    live(page)
    rows = page.locator("table[aria-label=Experiments] tbody tr:not(.gap)")
    expect(rows).to_have_count(2)
    app.state.store.requests.cancel(seeded["queued"])
    expect(rows).to_have_count(1)


def test_the_queue_shows_who_came_and_who_moved_ahead(page: Page, app: FastAPI, site: str) -> None:
    store: Store = app.state.store
    submit(store, "older")
    paths = asked(page)
    page.goto(f"{site}/queue")
    ready(page)
    live(page)
    rows = page.get_by_role("region", name="Waiting experiments").locator("tbody tr")
    expect(rows).to_have_count(1)
    younger = submit(store, "younger")
    expect(rows.nth(1)).to_contain_text("younger")
    store.requests.set_priority(younger, 75)
    expect(rows.first).to_contain_text("younger")
    page.wait_for_timeout(3500)
    quiet = len(paths)
    page.wait_for_timeout(3500)
    assert len(paths) == quiet, "nothing changes, nothing is asked for"
    assert paths.count("/stream") == 1


def test_the_list_is_read_again_when_its_server_is_back(
    page: Page, app: FastAPI, settings: Settings, seeded: dict[str, int]
) -> None:
    with serving(app) as url:
        page.goto(url)
        ready(page)
        live(page)
    expect(page.locator("#live")).to_contain_text("reconnecting")
    again = create_app(settings)
    submit(again.state.store, "meanwhile")
    with serving(again, int(url.rpartition(":")[2])):
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator("table[aria-label=Experiments]")).to_contain_text("meanwhile")
        page.goto("about:blank")


def test_a_page_that_no_one_sees_lets_go_of_its_stream(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    page.clock.install()
    page.goto(site)
    ready(page)
    live(page)
    show = """(seen) => {
      Object.defineProperty(document, "hidden", { value: !seen, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(show, False)
    page.clock.fast_forward(61_000)
    expect(page.locator("#live")).to_have_text("")
    wait_until(lambda: app.state.streams.polls == 0)
    submit(app.state.store, "unseen")
    page.evaluate(show, True)
    live(page)
    expect(page.locator("table[aria-label=Experiments] td:nth-child(3) a").first).to_have_text("unseen")
