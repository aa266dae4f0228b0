"""Devices that an experiment holds, and runs that wait for some: fenced, and closed with their driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from service.domain.access import Visibility
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import Held, StaleAttempt, Store
from tests.conformance.building import remove_deleted
from tests.execution.conftest import placement

Running = Callable[..., Any]


def test_a_placement_is_stored_as_it_is_now_however_often_it_is_sent(store: Store, running: Running) -> None:
    experiment, _ = running()
    held = placement("g", placed_s=100.0, seen_s=101.0)
    released = replace(held, ready_s=110.0, released_s=160.0, seen_s=160.0)
    for state in (held, held, released, released):
        store.drivers.record_placements(experiment.id, 1, [state])
    assert store.drivers.placements(experiment.id) == [released]
    ledger = store.accounting.ledger(experiment.id)
    assert {part.part: part.time_s for part in ledger.overhead} == {
        "worker_start": 10.0,
        "between_runs": 50.0,
    }
    assert ledger.total.cost_usd == pytest.approx(0.1 * 60 / 3600)
    assert store.accounting.totals(experiment.id).overhead_usd == pytest.approx(ledger.total.cost_usd)


def test_what_others_hold_is_known_by_experiment_and_hardware(store: Store, running: Running) -> None:
    mine, _ = running()
    other, _ = running()
    held = [placement(id, placed_s=1.0) for id in ("a", "b")]
    store.drivers.record_placements(other.id, 1, [*held, placement("c", placed_s=1.0, released_s=2.0)])
    assert store.drivers.held_by_others(mine.id) == [Held(other.id, "cpu", 4)]
    assert store.drivers.held_by_others(other.id) == []


def test_an_older_driver_can_store_no_placement(store: Store, queue: Queue, running: Running) -> None:
    experiment, (run,) = running()
    store.drivers.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s2", lease_s=30)
    with pytest.raises(StaleAttempt):
        store.drivers.record_placements(experiment.id, 1, [placement("g", placed_s=1.0)])
    with pytest.raises(StaleAttempt):
        store.drivers.set_waiting(experiment.id, 1, {run.id: "1 CPU"})
    assert store.drivers.placements(experiment.id) == []
    assert store.runs.get(run.id).waits_for is None


def test_what_a_killed_driver_held_ends_when_it_was_last_seen(
    store: Store, queue: Queue, running: Running
) -> None:
    experiment, _ = running()
    store.drivers.record_placements(experiment.id, 1, [placement("g", placed_s=100.0, seen_s=130.0)])
    store.drivers.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s2", lease_s=30)
    store.drivers.started(experiment.id, 2, "node", 2)
    store.drivers.record_placements(experiment.id, 2, [placement("h", placed_s=200.0)])
    store.attempts.reset_runs_of_dead_attempt(experiment.id, 2)
    assert {held.id: held.released_s for held in store.drivers.placements(experiment.id)} == {
        "g": 130.0,
        "h": None,
    }
    store.drivers.finish_experiment(experiment.id, 2, ExperimentState.succeeded)
    assert store.drivers.placements(experiment.id)[1].released_s == 200.0


def test_what_a_run_waits_for_is_shown_until_its_attempt_is_opened(store: Store, running: Running) -> None:
    experiment, (first, second) = running(2)
    store.drivers.set_waiting(
        experiment.id, 1, {first.id: "1 CPU; experiment 7 holds 2 cpu", second.id: "1 CPU"}
    )
    assert store.runs.get(first.id).waits_for == "1 CPU; experiment 7 holds 2 cpu"
    told = [event.message for event in store.experiments.events(experiment.id) if event.kind == "run.waiting"]
    assert told == ["waiting for 1 CPU; experiment 7 holds 2 cpu", "waiting for 1 CPU"]
    store.drivers.set_waiting(experiment.id, 1, {second.id: None})
    assert store.runs.get(second.id).waits_for is None
    attempt = store.attempts.open(first.id, 1, placement="g")
    assert (store.runs.get(first.id).state, store.runs.get(first.id).waits_for) == (RunState.starting, None)
    assert store.runs.attempts(first.id)[0].placement == "g"
    store.drivers.set_waiting(experiment.id, 1, {first.id: "too late"})
    assert store.runs.get(first.id).waits_for is None
    assert attempt == 1


def test_the_queue_lists_what_is_at_work_and_waits_for_capacity(
    store: Store, queue: Queue, running: Running
) -> None:
    experiment, (first, second, third) = running(3)
    store.drivers.set_waiting(
        experiment.id, 1, {first.id: "1 CPU", second.id: "capacity: no node has 8 CPU", third.id: "1 CPU"}
    )

    def listed() -> list[str]:
        return [each.reason for each in queue.listing().at_work if each.experiment is not None]

    assert listed() == ["runs wait for 1 CPU; and for capacity: no node has 8 CPU"]
    hidden = queue.listing(visible=Visibility(frozenset())).at_work
    assert [(each.experiment, each.reason) for each in hidden] == [
        (None, "of a project that you are not a member of")
    ]
    store.requests.cancel_run(second.id)
    assert store.runs.get(second.id).waits_for is None
    assert listed() == ["runs wait for 1 CPU"]
    store.drivers.release_experiment(experiment.id, 1, delay_s=0.0)
    assert listed() == [], "it is in the queue itself"


def test_a_deleted_experiment_leaves_no_placement(store: Store, running: Running) -> None:
    experiment, _ = running()
    store.drivers.record_placements(experiment.id, 1, [placement("g", placed_s=1.0, released_s=2.0)])
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    store.removal.delete(experiment.id, at_once=True)
    remove_deleted(store)
    assert store.drivers.placements(experiment.id) == []
