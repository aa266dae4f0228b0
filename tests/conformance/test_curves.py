"""Curves of many runs at once: the points that people see, averaged over ranges of steps."""

from __future__ import annotations

import math
import statistics

import pytest

from service.db.schema import BUCKET_STEPS
from service.domain.states import RunState
from service.store import PointBatch, RecordBatch, Store
from tests.conformance.test_recording import Training, points_of, resume


def test_a_short_series_comes_as_it_is(store: Store, training: Training) -> None:
    _, run, attempt = training()
    store.recording.record(RecordBatch(points=[points_of(run, attempt, range(50))]))
    found = store.series.buckets([run.id], "loss", 200)
    assert (found.width, found.exact) == (1, True)
    buckets = found.of_runs[run.id]
    assert [bucket.step for bucket in buckets] == list(range(50))
    assert [bucket.mean for bucket in buckets] == [bucket.low for bucket in buckets] == list(range(50))
    assert all(bucket.count == 1 for bucket in buckets)


def test_a_long_series_comes_as_means_with_their_range(store: Store, training: Training) -> None:
    _, run, attempt = training()
    store.recording.record(RecordBatch(points=[points_of(run, attempt, range(1_000))]))
    found = store.series.buckets([run.id], "loss", 100)
    assert (found.width, found.exact) == (10, True)
    buckets = found.of_runs[run.id]
    assert len(buckets) == 100
    assert [(one.mean, one.low, one.high) for one in buckets[:2]] == [(4.5, 0.0, 9.0), (14.5, 10.0, 19.0)]


def test_a_very_long_series_is_not_scanned(store: Store, training: Training) -> None:
    _, run, attempt = training()
    steps = 100 * BUCKET_STEPS
    store.recording.record(RecordBatch(points=[points_of(run, attempt, range(steps))]))
    found = store.series.buckets([run.id], "loss", 10)
    assert (found.width, found.exact) == (10 * BUCKET_STEPS, False)
    buckets = found.of_runs[run.id]
    assert [bucket.low for bucket in buckets] == [10.0 * BUCKET_STEPS * at for at in range(10)]
    assert buckets[-1].high == steps - 1
    assert buckets[0].mean == pytest.approx(statistics.fmean(range(10 * BUCKET_STEPS)))


def test_what_a_newer_attempt_does_again_is_hidden(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    store.recording.record(RecordBatch(points=[points_of(run, attempt, range(40))]))
    again = resume(store, experiment, run, attempt, 20)
    store.recording.record(RecordBatch(points=[points_of(run, again, range(20, 60), base=1000.0)]))
    for most in (100, 6):
        found = store.series.buckets([run.id], "loss", most)
        values = {point.step: point.value for point in store.series.points(run.id)["loss"]}
        for bucket in found.of_runs[run.id]:
            mine = [value for step, value in values.items() if step // found.width == bucket.number]
            if found.width == 1:
                assert bucket.mean == mine[0]
            else:
                assert bucket.high == max(mine)
    assert len(store.series.buckets([run.id], "loss", 100).of_runs[run.id]) == 60


def test_several_runs_are_read_at_once_in_the_same_buckets(store: Store, training: Training) -> None:
    _, one, attempt = training()
    _, other, attempt_of_other = training()
    store.recording.record(RecordBatch(points=[points_of(one, attempt, range(100))]))
    store.recording.record(
        RecordBatch(points=[points_of(other, attempt_of_other, range(0, 50, 5), base=7.0)])
    )
    found = store.series.buckets([one.id, other.id, other.id + 100], "loss", 10)
    assert found.of_runs.keys() == {one.id, other.id}
    assert [bucket.number for bucket in found.of_runs[other.id]] == [0, 1, 2, 3, 4]
    assert found.of_runs[other.id][0].mean == 7.0 + 2.5
    assert store.series.buckets([one.id], "accuracy", 10).of_runs == {}


def test_values_that_are_not_numbers_leave_a_gap(store: Store, training: Training) -> None:
    _, run, attempt = training()
    batch = PointBatch(run.id, attempt, "loss", [1, 2, 3], [1.0, math.nan, 3.0], [1.0, 2.0, 3.0])
    store.recording.record(RecordBatch(points=[batch]))
    assert [bucket.mean for bucket in store.series.buckets([run.id], "loss", 100).of_runs[run.id]] == [
        1.0,
        None,
        3.0,
    ]


def test_time_counts_in_attempts_without_the_wait_between_them(store: Store, training: Training) -> None:
    _, run, attempt = training()
    began = store.runs.attempts(run.id)[0].started_s
    batch = PointBatch(run.id, attempt, "loss", [1, 2], [1.0, 1.0], [began + 10.0, began + 30.0])
    store.recording.record(RecordBatch(points=[batch]))
    found = store.series.buckets([run.id], "loss", 100).of_runs[run.id]
    assert [bucket.active_s for bucket in found] == pytest.approx([10.0, 30.0])


def test_names_and_rates_of_runs(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    store.recording.record(
        RecordBatch(points=[points_of(run, attempt, range(2)), points_of(run, attempt, range(2), name="a")])
    )
    store.attempts.finish_run(
        run.id, attempt, RunState.succeeded, summary={"accuracy": 0.5, "energy_provenance": "modelled"}
    )
    assert store.series.point_names([experiment.id]) == ["a", "loss"]
    assert store.series.figure_names([experiment.id]) == ["accuracy"]
    assert store.series.rates([run.id])[run.id].price_usd_per_hour >= 0.0
    assert [(one.id, one.state) for one in store.series.begun_runs(experiment.id)] == [
        (run.id, RunState.succeeded)
    ]
    assert store.series.begun_runs(experiment.id, "state = 'failed'") == []
