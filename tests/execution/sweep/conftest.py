"""What tests of the sweep share: a sweep against a real SQLite store and no Ray."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.records import Experiment
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.recording import outages
from service.recording.mailbox import Assignment, Ending, Ready, Turn
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.store import Conflict, Store, StoreUnavailable
from tests.execution.conftest import Submit
from trainers.errors import FailureClass
from trainers.reporting import StopReason

CPUS = {"CPU": 2.0}
READY = Ready("placement", 0.0)
COMPLETED = Ending("completed", summary={"accuracy": 0.9})
PAUSED = Ending("stopped", stop_reason=StopReason.pause)
Begin = Callable[..., tuple[Sweep, Experiment]]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def resources() -> list[dict[str, float]]:
    """The cluster's nodes; tests change it."""
    return [dict(CPUS)]


@pytest.fixture
def taken() -> set[int]:
    """Nodes, by place, whose CPUs are reserved; tests change it."""
    return set()


@pytest.fixture
def leaving() -> dict[int, dict[str, Any]]:
    """What is different of nodes, by place; tests change it."""
    return {}


@pytest.fixture
def look(
    resources: list[dict[str, float]], taken: set[int], leaving: dict[int, dict[str, Any]]
) -> Callable[[], ClusterSnapshot]:
    """The cluster as it is."""

    def look() -> ClusterSnapshot:
        nodes = tuple(
            replace(
                ClusterNode(str(n), f"host-{n}", True, each, {"CPU": 0.0} if n in taken else {}),
                **leaving.get(n, {}),
            )
            for n, each in enumerate(resources)
        )
        return ClusterSnapshot(0.0, True, None, nodes)

    return look


@pytest.fixture
def begin(
    store: Store,
    queue: Queue,
    settings: Settings,
    submit: Submit,
    notes: list[str],
    look: Callable[[], ClusterSnapshot],
) -> Begin:
    """Submit, claim and begin the sweep of an experiment."""

    def begin(runs: int = 2, **fields: Any) -> tuple[Sweep, Experiment]:
        experiment = submit(runs, **fields)
        queue.claim("s", lease_s=60)
        store.drivers.started(experiment.id, 1, "node", 1)
        spec = ExperimentSpec.model_validate_json(store.experiments.spec(experiment.id)[1])

        def note(message: str, kind: EventKind) -> None:
            notes.append(message)
            store.drivers.note(experiment.id, 1, message, kind=kind)

        sweep = Sweep(SweepContext(store, settings, experiment.id, 1, spec, CATALOGUE, note), look)
        return sweep, experiment

    return begin


def turn_of(sweep: Sweep) -> Turn:
    following = sweep.next_turn()
    assert isinstance(following, Turn)
    return following


def given(sweep: Sweep) -> Assignment:
    """A run whose workers are ready at once."""
    return opened(sweep, turn_of(sweep))


def opened(sweep: Sweep, turn: Turn) -> Assignment:
    assignment = sweep.open(turn, READY)
    assert assignment is not None
    return assignment


def complete(sweep: Sweep, store: Store, assignment: Assignment, ending: Ending = COMPLETED) -> None:
    """The worker begins and ends as it would."""
    store.attempts.run_started(
        assignment.run_id, assignment.attempt, total_steps=9, resumed_from_step=0, facts={}
    )
    sweep.ended(assignment.turn, ending)


def in_order(store: Store, experiment: Experiment) -> list[int]:
    """Ids of an experiment's runs in the order of measurement."""
    spec = ExperimentSpec.model_validate_json(store.experiments.spec(experiment.id)[1])
    runs = store.runs.page(experiment_id=experiment.id, page_size=1000).items
    return [run.id for run in sorted(runs, key=lambda run: spec.places()[run.index])]


MACHINE_FAILED = Ending("failed", failure=(FailureClass.infrastructure, "a worker's node is gone"))


def losing(store: Store, monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """The answers of these transactions, counted from now, are lost after their commit."""
    write, numbers = store.database.write, itertools.count()

    def committed_and_lost(body: Callable[[Any], Any]) -> Any:
        answer = write(body)
        if next(numbers) in calls:
            raise StoreUnavailable("the connection was lost")
        return answer

    monkeypatch.setattr(store.database, "write", committed_and_lost)
    monkeypatch.setattr(outages, "RETRY_S", 0.0)


def started(store: Store, run_id: int) -> None:
    with contextlib.suppress(Conflict):  # Reported before; the answer was lost.
        store.attempts.run_started(run_id, 1, total_steps=9, resumed_from_step=0, facts={})
