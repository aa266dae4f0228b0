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
        store.record_placements(experiment.id, 1, [state])
    assert store.placements(experiment.id) == [released]
    ledger = store.ledger(experiment.id)
    assert {part.part: part.time_s for part in ledger.overhead} == {
        "worker_start": 10.0,
        "between_runs": 50.0,
    }
    assert ledger.total.cost_usd == pytest.approx(0.1 * 60 / 3600)
    assert store.experiment_totals(experiment.id).overhead_usd == pytest.approx(ledger.total.cost_usd)


def test_what_others_hold_is_known_by_experiment_and_hardware(store: Store, running: Running) -> None:
    mine, _ = running()
    other, _ = running()
    held = [placement(id, placed_s=1.0) for id in ("a", "b")]
    store.record_placements(other.id, 1, [*held, placement("c", placed_s=1.0, released_s=2.0)])
    assert store.held_by_others(mine.id) == [Held(other.id, "cpu", 4)]
    assert store.held_by_others(other.id) == []


def test_an_older_driver_can_store_no_placement(store: Store, queue: Queue, running: Running) -> None:
    experiment, (run,) = running()
    store.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s2", lease_s=30)
    with pytest.raises(StaleAttempt):
        store.record_placements(experiment.id, 1, [placement("g", placed_s=1.0)])
    with pytest.raises(StaleAttempt):
        store.set_waiting(experiment.id, 1, {run.id: "1 CPU"})
    assert store.placements(experiment.id) == []
    assert store.run(run.id).waits_for is None


def test_what_a_killed_driver_held_ends_when_it_was_last_seen(
    store: Store, queue: Queue, running: Running
) -> None:
    experiment, _ = running()
    store.record_placements(experiment.id, 1, [placement("g", placed_s=100.0, seen_s=130.0)])
    store.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s2", lease_s=30)
    store.driver_started(experiment.id, 2, "node", 2)
    store.record_placements(experiment.id, 2, [placement("h", placed_s=200.0)])
    store.reset_runs_of_dead_attempt(experiment.id, 2)
    assert {held.id: held.released_s for held in store.placements(experiment.id)} == {"g": 130.0, "h": None}
    store.finish_experiment(experiment.id, 2, ExperimentState.succeeded)
    assert store.placements(experiment.id)[1].released_s == 200.0


def test_what_a_run_waits_for_is_shown_until_its_attempt_is_opened(store: Store, running: Running) -> None:
    experiment, (first, second) = running(2)
    store.set_waiting(experiment.id, 1, {first.id: "1 CPU; experiment 7 holds 2 cpu", second.id: "1 CPU"})
    assert store.run(first.id).waits_for == "1 CPU; experiment 7 holds 2 cpu"
    told = [event.message for event in store.events(experiment.id) if event.kind == "run.waiting"]
    assert told == ["waiting for 1 CPU; experiment 7 holds 2 cpu", "waiting for 1 CPU"]
    store.set_waiting(experiment.id, 1, {second.id: None})
    assert store.run(second.id).waits_for is None
    attempt = store.open_attempt(first.id, 1, placement="g")
    assert (store.run(first.id).state, store.run(first.id).waits_for) == (RunState.starting, None)
    assert store.attempts(first.id)[0].placement == "g"
    store.set_waiting(experiment.id, 1, {first.id: "too late"})
    assert store.run(first.id).waits_for is None
    assert attempt == 1


def test_the_queue_lists_what_is_at_work_and_waits_for_capacity(
    store: Store, queue: Queue, running: Running
) -> None:
    experiment, (first, second, third) = running(3)
    store.set_waiting(
        experiment.id, 1, {first.id: "1 CPU", second.id: "capacity: no node has 8 CPU", third.id: "1 CPU"}
    )

    def listed() -> list[str]:
        return [each.reason for each in queue.listing().at_work if each.experiment is not None]

    assert listed() == ["runs wait for 1 CPU; and for capacity: no node has 8 CPU"]
    hidden = queue.listing(visible=Visibility(frozenset())).at_work
    assert [(each.experiment, each.reason) for each in hidden] == [
        (None, "of a project that you are not a member of")
    ]
    store.request_cancel_run(second.id)
    assert store.run(second.id).waits_for is None
    assert listed() == ["runs wait for 1 CPU"]
    store.release_experiment(experiment.id, 1, delay_s=0.0)
    assert listed() == [], "it is in the queue itself"


def test_a_deleted_experiment_leaves_no_placement(store: Store, running: Running) -> None:
    experiment, _ = running()
    store.record_placements(experiment.id, 1, [placement("g", placed_s=1.0, released_s=2.0)])
    store.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    store.delete(experiment.id, at_once=True)
    remove_deleted(store)
    assert store.placements(experiment.id) == []
