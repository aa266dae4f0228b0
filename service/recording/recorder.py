"""The recorder of one experiment: takes the workers' reports and writes them in batches.

Plain Python; `service.recording.experiment_actor` makes a Ray actor of it. A report is acknowledged
when its rows are committed or, while the database is unavailable, on the local disk. What lies on the
disk is written first, in order, when the database is back. A worker has one report under way at
a time and keeps collecting meanwhile, so what waits here is bounded by the number of workers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from service.recording.report import Acknowledgement, Report, merge
from service.recording.spool import Spool, SpoolBusy
from service.store import Conflict, NotFound, StaleAttempt, Store, StoreOutage
from trainers.reporting import StopReason

logger = logging.getLogger(__name__)

GATHER_S = 0.05
"""How long the writer waits for further reports to put into the same transaction."""
RETRY_S = 1.0
"""Pause between attempts to reach a database that is unavailable."""
_REPLAY_REPORTS = 500


class Recorder:
    """Writes reports through a store; thread-safe.

    Args:
        open_store: connects to the database; called by the writing thread, again while it fails.
        folder: where spools of this experiment lie.
        name: of this recorder's own spool, unique among attempts at the experiment.
    """

    def __init__(self, open_store: Callable[[], Store], folder: Path, name: str) -> None:
        self._open_store = open_store
        self._store: Store | None = None
        self._folder = folder
        self._spool = Spool(folder / f"{name}.spool")
        self._inherited = self._spools_left_behind()
        self._lock = threading.Condition()
        self._waiting: list[tuple[Report, Future[Acknowledgement]]] = []
        self._stop_all: StopReason | None = None
        self._stop_runs: dict[int, StopReason] = {}
        self._stale: set[tuple[int, int]] = set()
        self._away_until_s = 0.0
        self._caught_up = threading.Event()
        self._closing = False
        self._writer = threading.Thread(target=self._write_forever, name="recorder", daemon=True)
        self._writer.start()

    def submit(self, report: Report) -> Future[Acknowledgement]:
        """Take a report; the future resolves when its rows are safe."""
        future: Future[Acknowledgement] = Future()
        with self._lock:
            if report.empty or (report.run_id, report.attempt) in self._stale:
                future.set_result(self._answer(report))
                return future
            self._waiting.append((report, future))
            self._lock.notify()
        return future

    def request_stops(self, everything: StopReason | None, runs: Mapping[int, StopReason]) -> None:
        """Replace what is asked to stop: all runs, or some by id."""
        with self._lock:
            self._stop_all = everything
            self._stop_runs = dict(runs)

    def wait_until_caught_up(self, timeout_s: float) -> bool:
        """Wait until what earlier recorders left on this disk has reached the database."""
        return self._caught_up.wait(timeout_s)

    def close(self) -> None:
        """Write what waits, then end. An empty spool is removed."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._writer.join()
        self._spool.close(remove=self._spool.empty)
        for spool in self._inherited:
            spool.close()
        if self._store is not None:
            self._store.close()

    def _answer(self, report: Report) -> Acknowledgement:
        stop = self._stop_all or self._stop_runs.get(report.run_id)
        return Acknowledgement(stop, (report.run_id, report.attempt) in self._stale)

    def _spools_left_behind(self) -> list[Spool]:
        left = []
        for path in sorted(self._folder.glob("*.spool")):
            if path != self._spool.path:
                # One that is locked has a living writer, which will bring its records itself.
                with contextlib.suppress(SpoolBusy):
                    left.append(Spool(path))
        return left

    def _write_forever(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closing and not self._due():
                    self._lock.wait(RETRY_S / 2)
                closing = self._closing
            if not closing:
                time.sleep(GATHER_S)
            with self._lock:
                taken, self._waiting = self._waiting, []
            if not self._keep([report for report, _ in taken]):
                with self._lock:
                    self._waiting = taken + self._waiting
                if closing:
                    return
                time.sleep(RETRY_S)
                continue
            with self._lock:
                answers = [(future, self._answer(report)) for report, future in taken]
            for future, answer in answers:
                if not future.cancelled():
                    future.set_result(answer)
            if closing and not self._waiting:
                return

    def _due(self) -> bool:
        """Something on the disk waits for the database, and it is time to try."""
        behind = not self._caught_up.is_set() or not self._spool.empty
        return behind and time.monotonic() >= self._away_until_s

    def _keep(self, reports: list[Report]) -> bool:
        """Make reports durable, in the database or on the disk; False when neither takes them."""
        if time.monotonic() >= self._away_until_s:
            try:
                self._replay()
                self._write(reports)
                return True
            except StoreOutage as error:
                if self._away_until_s == 0.0:
                    logger.warning(
                        "the database is unavailable; spooling points to %s: %s", self._spool.path, error
                    )
                self._away_until_s = time.monotonic() + RETRY_S
        try:
            self._spool.append([report.to_bytes() for report in reports])
        except OSError as error:
            logger.error("neither the database nor the local disk accepts points: %s", error)
            return False
        return True

    def _replay(self) -> None:
        """Bring what is on the disk into the database, oldest first."""
        for spool in [*self._inherited, self._spool]:
            if not spool.empty:
                part: list[Report] = []
                for record in spool.records():
                    part.append(Report.from_bytes(record))
                    if len(part) == _REPLAY_REPORTS:
                        self._write(part)
                        part = []
                self._write(part)
                spool.clear()
                logger.info("stored the records of %s in the database", spool.path)
            if spool is not self._spool:
                spool.close(remove=True)
                self._inherited.remove(spool)
        self._connected()
        self._away_until_s = 0.0
        self._caught_up.set()

    def _write(self, reports: list[Report]) -> None:
        if not reports:
            return
        store = self._connected()
        for report in reports:
            if report.started is not None:
                try:
                    store.run_started(
                        report.run_id,
                        report.attempt,
                        total_steps=report.started.total_steps,
                        resumed_from_step=report.started.resumed_from_step,
                        facts=report.started.facts,
                    )
                except (StaleAttempt, NotFound):
                    with self._lock:
                        self._stale.add((report.run_id, report.attempt))
                except Conflict:
                    continue  # Said before: the report came twice.
        stale = store.record(merge(reports))
        with self._lock:
            self._stale |= stale

    def _connected(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store
