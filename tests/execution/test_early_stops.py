"""Which live runs end early, judged by what is stored."""

from __future__ import annotations

import pytest

from service.domain.states import RunState
from service.driving.driver import StopRequests
from service.driving.pruning import EarlyStops
from service.recording.recorder import Recorder, Report
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.store import PointBatch, RecordBatch, Store
from tests.execution.conftest import Submit
from trainers.errors import FailureClass

STEPS = 90


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def begin(store: Store, queue: Queue, submit: Submit, notes: list[str]):
    """Submit an experiment whose runs all train; returns its runs' ids and its early stops."""

    def begin(runs: int, **search: object) -> tuple[list[int], EarlyStops]:
        experiment = submit(runs, search=search)
        queue.claim("s", lease_s=60)
        store.drivers.started(experiment.id, 1, "node", 1)
        ids = [run.id for run in store.runs.page(experiment_id=experiment.id).items]
        for run_id in ids:
            number = store.attempts.open(run_id, 1)
            store.attempts.run_started(run_id, number, total_steps=STEPS, resumed_from_step=0, facts={})
        spec = ExperimentSpec.model_validate_json(store.experiments.spec(experiment.id)[1])
        begin.again = lambda: EarlyStops(store, experiment.id, spec, notes.append)
        return ids, begin.again()

    return begin


def report(store: Store, run_id: int, name: str, steps: list[int], values: list[float]) -> None:
    store.recording.record(
        RecordBatch(points=[PointBatch(run_id, 1, name, steps, values, [0.0] * len(steps))])
    )


def training(*runs: int) -> dict[int, int]:
    """First attempts."""
    return dict.fromkeys(runs, 1)


def test_nothing_is_looked_at_unless_asked_for(begin):
    _, stops = begin(1)
    assert not stops.wanted


def test_the_worst_of_three_at_a_rung_ends(begin, store, notes):
    (first, second, third), stops = begin(3, name="asha")
    for run_id, loss in ((first, 0.5), (second, 0.4), (third, 0.9)):
        report(store, run_id, "validation_loss", [10], [loss])
    assert stops.look(training(first, second, third)) == {(third, 1)}
    assert notes == [
        f"stopping run {third} early: at 11% of its length it ranks 3 of 3 by validation_loss (0.9)"
    ]
    assert stops.look(training(first, second, third)) == {(third, 1)}
    assert stops.look(training(first, second)) == frozenset()


def test_rungs_are_found_again_by_another_driver(begin, store):
    (first, second, third), _stops = begin(3, name="asha")
    for run_id, loss in ((first, 0.5), (second, 0.4)):
        report(store, run_id, "validation_loss", [10], [loss])
        store.attempts.finish_run(run_id, 1, RunState.succeeded, summary={})
    report(store, third, "validation_loss", [10], [0.9])
    assert begin.again().look(training(third)) == {(third, 1)}


def test_a_run_whose_loss_rises_for_good_ends(begin, store, notes):
    (calm, wild), stops = begin(2, stop_diverging=3.0)
    steps = list(range(1, 41))
    report(store, calm, "loss", steps, [1.0] * 40)
    report(store, wild, "loss", steps, [1.0] * 25 + [9.0] * 15)
    assert stops.look(training(calm, wild)) == {(wild, 1)}
    assert notes == [f"stopping run {wild} early: its loss is more than 3 times its lowest"]


def test_a_reference_run_is_no_candidate_and_goes_to_its_end(begin, store):
    ids, stops = begin(3, name="asha", samples=1, reduction=3, reference_every=3)
    *cells, first_reference, _ = ids
    for run_id, loss in zip(cells, (0.1, 0.2, 0.3), strict=True):
        report(store, run_id, "validation_loss", [STEPS // 9], [loss])
    report(store, first_reference, "validation_loss", [STEPS // 9], [9.0])
    assert (first_reference, 1) not in stops.look(training(*ids))


@pytest.mark.parametrize(("ended", "stopped_again"), [(RunState.stopped, False), (RunState.failed, True)])
def test_a_stop_stands_over_failures_until_people_retry_the_run(begin, store, ended, stopped_again):
    (calm, wild), stops = begin(2, name="asha", stop_diverging=3.0)
    steps = list(range(1, 41))
    report(store, calm, "loss", steps, [1.0] * 40)
    report(store, wild, "loss", steps, [1.0] * 25 + [9.0] * 15)
    assert stops.look(training(calm, wild)) == {(wild, 1)}
    retried_by_driver = 0.0 if ended is RunState.failed else None
    failure = (FailureClass.infrastructure, "died") if ended is RunState.failed else None
    store.attempts.finish_run(wild, 1, ended, failure=failure, retry_delay_s=retried_by_driver)
    if ended is RunState.stopped:
        store.requests.retry_run(wild)
    store.attempts.open(wild, 1)
    store.attempts.run_started(wild, 2, total_steps=STEPS, resumed_from_step=0, facts={})
    assert stops.look({calm: 1, wild: 2}) == ({(wild, 2)} if stopped_again else frozenset())


@pytest.mark.parametrize("by", ["search", "people"])
def test_a_stop_that_was_passed_on_does_not_end_the_next_attempt(begin, store, settings, tmp_path, by):
    """The run is retried before the driver looks again, and withdraws what it asked of the first attempt."""
    (calm, wild), early = begin(2, stop_diverging=3.0)
    experiment = store.runs.get(wild).experiment_id
    recorder = Recorder(store, tmp_path / "spool", experiment, 1)
    stops = StopRequests(recorder.request_stops)
    if by == "search":
        report(store, wild, "loss", list(range(1, 41)), [1.0] * 25 + [9.0] * 15)
        stops.stop_early(early.look(training(calm, wild)))
    else:
        store.requests.cancel_run(wild)
        stops.ask(None, store.drivers.requests(experiment, 1).cancel_attempts)
    assert recorder.submit(Report(wild, 1)).result().stop is not None
    store.attempts.finish_run(wild, 1, RunState.stopped if by == "search" else RunState.cancelled)
    store.requests.retry_run(wild)
    store.attempts.open(wild, 1)
    assert recorder.submit(Report(wild, 2)).result().stop is None
    recorder.close()
