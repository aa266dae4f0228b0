"""What pages say and show at a glance: words, amounts, colours, order."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.domain.states import ExperimentState, RunState
from service.store import Store
from tests.browser.conftest import ready, trained
from tests.browser.test_daily_work import submitted, with_failed_runs

pytestmark = pytest.mark.slow


def test_a_run_has_one_cost_and_says_what_was_charged(page: Page, app: FastAPI, site: str) -> None:
    experiment = with_failed_runs(app.state.store, "mixed")
    run = next(run for run in app.state.store.runs.all_of(experiment) if run.state is RunState.succeeded)
    page.goto(f"{site}/runs/{run.id}")
    ready(page)
    facts = page.locator("dl.facts")
    expect(facts.locator("div", has=page.get_by_text("cost_usd"))).to_contain_text("$0.0002")
    expect(page.get_by_text("the run itself cost $0.0002")).to_be_visible()
    expect(page.get_by_text("with overhead")).to_be_visible()
    assert "USD" not in page.locator("main").inner_text()


def test_money_is_compared_in_dollars_without_exponents(page: Page, app: FastAPI, site: str) -> None:
    experiment = with_failed_runs(app.state.store, "compared")
    page.goto(f"{site}/experiments/{experiment}/compare")
    ready(page)
    expect(page.locator("main")).to_contain_text("$0.0002 ±$0.00 n=6")


def test_cancelled_does_not_look_like_failed(page: Page, app: FastAPI, site: str) -> None:
    store: Store = app.state.store
    store.drivers.finish_experiment(with_failed_runs(store, "failed"), 1, ExperimentState.failed)
    store.requests.cancel(submitted(store, "gone"))
    page.goto(site)
    ready(page)
    colour, mark = (
        "node => getComputedStyle(node).color",
        "node => getComputedStyle(node, '::before').content",
    )
    cancelled, failed = page.locator(".state.cancelled").first, page.locator(".state.failed").first
    assert cancelled.evaluate(colour) != failed.evaluate(colour)
    assert cancelled.evaluate(mark) != failed.evaluate(mark)


def test_steps_of_long_runs_are_whole_with_separators(page: Page, app: FastAPI, site: str) -> None:
    experiment = with_failed_runs(app.state.store, "long")
    page.goto(f"{site}/experiments/{experiment}/runs")
    ready(page)
    cell = page.locator("table[aria-label=Runs] td", has_text="/ 2,000").first
    expect(cell).to_be_visible()
    assert cell.evaluate("node => node.scrollWidth <= node.clientWidth")


def test_lines_of_a_legend_are_told_apart(page: Page, app: FastAPI, site: str) -> None:
    changes = {"search": {"axes": {"precision": ["fp32", "bf16"], "batch.global_size": [8, 16, 32]}}}
    experiment = trained(app.state.store, done=True, changes=changes)
    drawn = page.request.get(
        f"{site}/api/v1/experiments/{experiment}/figures/curve",
        params={"metric": "loss", "by": "run", "max_curves": 12},
    )
    traces = [trace for trace in drawn.json()["data"] if trace.get("showlegend", True)]
    looks = {(trace["line"]["color"], trace["line"].get("dash", "solid")) for trace in traces}
    assert len(traces) == len(looks) == 12


def test_the_audit_log_begins_with_the_newest(page: Page, app: FastAPI, site: str) -> None:
    for name in ("first", "second", "third"):
        app.state.store.requests.cancel(submitted(app.state.store, name))
    page.goto(f"{site}/audit")
    ready(page)
    numbers = [int(each) for each in page.locator("main tbody tr td:first-child").all_inner_texts()]
    assert len(numbers) >= 3
    assert numbers == sorted(numbers, reverse=True)


def test_choices_are_in_plain_words_and_plots_bring_no_notes_of_their_own(
    page: Page, app: FastAPI, site: str
) -> None:
    experiment = trained(app.state.store, done=True)
    page.goto(f"{site}/experiments/{experiment}/runs")
    ready(page)
    expect(page.get_by_label("Group by")).to_contain_text("none")
    page.goto(f"{site}/new")
    ready(page)
    expect(page.get_by_text("Start from", exact=False).first).to_be_attached()
    page.goto(f"{site}/experiments/{experiment}/curves")
    ready(page)
    expect(page.get_by_label("succeeded only")).to_be_attached()
    page.goto(f"{site}/experiments/{experiment}/money")
    ready(page)
    plot = page.locator("figure[data-drawn] .nsewdrag").first
    plot.hover()
    plot.dblclick()
    expect(page.locator(".plotly-notifier .notifier-note")).to_have_count(0)


def test_a_server_that_sends_no_messages_says_so_instead_of_asking_where_to(page: Page, site: str) -> None:
    page.goto(f"{site}/account")
    ready(page)
    expect(page.get_by_text("This server sends no messages yet.")).to_be_visible()
    expect(page.get_by_text("mail: this server sends no e-mail")).to_be_visible()
    expect(page.get_by_role("button", name="Add a notification")).to_have_count(0)


def test_an_experiment_that_is_retried_is_followed_again(page: Page, app: FastAPI, site: str) -> None:
    store: Store = app.state.store
    experiment = with_failed_runs(store, "again")
    store.drivers.finish_experiment(experiment, 1, ExperimentState.incomplete, all_ended=True)
    page.goto(f"{site}/experiments/{experiment}")
    ready(page)
    state = page.locator("main .state").first
    expect(state).to_have_text("incomplete")
    expect(page.locator("#live")).to_have_text("")
    page.get_by_role("button", name="Retry 3 failed").click()
    expect(state).to_have_text("queued")
    expect(page.locator("#live")).to_have_text("live")
    store.requests.cancel(experiment)
    expect(state).to_have_text("cancelled")
