"""One attempt in one worker process: calls `trainers.entrypoint.train` and reports.

Ray's own errors are classified here, all others by `trainers.entrypoint.classify`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from service.domain.records import LogLine, MeasurementRow
from service.recording.mailbox import Assignment, Ending, WorkerAddress
from service.recording.recorder import STALE_EXIT_CODE, Acknowledgement, Report, Started
from service.recording.relay import RelayClient
from service.store import AliveRow, CheckpointRow, PointBatch, ProgressRow, RecordBatch
from service.workers.neighbour_watch import watcher
from service.workers.run_gauges import RunGauges
from trainers.config import Parallel
from trainers.errors import FailureClass, PipelineError
from trainers.reporting import Level, Measurement, NullSink, Point, Sink, StopReason, Stream, TrainingOutcome

logger = logging.getLogger(__name__)

POLL_S = 0.4  # Longest time between two reports, and so until a request to stop arrives
GATHER_S = 0.15  # Shortest time between two reports: rows are sent together
ALIVE_S = 5.0  # How often a report shows that its worker lives; a killed one is charged to this precision
SAVING_S = 600.0
"""Longest wait before a checkpoint for the rows that lead to it. A worker that is killed just
after a checkpoint resumes behind those steps: rows still in its memory would leave a gap for good.
A node may outlive its head, and the worker is killed once there is another: it waits for that here."""
FENCE_S = 2.0
"""Longest wait for the recorder to confirm that an attempt is still the current one. Without an answer it
counts as current: nothing can open another attempt while the database is unavailable, and what a replaced
attempt writes is in its own folder."""
_FRESH_S = 0.5  # An answer to a report that was sent this long ago still counts
_RESEND_S = 0.5
_FLUSH_S = 5.0
_WORST_FIRST = (
    FailureClass.out_of_memory,
    FailureClass.storage,
    FailureClass.infrastructure,
    FailureClass.not_finite,
    FailureClass.bad_data,
    FailureClass.bad_spec,
    FailureClass.preempted,
    FailureClass.lost,
    FailureClass.bug,
)


class RecorderSink(Sink):
    """Reports one attempt at one run to the recorder; a `Sink`, a `Stop` and a `Fence`.

    The training loop only appends to lists. A thread sends them, one report at a time, repeats a report until
    it is acknowledged, and polls for stop requests at least every `POLL_S`. Ranks above 0 only poll for stops
    and report their machine; `workers` is empty for a worker that is alone.
    """

    def __init__(
        self,
        send: Callable[[Report], Acknowledgement],
        run_id: int,
        attempt: int,
        *,
        rank: int = 0,
        workers: Sequence[WorkerAddress] = (),
        on_stale: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._run_id = run_id
        self._attempt = attempt
        self._rank = rank
        self._workers = workers
        self._on_stale = on_stale
        self._gauges = RunGauges(run_id)
        self._changed = threading.Condition()
        self._started: Started | None = None
        self._points: dict[str, PointBatch] = {}
        self._rows = RecordBatch()  # Without points and progress
        self._log_count = 0
        self._progress: ProgressRow | None = None
        self._unsent = 0
        self._acknowledged = 0
        self._alive_s = time.time()
        self._confirmed_s = -math.inf
        """When the last report was sent whose rows were taken as the current attempt's, monotonic."""
        self._reason: StopReason | None = None
        self._stale = False
        self._closing = False
        self._flushing = False
        self._thread = threading.Thread(target=self._send_forever, name=f"sink-{run_id}", daemon=True)
        self._thread.start()

    # -- Stop ------------------------------------------------------------------------------------

    def requested(self) -> StopReason | None:
        """Returns why to stop now; an attempt that is no longer current stops as well."""
        return StopReason.preempted if self._stale else self._reason

    @property
    def stale(self) -> bool:
        """Whether another attempt is current: nothing of this one counts any more."""
        return self._stale

    # -- Fence -----------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        return self._attempt

    def holds(self) -> bool:
        """Returns whether no later attempt is known; asks the recorder again unless it has just answered.

        The clock keeps running while a process is suspended, so one that wakes up asks.
        """
        if not self._stale and time.monotonic() - self._confirmed_s > _FRESH_S:
            self._add(lambda: setattr(self, "_alive_s", 0.0))  # A row, which is checked under the attempt.
            self.flush(FENCE_S)
        return not self._stale

    # -- Sink ------------------------------------------------------------------------------------

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        """Reports the start, with the worker's host and process and those of its peers."""
        known: dict[str, object] = {
            **facts,
            "worker_node": socket.gethostname(),
            "ray_node_id": ray_node_id(),
            "worker_pid": os.getpid(),
            **({"worker_places": [asdict(worker) for worker in self._workers]} if self._workers else {}),
        }
        # Plain values: to read one of torch's types the driver would import torch.
        plain = json.loads(json.dumps(known, default=str, skipkeys=True))
        self._add(lambda: setattr(self, "_started", Started(total_steps, resumed_from_step, plain)))

    def points(self, points: Sequence[Point]) -> None:
        def add() -> None:
            for point in points:
                batch = self._points.get(point.name)
                if batch is None:
                    batch = PointBatch(self._run_id, self._attempt, point.name, [], [], [])
                    self._points[point.name] = batch
                batch.steps.append(point.step)
                batch.values.append(point.value)
                batch.at_s.append(point.at_s)

        self._add(add)
        self._gauges.points(points)

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        """Replaces the progress in the next report; before a checkpoint, waits for the points up to it."""
        row = ProgressRow(self._run_id, self._attempt, step, total_steps, phase)
        self._add(lambda: setattr(self, "_progress", row))
        if phase == "saving" and self._rank == 0 and not self.flush(SAVING_S):
            logger.warning(
                "writing a checkpoint before the recorder has acknowledged the points leading to it"
            )

    def measurement(self, measurement: Measurement) -> None:
        self._add(lambda: self._rows.measurements.append(self._row(measurement)))
        self._gauges.measurement(measurement)

    def of_machine(self, measurements: Sequence[Measurement]) -> None:
        """Reports measurements of this worker's machine; any rank may."""
        rows = [self._row(measurement) for measurement in measurements]
        self._add(lambda: self._rows.measurements.extend(rows), any_rank=True)

    def _row(self, measurement: Measurement) -> MeasurementRow:
        values = asdict(measurement) | {"provenance": str(measurement.provenance)}
        return MeasurementRow(self._run_id, self._attempt, **values)

    def log(self, level: Level, message: str, stream: Stream = "log") -> None:
        def add() -> None:
            self._log_count += 1
            at = self._log_count, time.time()
            self._rows.logs.append(LogLine(self._run_id, self._attempt, *at, level, message, stream))

        self._add(add)

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        """Adds a checkpoint to the next report, if it was verified."""
        if verified:
            row = CheckpointRow(self._run_id, self._attempt, step, path)
            self._add(lambda: self._rows.checkpoints.append(row))

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is acknowledged; True at once for an attempt that is no longer current."""
        with self._changed:
            wanted = self._unsent
            self._flushing = True
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._acknowledged >= wanted or self._stale, timeout_s)
            finally:
                self._flushing = False

    def close(self) -> None:
        """Stops reporting; what was not acknowledged is given up (flush first)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)

    def _add(self, change: Callable[[], None], *, any_rank: bool = False) -> None:
        if self._rank and not any_rank:
            return
        with self._changed:
            change()
            self._unsent += 1
            self._changed.notify_all()

    # -- Sending ---------------------------------------------------------------------------------

    def _send_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._at_once, GATHER_S)
                self._changed.wait_for(
                    lambda: self._at_once() or self._unsent > self._acknowledged, POLL_S - GATHER_S
                )
                if self._closing:
                    return
                report, covers = self._take(), self._unsent
            if not self._deliver(report):
                return
            with self._changed:
                self._acknowledged = covers
                self._changed.notify_all()

    def _at_once(self) -> bool:
        return self._closing or self._flushing or self._started is not None

    def _take(self) -> Report:
        rows = replace(
            self._rows,
            points=list(self._points.values()),
            progress=[] if self._progress is None else [self._progress],
            alive=self._sign_of_life(),
        )
        report = Report(self._run_id, self._attempt, self._started, rows)
        self._started, self._progress = None, None
        self._points, self._rows = {}, RecordBatch()
        return report

    def _sign_of_life(self) -> list[AliveRow]:
        now = time.time()
        if self._rank or now - self._alive_s < ALIVE_S:
            return []
        self._alive_s = now
        return [AliveRow(self._run_id, self._attempt, now)]

    def _deliver(self, report: Report) -> bool:
        """Sends until acknowledged; False = the sink was closed before."""
        while True:
            sent_s = time.monotonic()
            try:
                answer = self._send(report)
            except Exception as error:
                # Whatever the way to the recorder raises, the rows stay here until it is back.
                logger.warning("the recorder does not respond; resending the report: %s", error)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, _RESEND_S):
                        return False
                continue
            self._reason = answer.stop
            if answer.stale and not self._stale:
                self._stale = True
                self._on_stale()
            if not report.empty:
                self._confirmed_s = sent_s
            return True


def ray_node_id() -> str | None:
    """Returns Ray's id of this process's node; None outside Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return str(ray.get_runtime_context().get_node_id())


def train_one(
    relay: RelayClient,
    assignment: Assignment,
    *,
    rank: int = 0,
    workers: Sequence[WorkerAddress] = (),
) -> TrainingOutcome:
    """Trains one assignment in this process; all its reports, errors included, are safe when this returns."""
    from trainers.entrypoint import train

    run_id, attempt = assignment.run_id, assignment.attempt
    sink = RecorderSink(relay.report, run_id, attempt, rank=rank, workers=workers, on_stale=_end_process)
    watch = watcher(sink.of_machine, assignment.turn.shape.device, rank, workers)
    try:
        try:
            outcome: TrainingOutcome = train(
                assignment.turn.config,
                sink if rank == 0 else NullSink(),
                sink,
                history=assignment.history,
                fence=sink,
            )
        finally:
            if watch is not None:
                watch.close()
        _flush(sink)
        return outcome
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sink.log("error", "".join(traceback.format_exception(error)))
        _flush(sink)
        raise
    finally:
        sink.close()


def ending_of(outcome: TrainingOutcome) -> Ending:
    return Ending(outcome.status, outcome.stop_reason, dict(outcome.summary))


def failure_of(error: BaseException) -> tuple[FailureClass, str]:
    """Returns class and one line for an error of a worker or of Ray under it."""
    import ray.exceptions as ray_errors

    cause: Any = error
    while (inner := getattr(cause, "health_check_failure", None) or _task_cause(cause)) is not None:
        cause = inner
    if isinstance(cause, ray_errors.OutOfMemoryError):
        return FailureClass.out_of_memory, "Ray ended the worker because the node ran out of memory"
    if isinstance(cause, ray_errors.NodeDiedError):
        return FailureClass.infrastructure, "a worker's node is gone"
    if isinstance(cause, ray_errors.RayActorError | ray_errors.WorkerCrashedError):
        if "OutOfMemoryError" in str(cause) or "memory usage threshold" in str(cause):
            return FailureClass.out_of_memory, "Ray ended the worker because the node ran out of memory"
        if getattr(cause, "preempted", False):
            return FailureClass.preempted, "the worker's node was preempted"
        return FailureClass.infrastructure, "a worker process died"
    if isinstance(cause, ray_errors.RayError) or type(cause).__module__.startswith("ray.train."):
        return FailureClass.infrastructure, f"{type(cause).__name__}: {_first_line(str(cause))}"
    from trainers.entrypoint import classify

    classified: tuple[FailureClass, str] = classify(cause)
    return classified


def failure_of_group(failures: Mapping[int, BaseException], parallel: Parallel) -> tuple[FailureClass, str]:
    """Returns the failure that explains the others: peers of a failed worker only lose a connection."""

    def order(rank: int) -> tuple[bool, int, int]:
        kind, _ = failure_of(failures[rank])
        return _lost_a_peer(failures[rank]), _WORST_FIRST.index(kind), rank

    first = min(failures, key=order)
    kind, message = failure_of(failures[first])
    stage = f" (stage {first // parallel.replicas})" if parallel.stage_count > 1 else ""
    lost = " lost another" if _lost_a_peer(failures[first]) else ""
    return kind, f"worker {first} of {parallel.workers}{stage}{lost}: {message}"


def _lost_a_peer(error: BaseException) -> bool:
    """Whether an error only shows that another worker, or the way to it, is gone."""
    cause = _task_cause(error) or error
    lost = isinstance(cause, RuntimeError | ConnectionError | PipelineError)
    of_ray = type(cause).__module__.partition(".")[0] == "ray"
    return lost and not of_ray and failure_of(cause)[0] is FailureClass.infrastructure


def _task_cause(error: Any) -> BaseException | None:
    """Cause of a failed remote call, which Ray wraps."""
    from ray.exceptions import RayTaskError

    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    return cause


def _flush(sink: RecorderSink) -> None:
    """Waits for the last acknowledgement, however long the recorder is unavailable: no rows are given up."""
    while not sink.flush(_FLUSH_S):
        continue


def _end_process() -> None:
    # Another attempt trains this run now. Ending at once, without unwinding, frees the devices and writes
    # nothing more.
    os._exit(STALE_EXIT_CODE)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:500]
