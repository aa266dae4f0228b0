"""The recorder without Ray: a database that goes away and comes back, and a recorder that is killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.domain.records import LogLine, MeasurementRow
from service.domain.states import RunState
from service.recording.recorder import Recorder
from service.recording.report import Acknowledgement, Report, Started
from service.scheduling.queue import Queue
from service.store import (
    CheckpointRow,
    PointBatch,
    ProgressRow,
    RecordBatch,
    Store,
    StoreUnavailable,
)
from tests.execution.conftest import Submit
from trainers.reporting import StopReason

TIMEOUT_S = 10.0


class AwayStore:
    """A store whose database can be taken away; everything else is the real one's."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.away = False
        self.writes = 0

    def record(self, batch: RecordBatch) -> frozenset[tuple[int, int]]:
        if self.away:
            raise StoreUnavailable("locked")
        self.writes += 1
        return self.store.record(batch)

    def run_started(self, *args: object, **kwargs: object) -> None:
        if self.away:
            raise StoreUnavailable("locked")
        self.store.run_started(*args, **kwargs)  # type: ignore[arg-type]

    def close(self) -> None:
        pass


@pytest.fixture
def away(store: Store) -> AwayStore:
    return AwayStore(store)


Record = Callable[[Report], Acknowledgement]


@pytest.fixture
def recorder(away: AwayStore, tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(lambda: away, tmp_path / "spool", "attempt-1")  # type: ignore[arg-type, return-value]
    yield made
    made.close()


@pytest.fixture
def run_id(store: Store, queue: Queue, submit: Submit) -> int:
    """A run whose attempt 1 is starting."""
    experiment = submit(1)
    queue.claim("s", lease_s=60)
    store.driver_started(experiment.id, 1, "node", 1)
    run = store.runs(experiment_id=experiment.id).items[0]
    assert store.open_attempt(run.id, 1) == 1
    return run.id


def points(run_id: int, steps: range, attempt: int = 1) -> Report:
    values = [1.0 / (step + 1) for step in steps]
    batch = PointBatch(run_id, attempt, "loss", list(steps), values, [float(step) for step in steps])
    return Report(run_id, attempt, rows=RecordBatch(points=[batch]))


def say(recorder: Recorder, report: Report) -> Acknowledgement:
    return recorder.submit(report).result(TIMEOUT_S)


def spooled_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "spool").glob("*.spool"))


def steps_of(store: Store, run_id: int) -> list[int]:
    return [point.step for point in store.points(run_id).get("loss", [])]


def test_what_is_acknowledged_is_in_the_database(recorder: Recorder, store: Store, run_id: int) -> None:
    assert say(recorder, points(run_id, range(10))) == Acknowledgement()
    assert steps_of(store, run_id) == list(range(10))


def test_all_kinds_of_rows_arrive(recorder: Recorder, store: Store, run_id: int) -> None:
    rows = RecordBatch(
        points=[PointBatch(run_id, 1, "loss", [1], [math.nan], [1.0])],
        logs=[LogLine(run_id, 1, 1, 2.0, "info", "hello")],
        measurements=[MeasurementRow(run_id, 1, "train_time_s", 3.0, "s", "counter", "run", 0.0, 3.0)],
        progress=[ProgressRow(run_id, 1, 5, 10, "training")],
        checkpoints=[CheckpointRow(run_id, 1, 4, "/there")],
    )
    say(recorder, Report(run_id, 1, Started(10, 0, {"seed": 0}), rows))
    run = store.run(run_id)
    assert (run.state, run.step, run.total_steps, run.checkpoint) == (RunState.running, 5, 10, "/there")
    assert math.isnan(store.points(run_id)["loss"][0].value)
    assert [line.message for line in store.logs(run_id, after=None)] == ["hello"]
    assert [row.value for row in store.measurements(run_id)] == [3.0]
    assert store.attempts(run_id)[0].facts == {"seed": 0}


def test_a_report_that_comes_twice_changes_nothing(recorder: Recorder, store: Store, run_id: int) -> None:
    report = Report(run_id, 1, Started(10, 0, {}), points(run_id, range(5)).rows)
    say(recorder, report)
    say(recorder, report)
    assert steps_of(store, run_id) == list(range(5))


def test_points_wait_on_the_disk_while_the_database_is_away_and_arrive_once(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    say(recorder, points(run_id, range(10)))
    away.away = True
    for first in range(10, 100, 10):
        assert say(recorder, points(run_id, range(first, first + 10))) == Acknowledgement()
    assert steps_of(store, run_id) == list(range(10))
    assert spooled_bytes(tmp_path) > 0
    away.away = False
    say(recorder, points(run_id, range(100, 101)))
    wait_for(lambda: spooled_bytes(tmp_path) == 0)
    assert steps_of(store, run_id) == list(range(101))


def test_the_disk_is_emptied_without_further_reports(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    away.away = True
    say(recorder, Report(run_id, 1, Started(10, 0, {}), points(run_id, range(10)).rows))
    away.away = False
    wait_for(lambda: spooled_bytes(tmp_path) == 0)
    assert steps_of(store, run_id) == list(range(10))
    assert store.run(run_id).state is RunState.running


def test_a_killed_recorder_leaves_its_spool_to_the_next(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    folder = tmp_path / "spool"
    away.away = True
    killed = Recorder(lambda: away, folder, "attempt-1")  # type: ignore[arg-type, return-value]
    say(killed, points(run_id, range(10)))
    kill(killed)
    away.away = False
    following = Recorder(lambda: away, folder, "attempt-2")  # type: ignore[arg-type, return-value]
    assert following.wait_until_caught_up(TIMEOUT_S)
    assert steps_of(store, run_id) == list(range(10))
    assert [path.name for path in folder.iterdir()] == ["attempt-2.spool"]
    following.close()


def kill(recorder: Recorder) -> None:
    """End the thread and free the lock, and do nothing else that an orderly end does."""
    with recorder._lock:
        recorder._closing = True
        recorder._lock.notify()
    recorder._writer.join()
    recorder._spool.close()


def test_a_stale_attempt_is_told_to_end(recorder: Recorder, store: Store, run_id: int) -> None:
    store.finish_run(run_id, 1, RunState.failed, retry_delay_s=0.0)
    experiment_id = store.run(run_id).experiment_id
    assert experiment_id
    assert store.open_attempt(run_id, 1) == 2
    assert say(recorder, points(run_id, range(5))).stale
    assert steps_of(store, run_id) == []
    assert not say(recorder, points(run_id, range(5), attempt=2)).stale
    assert steps_of(store, run_id) == list(range(5))


def test_stops_are_heard_with_any_report(recorder: Recorder, run_id: int) -> None:
    assert say(recorder, Report(run_id, 1)).stop is None
    recorder.request_stops(None, {run_id: StopReason.cancel})
    assert say(recorder, Report(run_id, 1)).stop is StopReason.cancel
    assert say(recorder, Report(run_id + 1, 1)).stop is None
    recorder.request_stops(StopReason.pause, {})
    assert say(recorder, points(run_id, range(1))).stop is StopReason.pause


def test_many_reports_share_a_transaction(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int
) -> None:
    futures = [recorder.submit(points(run_id, range(n, n + 1))) for n in range(200)]
    for future in futures:
        future.result(TIMEOUT_S)
    assert steps_of(store, run_id) == list(range(200))
    assert away.writes < 20


def test_nothing_is_acknowledged_when_neither_database_nor_disk_takes_it(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(records: object) -> None:
        raise OSError(28, "No space left on device")

    away.away = True
    monkeypatch.setattr(recorder._spool, "append", full)
    future = recorder.submit(points(run_id, range(5)))
    with pytest.raises(TimeoutError):
        future.result(0.5)
    away.away = False
    assert future.result(TIMEOUT_S) == Acknowledgement()
    assert steps_of(store, run_id) == list(range(5))


def test_a_database_that_is_away_at_the_start_is_waited_for(
    store: Store, run_id: int, tmp_path: Path, settings: Settings
) -> None:
    tries = []

    def open_store() -> Store:
        tries.append(1)
        if len(tries) < 2:
            raise StoreUnavailable("away")
        return Store.open(settings)

    recorder = Recorder(open_store, tmp_path / "spool", "attempt-1")
    assert recorder.wait_until_caught_up(TIMEOUT_S)
    say(recorder, points(run_id, range(3)))
    recorder.close()
    assert steps_of(store, run_id) == [0, 1, 2]


def test_reports_survive_json() -> None:
    report = Report(
        7,
        2,
        Started(10, 3, {"a": [1]}),
        RecordBatch(
            points=[PointBatch(7, 2, "loss", [1, 2], [math.inf, 0.5], [1.0, 2.0])],
            logs=[LogLine(7, 2, 1, 1.0, "info", "ä")],
            progress=[ProgressRow(7, 2, 1, None, None)],
            checkpoints=[CheckpointRow(7, 2, 1, "/x")],
        ),
    )
    assert Report.from_bytes(report.to_bytes()) == report


def wait_for(condition: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
