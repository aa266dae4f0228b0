"""The recorder without Ray: a database that goes away and comes back, and a recorder that is killed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.domain.events import EventKind
from service.domain.process_metrics import MetricRow
from service.domain.records import LogLine, MeasurementRow
from service.domain.states import RunState
from service.recording.recorder import Acknowledgement, Recorder, Report, Started
from service.recording.spool import Spool
from service.scheduling.queue import Queue
from service.store import (
    CheckpointRow,
    PointBatch,
    ProgressRow,
    RecordBatch,
    Store,
    StoreUnavailable,
    UnusableDatabase,
)
from tests.execution.conftest import Submit
from trainers.errors import FailureClass
from trainers.reporting import StopReason

TIMEOUT_S = 10.0


class AwayStore:
    """A store whose database can be taken away; everything else is the real one's."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.database = store.database
        self.recording = self.attempts = self.drivers = self.process_metrics = self
        self.away = False
        self.writes = 0
        self.figures: list[MetricRow] = []

    def record(self, batch: RecordBatch) -> frozenset[tuple[int, int]]:
        if self.away:
            raise StoreUnavailable("locked")
        self.writes += 1
        return self.store.recording.record(batch)

    def run_started(self, *args: object, **kwargs: object) -> None:
        if self.away:
            raise StoreUnavailable("locked")
        self.store.attempts.run_started(*args, **kwargs)  # type: ignore[arg-type]

    def note(self, *args: object, **kwargs: object) -> None:
        if self.away:
            raise StoreUnavailable("locked")
        self.store.drivers.note(*args, **kwargs)  # type: ignore[arg-type]

    def add(self, rows: list[MetricRow], *, source: str) -> None:
        if self.away:
            raise StoreUnavailable("locked")
        self.figures += rows
        self.store.process_metrics.add(rows, source=source)

    def drop_gauges(self, source: str) -> None:
        self.store.process_metrics.drop_gauges(source)

    def close(self) -> None:
        pass


@pytest.fixture
def away(store: Store) -> AwayStore:
    return AwayStore(store)


Record = Callable[[Report], Acknowledgement]


@pytest.fixture
def recorder(away: AwayStore, tmp_path: Path) -> Iterator[Recorder]:
    made = recorder_of(away, tmp_path)
    yield made
    made.close()


def recorder_of(store: AwayStore, tmp_path: Path, attempt: int = 1) -> Recorder:
    """A recorder of experiment 1."""
    return Recorder(store, tmp_path / "spool", 1, attempt)  # type: ignore[arg-type]


@pytest.fixture
def run_id(store: Store, queue: Queue, submit: Submit) -> int:
    """A run whose attempt 1 is starting."""
    experiment = submit(1)
    queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, 1, "node", 1)
    run = store.runs.page(experiment_id=experiment.id).items[0]
    assert store.attempts.open(run.id, 1) == 1
    return run.id


def points(run_id: int, steps: range, attempt: int = 1) -> Report:
    values = [1.0 / (step + 1) for step in steps]
    batch = PointBatch(run_id, attempt, "loss", list(steps), values, [float(step) for step in steps])
    return Report(run_id, attempt, rows=RecordBatch(points=[batch]))


def say(recorder: Recorder, report: Report) -> Acknowledgement:
    return recorder.submit(report).result(TIMEOUT_S)


def stored(recorder: Recorder) -> bool:
    """Whether nothing is left on the disk."""
    wait_for(lambda: recorder.trouble is None)
    return True


def spooled_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "spool").glob("*.spool"))


def steps_of(store: Store, run_id: int) -> list[int]:
    return [point.step for point in store.series.points(run_id).get("loss", [])]


def test_an_attempt_that_is_about_to_end_is_shut_out_while_the_database_is_away(
    recorder: Recorder, store: Store, away: AwayStore, run_id: int, tmp_path: Path
) -> None:
    """A worker that outlives its attempt is not told that rows are safe which the next attempt keeps out."""
    say(recorder, points(run_id, range(10)))
    away.away = True
    say(recorder, points(run_id, range(10, 12)))
    recorder.shut_out(run_id, 1)
    before = spooled_bytes(tmp_path)
    assert say(recorder, points(run_id, range(12, 14))).stale
    assert spooled_bytes(tmp_path) == before
    failure = (FailureClass.infrastructure, "the worker exited")
    store.attempts.finish_run(run_id, 1, RunState.failed, failure=failure, retry_delay_s=0.0)
    away.away = False
    assert stored(recorder)
    assert steps_of(store, run_id) == list(range(12)), "what was acknowledged before is there"


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
    run = store.runs.get(run_id)
    assert (run.state, run.step, run.total_steps, run.checkpoint) == (RunState.running, 5, 10, "/there")
    assert math.isnan(store.series.points(run_id)["loss"][0].value)
    assert [line.message for line in store.runs.logs(run_id, after=None)] == ["hello"]
    assert [row.value for row in store.runs.measurements(run_id)] == [3.0]
    assert store.runs.attempts(run_id)[0].facts == {"seed": 0}


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


def test_text_that_is_not_unicode_arrives_from_the_disk(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    away.away = True
    lines = [
        LogLine(run_id, 1, 1, 2.0, "info", "no such file: \udcff"),
        LogLine(run_id, 1, 2, 2.0, "info", "\x00"),
    ]
    say(recorder, Report(run_id, 1, Started(10, 0, {"path": "\udcff"}), RecordBatch(logs=lines)))
    away.away = False
    wait_for(lambda: spooled_bytes(tmp_path) == 0)
    assert [line.message for line in store.runs.logs(run_id)] == ["no such file: \ufffd", "\ufffd"]
    assert store.runs.attempts(run_id)[0].facts == {"path": "\ufffd"}


def test_the_disk_is_emptied_without_further_reports(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    away.away = True
    say(recorder, Report(run_id, 1, Started(10, 0, {}), points(run_id, range(10)).rows))
    away.away = False
    wait_for(lambda: spooled_bytes(tmp_path) == 0)
    assert steps_of(store, run_id) == list(range(10))
    assert store.runs.get(run_id).state is RunState.running


def test_an_outage_shows_in_the_figures_when_it_is_over(
    recorder: Recorder,
    away: AwayStore,
    store: Store,
    run_id: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.recording.recorder.FIGURES_EVERY_S", 0.0)
    away.away = True
    say(recorder, points(run_id, range(10)))
    away.figures.clear()
    away.away = False
    wait_for(lambda: spooled_bytes(tmp_path) == 0)
    say(recorder, points(run_id, range(10, 20)))
    lags, spooled = (
        [row.value for row in away.figures if row.name == f"stillhouse_{name}"]
        for name in ("recorder_lag_seconds", "spool_bytes")
    )
    assert lags[0] > lags[-1] >= 0
    assert spooled[0] > spooled[-1] == 0
    assert any(row.name == "stillhouse_commit_seconds_count" for row in away.figures)
    recorder.close()
    assert not any(row.is_gauge for row in store.process_metrics.figures())


def test_figures_that_cannot_be_stored_keep_no_points_back(
    recorder: Recorder, away: AwayStore, store: Store, run_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(away, "add", lambda *_, **__: 1 / 0)
    assert say(recorder, points(run_id, range(10))) == Acknowledgement()
    assert steps_of(store, run_id) == list(range(10))


def test_a_killed_recorder_leaves_its_spool_to_the_next(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    away.away = True
    killed = recorder_of(away, tmp_path)
    say(killed, points(run_id, range(10)))
    kill(killed)
    away.away = False
    following = recorder_of(away, tmp_path)
    assert stored(following)
    assert steps_of(store, run_id) == list(range(10))
    assert list((tmp_path / "spool").iterdir()) == []
    following.close()
    assert not (tmp_path / "spool").exists()


def kill(recorder: Recorder) -> None:
    """End the thread and free the lock, and do nothing else that an orderly end does."""
    with recorder._lock:
        recorder._closing = True
        recorder._lock.notify()
    recorder._writer.join()
    assert recorder._spool is not None
    recorder._spool.close()


def test_the_spool_of_a_hung_recorder_is_delivered_at_once_and_removed_when_it_ends(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    away.away = True
    hung = recorder_of(away, tmp_path)
    for first in range(5):
        say(hung, points(run_id, range(first, first + 1)))
    following = recorder_of(AwayStore(store), tmp_path)
    assert stored(following)
    assert steps_of(store, run_id) == [0, 1, 2, 3, 4]
    say(hung, points(run_id, range(5, 6)))  # It was not dead.
    wait_for(lambda: steps_of(store, run_id) == [0, 1, 2, 3, 4, 5])
    (left,) = (tmp_path / "spool").glob("*.spool")
    kill(hung)
    wait_for(lambda: not left.exists())
    following.close()


def spool_of_a_killed_recorder(away: AwayStore, run_id: int, tmp_path: Path) -> Path:
    """A spool with five records, of steps 0 to 4."""
    away.away = True
    killed = recorder_of(away, tmp_path)
    for first in range(5):
        say(killed, points(run_id, range(first, first + 1)))
    kill(killed)
    away.away = False
    (path,) = (tmp_path / "spool").glob("*.spool")
    return path


def test_a_damaged_record_costs_no_other_and_is_said_in_an_event(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    path = spool_of_a_killed_recorder(away, run_id, tmp_path)
    text = bytearray(path.read_bytes())
    text[len(text) * 3 // 10] ^= 1  # In the second record.
    path.write_bytes(text)
    following = recorder_of(away, tmp_path)
    assert stored(following)
    assert steps_of(store, run_id) == [0, 2, 3, 4]
    said = [
        event.message
        for event in store.experiments.events(1)
        if event.kind == EventKind.experiment_spool_damaged
    ]
    assert len(said) == 1
    assert f"{path} is damaged at byte " in said[0]
    assert "4 records are stored" in said[0]
    assert path.with_suffix(".damaged").read_bytes() == bytes(text)
    following.close()


def test_a_torn_end_of_a_spool_is_no_event(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    path = spool_of_a_killed_recorder(away, run_id, tmp_path)
    path.write_bytes(path.read_bytes()[:-3])
    following = recorder_of(away, tmp_path)
    assert stored(following)
    assert steps_of(store, run_id) == [0, 1, 2, 3]
    assert not any(event.kind == EventKind.experiment_spool_damaged for event in store.experiments.events(1))
    following.close()
    assert not (tmp_path / "spool").exists()


def test_records_that_make_no_sense_count_as_damage(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    spool = Spool(tmp_path / "spool", 1)
    spool.append([points(run_id, range(1)).to_bytes(), b'["of another release"]', b"\xff"])
    spool.append([points(run_id, range(1, 2)).to_bytes()])
    spool.close()
    following = recorder_of(away, tmp_path)
    assert stored(following)
    assert steps_of(store, run_id) == [0, 1]
    assert [event.kind for event in store.experiments.events(1)].count(
        EventKind.experiment_spool_damaged
    ) == 1
    following.close()


def test_an_outage_in_the_middle_of_a_replay_loses_nothing(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool_of_a_killed_recorder(away, run_id, tmp_path)
    monkeypatch.setattr("service.recording.recorder._REPLAY_REPORTS", 2)
    monkeypatch.setattr("service.recording.recorder.RETRY_S", 0.05)
    record, calls = away.record, []

    def failing(batch: RecordBatch) -> frozenset[tuple[int, int]]:
        calls.append(batch)
        if len(calls) in (2, 4):
            raise StoreUnavailable("locked")
        return record(batch)

    monkeypatch.setattr(away, "record", failing)
    following = recorder_of(away, tmp_path)
    assert stored(following)
    assert steps_of(store, run_id) == [0, 1, 2, 3, 4]
    following.close()


@pytest.mark.parametrize("error", [RuntimeError("odd"), UnusableDatabase("no such table: runs")])
def test_an_unforeseen_error_counts_as_an_outage(
    away: AwayStore,
    store: Store,
    run_id: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    monkeypatch.setattr("service.recording.recorder.RETRY_S", 0.05)

    def broken(*args: object, **kwargs: object) -> Any:
        raise error

    recorder = recorder_of(away, tmp_path)
    with monkeypatch.context() as patch:
        for name in ("record", "note"):
            patch.setattr(away, name, broken)
        assert say(recorder, points(run_id, range(5))) == Acknowledgement()
        assert say(recorder, points(run_id, range(5, 10))) == Acknowledgement()
        assert recorder.trouble == f"{type(error).__name__}: {error}"
        assert spooled_bytes(tmp_path) > 0
    assert stored(recorder)
    assert steps_of(store, run_id) == list(range(10))
    recorder.close()


def test_rows_that_the_database_refuses_are_set_aside_alone(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    recorder = recorder_of(away, tmp_path)
    steps = [*range(100), 1 << 70, 100, 101]
    values = [0.5] * len(steps)
    rows = RecordBatch(
        points=[
            PointBatch(run_id, 1, "accuracy", [1, 2], [0.1, 0.2], [0.0, 0.0]),
            PointBatch(run_id, 1, "loss", steps, values, [0.0] * len(steps)),
        ],
        logs=[LogLine(run_id, 1, 1, 2.0, "info", "hello"), LogLine(run_id, 1, 2, None, "info", "odd")],  # type: ignore[arg-type]
        checkpoints=[CheckpointRow(run_id, 1, 4, "/there")],
    )
    assert say(recorder, Report(run_id, 1, Started(10, 0, {}), rows)) == Acknowledgement()
    assert say(recorder, points(run_id, range(102, 105))) == Acknowledgement()
    assert steps_of(store, run_id) == list(range(105))
    assert [point.step for point in store.series.points(run_id)["accuracy"]] == [1, 2]
    assert [line.message for line in store.runs.logs(run_id)] == ["hello"]
    assert store.runs.get(run_id).checkpoint == "/there"
    said = [event for event in store.experiments.events(1) if event.kind == EventKind.run_rows_set_aside]
    assert [event.run_id for event in said] == [run_id]
    (kept,) = (tmp_path / "spool").glob("*.rejected.jsonl")
    assert str(kept) in said[0].message
    refused = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["points"][0]["steps"] for row in refused if row["points"]] == [[1 << 70]]
    assert [row["logs"][0]["message"] for row in refused if row["logs"]] == ["odd"]
    recorder.close()


def test_many_refused_rows_are_set_aside_without_a_transaction_for_each(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    record = away.record
    monkeypatch.setattr(away, "record", lambda batch: tried.append(1) or record(batch))
    recorder = recorder_of(away, tmp_path)
    steps = [(1 << 70) + step for step in range(5000)]
    batch = PointBatch(run_id, 1, "loss", steps, [0.0] * 5000, [0.0] * 5000)
    assert say(recorder, Report(run_id, 1, rows=RecordBatch(points=[batch]))) == Acknowledgement()
    assert len(tried) < 300
    (kept,) = (tmp_path / "spool").glob("*.rejected.jsonl")
    refused = [json.loads(line) for line in kept.read_text().splitlines()]
    assert sum(len(points["steps"]) for row in refused for points in row["points"]) == 5000
    recorder.close()


def test_facts_that_cannot_be_stored_do_not_keep_a_run_from_starting(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    recorder = recorder_of(away, tmp_path)
    say(recorder, Report(run_id, 1, Started(10, 0, {"odd": object()})))
    assert store.runs.get(run_id).state is RunState.running
    assert [event.kind for event in store.experiments.events(1)].count(EventKind.run_rows_set_aside) == 1
    recorder.close()


def test_the_writing_thread_outlives_its_own_mistakes(
    recorder: Recorder, store: Store, run_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, failed = recorder._keep, []

    def fails_once(reports: list[Report]) -> bool:
        if reports and not failed:
            failed.append(1)
            raise KeyError("odd")
        return keep(reports)

    monkeypatch.setattr(recorder, "_keep", fails_once)
    assert say(recorder, points(run_id, range(5))) == Acknowledgement()
    assert failed == [1]
    assert steps_of(store, run_id) == list(range(5))


def test_a_stale_attempt_is_told_to_end(recorder: Recorder, store: Store, run_id: int) -> None:
    store.attempts.finish_run(run_id, 1, RunState.failed, retry_delay_s=0.0)
    experiment_id = store.runs.get(run_id).experiment_id
    assert experiment_id
    assert store.attempts.open(run_id, 1) == 2
    assert say(recorder, points(run_id, range(5))).stale
    assert steps_of(store, run_id) == []
    assert not say(recorder, points(run_id, range(5), attempt=2)).stale
    assert steps_of(store, run_id) == list(range(5))


def test_stops_are_heard_with_any_report(recorder: Recorder, run_id: int) -> None:
    assert say(recorder, Report(run_id, 1)).stop is None
    recorder.request_stops(None, {(run_id, 1): StopReason.cancel})
    assert say(recorder, Report(run_id, 1)).stop is StopReason.cancel
    assert say(recorder, Report(run_id, 2)).stop is None
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
    def full(spool: Spool, records: object) -> None:
        raise OSError(28, "No space left on device")

    away.away = True
    monkeypatch.setattr(Spool, "append", full)
    future = recorder.submit(points(run_id, range(5)))
    with pytest.raises(TimeoutError):
        future.result(0.5)
    away.away = False
    assert future.result(TIMEOUT_S) == Acknowledgement()
    assert steps_of(store, run_id) == list(range(5))


def test_a_database_that_is_away_at_the_start_is_waited_for(
    away: AwayStore, store: Store, run_id: int, tmp_path: Path
) -> None:
    away.away = True
    recorder = recorder_of(away, tmp_path)
    say(recorder, points(run_id, range(3)))
    assert recorder.trouble == "StoreUnavailable: locked"
    away.away = False
    assert stored(recorder)
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
