"""What surrounds the data: a short head, the command palette, keys for tables, and phones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from tests.browser.conftest import menu, no_serious_findings, ready
from tests.browser.test_live import live

pytestmark = pytest.mark.slow

DESK, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
ROWS = "table[aria-label=Experiments] tbody tr:not(.gap)"


def top(page: Page, what: str) -> float:
    box = page.locator(what).first.bounding_box()
    assert box is not None, what
    return box["y"]


@pytest.mark.parametrize(
    ("tab", "data"), [("runs", "table.virtual tbody tr:not(.gap)"), ("curves", "figure")]
)
def test_data_begin_high_on_a_desk_and_on_a_phones_first_screen(
    page: Page, site: str, seeded: dict[str, int], tab: str, data: str
) -> None:
    address = f"{site}/experiments/{seeded['done']}/{tab}"
    for size, most in ((DESK, 300), (PHONE, 700)):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.goto(address)
        ready(page)
        assert top(page, data) < most


def test_a_menu_stays_open_while_the_page_changes_and_closes_on_escape(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/experiments/{seeded['running']}")
    ready(page)
    live(page)
    menu(page, "Actions")
    pause = page.get_by_role("button", name="Pause")
    pause.focus()
    app.state.store.requests.tag(seeded["running"], add=["kept"])
    expect(page.locator(".chip")).to_have_text("kept")
    expect(pause).to_be_focused()
    looked_at("actions")
    page.keyboard.press("Escape")
    expect(pause).to_be_hidden()
    expect(page.locator("summary", has_text="Actions")).to_be_focused()
    menu(page, "Actions")
    page.locator("main").click(position={"x": 5, "y": 5})
    expect(pause).to_be_hidden()


def test_tabs_are_in_three_groups(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(f"{site}/experiments/{seeded['done']}/spec")
    ready(page)
    tabs = page.get_by_role("navigation", name="Parts of the experiment")
    groups = tabs.get_by_role("group").evaluate_all(
        "nodes => nodes.map(node => node.getAttribute('aria-label'))"
    )
    assert groups == ["Answers", "Runs", "Details"]
    expect(tabs.get_by_role("group", name="Details").get_by_role("link", name="Spec")).to_have_attribute(
        "aria-current", "page"
    )
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.reload()
    ready(page)
    expect(tabs.get_by_role("link", name="Spec")).to_be_in_viewport(ratio=0.9)


def test_rows_of_the_list_are_cards_on_a_phone(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.goto(site)
    ready(page)
    card = page.locator(ROWS).filter(has_text="precision again")
    for part in (
        card.locator(".state"),
        card.get_by_role("link", name="precision again"),
        card.locator(".stack"),
    ):
        expect(part).to_be_in_viewport(ratio=0.9)
    scrolls = "node => node.closest('.table-scroll').scrollWidth > node.closest('.table-scroll').clientWidth"
    assert not card.evaluate(scrolls)
    no_serious_findings(page)
    page.set_viewport_size(DESK)  # type: ignore[arg-type]
    expect(page.get_by_role("columnheader", name="owner")).to_be_visible()


def test_the_current_page_is_in_view_among_the_pages_of_a_phone(page: Page, site: str) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    page.goto(f"{site}/projects")
    ready(page)
    expect(
        page.get_by_role("navigation", name="Pages").get_by_role("link", name="Projects")
    ).to_be_in_viewport(ratio=1)


def test_the_palette_finds_experiments_runs_pages_people_and_actions(
    page: Page, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/experiments/{seeded['queued']}")
    ready(page)
    field = page.get_by_role("combobox", name="Find experiments")
    options = page.get_by_role("listbox", name="Found").get_by_role("option")

    def find(words: str, first: str) -> None:
        page.keyboard.press("Control+k")
        expect(field).to_be_focused()
        page.keyboard.type(words)
        expect(options.first).to_contain_text(first)

    find("precision again", "Experiment")
    looked_at("palette")
    expect(options).to_have_count(1)
    expect(field).to_have_attribute("aria-activedescendant", "entry-0")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/experiments/{seeded['running']}")
    ready(page)
    find("run:3", "run:3 of experiment")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/runs/3")
    ready(page)
    find("queue", "Page")
    page.keyboard.press("Escape")
    expect(field).to_have_count(0)
    find("ada", "Person")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/?filter=owner*")
    ready(page)
    expect(page.locator(ROWS)).to_have_count(3)
    page.goto(f"{site}/experiments/{seeded['queued']}")
    ready(page)
    find("tags", "Action")
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_label("Words")).to_be_visible()


def test_arrows_choose_in_the_palette_and_a_button_opens_it(
    page: Page, site: str, seeded: dict[str, int]
) -> None:
    page.goto(site)
    ready(page)
    page.get_by_role("button", name="Find (Ctrl+K)").click()
    expect(page.get_by_role("combobox", name="Find experiments")).to_be_focused()
    options = page.get_by_role("listbox", name="Found").get_by_role("option")
    page.keyboard.type("precision")
    expect(options).to_have_count(2)
    page.keyboard.press("ArrowDown")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(options.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowUp")
    expect(options.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Find (Ctrl+K)")).to_be_focused()


def test_rows_are_walked_selected_and_opened_by_keys(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(site)
    ready(page)
    for key in ("j", "j", "ArrowDown", "k"):
        page.keyboard.press(key)
    second = page.locator(ROWS).nth(1)
    expect(second).to_be_focused()
    page.keyboard.press("x")
    expect(second.get_by_role("checkbox")).to_be_checked()
    page.keyboard.press("Space")
    expect(second.get_by_role("checkbox")).not_to_be_checked()
    name = second.get_by_role("link").first.inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/experiments/*")
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_have_text(name)


def test_the_first_run_is_three_keys_away_and_keys_are_listed(
    page: Page, site: str, seeded: dict[str, int]
) -> None:
    page.goto(f"{site}/experiments/{seeded['done']}")
    ready(page)
    for key in ("Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("table[aria-label=Runs] tbody tr:not(.gap)").first).to_be_focused()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_contain_text("Next and previous row")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{site}/runs/1*")


def test_keys_are_text_while_one_types(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(site)
    ready(page)
    page.keyboard.press("/")
    page.keyboard.type("jkx?")
    expect(page.locator("input[type=search]")).to_have_value("jkx?")


def test_the_queue_changes_in_place(page: Page, app: FastAPI, site: str, seeded: dict[str, int]) -> None:
    page.goto(f"{site}/queue")
    ready(page)
    live(page)
    choice = page.get_by_label("Priority of waiting")
    choice.focus()
    page.evaluate("window.kept = document.activeElement")
    app.state.store.requests.set_priority(seeded["queued"], 75)
    expect(choice).to_have_value("75")
    assert page.evaluate("window.kept === document.activeElement && window.kept.isConnected")


def test_an_experiment_is_renamed_and_starred(
    page: Page, app: FastAPI, site: str, seeded: dict[str, int]
) -> None:
    store = app.state.store
    page.goto(f"{site}/experiments/{seeded['queued']}")
    ready(page)
    menu(page, "Actions")
    page.get_by_role("button", name="Rename waiting").click()
    name = page.get_by_role("dialog").get_by_label("Name")
    name.fill("<b>")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("alert")).to_contain_text("name")
    name.fill("patient")
    page.get_by_role("dialog").get_by_role("button", name="Rename").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("patient")
    page.get_by_role("button", name="Star patient").click()
    expect(page.get_by_role("button", name="Star patient")).to_have_attribute("aria-pressed", "true")
    assert store.experiments.get(seeded["queued"]).tags == ["starred"]
    assert page.locator(".chip").count() == 0
    page.goto(site)
    ready(page)
    page.get_by_role("link", name="Starred").click()
    ready(page)
    expect(page.locator(ROWS)).to_have_count(1)
    page.get_by_role("button", name="Star patient").click()
    expect(page.get_by_text("No experiment matches.")).to_be_visible()
