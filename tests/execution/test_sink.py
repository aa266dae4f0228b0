"""A worker's sink: nothing is lost, nothing blocks, and stops arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from service.recording.recorder import Acknowledgement, Report
from service.workers.worker_attempt import RecorderSink
from trainers.reporting import Measurement, Point, Provenance, StopReason


class Receiver:
    """Stands for the recorder: keeps reports, answers what it is told to, can be away."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.answer = Acknowledgement()
        self.away = False
        self.slow_s = 0.0

    def __call__(self, report: Report) -> Acknowledgement:
        if self.away:
            raise ConnectionError("the recorder was killed")
        time.sleep(self.slow_s)
        self.reports.append(report)
        return self.answer

    def steps(self) -> list[int]:
        return [step for report in self.reports for batch in report.rows.points for step in batch.steps]


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def sink(receiver: Receiver) -> Iterator[RecorderSink]:
    made = RecorderSink(receiver, run_id=7, attempt=2)
    yield made
    made.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_points_are_sent_within_a_second_without_asking(sink: RecorderSink, receiver: Receiver) -> None:
    sink.points([Point("loss", 1, 0.5), Point("accuracy", 1, 0.1)])
    wait_for(lambda: receiver.steps() == [1, 1], timeout_s=1.0)


def test_flush_means_acknowledged(sink: RecorderSink, receiver: Receiver) -> None:
    for step in range(1000):
        sink.points([Point("loss", step, 0.5)])
    assert sink.flush(5)
    assert receiver.steps() == list(range(1000))


def test_flush_gives_up_after_its_time(sink: RecorderSink, receiver: Receiver) -> None:
    receiver.away = True
    sink.points([Point("loss", 1, 0.5)])
    assert not sink.flush(0.3)


def test_a_recorder_that_is_away_costs_no_point(sink: RecorderSink, receiver: Receiver) -> None:
    receiver.away = True
    for step in range(50):
        sink.points([Point("loss", step, 0.5)])
        time.sleep(0.005)
    receiver.away = False
    assert sink.flush(5)
    assert receiver.steps() == list(range(50))


def test_a_slow_recorder_does_not_hold_up_the_loop(sink: RecorderSink, receiver: Receiver) -> None:
    receiver.slow_s = 0.5
    began = time.perf_counter()
    for step in range(2000):
        sink.points([Point("loss", step, 0.5)])
    assert time.perf_counter() - began < 0.5
    assert sink.flush(10)
    assert receiver.steps() == list(range(2000))


def test_stops_are_heard_of_without_any_row(sink: RecorderSink, receiver: Receiver) -> None:
    assert sink.requested() is None
    receiver.answer = Acknowledgement(stop=StopReason.pause)
    wait_for(lambda: sink.requested() is StopReason.pause, timeout_s=1.5)


def test_a_stale_attempt_is_called_off_once(receiver: Receiver) -> None:
    called = []
    receiver.answer = Acknowledgement(stale=True)
    sink = RecorderSink(receiver, 7, 2, on_stale=lambda: called.append(1))
    wait_for(lambda: sink.stale)
    assert sink.requested() is StopReason.preempted
    sink.points([Point("loss", 1, 0.5)])
    assert sink.flush(1)
    sink.close()
    assert called == [1]


class Version(str):
    """A type as torch has one: whoever unpickles it imports its module."""


def test_all_kinds_of_rows_are_sent(sink: RecorderSink, receiver: Receiver) -> None:
    sink.started(total_steps=10, resumed_from_step=4, facts={"seed": 1, "torch": Version("2.13")})
    sink.progress(step=4, total_steps=10, phase="preparing")
    sink.progress(step=5, total_steps=10, phase="training")
    sink.measurement(Measurement("train_time_s", 1.0, "s", Provenance.counter, "run", 0.0, 1.0))
    sink.log("info", "one")
    sink.log("error", "two")
    sink.checkpoint(step=5, path="/x", verified=True)
    sink.checkpoint(step=6, path="/y", verified=False)
    assert sink.flush(5)
    started = [report.started for report in receiver.reports if report.started]
    assert [(s.total_steps, s.resumed_from_step, s.facts["seed"]) for s in started] == [(10, 4, 1)]
    assert "worker_pid" in started[0].facts
    assert type(started[0].facts["torch"]) is str
    rows = [report.rows for report in receiver.reports]
    assert [row.step for batch in rows for row in batch.progress][-1] == 5
    assert [(row.number, row.message) for batch in rows for row in batch.logs] == [(1, "one"), (2, "two")]
    assert [row.path for batch in rows for row in batch.checkpoints] == ["/x"]
    assert [row.provenance for batch in rows for row in batch.measurements] == ["counter"]


def test_no_checkpoint_is_ahead_of_the_points_that_lead_to_it(sink: RecorderSink, receiver: Receiver) -> None:
    for step in range(40):
        sink.points([Point("loss", step, 0.5)])
    sink.progress(step=39, total_steps=100, phase="saving")
    assert receiver.steps() == list(range(40))


def test_a_checkpoint_waits_for_a_recorder_whose_head_is_being_restarted(
    sink: RecorderSink, receiver: Receiver
) -> None:
    receiver.away = True
    sink.points([Point("loss", 1, 0.5)])
    saving = threading.Thread(target=sink.progress, kwargs={"step": 1, "total_steps": 9, "phase": "saving"})
    saving.start()
    saving.join(2.5)
    assert saving.is_alive(), "the checkpoint comes before the points that lead to it"
    receiver.away = False
    saving.join(5.0)
    assert receiver.steps() == [1]


def test_other_ranks_report_nothing_and_hear_stops(receiver: Receiver) -> None:
    receiver.answer = Acknowledgement(stop=StopReason.cancel)
    sink = RecorderSink(receiver, 7, 2, rank=1)
    sink.points([Point("loss", 1, 0.5)])
    wait_for(lambda: sink.requested() is StopReason.cancel)
    sink.close()
    assert all(report.empty for report in receiver.reports)


def test_close_ends_the_thread_even_while_the_recorder_is_away(receiver: Receiver) -> None:
    receiver.away = True
    sink = RecorderSink(receiver, 7, 2)
    sink.points([Point("loss", 1, 0.5)])
    sink.close()
    assert not any(thread.name == "sink-7" and thread.is_alive() for thread in threading.enumerate())


def test_a_worker_beyond_the_first_reports_its_machine_and_nothing_else(receiver: Receiver) -> None:
    sink = RecorderSink(receiver, run_id=7, attempt=2, rank=2)
    sink.points([Point("loss", 1, 0.5)])
    sink.of_machine(
        [Measurement("neighbours_foreign_pct", 40.0, "%", Provenance.sampled, "host:b", 0.0, 30.0)]
    )
    assert sink.flush(5.0)
    sink.close()
    rows = [row for report in receiver.reports for row in report.rows.measurements]
    assert [(row.name, row.scope, row.value) for row in rows] == [("neighbours_foreign_pct", "host:b", 40.0)]
    assert receiver.steps() == []


def test_the_fence_asks_again_with_a_row_that_the_database_checks(
    sink: RecorderSink, receiver: Receiver
) -> None:
    assert (sink.attempt, sink.holds()) == (2, True)
    assert any(not report.empty for report in receiver.reports)


def test_the_fence_falls_once_another_attempt_is_current(sink: RecorderSink, receiver: Receiver) -> None:
    receiver.answer = Acknowledgement(stale=True)
    assert not sink.holds()


def test_a_process_that_was_stopped_asks_before_it_trusts_an_older_answer(
    sink: RecorderSink, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sink.holds()
    receiver.answer = Acknowledgement(stale=True)
    awake_s = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: awake_s)
    assert not sink.holds()


def test_without_an_answer_the_fence_holds(
    sink: RecorderSink, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.workers.worker_attempt.FENCE_S", 0.05)
    receiver.away = True
    assert sink.holds()
