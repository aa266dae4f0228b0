"""An experiment that starts from a run waits for it, and says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import Conflict, NotFound, Store
from tests.conformance.building import Submit, count, remove_deleted
from trainers.errors import FailureClass

Training = Callable[..., tuple[Experiment, Run, int]]


@pytest.fixture(autouse=True)
def scheduler(queue: Queue) -> None:
    """One that lives, so that the queue's reasons are about the experiments."""
    queue.heartbeat("s", node="here", pid=1)


def reason(queue: Queue, experiment: Experiment) -> str:
    return queue.position(experiment.id).reason


def test_it_is_not_claimed_before_the_run_has_succeeded(
    store: Store, queue: Queue, submit: Submit, training: Training
) -> None:
    source, run, attempt = training()
    waiting = submit(1, model={"name": f"run:{run.id}"})
    assert reason(queue, waiting) == f"waiting for run {run.id} to finish"
    assert queue.claim("s", lease_s=30) == []
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"best_step": 9})
    assert reason(queue, waiting) == "next in line; the scheduler will claim it shortly"
    assert [found.id for found in queue.claim("s", lease_s=30)] == [waiting.id]
    assert source.id != waiting.id


def test_others_of_its_owner_pass_it(queue: Queue, submit: Submit, training: Training) -> None:
    _, run, _ = training()
    submit(1, model={"name": f"run:{run.id}"})
    later = submit(1)
    assert [found.id for found in queue.claim("s", lease_s=30, limit=5)] == [later.id]


def test_an_axis_waits_for_every_run_that_it_names(
    store: Store, queue: Queue, submit: Submit, running: Callable[..., Any]
) -> None:
    _, runs = running(3)
    names = [f"run:{run.id}" for run in runs]
    waiting = submit(1, model={"name": "tiny"}, search={"axes": {"model.teacher": [None, *names[1:]]}})
    assert [found.run_id for found in store.experiments.references(waiting.id)] == [runs[1].id, runs[2].id]
    assert reason(queue, waiting) == f"waiting for runs {runs[1].id} and {runs[2].id} to finish"
    assert [run.teacher for run in store.runs.page(experiment_id=waiting.id).items] == [None, *names[1:]]
    assert count(store, "run_references") == 2


def test_a_run_that_failed_is_told_and_holds_nobody_up(
    store: Store, queue: Queue, submit: Submit, training: Training
) -> None:
    _, run, attempt = training()
    waiting = submit(1, model={"name": f"run:{run.id}"})
    store.attempts.finish_run(
        run.id, attempt, RunState.failed, failure=(FailureClass.out_of_memory, "batch 64")
    )
    assert reason(queue, waiting) == (
        f"next in line; the scheduler will claim it shortly; run {run.id} failed: out_of_memory: "
        "batch 64; runs that start from it will fail with bad_spec"
    )
    assert [found.id for found in queue.claim("s", lease_s=30)] == [waiting.id]


def test_a_cancelled_run_that_is_retried_is_waited_for_again(
    store: Store, queue: Queue, submit: Submit, training: Training
) -> None:
    _, run, attempt = training()
    waiting = submit(1, model={"name": f"run:{run.id}"})
    store.requests.cancel_run(run.id)
    store.attempts.finish_run(run.id, attempt, RunState.cancelled)
    assert f"run {run.id} was cancelled" in reason(queue, waiting)
    store.requests.retry_run(run.id)
    assert reason(queue, waiting) == f"waiting for run {run.id} to finish"


def test_a_source_is_not_deleted_while_another_experiment_needs_it(
    store: Store, submit: Submit, training: Training
) -> None:
    source, run, attempt = training()
    waiting = submit(1, model={"name": f"run:{run.id}"})
    store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    store.drivers.finish_experiment(source.id, 1, ExperimentState.succeeded)
    with pytest.raises(Conflict, match=f"experiment {waiting.id} starts from run {run.id}"):
        store.removal.delete(source.id)
    store.requests.cancel(waiting.id)
    store.removal.delete(source.id)
    with pytest.raises(NotFound):
        store.runs.get(run.id)
    (left,) = store.experiments.references(waiting.id)
    assert left.hopeless == f"run {run.id} no longer exists"


def test_references_go_with_their_experiment(store: Store, submit: Submit, training: Training) -> None:
    _, run, _ = training()
    waiting = submit(1, model={"name": f"run:{run.id}"})
    store.requests.cancel(waiting.id)
    store.removal.delete(waiting.id, at_once=True)
    remove_deleted(store)
    assert count(store, "run_references") == 0


def test_a_run_is_found_by_its_number_or_not_at_all(store: Store, training: Training) -> None:
    _, run, _ = training()
    assert store.runs.find(run.id) == run
    assert store.runs.find(run.id + 1) is None


def test_the_last_line_of_a_log_is_of_the_last_attempt(store: Store, training: Training) -> None:
    from service.domain.records import LogLine
    from service.store import RecordBatch

    _, run, attempt = training()
    assert store.runs.last_log_line(run.id) is None
    lines = [LogLine(run.id, attempt, number, 1.0, "info", f"line {number}") for number in (1, 2, 10)]
    store.recording.record(RecordBatch(logs=lines))
    assert store.runs.last_log_line(run.id) == lines[-1]
