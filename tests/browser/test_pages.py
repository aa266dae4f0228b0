"""The frame of the web application: pages are drawn, links lead where they say, names stay text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import HOSTILE, ready

pytestmark = pytest.mark.slow


def test_the_list_leads_to_an_experiment_and_back(
    page: Page, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    page.goto(site)
    ready(page)
    looked_at("experiments")
    page.get_by_role("link", name="precision", exact=True).click()
    page.wait_for_url(f"{site}/experiments/{seeded['done']}")
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("precision")
    looked_at("experiment")
    page.go_back()
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_have_text("Experiments")


def test_names_are_text_wherever_they_come_from(page: Page, site: str, seeded: dict[str, int]) -> None:
    for path in ("/", "/queue", f"/experiments/{seeded['hostile']}"):
        page.goto(site + path)
        ready(page)
        assert HOSTILE in page.evaluate("document.body.textContent"), path
        assert page.locator("main img").count() == 0


def test_an_old_address_leads_to_the_page_it_meant(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(f"{site}/#/experiments/{seeded['done']}")
    page.wait_for_url(f"{site}/experiments/{seeded['done']}")
    ready(page)


@pytest.mark.parametrize("path", ["/experiments/999999", "/nowhere"])
def test_what_does_not_exist_is_said(page: Page, site: str, path: str) -> None:
    answer = page.goto(site + path)
    assert answer is not None
    if path.startswith("/experiments"):
        expect(page.get_by_text("This page does not exist")).to_be_visible()
    else:
        assert answer.status == 404


def test_a_page_is_reached_and_used_by_keyboard_alone(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(site)
    ready(page)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "precision":
            break
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/experiments/{seeded['done']}")


def test_the_chosen_theme_stays(page: Page, site: str) -> None:
    page.goto(site)
    ready(page)
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    page.reload()
    ready(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
