"""Transitions: each happens once, from the states that allow it, under the current attempt."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from service.domain.neighbours import Neighbour, of_time
from service.domain.records import Experiment, MeasurementRow, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.reuse import Reuse
from service.store import AliveRow, CheckpointRow, Conflict, NewExperiment, RecordBatch, StaleAttempt, Store
from tests.conformance.building import Submit, plans_of
from trainers.errors import FailureClass

Running = Callable[..., tuple[Experiment, list[Run]]]
Training = Callable[..., tuple[Experiment, Run, int]]


def test_a_run_from_queue_to_result(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    assert (run.state, run.attempt, run.total_steps) == (RunState.running, 1, 100)
    moved = store.attempts.finish_run(
        run.id, attempt, RunState.succeeded, summary={"accuracy": 0.9, "note": "x", "f1": None}
    )
    assert moved is RunState.succeeded
    done = store.runs.get(run.id)
    assert (done.state, done.accuracy, done.f1, done.phase) == (RunState.succeeded, 0.9, None, None)
    assert done.ended_s is not None
    assert store.runs.summary(run.id) == {"accuracy": 0.9, "note": "x", "f1": None}
    assert (
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
        is ExperimentState.succeeded
    )
    assert store.experiments.get(experiment.id).ended_s is not None
    (tried,) = store.runs.attempts(run.id)
    assert (tried.state, tried.experiment_attempt, tried.resumed_from_step) == (RunState.succeeded, 1, 0)
    assert [event.kind for event in store.experiments.events(experiment.id)] == [
        "experiment.submitted", "experiment.claimed", "experiment.started", "run.starting", "run.started",
        "run.succeeded", "experiment.succeeded",
    ]  # fmt: skip


def test_nan_figures_are_kept_and_found_by_no_filter(store: Store, training: Training) -> None:
    _, run, attempt = training()
    figures = {"accuracy": math.nan, "train_loss": math.inf, "validation_loss": -math.inf}
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=figures)
    summary = store.runs.summary(run.id)
    assert math.isnan(summary["accuracy"])  # type: ignore[arg-type]
    assert (summary["train_loss"], summary["validation_loss"]) == (math.inf, -math.inf)
    assert (store.runs.get(run.id).accuracy, store.runs.get(run.id).train_loss) == (None, math.inf)
    assert store.runs.page(filter="accuracy > 0.5").items == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RunState.succeeded, RunState.cancelled),
        (RunState.cancelled, RunState.succeeded),
        (RunState.failed, RunState.failed),
        (RunState.stopped, RunState.failed),
        (RunState.paused, RunState.succeeded),
    ],
)
def test_an_attempt_ends_once(store: Store, training: Training, first: RunState, second: RunState) -> None:
    experiment, run, attempt = training()
    if first is RunState.cancelled:
        store.requests.cancel_run(run.id)
    if first is RunState.paused:
        store.requests.pause(experiment.id)
    store.attempts.finish_run(run.id, attempt, first)
    with pytest.raises(Conflict, match=str(first)):
        store.attempts.finish_run(run.id, attempt, second)
    assert store.runs.get(run.id).state is first


@pytest.mark.parametrize("chosen, shown", [("multi_fused", "multi_fused"), (None, "auto")])
def test_a_started_run_shows_the_implementation_that_runs(
    store: Store, running: Running, chosen: str | None, shown: str
) -> None:
    experiment, (run,) = running(1, optimizer={"name": "adan", "implementation": "auto"})
    attempt = store.attempts.open(run.id, experiment.attempt)
    facts = {"optimizer_implementation": chosen}  # None: a run without steps has no optimizer.
    store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts=facts)
    assert store.runs.get(run.id).implementation == shown


def test_succeeded_needs_a_started_run(store: Store, running: Running) -> None:
    experiment, (run,) = running()
    attempt = store.attempts.open(run.id, experiment.attempt)
    with pytest.raises(Conflict, match="starting"):
        store.attempts.finish_run(run.id, attempt, RunState.succeeded)


def test_a_refused_transition_leaves_no_trace(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    before = store.experiments.events(experiment.id)
    with pytest.raises(StaleAttempt):
        store.attempts.finish_run(run.id, attempt + 1, RunState.succeeded, summary={"accuracy": 1.0})
    assert store.experiments.events(experiment.id) == before
    assert store.runs.summary(run.id) == {}


def test_retry_queues_counts_and_keeps_the_failure(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    failure = (FailureClass.infrastructure, "node lost")
    moved = store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure, retry_delay_s=5.0)
    assert moved is RunState.queued
    waiting = store.runs.get(run.id)
    assert (waiting.own_failures, waiting.infrastructure_failures) == (0, 1)
    assert waiting.failure_class is FailureClass.infrastructure
    assert waiting.not_before_s > store.clock() + 3
    (tried,) = store.runs.attempts(run.id)
    assert (tried.state, tried.failure_class) == (RunState.failed, FailureClass.infrastructure)
    with pytest.raises(StaleAttempt):
        store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    assert store.attempts.open(run.id, experiment.attempt) == attempt + 1
    assert store.runs.get(run.id).failure_class is None


@pytest.mark.parametrize(
    ("failure", "counted"),
    [
        (FailureClass.bug, (1, 0)), (FailureClass.out_of_memory, (1, 0)), (FailureClass.lost, (0, 1)),
        (FailureClass.infrastructure, (0, 1)), (FailureClass.preempted, (0, 0)),
    ],
)  # fmt: skip
def test_failures_of_machines_are_counted_apart(
    store: Store, training: Training, failure: FailureClass, counted: tuple[int, int]
) -> None:
    _, run, attempt = training()
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=(failure, "why"))
    done = store.runs.get(run.id)
    assert (done.own_failures, done.infrastructure_failures) == counted
    assert (done.failure_class, done.failure_message) == (failure, "why")


def test_cancel_beats_retry_and_a_result_beats_cancel(store: Store, running: Running) -> None:
    experiment, (first, second) = running(2)
    for run in (first, second):
        store.attempts.open(run.id, experiment.attempt)
        store.attempts.run_started(run.id, 1, total_steps=1, resumed_from_step=0, facts={})
    assert store.requests.cancel(experiment.id).state is ExperimentState.running
    assert store.drivers.renew_lease(experiment.id, 1, 30).cancel
    failure = (FailureClass.bug, "x")
    assert (
        store.attempts.finish_run(first.id, 1, RunState.failed, failure=failure, retry_delay_s=1)
        is RunState.cancelled
    )
    assert store.attempts.finish_run(second.id, 1, RunState.succeeded) is RunState.succeeded
    assert (
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
        is ExperimentState.succeeded
    )
    assert store.requests.cancel(experiment.id).state is ExperimentState.succeeded


def test_cancel_beats_pause_and_release(store: Store, queue: Queue, submit: Submit) -> None:
    for end in ("pause", "release"):
        submit()
        (held,) = queue.claim("s", lease_s=30)
        store.requests.pause(held.id)
        store.requests.cancel(held.id)
        if end == "pause":
            assert (
                store.drivers.finish_experiment(held.id, 1, ExperimentState.paused)
                is ExperimentState.cancelled
            )
        else:
            assert store.drivers.release_experiment(held.id, 1, delay_s=0) is ExperimentState.cancelled
        assert store.experiments.run_counts(held.id)[RunState.cancelled] == 1


@pytest.mark.parametrize("attempt_of_writer", [0, 2])
def test_every_write_of_another_attempt_at_the_experiment_is_refused(
    store: Store, running: Running, attempt_of_writer: int
) -> None:
    experiment, (run,) = running()
    before = store.experiments.get(experiment.id)
    writes: list[Callable[[], Any]] = [
        lambda: store.drivers.started(experiment.id, attempt_of_writer, "n", 1),
        lambda: store.drivers.renew_lease(experiment.id, attempt_of_writer, 1e6),
        lambda: store.attempts.open(run.id, attempt_of_writer),
        lambda: store.drivers.finish_experiment(experiment.id, attempt_of_writer, ExperimentState.failed),
        lambda: store.drivers.release_experiment(experiment.id, attempt_of_writer, delay_s=0),
        lambda: store.attempts.reset_runs_of_dead_attempt(experiment.id, attempt_of_writer),
    ]
    for write in writes:
        with pytest.raises(StaleAttempt):
            write()
    assert store.experiments.get(experiment.id) == before
    assert store.runs.get(run.id) == run


def test_the_driver_may_say_twice_that_it_started(store: Store, running: Running) -> None:
    experiment, _ = running()
    store.drivers.started(experiment.id, 1, "node", 1)
    assert [event.kind for event in store.experiments.events(experiment.id)].count("experiment.started") == 1


def test_runs_of_a_dead_attempt_are_queued_again(store: Store, queue: Queue, running: Running) -> None:
    experiment, runs = running(3)
    for run in runs[:2]:
        store.attempts.open(run.id, 1)
    store.attempts.run_started(runs[0].id, 1, total_steps=9, resumed_from_step=0, facts={})
    store.requests.cancel_run(runs[1].id)
    store.drivers.release_experiment(experiment.id, 1, delay_s=0)
    (again,) = queue.claim("s2", lease_s=30)
    assert (again.id, again.attempt, again.submission_id) == (
        experiment.id,
        2,
        f"stillhouse-{experiment.id}-2",
    )
    store.drivers.started(experiment.id, 2, "node", 2)
    assert store.attempts.reset_runs_of_dead_attempt(experiment.id, 2) == [runs[0].id, runs[1].id]
    first = store.runs.get(runs[0].id)
    assert (first.state, first.infrastructure_failures) == (RunState.queued, 1)
    assert store.runs.get(runs[1].id).state is RunState.cancelled
    assert store.runs.attempts(runs[0].id)[0].failure_class is FailureClass.lost
    assert store.attempts.reset_runs_of_dead_attempt(experiment.id, 2) == []
    with pytest.raises(StaleAttempt):
        store.attempts.finish_run(runs[0].id, 1, RunState.succeeded)


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (ExperimentState.succeeded, RunState.stopped), (ExperimentState.failed, RunState.failed),
        (ExperimentState.cancelled, RunState.cancelled), (ExperimentState.paused, RunState.paused),
    ],
)  # fmt: skip
def test_runs_go_with_their_experiment(
    store: Store, running: Running, end: ExperimentState, left: RunState
) -> None:
    experiment, runs = running(3)
    store.attempts.open(runs[0].id, 1)
    store.attempts.run_started(runs[0].id, 1, total_steps=1, resumed_from_step=0, facts={})
    store.attempts.finish_run(runs[0].id, 1, RunState.succeeded)
    store.attempts.open(runs[1].id, 1)
    store.drivers.finish_experiment(experiment.id, 1, end, failure=None)
    assert [run.state for run in store.runs.page(experiment_id=experiment.id).items] == [
        RunState.succeeded,
        left,
        left,
    ]
    assert store.runs.attempts(runs[1].id)[0].ended_s is not None
    with pytest.raises(StaleAttempt):
        store.drivers.renew_lease(experiment.id, 1, 30)


def test_pause_and_resume(store: Store, queue: Queue, running: Running, submit: Submit) -> None:
    waiting, _ = running(1)
    store.requests.pause(waiting.id)
    assert store.drivers.renew_lease(waiting.id, 1, 30).pause
    with pytest.raises(Conflict, match="pause"):
        store.attempts.open(store.runs.page(experiment_id=waiting.id).items[0].id, 1)
    assert not store.requests.resume(waiting.id).pause_requested_s
    store.requests.pause(waiting.id)
    store.drivers.finish_experiment(waiting.id, 1, ExperimentState.paused)
    assert queue.claim("s", lease_s=30) == []
    assert store.requests.resume(waiting.id).state is ExperimentState.queued
    assert store.experiments.run_counts(waiting.id)[RunState.queued] == 1
    queued = submit()
    assert store.requests.pause(queued.id).state is ExperimentState.paused
    assert store.requests.cancel(queued.id).state is ExperimentState.cancelled
    with pytest.raises(Conflict):
        store.requests.resume(queued.id)


def test_retry_queues_what_has_no_result(store: Store, running: Running) -> None:
    experiment, runs = running(2)
    with pytest.raises(Conflict, match="running"):
        store.requests.retry(experiment.id)
    store.attempts.open(runs[0].id, 1)
    store.attempts.run_started(runs[0].id, 1, total_steps=1, resumed_from_step=0, facts={})
    store.attempts.finish_run(runs[0].id, 1, RunState.succeeded, summary={"accuracy": 1.0})
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.failed, failure=(FailureClass.bug, "x"))
    again = store.requests.retry(experiment.id)
    assert (again.state, again.failure_class, again.ended_s) == (ExperimentState.queued, None, None)
    states = [run.state for run in store.runs.page(experiment_id=experiment.id).items]
    assert states == [RunState.succeeded, RunState.queued]


def test_retry_of_failed_runs_leaves_those_that_were_stopped(store: Store, running: Running) -> None:
    experiment, runs = running(3)
    ends = (RunState.succeeded, RunState.stopped, RunState.failed)
    for run, end in zip(runs, ends, strict=True):
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=1, resumed_from_step=0, facts={})
        failure = (FailureClass.bug, "x") if end is RunState.failed else None
        store.attempts.finish_run(run.id, attempt, end, failure=failure)
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.incomplete, all_ended=True)
    failed = {RunState.failed}
    assert store.requests.retry(experiment.id, only=failed).state is ExperimentState.queued
    states = [run.state for run in store.runs.page(experiment_id=experiment.id).items]
    assert states == [RunState.succeeded, RunState.stopped, RunState.queued]
    store.requests.cancel(experiment.id)
    with pytest.raises(Conflict, match="no run is failed; there is nothing to retry"):
        store.requests.retry(experiment.id, only=failed)


def measured(
    store: Store, run_id: int, shares: dict[Neighbour, float], *, experiment_attempt: int = 1
) -> int:
    """A run succeeds beside neighbours; returns its attempt."""
    attempt = store.attempts.open(run_id, experiment_attempt)
    store.attempts.run_started(run_id, attempt, total_steps=9, resumed_from_step=0, facts={})
    rows = [
        MeasurementRow(run_id, attempt, of_time(kind), share, "%", "sampled", "host:a", 0.0, 60.0)
        for kind, share in shares.items()
    ]
    store.recording.record(
        RecordBatch(measurements=rows, checkpoints=[CheckpointRow(run_id, attempt, 9, f"/c/{run_id}")])
    )
    store.attempts.finish_run(run_id, attempt, RunState.succeeded, summary={"accuracy": 0.5 + attempt / 10})
    return attempt


def test_retry_of_disturbed_results_measures_them_from_the_beginning(
    store: Store, queue: Queue, running: Running
) -> None:
    experiment, (alone, crowded, other) = running(3)
    measured(store, alone.id, {Neighbour.foreign: 3.0})
    measured(store, crowded.id, {Neighbour.foreign: 60.0, Neighbour.same_experiment: 0.0})
    measured(store, other.id, {Neighbour.other_experiment: 11.0})
    with pytest.raises(Conflict, match="running"):
        store.requests.retry_disturbed(experiment.id)
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    with pytest.raises(Conflict, match="nothing to retry"):
        store.requests.retry(experiment.id)

    assert store.requests.retry_disturbed(experiment.id).state is ExperimentState.queued
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [run.state for run in runs] == [RunState.succeeded, RunState.queued, RunState.queued]
    again = runs[1]
    assert (again.attempt, again.first_attempt, again.step) == (1, 2, 0)
    assert (again.checkpoint, again.checkpoint_step, again.started_s, again.ended_s) == (None,) * 4
    assert (again.accuracy, again.neighbours_foreign_pct, again.neighbours_same_experiment_pct) == (None,) * 3
    assert store.runs.summary(again.id) == {}
    (earlier,) = store.runs.attempts(again.id)
    assert (earlier.state, earlier.summary) == (RunState.succeeded, {"accuracy": 0.6})
    said = [event.message for event in store.experiments.events(experiment.id) if event.kind == "run.retried"]
    assert said == [
        "queued again, from the beginning: disturbed by foreign processes",
        "queued again, from the beginning: disturbed by another experiment",
    ]

    (claimed,) = queue.claim("s1", lease_s=30)
    store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    assert measured(store, again.id, {Neighbour.foreign: 0.0}, experiment_attempt=claimed.attempt) == 2
    found = store.runs.get(again.id)
    # The share of the measurement that was replaced is not in it.
    assert (found.accuracy, found.neighbours_foreign_pct, found.first_attempt) == (0.7, 0.0, 2)
    assert [attempt.summary for attempt in store.runs.attempts(again.id)] == [{"accuracy": 0.6}, None]
    (account,) = [of for of in store.accounting.ledger(experiment.id).runs if of.run_id == again.id]
    assert [charge.attempt for charge in account.charges] == [1, 2]


def test_without_disturbed_results_there_is_nothing_to_measure_again(store: Store, running: Running) -> None:
    experiment, (run,) = running(1)
    measured(store, run.id, {Neighbour.foreign: 10.0, Neighbour.same_experiment: 90.0})
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    with pytest.raises(Conflict, match="no result was disturbed; there is nothing to remeasure"):
        store.requests.retry_disturbed(experiment.id)
    assert store.experiments.get(experiment.id).state is ExperimentState.succeeded


def test_a_disturbed_result_that_another_run_reuses_keeps_its_figures(store: Store, running: Running) -> None:
    experiment, (run,) = running(1)
    measured(store, run.id, {Neighbour.foreign: 50.0})
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    spec, plans, text = plans_of(1, reuse=True)
    second, _ = store.submissions.submit(
        NewExperiment(spec, plans, spec_text=text, owner="ada", reuse=Reuse({0: run.id}))
    )
    (reusing,) = store.runs.page(experiment_id=second.id).items
    assert reusing.neighbours_foreign_pct == 50.0
    with pytest.raises(Conflict, match=rf"run {run.id} as run {reusing.id}\) and keep their figures"):
        store.requests.retry_disturbed(experiment.id)

    assert store.requests.retry_disturbed(second.id).state is ExperimentState.queued
    found = store.runs.get(reusing.id)
    assert (found.state, found.reused_from, found.first_attempt) == (RunState.queued, None, 1)
    assert store.runs.get(run.id).accuracy == 0.6


def test_retry_of_one_run_queues_its_experiment(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    with pytest.raises(Conflict, match="running"):
        store.requests.retry_run(run.id)
    store.attempts.finish_run(run.id, attempt, RunState.stopped, summary={"accuracy": 0.5})
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    again = store.requests.retry_run(run.id)
    assert (again.state, again.accuracy) == (RunState.queued, None)
    assert store.experiments.get(experiment.id).state is ExperimentState.queued


def test_cancel_of_single_runs(store: Store, running: Running) -> None:
    experiment, runs = running(2)
    assert store.requests.cancel_run(runs[0].id).state is RunState.cancelled
    with pytest.raises(Conflict):
        store.attempts.open(runs[0].id, 1)
    store.attempts.open(runs[1].id, 1)
    assert store.requests.cancel_run(runs[1].id).state is RunState.starting
    assert store.drivers.renew_lease(experiment.id, 1, 30).cancel_attempts == {(runs[1].id, 1)}
    store.attempts.finish_run(runs[1].id, 1, RunState.cancelled)
    assert store.drivers.renew_lease(experiment.id, 1, 30).cancel_attempts == frozenset()
    assert store.requests.cancel_run(runs[1].id).state is RunState.cancelled


def test_only_ended_experiments_are_deleted(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    with pytest.raises(Conflict, match="running"):
        store.removal.delete(experiment.id)
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"accuracy": 1.0})
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    store.removal.delete(experiment.id)
    assert store.experiments.page().items == []
    assert store.runs.page().items == []


def test_events_are_numbered_without_gaps_in_commit_order(store: Store, running: Running) -> None:
    experiment, runs = running(8)

    def work(run: Run) -> None:
        for _ in range(3):
            attempt = store.attempts.open(run.id, 1)
            store.attempts.run_started(run.id, attempt, total_steps=1, resumed_from_step=0, facts={})
            store.attempts.finish_run(
                run.id, attempt, RunState.failed, failure=(FailureClass.bug, "x"), retry_delay_s=0.0
            )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, runs))
    events = store.experiments.events(experiment.id)
    assert [event.number for event in events] == list(range(1, 3 + 8 * 9 + 1))
    assert store.experiments.events(experiment.id, after=10, limit=2) == events[10:12]
    for run in runs:
        mine = [event.kind for event in events if event.run_id == run.id]
        assert mine == ["run.starting", "run.started", "run.retrying"] * 3


def test_one_of_many_concurrent_ends_wins(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    store.requests.cancel_run(run.id)
    ends = [RunState.succeeded, RunState.failed, RunState.cancelled, RunState.stopped] * 2

    def end(state: RunState) -> bool:
        try:
            store.attempts.finish_run(run.id, attempt, state)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(end, ends))
    assert sum(won) == 1
    assert store.runs.get(run.id).state is ends[won.index(True)]
    assert (
        sum(
            e.kind.startswith(("run.succ", "run.fail", "run.cancelled", "run.stop"))
            for e in store.experiments.events(experiment.id)
        )
        == 1
    )


def test_totals_charge_lost_attempts(store: Store, training: Training) -> None:
    now = [1000.0]
    store.clocks.simulated = lambda: now[0]
    experiment, run, attempt = training(resources={"cpus_per_worker": 2})
    store.recording.record(RecordBatch(alive=[AliveRow(run.id, attempt, now[0] + 1800)]))
    now[0] += 7200  # It is noticed late, and nobody knows when it died.
    store.attempts.finish_run(
        run.id, attempt, RunState.failed, failure=(FailureClass.lost, "x"), retry_delay_s=0.0
    )
    store.attempts.open(run.id, 1)
    now[0] += 1800
    totals = store.accounting.totals(experiment.id)
    assert totals.device_hours == pytest.approx(2.0)
    assert totals.cost_usd == pytest.approx(2.0 * 0.05)
    assert totals.energy_kwh == pytest.approx(2.0 * 7.5 / 1000)
