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
from tests.api.conftest import running
from tests.browser.conftest import ready
from trainers.errors import FailureClass

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class House:
    """A server and what is in it."""

    url: str
    store: Store
    mixed: int  # Experiment of 12 runs, of which 9 succeeded and 3 failed
    waiting: int  # Experiment "small in vision" of one run that waits


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(sqlite_template, folder / "stillhouse.db")
    app = create_app(Settings(data_dir=folder))
    store: Store = app.state.store
    mixed = submitted(store, "mixed", axes={"precision": ["fp32", "bf16"]}, seeds=6)
    Queue(store).claim("scheduler", lease_s=3600)
    store.drivers.started(mixed, 1, "driver", 0)
    for run in store.runs.all_of(mixed):
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=2000, resumed_from_step=0, facts={})
        if run.point["precision"] == "bf16" and run.seed % 2:
            failure = (FailureClass.out_of_memory, "batch 32 does not fit")
            store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure)
        else:
            summary = {"train_loss": 0.1 * (1 + run.seed), "accuracy": 0.9, "cost_usd": 0.0002}
            store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=summary)
    store.drivers.finish_experiment(mixed, 1, ExperimentState.incomplete, all_ended=True)
    waiting = submitted(store, "small in vision")
    with running(app) as url:
        yield House(url, store, mixed, waiting)


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
