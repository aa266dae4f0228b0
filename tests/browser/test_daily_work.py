"""Daily work with experiments, some of whose runs failed; all tests share a server and a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from api.app import create_app
from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from tests.browser.conftest import menu, ready, trained
from tests.serving import serving
from trainers.errors import FailureClass

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class House:
    """A server and what is in it."""

    url: str
    store: Store
    mixed: int  # Experiment of 12 runs, of which 9 succeeded and 3 failed
    words: int  # The same, not ended
    waiting: int  # Experiment "small in vision" of one run that waits
    wide: int  # Experiment of 2,000 runs that wait
    live: int  # Experiment of eight runs that train


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    app = create_app(Settings(data_dir=folder))
    store: Store = app.state.store
    mixed, words = with_failed_runs(store, "mixed"), with_failed_runs(store, "words")
    store.drivers.finish_experiment(mixed, 1, ExperimentState.incomplete, all_ended=True)
    waiting = submitted(store, "small in vision")
    wide = submitted(store, "wide", axes={"batch.global_size": [16, 8]}, seeds=1000)
    live = trained(store, done=False, changes={"name": "live", "queue": {"priority": 90}})
    with serving(app) as url:
        yield House(url, store, mixed, words, waiting, wide, live)


def with_failed_runs(store: Store, name: str) -> int:
    experiment = submitted(store, name, axes={"precision": ["fp32", "bf16"]}, seeds=6)
    Queue(store).claim("scheduler", lease_s=3600)
    store.drivers.started(experiment, 1, "driver", 0)
    for run in store.runs.all_of(experiment):
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=2000, resumed_from_step=0, facts={})
        if run.point["precision"] == "bf16" and run.seed % 2:
            failure = (FailureClass.out_of_memory, "batch 32 does not fit")
            store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure)
        else:
            summary = {"train_loss": 0.1 * (1 + run.seed), "accuracy": 0.9, "cost_usd": 0.0002}
            store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=summary)
    return experiment


def submitted(store: Store, name: str, *, axes: dict[str, list[object]] | None = None, seeds: int = 1) -> int:
    document = {"name": name, "task": {"name": "imdb"}, "seeds": list(range(seeds))}
    spec = validate(document | ({"search": {"axes": axes}} if axes else {}))
    new = NewExperiment(spec, list(spec.runs()), spec_text=f"name: {name}\n", owner="ada")
    return store.submissions.submit(new)[0].id


def test_failed_runs_are_counted_found_and_retried(page: Page, house: House) -> None:
    page.goto(f"{house.url}/?state=incomplete")
    ready(page)
    row = page.locator("table[aria-label=Experiments] tbody tr:not(.gap)")
    expect(row).to_contain_text("9 succeeded, 3 failed")
    expect(row.locator(".state")).to_have_text("incomplete")
    row.get_by_role("link", name="3 failed").click()
    ready(page)
    expect(page.locator("table[aria-label=Runs] tbody tr:not(.gap)")).to_have_count(3)
    expect(page.locator("main .state").first).to_have_text("incomplete")
    page.get_by_role("button", name="Retry 3 failed").click()
    expect(page.locator("main .state").first).to_have_text("queued")
    expect(page.locator(".runs-by-state")).to_contain_text("9 succeeded, 3 queued")
    assert house.store.experiments.run_counts(house.mixed)[RunState.succeeded] == 9


def test_a_long_table_shows_its_rows_wherever_one_jumps(page: Page, house: House) -> None:
    page.goto(f"{house.url}/experiments/{house.wide}/runs")
    ready(page)
    ids = [run.id for run in house.store.runs.all_of(house.wide)]
    table = page.get_by_role("region", name="Runs")
    cell = table.locator("tbody tr:not(.gap) a")
    expect(table).to_contain_text("seed")
    table.evaluate("node => { node.scrollTop = node.scrollHeight; }")
    expect(cell.last).to_have_text(str(ids[-1]))
    table.evaluate("node => { node.scrollTop = 0; }")
    expect(cell.first).to_have_text(str(ids[0]))
    dragged = """async node => {
      for (let part = 0; part <= 40; part++) {
        node.scrollTop = ((node.scrollHeight - node.clientHeight) * (part % 2 ? part : 40 - part)) / 61;
        await new Promise(requestAnimationFrame);
      }
    }"""
    table.evaluate(dragged)
    expect(table.get_by_text("…", exact=True)).to_have_count(0)
    table.evaluate("node => { node.scrollTop = 1000 * 34; }")
    expect(table.get_by_role("link", name=str(ids[1000]), exact=True)).to_be_visible()
    page.get_by_role("button", name="batch.global_size").click()
    expect(table.locator("tbody tr:not(.gap)").first.locator("td").nth(3)).to_have_text("8")
    table.evaluate("node => { node.scrollTop = node.scrollHeight; }")
    expect(cell.last).to_have_text(str(ids[999]))


def test_words_on_the_page_are_words_of_filters(page: Page, house: House) -> None:
    page.goto(f"{house.url}/experiments/{house.words}/runs")
    ready(page)
    rows = page.locator("table[aria-label=Runs] tbody tr:not(.gap)")
    search = page.get_by_role("combobox", name="Filter")
    for typed, count in {
        "loss < 0.35": 5, "train_loss < 0.35": 5, "fp32": 6, "precision = fp32 and loss < 0.35": 3,
        "failed": 3, "batch > 1": 12, "cost > 1": 0, "out_of_memory": 3,
    }.items():  # fmt: skip
        search.fill(typed)
        expect(rows, typed).to_have_count(count)
        expect(page.get_by_role("alert")).to_have_count(0)
    search.fill("precison = fp32")
    expect(page.get_by_role("alert")).to_contain_text("did you mean 'precision'?")
    search.fill("accuracy > 0.8 and sta")
    offered = page.get_by_role("listbox", name="What fits here").get_by_role("option")
    expect(offered).to_have_text(["state", "started_s", "starred"])
    search.fill("state = f")
    expect(offered).to_have_text(["failed"])
    search.fill("prec = fp32 and loss < 0.35")
    for _ in range(len(" = fp32 and loss < 0.35")):
        search.press("ArrowLeft")
    search.press("ArrowDown")
    expect(offered).to_have_text(["precision"])
    search.press("Enter")
    expect(search).to_have_value("precision = fp32 and loss < 0.35")
    expect(rows).to_have_count(3)
    search.fill("sta = failed")
    search.press("Home")
    for _ in range(3):
        search.press("ArrowRight")
    search.press("ArrowDown")
    offered.get_by_text("state", exact=True).click()
    expect(search).to_have_value("state = failed")
    expect(offered).to_have_count(0)
    search.fill("")
    for title in page.locator("table[aria-label=Runs] th button").all_inner_texts():
        page.get_by_role("button", name=title, exact=True).click()
        expect(rows).to_have_count(12)
        expect(page.locator("th[aria-sort]")).to_contain_text(title)


def test_a_name_with_words_of_the_grammar_is_searched_for(page: Page, house: House) -> None:
    page.goto(house.url)
    ready(page)
    search = page.get_by_role("combobox", name="Search")
    names = page.locator("table[aria-label=Experiments] tbody tr:not(.gap) td:nth-child(3) a")
    for typed, found in {
        "small in vision": ["small in vision"],
        "owner = ada and state = running": ["live", "words"],
    }.items():
        search.fill(typed)
        expect(names).to_have_text(found)
        expect(page.get_by_role("alert")).to_have_count(0)


def test_back_comes_back_to_the_row_that_was_left(page: Page, house: House) -> None:
    page.goto(f"{house.url}/experiments/{house.wide}/runs")
    ready(page)
    table = page.get_by_role("region", name="Runs")
    table.evaluate("node => { node.scrollTop = 1200 * 34; }")
    link = table.get_by_role("link", name=str(house.store.runs.all_of(house.wide)[1203].id), exact=True)
    link.click()
    ready(page)
    expect(page.get_by_role("heading", level=1)).to_contain_text("Run")
    page.go_back()
    expect(link).to_be_in_viewport()


def test_notes_are_markdown_and_never_markup(page: Page, house: House) -> None:
    house.store.requests.annotate(
        house.mixed,
        "**Best** so far:\n\n- [paper](https://example.org/p)\n- `lr` <img src=x onerror=alert(1)>",
    )
    page.goto(f"{house.url}/experiments/{house.mixed}")
    ready(page)
    menu(page, "Notes")
    notes = page.locator(".notes")
    expect(notes.locator("strong")).to_have_text("Best")
    expect(notes.locator("li a")).to_have_attribute("href", "https://example.org/p")
    expect(notes.locator("li").nth(1)).to_have_text("lr <img src=x onerror=alert(1)>")
    expect(notes.locator("img")).to_have_count(0)


def test_a_deleted_experiment_is_restored_from_its_place(page: Page, house: House) -> None:
    gone = submitted(house.store, "gone")
    house.store.requests.cancel(gone)
    house.store.removal.delete(gone)
    page.goto(house.url)
    ready(page)
    page.get_by_role("link", name="Deleted").click()
    page.get_by_role("button", name="Restore gone").click()
    page.wait_for_url(f"{house.url}/experiments/{gone}")
    expect(page.get_by_role("heading", level=1)).to_have_text("gone")


def test_an_unknown_address_is_a_page_and_a_printed_table_has_its_titles(page: Page, house: House) -> None:
    answer = page.goto(f"{house.url}/nowhere")
    assert answer is not None and answer.status == 404
    expect(page.get_by_text("This page does not exist")).to_be_visible()
    page.goto(f"{house.url}/experiments/{house.mixed}/runs")
    ready(page)
    page.emulate_media(media="print")
    expect(page.get_by_role("columnheader", name="train_loss").get_by_text("train_loss")).to_be_visible()
    page.goto(house.url)
    ready(page)
    clipped = "getComputedStyle(document.querySelector('td.box')).textOverflow"
    assert page.evaluate(clipped) == "clip", "a box is not followed by an ellipsis"


def test_a_page_says_why_it_is_empty_and_recovers(page: Page, house: House) -> None:
    page.goto(house.url)
    ready(page)
    page.route("**/api/v1/experiments*", lambda route: route.abort())
    page.route("**/healthz", lambda route: route.abort())
    page.get_by_role("link", name="Queue", exact=True).click()
    page.get_by_role("link", name="Experiments", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")
    page.unroute("**/api/v1/experiments*")
    page.unroute("**/healthz")
    expect(page.locator("table[aria-label=Experiments]")).to_contain_text("mixed")
    page.context.set_offline(True)
    page.get_by_role("link", name="Hardware").click()
    expect(page.get_by_role("alert")).to_contain_text("You are offline")
    page.context.set_offline(False)
    expect(page.get_by_role("heading", level=1)).to_contain_text("Hardware")
