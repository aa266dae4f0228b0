"""Views of the list in the browser: saved, chosen, shared, deleted, and linked to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.domain.access import Visibility
from tests.browser.conftest import ready

pytestmark = pytest.mark.slow

DEFAULT = Visibility(frozenset({"default"}))


def test_a_view_is_saved_chosen_shared_and_deleted(
    page: Page, site: str, app: FastAPI, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    rows = page.locator("table[aria-label=Experiments] td:nth-child(3) a")
    page.goto(f"{site}/?state=queued&order_by=name asc&columns=id,name,state")
    ready(page)
    page.locator("summary", has_text="Views").click()
    expect(page.get_by_text("No views are saved yet.")).to_be_visible()
    page.get_by_role("button", name="Save as").click()
    page.get_by_role("dialog").get_by_label("Name").fill("what waits")
    page.get_by_role("button", name="Save", exact=True).click()
    link = page.get_by_role("link", name="what waits")
    expect(link).to_have_attribute("aria-current", "true")
    looked_at("views")
    page.goto(site)
    ready(page)
    expect(rows).to_have_count(4)
    page.locator("summary", has_text="Views").click()
    link.click()
    ready(page)
    expect(rows).to_have_count(2)
    assert "state=queued" in page.url
    expect(page.get_by_role("columnheader")).to_have_count(4)
    expect(page.locator("th[aria-sort]")).to_have_text("name ↑")
    page.locator("summary", has_text="Views").click()
    page.get_by_role("button", name="Share what waits").click()
    page.get_by_role("dialog").get_by_label("For").select_option("default")
    page.get_by_role("dialog").get_by_role("button", name="Share").click()
    expect(page.get_by_text("in default")).to_be_visible()
    assert [one.shared for one in app.state.store.views.visible("someone else", DEFAULT)] == [True]
    page.get_by_role("button", name="Delete what waits").click()
    page.get_by_role("button", name="Delete the view").click()
    expect(link).to_have_count(0)


def test_escape_closes_the_menu_and_a_link_to_a_view_shows_the_same(
    page: Page, site: str, app: FastAPI, seeded: dict[str, int]
) -> None:
    app.state.store.views.save("ada", "ada's", "state=queued", project="default", shared=True)
    page.goto(site)
    ready(page)
    page.locator("summary", has_text="Views").press("Enter")
    link = page.get_by_role("link", name="ada's")
    expect(link).to_be_visible()
    href = link.get_attribute("href")
    page.keyboard.press("Escape")
    expect(link).to_be_hidden()
    page.goto(f"{site}{href}")
    ready(page)
    expect(page.locator("table[aria-label=Experiments] td:nth-child(3) a")).to_have_count(2)
