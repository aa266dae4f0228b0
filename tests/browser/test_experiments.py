"""Experiments in the browser: found, compared, managed, tagged, read, and deleted with a way back."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.domain.states import ExperimentState
from service.scheduling.cluster import ClusterSnapshot
from service.scheduling.queue import Queue
from tests.browser.conftest import menu, ready

pytestmark = pytest.mark.slow


def names(page: Page) -> list[str]:
    return page.locator("table[aria-label=Experiments] td:nth-child(3) a").all_inner_texts()


def test_experiments_are_found_and_the_address_keeps_how(
    page: Page, site: str, seeded: dict[str, int]
) -> None:
    page.goto(site)
    ready(page)
    page.locator("input[type=search]").fill("precision")
    expect(page.locator("table[aria-label=Experiments] td:nth-child(3) a")).to_have_count(2)
    page.get_by_role("combobox", name="State").select_option("succeeded")
    expect(page.locator("table[aria-label=Experiments] td:nth-child(3) a")).to_have_count(1)
    page.reload()
    ready(page)
    assert names(page) == ["precision"]
    assert "filter=precision" in page.url and "state=succeeded" in page.url
    page.goto(f"{site}/?filter=owner = 'ada' and state = 'queued'")
    ready(page)
    assert names(page) == ["waiting"]


def test_a_wrong_filter_says_what_is_wrong_and_stays_to_be_mended(
    page: Page, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/?filter=colour = 'red'")
    ready(page)
    expect(page.get_by_role("alert")).to_contain_text("colour")
    looked_at("experiments-wrong-filter")
    page.locator("input[type=search]").fill("")
    expect(page.locator("table[aria-label=Experiments] td:nth-child(3) a")).to_have_count(4)


def test_columns_order_and_selection(page: Page, site: str, seeded: dict[str, int]) -> None:
    page.goto(site)
    ready(page)
    page.get_by_role("button", name="id", exact=True).click()
    expect(page.locator("th[aria-sort]")).to_have_text("id ↑")
    expect(page.locator("table[aria-label=Experiments] td:nth-child(3) a").first).to_have_text("precision")
    page.get_by_text("Columns").click()
    page.get_by_role("checkbox", name="priority").check()
    expect(page.get_by_role("columnheader", name="priority")).to_be_visible()
    page.get_by_label(f"Select {seeded['done']}").check()
    page.get_by_label(f"Select {seeded['running']}").check()
    link = page.get_by_role("link", name="Compare 2")
    assert link.get_attribute("href") == f"/compare?ids={seeded['done']},{seeded['running']}"


def test_costs_are_columns_that_follow_what_runs(page: Page, site: str, seeded: dict[str, int]) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(site)
    ready(page)
    assert not any("costs" in url for url in asked), "what is not shown is not asked for"
    page.get_by_text("Columns").click()
    page.get_by_role("checkbox", name="cost so far").check()
    page.get_by_role("checkbox", name="forecast of the rest").check()
    rows = page.locator("table[aria-label=Experiments] tbody tr:not(.gap)")
    running = rows.filter(has_text="precision again").locator("td")
    expect(running.nth(11)).to_have_text("$0.00")  # All its steps are made.
    expect(rows.filter(has_text="waiting").locator("td").nth(11)).to_have_text("–")
    for order in ("ascending", "descending"):
        page.get_by_role("button", name="cost so far").click()
        expect(page.locator(f"th[aria-sort={order}]")).to_be_visible()
    expect(rows.first).to_contain_text("precision")
    expect(running.nth(10)).to_contain_text("$")
    before = running.nth(10).inner_text()
    expect(running.nth(10)).not_to_have_text(before)


def test_an_experiment_is_cancelled_tagged_and_deleted_with_a_way_back(
    page: Page, site: str, app: FastAPI, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    store = app.state.store
    page.goto(f"{site}/experiments/{seeded['queued']}")
    ready(page)
    menu(page, "Actions")
    page.get_by_role("button", name="Tags").click()
    looked_at("dialog")
    page.get_by_label("Words").fill("baseline <b>bold</b>")
    page.get_by_role("button", name="Set").click()
    expect(page.get_by_role("alert")).to_contain_text("tag")
    page.get_by_label("Words").fill("baseline")
    page.get_by_role("button", name="Set").click()
    expect(page.locator(".chip")).to_have_text("baseline")
    menu(page, "Actions")
    page.get_by_role("button", name="Cancel waiting").click()
    page.get_by_role("button", name="Cancel the experiment").click()
    expect(page.locator("main .state").first).to_have_text("cancelled")
    assert store.experiments.get(seeded["queued"]).state is ExperimentState.cancelled
    menu(page, "Actions")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.wait_for_url(f"{site}/")
    ready(page)
    page.get_by_role("button", name="Undo").click()
    page.wait_for_url(f"{site}/experiments/{seeded['queued']}")


def test_a_spec_is_read_and_compared(
    page: Page, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/experiments/{seeded['done']}/spec?against={seeded['queued']}")
    ready(page)
    expect(page.get_by_role("table", name="Differences")).to_contain_text("search.axes.precision")
    looked_at("spec")


def test_runs_are_filtered_sorted_gathered_and_pinned(
    page: Page, site: str, seeded: dict[str, int], looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/experiments/{seeded['done']}/runs")
    ready(page)
    rows = page.locator("table[aria-label=Runs] tbody tr:not(.gap)")
    expect(rows).to_have_count(8)
    page.locator("input[type=search]").fill("axis.precision = 'bf16'")
    expect(rows).to_have_count(4)
    page.get_by_role("button", name="seed").click()
    expect(rows.first.locator("td").nth(5)).to_have_text("0")
    page.locator("input[type=search]").fill("")
    expect(rows).to_have_count(8)
    page.get_by_label("Group by").select_option("batch.global_size")
    page.get_by_role("button", name="Expand all").click()
    sizes = [text for text in page.locator("tbody td:nth-child(5)").all_inner_texts() if text.isdigit()]
    assert len(sizes) == 8 and sizes == sorted(sizes)
    page.get_by_label("Group by").select_option("none")
    page.get_by_role("button", name="Menu of run 8", exact=True).click()
    page.get_by_role("menuitem", name="Keep at the top").click()
    expect(rows.first.locator("a")).to_have_text("8")
    expect(rows.first).to_have_class("pinned")
    looked_at("runs")
    page.locator("input[type=search]").fill("nonsense = 1")
    expect(page.get_by_role("alert")).to_contain_text("nonsense")


def test_an_experiment_and_its_runs_link_their_job_in_rays_dashboard(
    page: Page, site: str, app: FastAPI, seeded: dict[str, int]
) -> None:
    snapshot = ClusterSnapshot(time.time(), True, "http://ray.example:8265", ())
    Queue(app.state.store).put_cluster(snapshot)
    experiment = seeded["done"]
    job = app.state.store.experiments.get(experiment).submission_id
    run = app.state.store.runs.page(experiment_id=experiment).items[0]
    for path in (f"/experiments/{experiment}", f"/runs/{run.id}"):
        page.goto(f"{site}{path}")
        ready(page)
        if path.startswith("/experiments"):
            menu(page, "ada")
        link = page.get_by_role("link", name="job in the dashboard")
        expect(link).to_have_attribute("href", f"http://ray.example:8265/#/jobs/{job}")
