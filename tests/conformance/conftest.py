"""What the conformance tests build their worlds from: one suite, run on every database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.domain.records import Experiment, Run
from service.store import Store
from tests.conformance.building import Submit, started, submitted


@pytest.fixture
def submit(store: Store) -> Submit:
    """Submit an experiment with some runs."""

    def call(runs: int = 1, **fields: Any) -> Experiment:
        return submitted(store, runs, **fields)

    return call


@pytest.fixture
def running(store: Store) -> Callable[..., tuple[Experiment, list[Run]]]:
    """An experiment whose driver has started, with its runs."""

    def call(runs: int = 1, **fields: Any) -> tuple[Experiment, list[Run]]:
        return started(store, runs, **fields)

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
