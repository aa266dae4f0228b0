"""What the conformance tests build their worlds from: one suite, run on every database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.domain.records import Experiment, Run
from service.scheduling.queue import Queue
from service.store import NewExperiment, Store
from tests.conformance.building import Submit, plans_of


@pytest.fixture
def submit(store: Store) -> Submit:
    """Submit an experiment with some runs."""

    def call(
        runs: int = 1, *, owner: str = "ada", priority: int = 50, key: str | None = None, **fields: Any
    ) -> Experiment:
        spec, plans, written = plans_of(runs, priority, **fields)
        return store.submissions.submit(
            NewExperiment(spec, plans, spec_text=written, owner=owner, idempotency_key=key)
        )[0]

    return call


@pytest.fixture
def running(store: Store, queue: Queue, submit: Submit) -> Callable[..., tuple[Experiment, list[Run]]]:
    """An experiment whose driver has started, with its runs."""

    def call(runs: int = 1, **fields: Any) -> tuple[Experiment, list[Run]]:
        wanted = submit(runs, **fields)
        (claimed,) = queue.claim("s1", lease_s=30)
        assert claimed.id == wanted.id
        store.drivers.started(claimed.id, claimed.attempt, "node", 1)
        return store.experiments.get(claimed.id), store.runs.page(experiment_id=claimed.id).items

    return call


@pytest.fixture
def training(store: Store, running: Callable[..., Any]) -> Callable[..., tuple[Experiment, Run, int]]:
    """An experiment with one run that trains under an open attempt."""

    def call(**fields: Any) -> tuple[Experiment, Run, int]:
        experiment, (run,) = running(1, **fields)
        attempt = store.attempts.open(run.id, experiment.attempt)
        store.attempts.run_started(run.id, attempt, total_steps=100, resumed_from_step=0, facts={})
        return experiment, store.runs.get(run.id), attempt

    return call
