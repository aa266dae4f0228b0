"""What the ending of a run leads to: another attempt, a result, or the end of the experiment."""

from __future__ import annotations

import threading

import pytest

from service.domain.events import EventKind
from service.domain.states import ExperimentState, RunState
from service.driving.choosing import Wait
from service.recording.mailbox import Ending, Turn
from service.store import CheckpointRow, RecordBatch, Store
from tests.execution.conftest import Clock
from tests.execution.sweep.conftest import (
    COMPLETED,
    PAUSED,
    READY,
    Begin,
    complete,
    given,
    opened,
    turn_of,
)
from trainers.errors import FailureClass
from trainers.reporting import StopReason


def test_a_machine_failure_is_tried_again_after_its_delay(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(1)
    first = given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.infrastructure, "a worker process died")))
    assert store.runs.get(first.run_id).state is RunState.queued
    assert sweep.next_turn() is Wait.later
    clock.forward(2)
    again = given(sweep)
    assert (again.run_id, again.attempt) == (first.run_id, 2)


def test_a_bug_is_tried_max_restarts_times(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(1, max_restarts=2)
    for attempt in (1, 2, 3):
        assignment = given(sweep)
        assert assignment.attempt == attempt
        sweep.ended(assignment.turn, Ending("failed", failure=(FailureClass.bug, "IndexError")))
        clock.forward(301)
    assert store.runs.get(assignment.run_id).state is RunState.failed
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.failed, (FailureClass.bug, "IndexError"))


def test_out_of_memory_is_a_result_and_not_tried_again(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2)
    first, second = given(sweep), given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.out_of_memory, "batch 32 does not fit")))
    complete(sweep, store, second)
    assert store.runs.get(first.run_id).state is RunState.failed
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)


def test_a_run_cancelled_on_request_leaves_its_experiment_succeeded(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2)
    first, second = given(sweep), given(sweep)
    store.requests.cancel_run(first.run_id)
    sweep.ended(first.turn, Ending("stopped", stop_reason=StopReason.cancel))
    complete(sweep, store, second)
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)


def test_progress_between_machine_failures_keeps_the_delay_short(
    begin: Begin, store: Store, clock: Clock
) -> None:
    sweep, _ = begin(1)
    for attempt in range(1, 8):
        assignment = given(sweep)
        assert assignment.attempt == attempt
        assert assignment.history.checkpoint_step == ((attempt - 1) * 10 or None)
        store.recording.record(
            RecordBatch(checkpoints=[CheckpointRow(assignment.run_id, attempt, attempt * 10, "/x")])
        )
        sweep.ended(assignment.turn, Ending("failed", failure=(FailureClass.infrastructure, "died")))
        clock.forward(1.1)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StopReason.cancel, RunState.cancelled),
        (StopReason.pause, RunState.paused),
        (StopReason.early_stop, RunState.stopped),
        (StopReason.preempted, RunState.queued),
    ],
)
def test_a_stopped_run_goes_where_its_reason_says(
    begin: Begin, store: Store, reason: StopReason, state: RunState
) -> None:
    sweep, experiment = begin(1)
    assignment = given(sweep)
    if reason is StopReason.cancel:
        store.requests.cancel_run(assignment.run_id)
    if reason is StopReason.pause:
        store.requests.pause(experiment.id)
    sweep.ended(assignment.turn, Ending("stopped", stop_reason=reason, summary={"steps": 3}))
    assert store.runs.get(assignment.run_id).state is state


def test_a_pause_withdrawn_while_runs_stop_for_it_is_forgotten(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first, second = given(sweep), given(sweep)
    store.requests.pause(experiment.id)
    sweep.stopping = StopReason.pause
    sweep.ended(first.turn, PAUSED)
    store.requests.resume(experiment.id)
    sweep.ended(second.turn, PAUSED)  # It had stopped before it could hear of that.
    sweep.stopping = None
    complete(sweep, store, given(sweep))
    complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.conclude() is ExperimentState.succeeded
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [(run.state, run.attempt) for run in runs] == [(RunState.succeeded, 2)] * 2


def test_a_pause_withdrawn_as_the_experiment_pauses_is_not_carried_out(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1)
    store.requests.pause(experiment.id)
    sweep.stopping = StopReason.pause
    assert sweep.next_turn() is Wait.over
    store.requests.resume(experiment.id)
    assert sweep.conclude() is None
    sweep.stopping = None
    sweep.recover()
    complete(sweep, store, given(sweep))
    assert sweep.conclude() is ExperimentState.succeeded


def test_a_run_that_is_retried_as_the_experiment_ends_is_run(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    first = given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.bad_data, "line 3")))
    assert sweep.next_turn() is Wait.over
    store.requests.retry_run(first.run_id)
    assert sweep.conclude() is None
    assert store.runs.get(first.run_id).state is RunState.queued
    sweep.recover()
    complete(sweep, store, given(sweep))
    assert sweep.conclude() is ExperimentState.succeeded


def test_runs_whose_trials_were_ended_start_again_when_people_ask_for_more(
    begin: Begin, store: Store
) -> None:
    """A pause took too long, so that all trials were ended at once, and was withdrawn just then."""
    sweep, experiment = begin(1)
    first = given(sweep)
    store.attempts.run_started(first.run_id, 1, total_steps=9, resumed_from_step=0, facts={})
    store.requests.pause(experiment.id)
    store.requests.resume(experiment.id)
    assert sweep.conclude() is None
    sweep.recover()
    assert given(sweep).attempt == 2


def test_an_ending_waits_for_the_report_of_its_start(begin: Begin, store: Store) -> None:
    """The database was away: the driver comes back to it before the recorder does."""
    sweep, _ = begin(1)
    assignment = given(sweep)
    late = threading.Timer(
        0.5,
        lambda: store.attempts.run_started(
            assignment.run_id, 1, total_steps=9, resumed_from_step=0, facts={}
        ),
    )
    late.start()
    sweep.ended(assignment.turn, COMPLETED)
    late.join()
    assert store.runs.get(assignment.run_id).state is RunState.succeeded


def test_an_echo_of_an_ending_changes_nothing(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    assignment = given(sweep)
    complete(sweep, store, assignment)
    sweep.ended(assignment.turn, Ending("failed", failure=(FailureClass.bug, "late")))
    assert store.runs.get(assignment.run_id).state is RunState.succeeded


AXIS = {"search": {"axes": {"batch.global_size": [8, 16, 32, 64]}}, "batch": {"micro_size": "auto"}}


def test_out_of_memory_prunes_what_needs_more(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1, **AXIS)
    sizes = {
        run.id: run.point["batch.global_size"] for run in store.runs.page(experiment_id=experiment.id).items
    }
    while (assignment := given(sweep)) and sizes[assignment.run_id] != 32:
        complete(sweep, store, assignment)
    sweep.ended(
        assignment.turn, Ending("failed", failure=(FailureClass.out_of_memory, "micro-batch 32 is too large"))
    )
    while isinstance(following := sweep.next_turn(), Turn):
        complete(sweep, store, opened(sweep, following))
    ended = {sizes[run.id]: run for run in store.runs.page(experiment_id=experiment.id).items}
    # 64 may have been measured before 32 was: then it stands.
    assert {size for size, run in ended.items() if run.state is RunState.succeeded} >= {8, 16}
    if ended[64].state is not RunState.succeeded:
        assert ended[64].failure_class is FailureClass.out_of_memory
        assert (ended[64].failure_message or "").startswith("does not fit (by 32)")
    assert sweep.final_state()[0] is ExperimentState.succeeded


NO_TEXT = (FailureClass.bad_data, "train.jsonl, line 1, field text: missing (found: sentence, label)")


def test_a_mistake_in_the_data_of_all_runs_ends_the_experiment_once(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(6)
    first = given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=NO_TEXT))
    assert sweep.next_turn() is Wait.over
    assert sweep.conclude() is ExperimentState.failed
    assert store.experiments.get(experiment.id).failure_message == NO_TEXT[1]
    runs = store.runs.page(experiment_id=experiment.id).items
    assert {(run.state, run.failure_class, run.failure_message) for run in runs} == {
        (RunState.failed, *NO_TEXT)
    }
    assert sorted(run.attempt for run in runs) == [0, 0, 0, 0, 0, 1]
    told = [event.kind for event in store.experiments.events(experiment.id) if NO_TEXT[1] in event.message]
    assert told == [EventKind.run_failed, EventKind.experiment_failed]


def test_a_run_that_waits_for_its_workers_is_spared_a_mistake_in_data(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2)
    first, second = given(sweep), turn_of(sweep)
    sweep.ended(first.turn, Ending("failed", failure=NO_TEXT))
    assert not sweep.wanted(second)
    assert sweep.open(second, READY) is None
    assert sweep.conclude() is ExperimentState.failed
    assert store.runs.get(second.run_id).failure_message == NO_TEXT[1]


def test_runs_with_other_data_are_judged_separately(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2, search={"axes": {"task.path": ["good", "bad"]}})
    paths = {run.id: run.point["task.path"] for run in store.runs.page(experiment_id=experiment.id).items}
    attempts = 0
    while isinstance(turn := sweep.next_turn(), Turn):
        assignment = opened(sweep, turn)
        if paths[turn.run_id] == "good":
            complete(sweep, store, assignment)
        else:
            attempts += 1
            sweep.ended(turn, Ending("failed", failure=NO_TEXT))
    ended = store.runs.page(experiment_id=experiment.id).items
    assert attempts == 1
    assert {run.state for run in ended if paths[run.id] == "good"} == {RunState.succeeded}
    assert {run.failure_message for run in ended if paths[run.id] == "bad"} == {NO_TEXT[1]}
    assert sweep.conclude() is ExperimentState.incomplete


def test_data_that_a_run_has_trained_on_are_usable(begin: Begin, store: Store) -> None:
    """One node may lack the files, or they changed between the attempts at one run."""
    sweep, _ = begin(3)
    complete(sweep, store, given(sweep))
    second = given(sweep)
    sweep.ended(second.turn, Ending("failed", failure=NO_TEXT))
    complete(sweep, store, given(sweep))
    assert sweep.conclude() is ExperimentState.incomplete


def test_workers_that_fail_before_they_are_ready_count_as_a_failure_of_the_run(
    begin: Begin, store: Store
) -> None:
    sweep, _ = begin(1)
    turn = turn_of(sweep)
    sweep.ended(turn, Ending("failed", failure=(FailureClass.infrastructure, "a worker process died")))
    run = store.runs.get(turn.run_id)
    assert (run.state, run.infrastructure_failures) == (RunState.queued, 1)
    assert [attempt.failure_class for attempt in store.runs.attempts(turn.run_id)] == [
        FailureClass.infrastructure
    ]
