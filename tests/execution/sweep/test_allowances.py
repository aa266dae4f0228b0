"""A sweep holds no more devices than it is allowed, and gives back those beyond."""

from __future__ import annotations

from service.domain.events import EventKind
from service.domain.shares import DeviceAllowance
from service.domain.states import ExperimentState, RunState
from service.driving.choosing import Wait
from service.fairness.state import USEFUL_S
from service.recording.mailbox import Ending
from service.store import Store
from tests.execution.sweep.conftest import READY, Begin, complete, given, turn_of
from trainers.reporting import StopReason

PREEMPTED = Ending("stopped", stop_reason=StopReason.preempted, summary={"steps": 3})


def test_starts_no_more_runs_than_it_may_hold_devices(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2)
    sweep.allow({"cpu": DeviceAllowance(1)})
    first = given(sweep)
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, first)
    given(sweep)


def test_without_any_allowance_it_waits(begin: Begin) -> None:
    sweep, _ = begin(2)
    first = given(sweep)
    sweep.allow({"cpu": DeviceAllowance(0, preemptible=False)})
    assert sweep.next_turn() is Wait.later
    assert not sweep.may_start_more
    sweep.allow({})
    assert sweep.may_start_more
    given(sweep)
    assert first.run_id in {live.run_id for live in sweep.live}


def test_once_every_run_has_its_turn_idle_processes_end(begin: Begin) -> None:
    sweep, _ = begin(2)
    given(sweep)
    assert sweep.may_start_more
    given(sweep)
    assert sweep.next_turn() is Wait.later
    assert not sweep.may_start_more


def test_with_nothing_live_and_no_allowance_it_yields_its_place(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first = given(sweep)
    sweep.allow({"cpu": DeviceAllowance(0, reason="no cpu device is free")})
    store.attempts.run_started(first.run_id, 1, total_steps=9, resumed_from_step=0, facts={})
    sweep.ended(first.turn, PREEMPTED)
    assert sweep.next_turn() is Wait.over
    assert sweep.conclude() is ExperimentState.queued
    assert store.experiments.get(experiment.id).state is ExperimentState.queued
    assert {run.state for run in store.runs.page(experiment_id=experiment.id).items} == {RunState.queued}
    assert store.experiments.events(experiment.id)[-1].message.endswith("no cpu device is free")


def test_an_allowance_that_comes_before_the_end_is_used(begin: Begin) -> None:
    sweep, _ = begin(1)
    sweep.allow({"cpu": DeviceAllowance(0)})
    assert sweep.next_turn() is Wait.over
    sweep.allow({"cpu": DeviceAllowance(1)})
    assert sweep.conclude() is None
    sweep.recover()
    given(sweep)


def test_a_cancellation_goes_before_yielding(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1)
    sweep.allow({"cpu": DeviceAllowance(0)})
    assert sweep.next_turn() is Wait.over
    store.requests.cancel(experiment.id)
    sweep.stopping = StopReason.cancel
    assert sweep.conclude() is ExperimentState.cancelled


def test_the_newest_run_beyond_the_allowance_is_preempted_and_queued_again(
    begin: Begin, store: Store
) -> None:
    sweep, experiment = begin(2)
    first, second = given(sweep), given(sweep)
    assert not sweep.preempted
    sweep.allow({"cpu": DeviceAllowance(1, reason="its share is 1 of the cpu devices")})
    assert sweep.preempted == {(second.run_id, second.attempt)}
    store.attempts.run_started(second.run_id, 1, total_steps=9, resumed_from_step=0, facts={})
    sweep.ended(second.turn, PREEMPTED)
    run = store.runs.get(second.run_id)
    assert (run.state, run.own_failures, run.infrastructure_failures) == (RunState.queued, 0, 0)
    assert not sweep.preempted
    assert sweep.next_turn() is Wait.later
    events = [
        event for event in store.experiments.events(experiment.id) if event.kind == EventKind.run_preempted
    ]
    assert ["its share is 1 of the cpu devices" in event.message for event in events] == [True]
    complete(sweep, store, first)
    again = given(sweep)
    assert (again.run_id, again.attempt) == (second.run_id, 2)


def test_a_run_that_has_worked_for_a_useful_time_goes_before_one_that_has_just_started(
    begin: Begin, store: Store
) -> None:
    now = [store.clock()]
    store.clocks.simulated = lambda: now[0]
    sweep, _ = begin(2)
    first = given(sweep)
    now[0] += USEFUL_S
    given(sweep)
    sweep.allow({"cpu": DeviceAllowance(1)})
    assert sweep.preempted == {(first.run_id, first.attempt)}


def test_a_run_that_is_not_placed_yet_goes_before_one_that_trains(begin: Begin) -> None:
    sweep, _ = begin(2)
    waiting = turn_of(sweep)
    training = given(sweep)
    sweep.allow({"cpu": DeviceAllowance(1)})
    assert not sweep.wanted(waiting)
    assert sweep.wanted(training.turn)
    assert not sweep.preempted


def test_workers_that_get_ready_beyond_the_allowance_get_no_attempt(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2)
    given(sweep)
    turn = turn_of(sweep)
    sweep.allow({"cpu": DeviceAllowance(1)})
    assert sweep.open(turn, READY) is None
    assert store.runs.get(turn.run_id).state is RunState.queued


def test_what_is_not_preemptible_ends_in_its_own_time(begin: Begin) -> None:
    sweep, _ = begin(3)
    given(sweep), given(sweep)
    sweep.allow({"cpu": DeviceAllowance(0, preemptible=False)})
    assert not sweep.preempted
    assert sweep.next_turn() is Wait.later


def test_a_run_that_is_measured_alone_is_not_interrupted(begin: Begin) -> None:
    sweep, _ = begin(1, measure="exclusive")
    given(sweep)
    sweep.allow({"cpu": DeviceAllowance(0)})
    assert not sweep.preempted


def test_a_run_larger_than_the_allowance_runs_alone(begin: Begin) -> None:
    sweep, _ = begin(2, resources={"cpus_per_worker": 2})
    sweep.allow({"cpu": DeviceAllowance(1)})
    given(sweep)
    assert not sweep.preempted
    assert sweep.next_turn() is Wait.later
