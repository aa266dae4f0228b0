"""Batches: durable, repeatable, fenced; and what people see of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from service.db import schema
from service.db.engine import driver_connection
from service.domain.records import Experiment, LogLine, MeasurementRow, PointRow, Run
from service.domain.states import RunState
from service.scheduling.queue import Queue
from service.store import CheckpointRow, PointBatch, ProgressRow, RecordBatch, Store
from service.store.recording import FEWEST_COPIED
from tests.conformance.building import count
from trainers.errors import FailureClass

Training = Callable[..., tuple[Experiment, Run, int]]


def points_of(run: Run, attempt: int, steps: range, *, name: str = "loss", base: float = 0.0) -> PointBatch:
    """One point a step, whose value tells step and attempt."""
    return PointBatch(
        run.id, attempt, name, list(steps), [base + step for step in steps], [float(step) for step in steps]
    )


def whole_batch(run: Run, attempt: int) -> RecordBatch:
    """Something of everything."""
    return RecordBatch(
        points=[points_of(run, attempt, range(1, 6)), points_of(run, attempt, range(1, 6), name="accuracy")],
        logs=[LogLine(run.id, attempt, number, 1.0, "info", f"line {number}") for number in (1, 2, 3)],
        measurements=[
            MeasurementRow(run.id, attempt, "train_time_s", 1.5, "s", "counter", "run", 0.0, 1.5),
            MeasurementRow(run.id, attempt, "energy_kwh", math.nan, "kWh", "modelled", "run", 0.0, 1.5),
        ],
        progress=[
            ProgressRow(run.id, attempt, 4, 100, "training"),
            ProgressRow(run.id, attempt, 5, 100, "validating"),
        ],
        checkpoints=[CheckpointRow(run.id, attempt, 3, "/c/3"), CheckpointRow(run.id, attempt, 5, "/c/5")],
    )


def content(store: Store, run: Run) -> object:
    """All that can be read of a run, comparable (NaN is made a word)."""
    measured = [
        (m.name, repr(m.value), m.unit, m.provenance, m.scope) for m in store.runs.measurements(run.id)
    ]
    latest = [(p.name, p.step, p.attempt, repr(p.value)) for p in store.series.latest_points(run.id)]
    series = {
        name: [(p.step, p.attempt, repr(p.value)) for p in found]
        for name, found in store.series.points(run.id).items()
    }
    return (
        store.runs.get(run.id),
        store.runs.attempts(run.id),
        store.runs.logs(run.id),
        measured,
        latest,
        series,
    )


def test_everything_of_a_batch_is_seen(store: Store, training: Training) -> None:
    _, run, attempt = training()
    assert store.recording.record(whole_batch(run, attempt)) == frozenset()
    now = store.runs.get(run.id)
    assert (now.step, now.phase, now.checkpoint, now.checkpoint_step) == (5, "validating", "/c/5", 5)
    assert store.runs.attempts(run.id)[0].last_step == 5
    latest = store.series.latest_points(run.id)
    assert [point.name for point in latest] == ["accuracy", "loss"]
    assert latest[1] == PointRow("loss", 5, attempt, 5.0, 5.0)
    some = store.series.sampled_points(run.id, ["loss"], min_step=2, max_step=4)["loss"]
    assert [point.step for point in some.points] == [2, 3, 4]
    assert store.series.points(run.id, ["loss", "nothing"])["nothing"] == []
    assert [line.message for line in store.runs.logs(run.id)] == ["line 1", "line 2", "line 3"]
    measured = {row.name: row.value for row in store.runs.measurements(run.id)}
    assert measured["train_time_s"] == 1.5
    assert math.isnan(measured["energy_kwh"])


def test_the_same_batch_again_changes_nothing(store: Store, training: Training) -> None:
    _, run, attempt = training()
    batch = whole_batch(run, attempt)
    store.recording.record(batch)
    before = content(store, run)
    assert store.recording.record(batch) == frozenset()
    assert content(store, run) == before
    assert (count(store, "points"), count(store, "log_lines"), count(store, "measurements")) == (10, 3, 2)


def test_batches_may_arrive_in_any_order(store: Store, training: Training) -> None:
    _, run, attempt = training()
    parts = [points_of(run, attempt, range(start, start + 10)) for start in range(0, 100, 10)]
    random.Random(1).shuffle(parts)
    for part in parts:
        store.recording.record(RecordBatch(points=[part]))
    assert [point.step for point in store.series.points(run.id)["loss"]] == list(range(100))
    assert store.series.latest_points(run.id)[0].step == 99


def test_values_that_are_not_finite_come_back(store: Store, training: Training) -> None:
    _, run, attempt = training()
    values = [1.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]
    steps = list(range(6))
    store.recording.record(RecordBatch(points=[PointBatch(run.id, attempt, "x", steps, values, [0.0] * 6)]))
    read = [point.value for point in store.series.points(run.id)["x"]]
    assert list(map(repr, read)) == list(map(repr, values))
    store.recording.record(RecordBatch(points=[PointBatch(run.id, attempt, "y", [1], [math.nan], [0.0])]))
    assert math.isnan(store.series.latest_points(run.id)[1].value)


def test_a_large_batch_may_be_there_in_part_and_hold_values_that_are_not_finite(
    store: Store, training: Training
) -> None:
    _, run, attempt = training()
    count_of_steps = 2 * FEWEST_COPIED

    def batch(steps: range) -> RecordBatch:
        values = [math.nan if step % 7 == 0 else math.inf if step % 11 == 0 else step / 3 for step in steps]
        return RecordBatch(points=[PointBatch(run.id, attempt, "x", list(steps), values, [0.5] * len(steps))])

    store.recording.record(batch(range(count_of_steps)))
    store.recording.record(batch(range(FEWEST_COPIED, FEWEST_COPIED + count_of_steps)))
    points = store.series.points(run.id)["x"]
    steps = range(FEWEST_COPIED + count_of_steps)
    (expected,) = batch(steps).points
    assert [point.step for point in points] == list(steps)
    assert list(map(repr, [point.value for point in points])) == list(map(repr, expected.values))
    assert store.series.latest_points(run.id)[0].step == steps[-1]


def test_rows_of_a_stale_attempt_are_dropped_and_named(store: Store, training: Training) -> None:
    experiment, run, old = training()
    store.recording.record(whole_batch(run, old))
    failure = (FailureClass.infrastructure, "x")
    store.attempts.finish_run(run.id, old, RunState.failed, failure=failure, retry_delay_s=0.0)
    new = store.attempts.open(run.id, experiment.attempt)
    opened = content(store, run)
    late = whole_batch(run, old)
    late.points.append(points_of(run, old, range(50, 60)))
    assert store.recording.record(late) == {(run.id, old)}
    assert content(store, run) == opened
    mixed = RecordBatch(points=[points_of(run, old, range(70, 75)), points_of(run, new, range(6, 9))])
    assert store.recording.record(mixed) == {(run.id, old)}
    assert [point.step for point in store.series.points(run.id)["loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    unknown = RecordBatch(points=[PointBatch(10**9, 1, "x", [1], [1.0], [1.0])])
    assert store.recording.record(unknown) == {(10**9, 1)}


def test_late_points_are_taken_until_the_next_attempt_and_their_writer_is_stopped(
    store: Store, training: Training
) -> None:
    experiment, run, old = training()
    store.recording.record(whole_batch(run, old))
    failure = (FailureClass.infrastructure, "x")
    store.attempts.finish_run(run.id, old, RunState.failed, failure=failure, retry_delay_s=0.0)
    queued = store.runs.get(run.id)
    assert store.recording.record(RecordBatch(
        points=[points_of(run, old, range(6, 9))],
        progress=[ProgressRow(run.id, old, 8, 100, "training")],
        checkpoints=[CheckpointRow(run.id, old, 8, "/c/8")],
    )) == {(run.id, old)}  # fmt: skip
    now = store.runs.get(run.id)
    assert (now.state, now.step, now.checkpoint) == (RunState.queued, queued.step, "/c/8")
    assert [point.step for point in store.series.points(run.id)["loss"]] == list(range(1, 9))
    new = store.attempts.open(run.id, experiment.attempt)
    assert store.recording.record(RecordBatch(points=[points_of(run, old, range(9, 12))])) == {(run.id, old)}
    assert store.recording.record(RecordBatch(points=[points_of(run, new, range(6, 9))])) == frozenset()


def test_late_points_of_an_ended_attempt_are_kept_but_move_nothing(store: Store, training: Training) -> None:
    _, run, attempt = training()
    store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    ended = store.runs.get(run.id)
    assert store.recording.record(RecordBatch(
        points=[points_of(run, attempt, range(1, 4))],
        progress=[ProgressRow(run.id, attempt, 3, 100, "training")],
    )) == frozenset()  # fmt: skip
    assert store.runs.get(run.id) == ended
    assert len(store.series.points(run.id)["loss"]) == 3


def resume(store: Store, experiment: Experiment, run: Run, attempt: int, step: int) -> int:
    """End an attempt by a failure of the machine, and start the next from a step."""
    failure = (FailureClass.infrastructure, "x")
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure, retry_delay_s=0.0)
    new = store.attempts.open(run.id, experiment.attempt)
    store.attempts.run_started(run.id, new, total_steps=100, resumed_from_step=step, facts={})
    return new


def test_a_resumed_run_shows_each_step_once(store: Store, training: Training) -> None:
    experiment, run, first = training()
    store.recording.record(RecordBatch(points=[points_of(run, first, range(1, 31), base=1000)]))
    second = resume(store, experiment, run, first, 20)
    third_part = [point.step for point in store.series.points(run.id)["loss"]]
    assert third_part == list(range(1, 21))
    store.recording.record(RecordBatch(points=[points_of(run, second, range(20, 26), base=2000)]))
    third = resume(store, experiment, run, second, 10)
    store.recording.record(RecordBatch(points=[points_of(run, third, range(11, 13), base=3000)]))
    seen = [(point.step, point.attempt) for point in store.series.points(run.id)["loss"]]
    assert seen == [*((step, first) for step in range(1, 11)), (11, third), (12, third)]
    assert store.series.latest_points(run.id)[0] == PointRow("loss", 12, third, 12.0, 3012.0)
    assert count(store, "points") == 38  # Hidden, not gone.


def test_of_two_attempts_that_report_a_step_the_newer_counts(store: Store, training: Training) -> None:
    experiment, run, first = training()
    store.recording.record(RecordBatch(points=[points_of(run, first, range(1, 11))]))
    second = resume(store, experiment, run, first, 8)
    store.recording.record(RecordBatch(points=[points_of(run, second, range(8, 12), base=100)]))
    seen = {point.step: point.value for point in store.series.points(run.id)["loss"]}
    assert [*seen] == list(range(1, 12))
    assert (seen[7], seen[8], seen[11]) == (7.0, 108.0, 111.0)


def test_an_attempt_that_never_started_hides_nothing(store: Store, training: Training) -> None:
    experiment, run, first = training()
    store.recording.record(RecordBatch(points=[points_of(run, first, range(1, 11))]))
    failure = (FailureClass.infrastructure, "x")
    store.attempts.finish_run(run.id, first, RunState.failed, failure=failure, retry_delay_s=0.0)
    store.attempts.open(run.id, experiment.attempt)
    assert len(store.series.points(run.id)["loss"]) == 10


def test_thinning_keeps_ends_extremes_and_nan(store: Store, training: Training) -> None:
    _, run, attempt = training()
    for length in (5_000, 120_000):  # Out of all points, and out of extremes that are kept.
        name = f"m{length}"
        values = [math.sin(step / 500) for step in range(length)]
        values[length // 3], values[length // 2], values[length // 4] = 99.0, -99.0, math.nan
        steps = list(range(length))
        store.recording.record(
            RecordBatch(points=[PointBatch(run.id, attempt, name, steps, values, [0.0] * length)])
        )
        (series,) = store.series.points(run.id, [name], max_points=200).values()
        assert 100 <= len(series) <= 210
        assert [point.step for point in series] == sorted({point.step for point in series})
        assert (series[0].step, series[-1].step) == (0, length - 1)
        kept = {point.step: point.value for point in series}
        assert (kept[length // 3], kept[length // 2]) == (99.0, -99.0)
        assert math.isnan(kept[length // 4])
        assert len(store.series.points(run.id, [name])[name]) == length


def test_thinning_of_a_long_resumed_series_shows_no_hidden_point(store: Store, training: Training) -> None:
    experiment, run, first = training()
    store.recording.record(RecordBatch(points=[points_of(run, first, range(80_000))]))
    second = resume(store, experiment, run, first, 60_000)
    store.recording.record(RecordBatch(points=[points_of(run, second, range(60_000, 130_000), base=1e6)]))
    for point in store.series.points(run.id, ["loss"], max_points=100)["loss"]:
        assert point.attempt == (first if point.step < 60_000 else second)


@pytest.mark.parametrize("seed", range(4))
def test_kept_extremes_are_those_of_the_points(store: Store, training: Training, seed: int) -> None:
    chance = random.Random(seed)
    _, run, attempt = training()
    values = [chance.choice([math.nan, math.inf, -math.inf, 1.0, chance.random()]) for _ in range(700)]
    steps = chance.sample(range(2_000), 700)
    rest = list(range(700))
    chance.shuffle(rest)
    while rest:  # In any order, in batches of any size, some of it twice.
        size = chance.randrange(1, 80)
        batch, rest = rest[:size], rest[size:] if chance.random() < 0.7 else rest[size // 2 :]
        at = [steps[n] for n in batch]
        half = len(batch) // 2
        told = [values[n] for n in batch]
        store.recording.record(RecordBatch(points=[
            PointBatch(run.id, attempt, "loss", part, found, [0.0] * len(part))
            for part, found in ((at[:half], told[:half]), (at[half:], told[half:]))
        ]))  # fmt: skip
    with store.database.read() as connection:
        found = connection.execute(
            sa.select(schema.point_extremes).order_by(schema.point_extremes.c.bucket)
        ).all()
    expected = []
    stored = {point.step: point.value for point in store.series.points(run.id)["loss"]}
    for bucket in range(2_000 // schema.BUCKET_STEPS + 1):
        mine = {step: value for step, value in stored.items() if step // schema.BUCKET_STEPS == bucket}
        known = [step for step, value in mine.items() if value == value]
        low, high = min(known, key=mine.__getitem__), max(known, key=mine.__getitem__)
        missing = min((step for step, value in mine.items() if value != value), default=None)
        expected.append((bucket, mine[low], low, mine[high], high, missing))
    assert [tuple(row)[3:] for row in found] == expected


def test_a_sample_says_how_wide_its_buckets_are(store: Store, training: Training) -> None:
    _, run, attempt = training()
    for name in ("a", "b"):
        for start in range(0, 100_000, 20_000):
            store.recording.record(
                RecordBatch(points=[points_of(run, attempt, range(start, start + 20_000), name=name)])
            )
    found = store.series.sampled_points(run.id, max_points=1_000)
    assert {name: one.bucket_steps for name, one in found.items()} == {"a": 201, "b": 201}
    assert all(len(one.points) <= 1_002 for one in found.values())
    few = store.series.sampled_points(run.id, ["a"], min_step=99_500)
    assert few["a"].bucket_steps is None
    assert [point.step for point in few["a"].points] == list(range(99_500, 100_000))


def test_a_sample_of_a_long_series_looks_its_points_up(store: Store, training: Training) -> None:
    if not store.database.is_sqlite:
        pytest.skip("counts instructions of SQLite")
    _, run, attempt = training()
    store.recording.record(RecordBatch(points=[points_of(run, attempt, range(20_000))]))
    thousands: list[None] = []
    with store.database.readers.connect() as connection:  # The one that the pool has.
        driver_connection(connection).set_progress_handler(lambda: thousands.append(None), 1_000)
    store.series.sampled_points(run.id, max_points=100)
    assert len(thousands) < 20  # Fewer instructions than there are points: nothing has scanned them.


def test_many_series_share_the_points_of_one_answer(store: Store, training: Training) -> None:
    _, run, attempt = training()
    names = [f"m{n}" for n in range(50)]
    store.recording.record(
        RecordBatch(points=[points_of(run, attempt, range(1_000), name=name) for name in names])
    )
    found = store.series.sampled_points(run.id)
    assert len(found) == 50
    assert sum(len(one.points) for one in found.values()) <= 10_000
    assert all(one.bucket_steps is not None for one in found.values())


def test_pages_hold_every_visible_point_once(store: Store, training: Training) -> None:
    experiment, run, first = training()
    store.recording.record(RecordBatch(points=[points_of(run, first, range(40))]))
    second = resume(store, experiment, run, first, 25)
    store.recording.record(RecordBatch(points=[points_of(run, second, range(20, 60), base=100.0)]))
    seen: list[PointRow] = []
    place: int | None = 0
    while place is not None:
        rows, place = store.series.points_page(run.id, "loss", min_step=place, limit=7)
        assert len(rows) <= 7
        seen += rows
    assert seen == store.series.points(run.id)["loss"]
    assert [point.step for point in seen] == list(range(60))
    assert store.series.points_page(run.id, "nothing") == ([], None)


def test_logs_go_on_after_a_cursor_over_attempts(store: Store, training: Training) -> None:
    experiment, run, first = training()
    store.recording.record(
        RecordBatch(logs=[LogLine(run.id, first, n, 1.0, "info", f"a{n}") for n in (1, 2, 3)])
    )
    second = resume(store, experiment, run, first, 0)
    store.recording.record(
        RecordBatch(logs=[LogLine(run.id, second, n, 1.0, "info", f"b{n}") for n in (1, 2)])
    )
    seen: list[str] = []
    after = None
    while lines := store.runs.logs(run.id, after=after, limit=2):
        seen += [line.message for line in lines]
        after = lines[-1].cursor
    assert seen == ["a1", "a2", "a3", "b1", "b2"]
    assert [line.message for line in store.runs.logs(run.id, attempt=second)] == ["b1", "b2"]


def test_text_that_databases_refuse_is_made_storable(store: Store, training: Training) -> None:
    _, run, attempt = training()
    store.recording.record(RecordBatch(
        logs=[LogLine(run.id, attempt, 1, 1.0, "info", "a\x00b\ud800" + "x" * 50_000)],
        points=[PointBatch(run.id, attempt, "n\x00" * 300, [1], [1.0], [1.0])],
    ))  # fmt: skip
    assert store.runs.logs(run.id)[0].message.startswith("a\ufffdb\ufffdxxx")
    assert len(store.series.latest_points(run.id)) == 1


@pytest.mark.parametrize("recorders", [2])
def test_concurrent_recorders_lose_nothing(
    store: Store, running: Callable[..., tuple[Experiment, list[Run]]], queue: Queue, recorders: int
) -> None:
    experiment, runs = running(4)
    attempts = {run.id: store.attempts.open(run.id, experiment.attempt) for run in runs}

    def work(name: int) -> None:
        for start in range(0, 500, 50):
            steps = range(start, start + 50)
            store.recording.record(RecordBatch(
                points=[points_of(run, attempts[run.id], steps, name=f"m{name}") for run in runs],
                progress=[ProgressRow(run.id, attempts[run.id], start, 500, "training") for run in runs],
            ))  # fmt: skip

    with ThreadPoolExecutor(recorders) as pool:
        list(pool.map(work, range(recorders)))
    assert count(store, "points") == recorders * 4 * 500
