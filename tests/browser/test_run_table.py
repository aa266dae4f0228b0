"""The table of an experiment's runs as a workbench; all tests share a server and a browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from api.app import create_app
from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from tests.browser.conftest import NARROW, WIDE, ready
from tests.serving import serving
from trainers.errors import FailureClass

pytestmark = pytest.mark.slow

AXES = {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32]}


@dataclass(frozen=True)
class Lab:
    """A server and what is in it."""

    url: str
    store: Store
    ended: int  # Experiment of 24 runs, of which 2 failed
    waiting: int  # Experiment of 600 runs that wait

    def runs(self) -> str:
        return f"{self.url}/experiments/{self.ended}/runs"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    app = create_app(Settings(data_dir=folder))
    store: Store = app.state.store
    ended = measured(store)
    spec = validate({"name": "waiting", "task": {"name": "imdb"}, "seeds": list(range(600))})
    new = NewExperiment(spec, list(spec.runs()), spec_text="name: waiting\n", owner="ada")
    waiting = store.submissions.submit(new)[0].id
    with serving(app) as url:
        yield Lab(url, store, ended, waiting)


def measured(store: Store) -> int:
    document = {
        "name": "measured",
        "task": {"name": "imdb"},
        "search": {"axes": AXES},
        "seeds": list(range(6)),
    }
    spec = validate(document)
    new = NewExperiment(spec, list(spec.runs()), spec_text="name: measured\n", owner="ada")
    experiment = store.submissions.submit(new)[0].id
    Queue(store).claim("scheduler", lease_s=3600)
    store.drivers.started(experiment, 1, "driver", 0)
    for run in store.runs.all_of(experiment):
        attempt = store.attempts.open(run.id, 1)
        facts = {"packages": {"torch": "2.12" if run.seed else "2.11", "numpy": "2.4"}, "commit": "abc"}
        store.attempts.run_started(run.id, attempt, total_steps=20, resumed_from_step=0, facts=facts)
        points = PointBatch(run.id, attempt, "loss", [1, 2], [1.0, 0.5], [1e9, 1e9 + 1])
        store.recording.record(RecordBatch(points=[points]))
        if run.point["precision"] == "bf16" and run.seed == 3:
            failure = (FailureClass.out_of_memory, "too large")
            store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure)
            continue
        better = 0.02 * (run.point["precision"] == "fp32") + 0.001 * run.seed
        figures = {
            "train_loss": 0.5 - better, "accuracy": 0.9 + better, "score": 0.9 + better,
            "headline": "accuracy", "cost_usd": 0.0002 + run.id / 1e6, "total_time_s": 100.0 + run.id,
        }  # fmt: skip
        store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=figures)
    store.drivers.finish_experiment(experiment, 1, ExperimentState.incomplete, all_ended=True)
    return experiment


def rows(page: Page) -> Locator:
    return page.locator("table[aria-label=Runs] tbody tr:not(.gap)")


def headings(page: Page) -> list[str]:
    return page.locator("table[aria-label=Runs] thead th .sorts").all_inner_texts()


def opened(page: Page, path: str) -> None:
    page.goto(path)
    ready(page)
    expect(rows(page).first).to_be_visible()


def menu(page: Page, run: int, item: str) -> None:
    page.get_by_role("button", name=f"Menu of run {run}", exact=True).click()
    page.get_by_role("menuitem", name=item).click()


def test_columns_are_chosen_ordered_widened_and_kept_in_view_by_the_address(
    page: Page, lab: Lab, looked_at: Callable[[str], None]
) -> None:
    opened(page, lab.runs())
    page.locator("summary", has_text="Columns").click()
    panel = page.locator(".columns-menu")
    panel.get_by_role("checkbox", name="step", exact=True).uncheck()
    panel.get_by_label("More columns").fill("hardw")
    panel.get_by_role("checkbox", name="hardware").check()
    panel.get_by_role("button", name="Move hardware up").click()
    panel.get_by_role("button", name="Keep accuracy in view").click()
    panel.get_by_label("Width of state").fill("90")
    panel.get_by_label("Width of state").press("Enter")
    expect(page.locator("th", has_text="state")).to_have_css("width", "90px")
    looked_at("columns of runs")
    shown = headings(page)
    assert shown[0].startswith("accuracy") and "step" not in " ".join(shown)
    assert shown[-2:] == ["hardware", "energy_kwh"]
    query = parse_qs(urlsplit(page.url).query)["columns"][0]
    assert query.startswith("!accuracy,id,") and "state~90" in query
    page.reload()
    ready(page)
    expect(rows(page)).to_have_count(24)
    assert headings(page) == shown
    page.set_viewport_size(NARROW)
    region = page.get_by_role("region", name="Runs")
    region.scroll_into_view_if_needed()
    region.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    expect(page.locator("th", has_text="accuracy")).to_be_in_viewport()
    expect(page.locator("th", has_text="precision")).not_to_be_in_viewport()
    page.set_viewport_size(WIDE)
    page.locator("summary", has_text="Views").click()
    page.get_by_role("button", name="Save as").click()
    page.locator("dialog [name=name]").fill("with hardware")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    opened(page, lab.runs())
    page.locator("summary", has_text="Views").click()
    page.get_by_role("link", name="with hardware").click()
    ready(page)
    assert headings(page) == shown
    page.goto(lab.url)
    ready(page)
    page.locator("summary", has_text="Views").click()
    expect(page.get_by_text("No views are saved yet.")).to_be_visible()


def test_columns_are_dragged_to_other_places_and_widths(page: Page, lab: Lab) -> None:
    opened(page, f"{lab.runs()}?columns=id,precision,seed,state")
    page.locator("th", has_text="state").drag_to(page.locator("th", has_text="precision"))
    expect(page.locator("th .sorts").nth(1)).to_have_text("state")
    assert headings(page) == ["id", "state", "precision", "seed"]
    grip = page.locator("th", has_text="seed").locator(".grip").bounding_box()
    assert grip is not None
    page.mouse.move(grip["x"] + 4, grip["y"] + 5)
    page.mouse.down()
    page.mouse.move(grip["x"] + 64, grip["y"] + 5, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile("seed(~|%7E)"))
    assert headings(page) == ["id", "state", "precision", "seed"], "and it is not sorted or moved by that"


def test_groups_have_count_mean_and_spread_and_fold(
    page: Page, lab: Lab, looked_at: Callable[[str], None]
) -> None:
    opened(page, lab.runs())
    page.get_by_label("Group by").select_option("precision")
    expect(rows(page)).to_have_count(2)
    scores = [run.accuracy for run in lab.store.runs.all_of(lab.ended) if run.point["precision"] == "bf16"]
    values = [value for value in scores if value is not None]
    group = rows(page).filter(has_text="precision bf16")
    expect(group).to_contain_text("12 runs: 10 succeeded, 2 failed")
    mean = group.locator("td[title*=mean]").nth(1)
    expect(mean).to_contain_text(f"{statistics.fmean(values):.4f}".rstrip("0"))
    expect(mean).to_contain_text(f"± {float(f'{statistics.stdev(values):.2g}'):g}")
    expect(mean).to_have_attribute("title", re.compile("from 0.9 to 0.905, over 10"))
    page.get_by_role("button", name="accuracy").click()
    expect(rows(page).first).to_contain_text("bf16")
    page.get_by_role("button", name="accuracy").click()
    expect(rows(page).first).to_contain_text("fp32")
    page.get_by_role("button", name="precision fp32").click()
    expect(rows(page)).to_have_count(14)
    best = lab.store.runs.page(experiment_id=lab.ended, order_by="precision, accuracy desc", filter="fp32")
    expect(rows(page).nth(1).get_by_role("link").first).to_have_text(str(best.items[0].id))
    page.get_by_role("button", name="precision", exact=True).click()
    page.get_by_role("button", name="precision", exact=True).click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text(re.compile("precision"))
    expect(rows(page).first).to_contain_text("precision fp32")
    page.get_by_label("then by").select_option("batch.global_size")
    expect(rows(page)).to_have_count(4)
    page.get_by_role("button", name="Expand all").click()
    expect(rows(page)).to_have_count(28)
    looked_at("groups of runs")
    page.get_by_role("button", name="Collapse all").click()
    expect(rows(page)).to_have_count(4)
    page.get_by_label("Select precision fp32, batch.global_size 16").check()
    expect(page.get_by_role("group", name="Selected runs")).to_contain_text("6 runs selected")
    expect(page.get_by_label("Select precision fp32, batch.global_size 16")).to_be_checked()
    page.reload()
    ready(page)
    expect(rows(page)).to_have_count(4)


def test_groups_are_over_all_runs_not_over_those_that_were_read(page: Page, lab: Lab) -> None:
    opened(page, f"{lab.url}/experiments/{lab.waiting}/runs?group=state")
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("600 runs: 600 queued")
    page.get_by_role("button", name="state queued").click()
    page.get_by_role("region", name="Runs").evaluate("node => { node.scrollTop = node.scrollHeight; }")
    last = lab.store.runs.all_of(lab.waiting)[-1].id
    expect(page.get_by_role("link", name=str(last), exact=True)).to_be_visible()


def test_lines_have_the_colours_of_curves_and_are_hidden(page: Page, lab: Lab) -> None:
    opened(page, lab.runs())
    runs = lab.store.runs.all_of(lab.ended)
    strokes = page.eval_on_selector_all(
        "table[aria-label=Runs] .line-key line", "nodes => nodes.map(node => node.getAttribute('stroke'))"
    )
    path = f"{lab.url}/api/v1/experiments/{lab.ended}/curves"
    answer = page.request.get(path, params={"by": "run", "metric": "loss", "filter": "bf16"}).json()
    drawn = """async numbers => {
      const { lineStyle } = await import("/static/core/lines.js");
      return numbers.map(number => lineStyle(number).colour);
    }"""
    lines = answer["items"][0]["lines"]
    assert len(lines) == 12, "some of the runs have the lines that they have among all"
    by_run = dict(zip([run.id for run in runs], strokes, strict=True))
    colours = page.evaluate(drawn, [line["colour"] for line in lines])
    assert colours == [by_run[line["runs"][0]] for line in lines]
    page.get_by_role("button", name=f"Curve of run {runs[1].id}", exact=True).click()
    page.get_by_label(f"Select {runs[2].id}", exact=True).check()
    page.get_by_role("button", name="Hide curves").click()
    link = page.get_by_role("link", name="Curves, 2 hidden")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    link.click()
    ready(page)
    expect(page.get_by_role("button", name="Show hidden runs")).to_be_visible()
    filters = [parse_qs(urlsplit(url).query).get("filter") for url in asked if "/curves?" in url]
    assert [f"id NOT IN ({runs[1].id},{runs[2].id})"] in filters


def test_all_that_match_are_selected_cancelled_retried_and_tagged(page: Page, lab: Lab) -> None:
    opened(page, f"{lab.url}/experiments/{lab.waiting}/runs")
    page.get_by_role("combobox", name="Filter").fill("seed >= 100")
    bar = page.get_by_role("group", name="Selected runs")
    expect(page.locator("table[aria-label=Runs]")).to_have_attribute("aria-rowcount", "501")
    page.get_by_label("Select all").check()
    expect(bar).to_contain_text("500 runs selected")
    bar.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the runs").click()
    expect(page.get_by_role("status").filter(has_text="Cancelled 500 runs")).to_be_visible()
    assert lab.store.experiments.run_counts(lab.waiting)[RunState.cancelled] == 500
    expect(bar).to_contain_text("500 runs selected")
    bar.get_by_role("button", name="Retry").click()
    expect(page.get_by_role("status").filter(has_text="Retried 500 runs")).to_be_visible()
    assert lab.store.experiments.run_counts(lab.waiting)[RunState.queued] == 600
    bar.get_by_role("button", name="Tag").click()
    page.get_by_label("Add", exact=False).fill("later")
    page.get_by_role("dialog").get_by_role("button", name="Tag").click()
    expect(page.get_by_role("status").filter(has_text="Tagged 500 runs")).to_be_visible()
    page.get_by_role("combobox", name="Filter").fill("tag = later and seed < 102")
    expect(rows(page)).to_have_count(2)
    bar.get_by_role("button", name="Select none").click()
    expect(bar).to_be_hidden()


def test_the_export_is_what_the_table_shows(page: Page, lab: Lab) -> None:
    opened(page, f"{lab.runs()}?columns=seed,precision,accuracy&filter=bf16&order_by=seed desc")
    link = page.locator(".of-runs").get_by_role("link", name="CSV").get_attribute("href")
    table = list(csv.reader(io.StringIO(page.request.get(f"{lab.url}{link}").text())))
    assert table[0] == ["seed", "axis.precision", "score"]
    assert len(table) == 13
    assert [line[0] for line in table[1:3]] == ["5", "5"] and {line[1] for line in table[1:]} == {"bf16"}


def test_runs_are_named_starred_noted_and_tagged_by_those_who_may(
    page: Page, lab: Lab, looked_at: Callable[[str], None]
) -> None:
    run = lab.store.runs.all_of(lab.ended)[4].id
    opened(page, lab.runs())
    star = page.get_by_role("button", name=f"Star run {run}", exact=True)
    star.click()
    expect(star).to_have_attribute("aria-pressed", "true")
    menu(page, run, "Name, tags and notes")
    page.get_by_label("Name", exact=True).fill("the best <i>so far</i>")
    page.get_by_role("textbox", name="Tags").fill("two, words!")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("alert")).to_contain_text("is not a tag")
    page.get_by_role("textbox", name="Tags").fill("baseline paper")
    page.get_by_role("textbox", name="Notes").fill("see p. 4")
    looked_at("dialog of a run")
    page.get_by_role("button", name="Save").click()
    stored = lab.store.runs.get(run)
    expect(page.get_by_role("dialog")).to_have_count(0)
    stored = lab.store.runs.get(run)
    assert (stored.name, stored.tags, stored.notes) == (
        "the best <i>so far</i>", ["baseline", "paper"], "see p. 4",
    )  # fmt: skip
    assert stored.starred
    page.get_by_role("combobox", name="Filter").fill("starred and tag = paper")
    expect(rows(page)).to_have_count(1)
    page.reload()
    ready(page)
    expect(rows(page)).to_contain_text("the best <i>so far</i>")
    expect(rows(page)).to_contain_text("see p. 4")

    def as_viewer(route: Route) -> None:
        who = {
            "user": "eve",
            "scope": "read",
            "administrator": False,
            "via": "token",
            "roles": {"default": "viewer"},
        }
        route.fulfill(body=json.dumps(who), content_type="application/json")

    page.route("**/api/v1/whoami", as_viewer)
    page.reload()
    ready(page)
    expect(rows(page)).to_contain_text("the best <i>so far</i>")
    expect(page.get_by_role("button", name=f"Star run {run}", exact=True)).to_be_disabled()
    page.get_by_role("button", name=f"Menu of run {run}", exact=True).click()
    expect(page.get_by_role("menuitem", name="Keep at the top")).to_be_visible()
    expect(page.get_by_role("menuitem", name="Name, tags and notes")).to_have_count(0)
    page.keyboard.press("Escape")
    page.get_by_label(f"Select {run}", exact=True).check()
    bar = page.get_by_role("group", name="Selected runs")
    expect(bar.get_by_role("button", name="Hide curves")).to_be_visible()
    expect(bar.get_by_role("button", name="Tag")).to_have_count(0)


def test_figures_are_differences_to_a_baseline(page: Page, lab: Lab) -> None:
    base, other, *_ = lab.store.runs.all_of(lab.ended)
    opened(page, f"{lab.runs()}?columns=id,accuracy,cost_usd")
    menu(page, base.id, "Use as baseline")
    cell = rows(page).nth(1).locator("td")
    expect(cell.nth(3)).to_have_text("+0.001")
    expect(cell.nth(3).locator("span")).to_have_attribute("title", "0.921")
    expect(cell.nth(4)).to_have_text("+$0.000001")
    expect(rows(page).first.locator("td").nth(3)).to_have_text("0.92")
    page.get_by_role("button", name="Differences in percent").click()
    expect(cell.nth(3)).to_have_text("+0.1 %")
    assert f"baseline={base.id}&difference=percent" in page.url
    page.reload()
    ready(page)
    expect(cell.nth(3)).to_have_text("+0.1 %")
    page.get_by_label("Group by").select_option("precision")
    expect(rows(page).filter(has_text="bf16").locator("td[title*=mean]").first).to_contain_text("−1.9 %")
    page.get_by_role("button", name="Compare with no baseline").click()
    expect(rows(page).filter(has_text="bf16").locator("td[title*=mean]").first).to_contain_text("0.9")
    assert "baseline" not in page.url and other.id


def test_runs_are_compared_side_by_side(page: Page, lab: Lab, looked_at: Callable[[str], None]) -> None:
    first, *_, last = lab.store.runs.all_of(lab.ended)
    opened(page, lab.runs())
    for run in (first, last):
        page.get_by_label(f"Select {run.id}", exact=True).check()
    page.get_by_role("link", name="Compare 2").click()
    page.wait_for_url(f"{lab.url}/compare/runs?ids={first.id},{last.id}")
    ready(page)
    configuration = page.get_by_role("table", name="Configuration")
    fields = configuration.locator("tbody code")
    expect(fields).to_have_text(["batch.global_size", "precision", "seeds"])
    expect(configuration.locator("tbody tr").first.locator("mark")).to_have_text(["16", "32"])
    environment = page.get_by_role("table", name="Environment")
    expect(environment.locator("tbody tr")).to_have_text(re.compile("packages.torch.*2.11.*2.12"))
    expect(page.get_by_role("table", name="Figures")).to_contain_text("accuracy")
    looked_at("compared runs")
    page.get_by_label("also what is equal").check()
    expect(environment.locator("tbody tr")).to_have_count(3)
    expect(environment.locator("tbody tr").first).to_contain_text("packages.torch")
    page.reload()
    ready(page)
    expect(environment.locator("tbody tr")).to_have_count(3)
    page.get_by_label("runs", exact=True).fill("1")
    page.get_by_label("runs", exact=True).press("Enter")
    expect(page.get_by_text("Name two or more runs")).to_be_visible()


def test_a_menu_of_a_row_is_used_with_the_keyboard(page: Page, lab: Lab) -> None:
    opened(page, lab.runs())
    run = lab.store.runs.all_of(lab.ended)[2].id
    button = page.get_by_role("button", name=f"Menu of run {run}", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("menuitem").first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("menuitem", name="Keep at the top")).to_be_focused()
    expect(page.get_by_role("main").get_by_role("menu")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("menu")).to_have_count(0)
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(rows(page).first.get_by_role("link").first).to_have_text(str(run))
    assert f"pin={run}" in page.url


def test_selected_experiments_are_tagged_stopped_archived_and_deleted(page: Page, lab: Lab) -> None:
    ids = []
    for name in ("first of two", "second of two"):
        spec = validate({"name": name, "task": {"name": "imdb"}})
        new = NewExperiment(spec, list(spec.runs()), spec_text=f"name: {name}\n", owner="ada")
        ids.append(lab.store.submissions.submit(new)[0].id)
    page.goto(f"{lab.url}/?filter=of two")
    ready(page)
    page.get_by_label("Select all").check()
    bar = page.get_by_role("group", name="Selected experiments")
    expect(bar).to_contain_text("2 experiments selected")
    bar.get_by_role("button", name="Tag").click()
    page.get_by_label("Add", exact=False).fill("pair")
    page.get_by_role("dialog").get_by_role("button", name="Tag").click()
    expect(page.get_by_role("status").filter(has_text="Tagged 2 experiments")).to_be_visible()
    bar.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete them").click()
    expect(page.get_by_role("alert").filter(has_text="Refused for")).to_be_visible()
    bar.get_by_role("button", name="Select none").click()
    page.get_by_label("Select all").check()
    bar.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop them").click()
    expect(page.get_by_role("status").filter(has_text="Stopped 2 experiments")).to_be_visible()
    bar.get_by_role("button", name="Archive").click()
    expect(page.get_by_role("status").filter(has_text="Archived 2 experiments")).to_be_visible()
    stored = [lab.store.experiments.get(id) for id in ids]
    assert [(one.tags, str(one.state), one.archived_s is None) for one in stored] == [
        (["pair"], "cancelled", False)
    ] * 2
    bar.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete them").click()
    expect(page.get_by_role("status").filter(has_text="Deleted 2 experiments")).to_be_visible()
    expect(page.get_by_text("No experiment matches.")).to_be_visible()
