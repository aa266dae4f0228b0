"""Sweeps that reach their budget."""

from __future__ import annotations

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.driving.choosing import Wait
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.store import Store
from tests.execution.conftest import Clock
from tests.execution.sweep.conftest import (
    CPUS,
    READY,
    Begin,
    complete,
    given,
    opened,
    turn_of,
)


def test_a_reached_budget_stops_the_rest(begin: Begin, store: Store, clock: Clock, notes: list[str]) -> None:
    sweep, experiment = begin(3, budget={"hours": 1.0}, queue={"max_concurrent_runs": 1})
    first = given(sweep)
    clock.forward(2 * 3600)
    complete(sweep, store, first)
    assert sweep.next_turn() is Wait.over
    assert "budget.hours reached" in notes[0]
    state, _ = sweep.final_state()
    assert state is ExperimentState.succeeded
    store.drivers.finish_experiment(experiment.id, 1, state)
    states = [run.state for run in store.runs.page(experiment_id=experiment.id).items]
    assert states == [RunState.succeeded, RunState.stopped, RunState.stopped]


def test_a_budget_of_runs_ends_the_sweep(begin: Begin, store: Store, notes: list[str]) -> None:
    sweep, _ = begin(3, budget={"runs": 2})
    for _ in range(2):
        complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)
    assert notes == ["budget.runs reached: 2 of 2 runs; no further runs are started"]


def test_a_held_budget_pauses_and_is_granted_again_by_a_resume(
    begin: Begin, store: Store, queue: Queue, settings: Settings
) -> None:
    sweep, experiment = begin(3, budget={"runs": 1, "when_reached": "hold"})
    complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.paused, None)
    spec = ExperimentSpec.model_validate_json(store.experiments.spec(experiment.id)[1])
    context = SweepContext(store, settings, experiment.id, 1, spec, CATALOGUE)
    dead = Sweep(context, lambda: ClusterSnapshot(0.0, True, None, ()))
    assert dead.next_turn() is Wait.over  # A driver that died before the pause grants nothing.
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.paused)
    store.requests.resume(experiment.id)
    queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, 2, "node", 1)
    nodes = (ClusterNode("0", "0", True, dict(CPUS), {}),)
    context = SweepContext(store, settings, experiment.id, 2, spec, CATALOGUE)
    again = Sweep(context, lambda: ClusterSnapshot(0.0, True, None, nodes))
    complete(again, store, given(again))
    assert again.next_turn() is Wait.over
    assert again.final_state() == (ExperimentState.paused, None)


def test_a_budget_used_up_while_a_run_waits_for_room_charges_it_nothing(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2, budget={"runs": 1})
    first, second = turn_of(sweep), turn_of(sweep)
    complete(sweep, store, opened(sweep, first))
    assert sweep.open(second, READY) is None
    assert not sweep.wanted(second)
    assert store.runs.attempts(second.run_id) == []
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)
