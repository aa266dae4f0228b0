"""An application over an empty SQLite store, in process and over real HTTP."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.app import create_app
from service.config.settings import Settings
from service.domain.records import Experiment, Run
from service.output import bounded
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store
from tests.serving import serving
from tests.shared_routes import share_routes
from trainers.data.synthetic import write_corpus

share_routes()
bounded.LONGEST_S = 600.0  # Machines are busy.

BASE_URL = "http://127.0.0.1:8400"
SPEC = """\
name: precision-by-seed
task: {name: imdb, path: texts}
model: {name: tiny}
search: {axes: {precision: [fp32, bf16]}}
seeds: [0, 1]
"""
TOKEN = "stillhouse-" + "t" * 32


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Files of this process grow to a size at most: what is larger already meets a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with all tables and no rows; made once, copied for each test."""
    folder = tmp_path_factory.mktemp("migrated")
    Store.open(Settings(data_dir=folder), migrate=True).close()
    return folder / "stillhouse.db"


@pytest.fixture
def settings(tmp_path: Path, migrated: Path) -> Settings:
    """Settings of a migrated installation with one dataset, `texts`."""
    write_corpus(tmp_path / "texts", train=16, test=8, seed=0)
    (tmp_path / "data").mkdir()
    shutil.copy(migrated, tmp_path / "data" / "stillhouse.db")
    return Settings(data_dir=tmp_path / "data", data_roots=str(tmp_path), model_roots=str(tmp_path))


class Lasting(bounded.BoundedProcess):
    """A process that reads what people send, for one application after the other: it takes 1 s to start."""

    def close(self) -> None:
        """Does nothing: the next application asks it."""


@pytest.fixture(scope="session")
def lasting_process() -> Iterator[Lasting]:
    """Such a process, which starts when it is first asked."""
    process = Lasting()
    yield process
    bounded.BoundedProcess.close(process)


@pytest.fixture
def app(settings: Settings, lasting_process: Lasting) -> FastAPI:
    """The application."""
    app = create_app(settings)
    app.state.bounded = lasting_process
    return app


@pytest.fixture
def store(app: FastAPI) -> Store:
    """The application's store."""
    opened: Store = app.state.store
    return opened


@pytest.fixture
def client(app: FastAPI) -> Iterator[TestClient]:
    """A client in this process; an exception in a route is an exception here."""
    with TestClient(app, base_url=BASE_URL) as client:
        yield client


class Driver:
    """What a driver and its workers do to the store, by hand."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.queue = Queue(store)

    def submit(self, **changes: object) -> Experiment:
        """Submit a spec of one run per seed."""
        document = {"name": "driven", "task": {"name": "imdb", "path": "texts"}, **changes}
        spec = validate(document)
        text = json.dumps(document)
        return self.store.submissions.submit(
            NewExperiment(spec, list(spec.runs()), spec_text=text, owner="ada")
        )[0]

    def start(self, experiment: Experiment, facts: Mapping[str, Any] | None = None) -> list[Run]:
        """Bring the experiment and all its runs to running, with this record."""
        (claimed,) = self.queue.claim("scheduler", lease_s=60.0)
        assert claimed.id == experiment.id
        self.store.drivers.started(claimed.id, claimed.attempt, "here", 1)
        runs = self.store.runs.page(experiment_id=claimed.id).items
        for run in runs:
            attempt = self.store.attempts.open(run.id, claimed.attempt)
            self.store.attempts.run_started(
                run.id, attempt, total_steps=100, resumed_from_step=0, facts=facts or {}
            )
        return [self.store.runs.get(run.id) for run in runs]

    def report(self, run: Run, name: str, steps: list[int], values: list[float]) -> None:
        """Record points of the run's current attempt."""
        at_s = [time.time()] * len(steps)
        stale = self.store.recording.record(
            RecordBatch(points=[PointBatch(run.id, run.attempt, name, steps, values, at_s)])
        )
        assert not stale

    def finish(self, experiment: Experiment, runs: list[Run]) -> None:
        """End all runs and the experiment well."""
        from service.domain.states import ExperimentState, RunState

        for run in runs:
            self.store.attempts.finish_run(run.id, run.attempt, RunState.succeeded, summary={"accuracy": 0.9})
        self.store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)


@pytest.fixture
def driver(store: Store) -> Driver:
    """A driver of experiments in the application's store."""
    return Driver(store)


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    """Base URL of the application over real HTTP."""
    with serving(app) as base:
        yield base


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of the running application."""
    with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
        yield client


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds; fails when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
