"""What tests of the execution share: a store on SQLite with a clock that tests move."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.config.settings import Settings
from service.domain.records import Experiment, Placement
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, Store


class Clock:
    """Unix seconds that stand still until a test moves them."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    """The store's clock."""
    return Clock()


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    """An installation in a temporary folder, with a migrated SQLite file."""
    shutil.copy(sqlite_template, tmp_path / "stillhouse.db")
    return Settings(data_dir=tmp_path, data_roots=str(tmp_path), lease_s=30.0)


@pytest.fixture
def store(settings: Settings, clock: Clock) -> Iterator[Store]:
    """An empty store."""
    opened = Store.open(settings, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def queue(store: Store) -> Queue:
    """Its queue."""
    return Queue(store)


Submit = Callable[..., Experiment]


@pytest.fixture
def submit(store: Store) -> Submit:
    """Submit an experiment with some runs; fields override the spec's."""

    def submit(runs: int = 2, *, owner: str = "ada", **fields: Any) -> Experiment:
        spec = validate({"name": "tried", "task": {"name": "imdb"}, "seeds": list(range(runs)), **fields})
        experiment, _ = store.submissions.submit(
            NewExperiment(spec, list(spec.runs()), spec_text=spec.canonical_json(), owner=owner)
        )
        return experiment

    return submit


def placement(id: str, *, placed_s: float, **fields: Any) -> Placement:
    """Two CPUs, held since `placed_s`."""
    values: dict[str, Any] = {
        "hardware": "cpu",
        "workers": 1,
        "devices": 2,
        "price_usd_per_hour": 0.1,
        "power_w": 15.0,
        "ready_s": None,
        "released_s": None,
        "seen_s": placed_s,
        **fields,
    }
    return Placement(id=id, placed_s=placed_s, **values)
