"""A worker's side of the recorder: a sink that never blocks the loop, and its stop requests.

The loop appends to lists in memory. A thread sends them, one report at a time, and repeats a report until it
is acknowledged; it polls for stop requests at least every `POLL_S`, with or without rows.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

from service.domain.records import LogLine, MeasurementRow
from service.recording.mailbox import WorkerAddress
from service.recording.report import Acknowledgement, Report, Started
from service.store import AliveRow, CheckpointRow, PointBatch, ProgressRow, RecordBatch
from trainers.reporting import Measurement, Point, StopReason

logger = logging.getLogger(__name__)

POLL_S = 0.4
"""Longest time between two reports: a request to stop is heard of after at most this."""
GATHER_S = 0.15
"""Shortest time between two reports: rows are sent together."""
ALIVE_S = 5.0
"""How often a report says that its worker is alive: what a killed one is charged is known as precisely."""
SAVING_S = 2.0
"""Longest wait before a checkpoint for the rows that lead to it. A worker that is killed just
after a checkpoint resumes behind those steps: rows still in its memory would leave a gap for good.
Saving is the one place where the loop stands still anyway."""
FENCE_S = 2.0
"""Longest wait for the recorder's word that an attempt is still the current one. Without an answer it counts
as current: nothing can open another attempt while the database is unavailable, and what a replaced attempt
writes lies in its own folder."""
_FRESH_S = 0.5
"""An answer to a report that was sent this long ago still counts."""
_RESEND_S = 0.5


class RecorderSink:
    """Reports one attempt at one run to the recorder; a `Sink`, a `Stop` and a `Fence`.

    Args:
        send: delivers a report and returns the recorder's answer; if it raises, the same report is sent
            again.
        rank: of this worker; those above 0 only poll for stops and report their machine.
        workers: this one and its peers, by rank; empty for a worker that is alone.
        on_stale: called once when another attempt has become the current one.
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
        self._changed = threading.Condition()
        self._started: Started | None = None
        self._points: dict[str, PointBatch] = {}
        self._logs: list[LogLine] = []
        self._log_count = 0
        self._measurements: list[MeasurementRow] = []
        self._progress: ProgressRow | None = None
        self._checkpoints: list[CheckpointRow] = []
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
        self._add(lambda: setattr(self, "_started", Started(total_steps, resumed_from_step, known)))

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

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        """Replaces the progress in the next report; before a checkpoint, waits for the points up to it."""
        row = ProgressRow(self._run_id, self._attempt, step, total_steps, phase)
        self._add(lambda: setattr(self, "_progress", row))
        if phase == "saving" and self._rank == 0 and not self.flush(SAVING_S):
            logger.warning(
                "writing a checkpoint before the recorder has acknowledged the points leading to it"
            )

    def measurement(self, measurement: Measurement) -> None:
        self._add(lambda: self._measurements.append(self._row(measurement)))

    def of_machine(self, measurements: Sequence[Measurement]) -> None:
        """Reports measurements of this worker's machine; any rank may."""
        rows = [self._row(measurement) for measurement in measurements]
        self._add(lambda: self._measurements.extend(rows), any_rank=True)

    def _row(self, measurement: Measurement) -> MeasurementRow:
        return MeasurementRow(
            self._run_id,
            self._attempt,
            measurement.name,
            measurement.value,
            measurement.unit,
            str(measurement.provenance),
            measurement.scope,
            measurement.start_s,
            measurement.end_s,
        )

    def log(self, level: Literal["debug", "info", "warning", "error"], message: str) -> None:
        def add() -> None:
            self._log_count += 1
            self._logs.append(
                LogLine(self._run_id, self._attempt, self._log_count, time.time(), level, message)
            )

        self._add(add)

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        """Adds a checkpoint to the next report, if it was verified."""
        if verified:
            row = CheckpointRow(self._run_id, self._attempt, step, path)
            self._add(lambda: self._checkpoints.append(row))

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
        rows = RecordBatch(
            list(self._points.values()),
            self._logs,
            self._measurements,
            [] if self._progress is None else [self._progress],
            self._checkpoints,
            self._sign_of_life(),
        )
        report = Report(self._run_id, self._attempt, self._started, rows)
        self._started, self._progress = None, None
        self._points, self._logs, self._measurements, self._checkpoints = {}, [], [], []
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
