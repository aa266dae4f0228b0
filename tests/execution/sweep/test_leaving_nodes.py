"""Nodes that drain or die: their runs leave with a checkpoint where there is time, and no others do."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.events import EventKind
from service.domain.records import Event
from service.domain.shares import DeviceAllowance
from service.domain.states import RunState
from service.driving.choosing import Wait
from service.driving.sweep import Sweep
from service.recording.mailbox import Assignment, Ending, Ready
from service.store import AliveRow, CheckpointRow, ProgressRow, RecordBatch, Store
from tests.execution.conftest import Clock
from tests.execution.sweep.conftest import Begin, turn_of
from trainers.errors import FailureClass
from trainers.reporting import StopReason

PREEMPTED = Ending("stopped", stop_reason=StopReason.preempted, summary={"steps": 5})
DIED = Ending("failed", failure=(FailureClass.infrastructure, "a worker process died"))
DRAINING: dict[str, Any] = {"draining": True, "drain_deadline_s": 1_000_040.0}
LOST: dict[str, Any] = {"alive": False, "message": "health check failed"}


def on(sweep: Sweep, *nodes: str) -> Assignment:
    """A run whose workers are ready on these nodes."""
    assignment = sweep.open(turn_of(sweep), Ready(f"on-{nodes}", 0.0, nodes))
    assert assignment is not None
    return assignment


def trains(store: Store, assignment: Assignment, *, step: int, checkpoint: int) -> None:
    run_id, attempt = assignment.run_id, assignment.attempt
    store.attempts.run_started(run_id, attempt, total_steps=9, resumed_from_step=0, facts={})
    store.recording.record(
        RecordBatch(
            [],
            [],
            [],
            [ProgressRow(run_id, attempt, step, 9, "training")],
            [CheckpointRow(run_id, attempt, checkpoint, "/checkpoint")],
            [AliveRow(run_id, attempt, 0.0)],
        )
    )


def last_event(store: Store, assignment: Assignment) -> Event:
    run = store.runs.get(assignment.run_id)
    return [each for each in store.experiments.events(run.experiment_id) if each.run_id == run.id][-1]


@pytest.fixture(autouse=True)
def two_nodes(resources: list[dict[str, float]]) -> None:
    resources[:] = [{"CPU": 1.0}, {"CPU": 1.0}]


@pytest.mark.parametrize("measure", ["shared", "exclusive"])
def test_a_run_on_a_draining_node_stops_and_the_others_do_not(
    begin: Begin, leaving: dict[int, dict[str, Any]], measure: str
) -> None:
    sweep, _ = begin(2, measure=measure)
    first, _ = on(sweep, "0"), on(sweep, "1")
    leaving[0] = DRAINING
    assert not sweep.preempted
    sweep.see_nodes()
    assert sweep.preempted == {(first.run_id, first.attempt)}


def test_a_group_stops_when_one_of_its_nodes_drains(begin: Begin, leaving: dict[int, dict[str, Any]]) -> None:
    sweep, _ = begin(1, parallel={"strategy": "ddp", "workers": 2})
    group = on(sweep, "0", "1")
    leaving[1] = DRAINING
    sweep.see_nodes()
    assert sweep.preempted == {(group.run_id, group.attempt)}


def preempted(store: Store, run: Any, lost_steps: int) -> str:
    """Checks that a run waits for another attempt without a failure; returns what its last event says."""
    stored = store.runs.get(run.run_id)
    assert (stored.state, stored.own_failures, stored.infrastructure_failures) == (RunState.queued, 0, 0)
    event = last_event(store, run)
    assert (event.kind, event.data) == (EventKind.run_preempted, {"lost_steps": lost_steps})
    return event.message


def test_it_is_queued_again_with_the_reason_and_without_a_failure(
    begin: Begin, store: Store, leaving: dict[int, dict[str, Any]]
) -> None:
    sweep, _ = begin(1)
    run = on(sweep, "0")
    trains(store, run, step=5, checkpoint=5)
    leaving[0] = DRAINING
    sweep.see_nodes()
    sweep.ended(run.turn, PREEMPTED)
    assert "node host-0 is draining, and goes at 13:47:20 UTC" in preempted(store, run, lost_steps=0)


def test_a_run_that_does_not_get_to_its_checkpoint_in_time_is_preempted_all_the_same(
    begin: Begin, store: Store, leaving: dict[int, dict[str, Any]]
) -> None:
    sweep, _ = begin(1)
    run = on(sweep, "0")
    trains(store, run, step=5, checkpoint=3)
    leaving[0] = DRAINING
    sweep.see_nodes()
    leaving[0] = LOST  # Ray forgets the notice with the node.
    sweep.ended(run.turn, DIED)
    assert "node host-0 was drained (health check failed): a worker process died" in preempted(
        store, run, lost_steps=2
    )


def test_a_run_whose_node_was_lost_says_so_and_no_other_run_gives_its_device_back(
    begin: Begin, store: Store, leaving: dict[int, dict[str, Any]]
) -> None:
    sweep, _ = begin(2)
    older, newer = on(sweep, "0"), on(sweep, "1")
    trains(store, older, step=5, checkpoint=3)
    leaving[0] = LOST
    sweep.see_nodes()
    sweep.allow({"cpu": DeviceAllowance(1, reason="its share is 1 of the cpu devices")})
    assert not sweep.preempted
    sweep.ended(older.turn, DIED)
    assert not sweep.preempted
    assert [live.run_id for live in sweep.live] == [newer.run_id]
    assert store.runs.get(older.run_id).failure_class is FailureClass.infrastructure
    event = last_event(store, older)
    assert event.kind == EventKind.run_retrying
    assert "node host-0 was lost (health check failed): a worker process died" in event.message


def test_a_worker_that_outlives_its_node_does_not_blame_the_share(
    begin: Begin, store: Store, leaving: dict[int, dict[str, Any]]
) -> None:
    sweep, _ = begin(1)
    run = on(sweep, "0")
    trains(store, run, step=5, checkpoint=5)
    sweep.allow({"cpu": DeviceAllowance(0, reason="its share is 0 of the cpu devices")})
    leaving[0] = LOST
    sweep.see_nodes()
    sweep.ended(run.turn, PREEMPTED)
    event = last_event(store, run)
    assert (event.kind, event.data) == (EventKind.run_retrying, {"lost_steps": 0})
    assert "infrastructure: node host-0 was lost" in event.message


def test_nothing_new_starts_on_a_draining_node(begin: Begin, leaving: dict[int, dict[str, Any]]) -> None:
    sweep, _ = begin(3)
    on(sweep, "0")
    ready = turn_of(sweep)
    leaving[1] = DRAINING
    sweep.see_nodes()
    there = Ready("there", 0.0, ("1",))
    assert sweep.open(ready, there) is None
    assert sweep.leaves(there)
    assert not sweep.leaves(Ready("here", 0.0, ("0",)))


def test_a_run_of_a_draining_node_continues_where_there_is_room(
    begin: Begin, store: Store, clock: Clock, leaving: dict[int, dict[str, Any]]
) -> None:
    sweep, _ = begin(1)
    run = on(sweep, "0")
    trains(store, run, step=5, checkpoint=5)
    leaving[0] = leaving[1] = DRAINING
    clock.forward(3)
    sweep.see_nodes()
    sweep.ended(run.turn, PREEMPTED)
    assert sweep.next_turn() is Wait.later
    del leaving[1]
    clock.forward(3)
    sweep.see_nodes()
    again = on(sweep, "1")
    assert (again.run_id, again.attempt) == (run.run_id, 2)
