"""The tabs with figures: drawn under the page's policy, usable by keyboard, and in the address."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from api.app import create_app
from benchmarks.simulated import open_store, sweep
from service.config.settings import Settings
from tests.browser.conftest import menu, profile, ready
from tests.serving import serving

pytestmark = pytest.mark.slow

TABS = ["curves", "compare", "frontier", "effects", "parallel", "scores", "money"]


@pytest.fixture(scope="module")
def context(chromium: Browser) -> Iterator[BrowserContext]:
    """One for all tests: scripts of plots are large, and nothing here is kept in a profile."""
    with profile(chromium) as context:
        yield context


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path
) -> Iterator[tuple[str, list[int]]]:
    """URL of a server for tests that only look, and its experiments: two sweeps with all their figures."""
    folder = tmp_path_factory.mktemp("swept")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    settings = Settings(data_dir=folder)
    store, clock = open_store(settings)
    ids = [sweep(store, clock).id]
    ids.append(sweep(store, clock, axes={"precision": ["fp32", "bf16"]}, seeds=2, first_seed=7).id)
    ids.append(sweep(store, clock, axes={"task.name": ["imdb", "tariff"], "precision": ["fp32", "bf16"]}).id)
    store.close()
    with serving(create_app(settings)) as url:
        yield url, ids


@pytest.fixture(scope="module")
def swept_site(served: tuple[str, list[int]]) -> str:
    return served[0]


@pytest.fixture(scope="module")
def swept(served: tuple[str, list[int]]) -> list[int]:
    return served[1]


def opened(page: Page, address: str) -> None:
    page.goto(address)
    ready(page)
    page.wait_for_selector("figure:not([data-drawn])", state="detached")


@pytest.mark.parametrize("tab", TABS)
def test_every_tab_is_drawn(page: Page, swept_site: str, swept: list[int], tab: str) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/{tab}")
    if tab != "compare":
        assert page.locator("figure figcaption").count() >= 1
    if tab not in ("compare", "parallel", "curves"):
        assert page.locator("figure svg.main-svg").count() >= 1
        expect(page.get_by_text("As a table").first).to_be_visible()


@pytest.mark.parametrize("tab", ["curves", "frontier", "parallel"])
def test_several_experiments_are_compared(page: Page, swept_site: str, swept: list[int], tab: str) -> None:
    opened(page, f"{swept_site}/compare?ids={swept[0]},{swept[1]}&tab={tab}")
    assert page.locator("figure").count() == (3 if tab == "curves" else 1)
    expect(page.get_by_role("link", name=re.compile(f"^{swept[1]} "))).to_be_visible()


def test_choices_are_in_the_address_and_come_back_from_it(
    page: Page, swept_site: str, swept: list[int]
) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/curves")
    page.get_by_label("over", exact=True).select_option("cost")
    page.get_by_label("smoothing", exact=True).fill("0.9")
    page.wait_for_url(re.compile(r"x=cost&smooth=0\.9"))
    caption = page.get_by_text("weight 0.9 on what came before").first
    expect(caption).to_be_visible()
    page.reload()
    ready(page)
    expect(page.get_by_label("over", exact=True)).to_have_value("cost")
    expect(caption).to_be_visible()


def test_a_filter_that_is_wrong_is_said_and_can_be_mended(
    page: Page, swept_site: str, swept: list[int]
) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/curves")
    field = page.get_by_label("filter", exact=True)
    field.fill("colour = 'red'")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("colour")
    field.fill("precision = 'bf16'")
    field.press("Enter")
    page.wait_for_selector("figure[data-drawn]")
    expect(page.get_by_role("button", name=re.compile("precision=bf16"))).to_have_count(6)
    expect(page.get_by_role("button", name=re.compile("precision=fp32"))).to_have_count(0)


def test_a_figure_has_its_data_as_a_table(page: Page, swept_site: str, swept: list[int]) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/curves?by=run&metric=loss")
    page.get_by_text("As a table").click()
    table = page.get_by_role("region", name="The figure as a table")
    expect(table.locator("tbody tr")).to_have_count(3 * 10)
    table.get_by_role("link").first.click()
    page.wait_for_url(re.compile(r"/runs/\d+$"))


def test_a_brush_of_the_frontier_lists_configurations_with_their_runs(
    page: Page, swept_site: str, swept: list[int]
) -> None:
    page.set_viewport_size({"width": 1440, "height": 1400})
    opened(page, f"{swept_site}/experiments/{swept[0]}/frontier")
    plot = page.locator("figure .nsewdrag").first.bounding_box()
    assert plot is not None
    page.mouse.move(plot["x"] + 5, plot["y"] + 5)
    page.mouse.down()
    page.mouse.move(plot["x"] + plot["width"] - 5, plot["y"] + plot["height"] - 5, steps=5)
    page.mouse.up()
    expect(page.get_by_role("heading", name="10 of 10 configurations chosen")).to_be_visible()
    assert "x0=" in page.url
    page.get_by_label("to", exact=True).first.fill("0")
    page.get_by_label("to", exact=True).first.press("Enter")
    expect(page.get_by_text("No configuration is in this range.")).to_be_visible()
    page.get_by_role("button", name="All").click()
    expect(page.get_by_role("heading", name="On the frontier")).to_be_visible()


def test_ranges_of_parallel_coordinates_are_brushed_or_typed(
    page: Page, swept_site: str, swept: list[int]
) -> None:
    page.set_viewport_size({"width": 1440, "height": 1400})
    opened(page, f"{swept_site}/experiments/{swept[0]}/parallel")
    expect(page.get_by_role("heading", name="30 of 30 runs")).to_be_visible()
    page.get_by_text("Choose ranges").click()
    page.get_by_role("group", name="precision").get_by_label("from").select_option("bf16")
    expect(page.get_by_role("heading", name="18 of 30 runs")).to_be_visible()
    brush = page.locator(".parallel .brush").nth(1).bounding_box()
    assert brush is not None
    page.mouse.move(brush["x"] + 16, brush["y"] + 4)
    page.mouse.down()
    page.mouse.move(brush["x"] + 16, brush["y"] + brush["height"] / 4, steps=4)
    page.mouse.up()
    expect(page.get_by_role("heading", name="6 of 30 runs")).to_be_visible()
    assert page.url.count("range=") == 2


def test_the_ranking_follows_the_sliders(page: Page, swept_site: str, swept: list[int]) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/scores")
    page.get_by_label("strategy", exact=True).select_option("")
    slider = page.get_by_label(re.compile("^cost_usd"))
    slider.focus()
    page.keyboard.press("End")
    page.wait_for_url(re.compile(r"weight=cost_usd%3D1(&|$)"))
    expect(page.get_by_role("region", name="Ranking")).to_be_visible()
    expect(page.get_by_label(re.compile("^cost_usd"))).to_have_value("1")


def test_claims_are_made_between_two_sides(page: Page, swept_site: str, swept: list[int]) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/compare?by=precision")
    page.get_by_label("claim: A").select_option("precision=bf16")
    page.get_by_label("against B").select_option("precision=fp32")
    expect(page.get_by_role("heading", name="Claims")).to_be_visible()
    expect(page.get_by_text("(A) against").first).to_be_visible()


def test_configurations_are_compared_at_their_best_batch(
    page: Page, swept_site: str, swept: list[int], looked_at: Callable[[str], None]
) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/compare")
    page.get_by_label("best over").select_option("batch.global_size")
    page.wait_for_url(re.compile("best=batch.global_size"))
    expect(page.get_by_text("Each at its best batch.global_size by accuracy on validation")).to_be_visible()
    expect(page.get_by_role("group", name="rows by").get_by_label("batch.global_size")).to_have_count(0)
    page.get_by_label("test every pair").check()
    expect(page.get_by_role("heading", name="Claims")).to_be_visible()
    looked_at("figures-best-over")
    page.reload()
    ready(page)
    expect(page.get_by_label("best over")).to_have_value("batch.global_size")


def test_the_recommendation_names_the_best_for_each_value_of_an_axis(
    page: Page, swept_site: str, swept: list[int], looked_at: Callable[[str], None]
) -> None:
    opened(page, f"{swept_site}/experiments/{swept[0]}/compare")
    answer = page.get_by_label("Answer", exact=True)
    expect(answer.get_by_text("Use ", exact=False).first).to_be_visible()
    expect(page.get_by_label("the best for each")).to_be_hidden()
    menu(page, "Why")
    page.get_by_label("the best for each").select_option("precision")
    table = page.get_by_role("region", name="The best for each precision")
    expect(table.get_by_role("row")).to_have_count(3)
    expect(table).to_contain_text("cost_usd")
    looked_at("answer-per")


def test_configurations_are_ranked_over_tasks(
    page: Page, swept_site: str, swept: list[int], looked_at: Callable[[str], None]
) -> None:
    opened(page, f"{swept_site}/compare?ids={swept[2]}&tab=tasks")
    table = page.get_by_role("region", name="Configurations over tasks")
    expect(table.get_by_role("row")).to_have_count(3)
    expect(table).to_contain_text("tariff accuracy")
    expect(page.get_by_role("region", name="Probability of improvement").get_by_role("row")).to_have_count(2)
    looked_at("tasks")
    page.get_by_label("figure", exact=True).select_option("cost_usd")
    expect(table).to_contain_text("tariff cost_usd")


def test_the_guide_quotes_experiments(page: Page, swept_site: str, swept: list[int]) -> None:
    opened(page, swept_site)
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Guide").click()
    ready(page)
    table = page.get_by_role("region", name="precision: imdb on cpu")
    expect(table).to_contain_text("bf16 is better")
    expect(table.get_by_role("link", name=str(swept[0]), exact=True).first).to_have_attribute(
        "href", f"/experiments/{swept[0]}/compare"
    )
    expect(page.get_by_role("region", name="Experiments")).to_contain_text("precision by batch by optimizer")
    page.get_by_label("project").fill("other")
    page.get_by_label("project").press("Enter")
    expect(page.get_by_text("No finished experiment varies an axis.")).to_be_visible()
    assert page.url.endswith("?project=other")


def test_a_tab_without_anything_to_draw_says_why(page: Page, site: str, seeded: dict[str, int]) -> None:
    for tab in TABS:
        page.goto(f"{site}/experiments/{seeded['queued']}/{tab}")
        ready(page)
        assert page.locator("main .problem").count() == 0, tab
        assert page.locator("main .empty").count() >= 1 or tab == "compare", tab
