"""The recorder of one experiment: takes the workers' reports and writes them in batches. Knows no Ray.

A report is acknowledged when its rows are committed or, while the database is unavailable, on the local disk.
Once the database is back, rows on the disk are written first, in order. A worker has one report in flight and
collects further rows meanwhile, so the number of workers bounds what waits here.

No error ends the writing thread. One that is not an outage either concerns some rows, which are then set
aside in a file, or counts as an outage. Both, and a damaged spool, become events of the experiment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from service.db.errors import OutOfRange
from service.domain.events import EventKind
from service.domain.process_metrics import MetricBuffer
from service.recording.spool import Spool, SpoolReader, append_line, left_behind, rejected_file, spooled_bytes
from service.store import Conflict, NotFound, RecordBatch, StaleAttempt, Store, StoreError
from service.store.base import storable
from trainers.reporting import StopReason

logger = logging.getLogger(__name__)

STALE_EXIT_CODE = 70  # Of a process that ends at once, because another attempt is current
GATHER_S = 0.05  # How long the writer waits for further reports to put into the same transaction
RETRY_S = 1.0  # Pause between attempts to reach a database that is unavailable
FIGURES_EVERY_S = 5.0  # How often figures for `/metrics` are stored
_REPLAY_REPORTS = 500
_LOOK_S = 0.05  # How often it is looked whether spooled points are stored
_MOST_SPLITS = 100  # How often a batch that the database refuses is halved to find the rows that it refuses


@dataclass(frozen=True, slots=True)
class Started:
    """A worker has begun; see `Store.run_started`."""

    total_steps: int
    resumed_from_step: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of one attempt, and a sign of life even without rows; safe to repeat: every row has a key."""

    run_id: int
    attempt: int
    started: Started | None = None
    rows: RecordBatch = field(default_factory=RecordBatch)

    @property
    def empty(self) -> bool:
        return self.started is None and not self.rows.attempts()

    def to_bytes(self) -> bytes:
        """Returns JSON in which NaN and infinities keep their names, and what JSON lacks becomes a string."""
        text = json.dumps(asdict(self), separators=(",", ":"), default=str, skipkeys=True, ensure_ascii=False)
        return storable(text).encode()

    @staticmethod
    def from_bytes(text: bytes) -> Report:
        return _REPORT.validate_json(text)


_REPORT = TypeAdapter(Report)


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The rows of a report are safe."""

    stop: StopReason | None = None  # Why the run should end at its next step boundary
    stale: bool = False  # Another attempt is current; end and write nothing


def merge(reports: list[Report]) -> RecordBatch:
    batch = RecordBatch()
    for report in reports:
        for rows in fields(batch):
            getattr(batch, rows.name).extend(getattr(report.rows, rows.name))
    return batch


class Recorder:
    """Writes reports through a store, in a thread that tries again while that fails; thread-safe."""

    def __init__(self, store: Store, folder: Path, experiment_id: int, attempt: int) -> None:
        self._store = store
        self._folder, self._experiment_id, self._attempt = folder, experiment_id, attempt
        self._spool: Spool | None = None  # On the disk; None until the database first takes nothing
        self._inherited = left_behind(folder)
        self._look_again_s = 0.0  # When the spools of recorders that still live are looked at again
        self._announced: set[tuple[int, int]] = set()  # Attempts with an event about rows that were set aside
        self._lock = threading.Condition()
        self._waiting: list[tuple[Report, Future[Acknowledgement]]] = []
        self._stop_all: StopReason | None = None
        self._stop_attempts: dict[tuple[int, int], StopReason] = {}
        self._stale: set[tuple[int, int]] = set()
        self._away_until_s = 0.0
        self.trouble: str | None = "the database has not been reached yet"
        """Why rows on this disk, also from earlier recorders, wait for the database; None = none wait."""
        self._closing = False
        self._figures = MetricBuffer()
        store.database.observe_write = functools.partial(
            self._figures.observe, "stillhouse_commit_seconds", process="recorder"
        )
        self._figures_s = float("-inf")
        self._oldest_s: float | None = None
        """When the oldest report came that is not in the database, monotonic; None = there is none."""
        self._writer = threading.Thread(target=self._write_forever, name="recorder", daemon=True)
        self._writer.start()

    def submit(self, report: Report) -> Future[Acknowledgement]:
        """Takes a report; the future resolves when its rows are safe."""
        future: Future[Acknowledgement] = Future()
        with self._lock:
            if report.empty or (report.run_id, report.attempt) in self._stale:
                future.set_result(self._answer(report))
                return future
            self._waiting.append((report, future))
            if self._oldest_s is None:
                self._oldest_s = time.monotonic()
            self._lock.notify()
        return future

    def request_stops(
        self, everything: StopReason | None, attempts: Mapping[tuple[int, int], StopReason]
    ) -> None:
        """Replaces the stop requests: for all runs, and for attempts, as (run, number)."""
        with self._lock:
            self._stop_all = everything
            self._stop_attempts = dict(attempts)

    def shut_out(self, run_id: int, attempt: int) -> None:
        """Takes no further reports of an attempt that is about to end: its processes may live on."""
        with self._lock:
            self._stale.add((run_id, attempt))

    def wait_until_stored(self, timeout_s: float) -> str | None:
        """Waits until no points of any attempt are left on the node's disk; returns why some are, or None."""
        deadline = time.monotonic() + timeout_s
        while (trouble := self.trouble) is not None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return trouble

    def close(self) -> None:
        """Ends the writing thread; whoever opened the store closes it."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._writer.join()
        if self._spool is not None:
            self._spool.close()
        for spool in self._inherited:
            spool.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # Fails if anything waits in it, or is kept there.
        with contextlib.suppress(StoreError):
            self._store.process_metrics.drop_gauges(self._source)

    def _answer(self, report: Report) -> Acknowledgement:
        stop = self._stop_all or self._stop_attempts.get((report.run_id, report.attempt))
        return Acknowledgement(stop, (report.run_id, report.attempt) in self._stale)

    # -- The writing thread ----------------------------------------------------------------------

    def _write_forever(self) -> None:
        while True:
            try:
                if self._write_waiting():
                    return
            except Exception:
                # What was taken is still in `_waiting`: the next round takes it again.
                logger.exception("the recorder failed; trying again")
                time.sleep(RETRY_S)

    def _write_waiting(self) -> bool:
        """Makes waiting reports durable and answers them; True = the recorder is closed and done."""
        with self._lock:
            while not self._waiting and not self._closing and not self._due():
                self._lock.wait(RETRY_S / 2)
            closing = self._closing
        if not closing:
            time.sleep(GATHER_S)
        with self._lock:
            waiting = list(self._waiting)
        if not self._keep([report for report, _ in waiting]):
            if not closing:
                time.sleep(RETRY_S)
            return closing
        with self._lock:
            del self._waiting[: len(waiting)]
            answers = [(future, self._answer(report)) for report, future in waiting]
        for future, answer in answers:
            if not future.cancelled():
                future.set_result(answer)
        return closing and not self._waiting

    def _due(self) -> bool:
        now = time.monotonic()
        behind = self.trouble is not None or (bool(self._inherited) and now >= self._look_again_s)
        return behind and now >= self._away_until_s

    def _keep(self, reports: list[Report]) -> bool:
        """Makes reports durable, in the database or on the disk; False = neither accepts them."""
        if time.monotonic() >= self._away_until_s:
            try:
                self._store_figures()
                self._replay()
                self._write(reports)
            except Exception as error:
                # Not even an unforeseen error may lose rows or end this thread.
                self._away(error)
            else:
                if self.trouble is not None:
                    logger.info("the database takes points")
                    self.trouble = None
                with self._lock:
                    # What came during the write waits for the next; its age is counted from here.
                    self._oldest_s = time.monotonic() if len(self._waiting) > len(reports) else None
                return True
        try:
            if reports:
                self._spool = self._spool or Spool(self._folder, self._attempt)
                self._spool.append([report.to_bytes() for report in reports])
        except OSError as error:
            logger.error("neither the database nor the local disk accepts points: %s", error)
            return False
        return True

    def _away(self, error: Exception) -> None:
        trouble = f"{type(error).__name__}: {_line(error)}"
        if trouble != self.trouble:
            foreseen = isinstance(error, StoreError)
            logger.warning(
                "spooling points to %s: %s", self._folder, trouble, exc_info=None if foreseen else error
            )
        self.trouble = trouble
        self._away_until_s = time.monotonic() + RETRY_S

    # -- Figures -----------------------------------------------------------------------------------

    def _store_figures(self) -> None:
        """Stores figures when due; before what waits, so that a lag is visible before it is over."""
        now = time.monotonic()
        if now - self._figures_s < FIGURES_EVERY_S:
            return
        lag_s = 0.0 if self._oldest_s is None else now - self._oldest_s
        self._figures.gauge("stillhouse_recorder_lag_seconds", lag_s)
        self._figures.gauge("stillhouse_spool_bytes", float(spooled_bytes(self._folder)))
        rows = self._figures.taken()
        try:
            self._store.process_metrics.add(rows, source=self._source)
        except StoreError:
            self._figures.put_back(rows)
            raise
        except Exception:
            # Points matter more than figures about them: those must never keep rows from the database.
            logger.exception("figures could not be stored")
        self._figures_s = now

    @property
    def _source(self) -> str:
        return f"experiment:{self._experiment_id}:{self._attempt}"

    # -- From the disk to the database -----------------------------------------------------------

    def _replay(self) -> None:
        """Writes what is on the disk into the database, oldest first."""
        for spool in list(self._inherited):
            # The lock comes first: once it is held, nothing is added behind what is read.
            ended = spool.lock()
            self._deliver(spool)
            if ended:
                try:
                    spool.close(remove=not self._set_aside_damaged(spool))
                except OSError as error:
                    logger.error("%s is stored and cannot be removed: %s", spool.path, error)
                self._inherited.remove(spool)
        self._look_again_s = time.monotonic() + RETRY_S
        if self._spool is not None:
            own = self._spool.reader()
            try:
                self._deliver(own)
                damaged = self._set_aside_damaged(own)
            finally:
                own.close()
            self._spool.close(remove=not damaged)
            self._spool = None

    def _deliver(self, spool: SpoolReader) -> None:
        before, part = spool.progress.records, list[Report]()
        for record in spool.records():
            try:
                part.append(Report.from_bytes(record))
            except ValueError:
                spool.reject(record)
            if len(part) == _REPLAY_REPORTS:
                self._write(part)
                spool.delivered()
                part = []
        self._write(part)
        spool.delivered()
        if spool.progress.records > before:
            logger.info(
                "stored %d records of %s in the database", spool.progress.records - before, spool.path
            )

    def _set_aside_damaged(self, spool: SpoolReader) -> bool:
        """Renames a damaged spool and writes an event; False = the spool is sound."""
        progress = spool.progress
        if progress.torn_bytes:
            logger.warning("%s ends in %d bytes of an unfinished append", spool.path, progress.torn_bytes)
        if progress.first_damage is None:
            return False
        message = (
            f"{spool.path} is damaged at byte {progress.first_damage}: {progress.damaged_bytes} bytes could "
            f"not be read, {progress.records} records are stored; the file is kept with the suffix .damaged"
        )
        self._announce(EventKind.experiment_spool_damaged, message)
        spool.set_aside()
        return True

    # -- Into the database -----------------------------------------------------------------------

    def _write(self, reports: list[Report]) -> None:
        if not reports:
            return
        for report in reports:
            if report.started is not None:
                self._start(report, report.started)
        stale = self._store_rows(merge(reports), iter(range(_MOST_SPLITS)))
        with self._lock:
            self._stale |= stale

    def _start(self, report: Report, started: Started) -> None:
        def begin(facts: Mapping[str, object]) -> None:
            try:
                self._store.attempts.run_started(
                    report.run_id,
                    report.attempt,
                    total_steps=started.total_steps,
                    resumed_from_step=started.resumed_from_step,
                    facts=facts,
                )
            except (StaleAttempt, NotFound):
                with self._lock:
                    self._stale.add((report.run_id, report.attempt))
            except Conflict:
                pass  # Said before: the report came twice.

        try:
            begin(started.facts)
        except StoreError:
            raise
        except Exception as error:
            self._set_aside([(report.run_id, report.attempt)], asdict(started), error)
            begin({})  # The run has started, whatever is wrong with its facts.

    def _store_rows(self, batch: RecordBatch, splits: Iterable[int]) -> frozenset[tuple[int, int]]:
        """Stores a batch without rows that the database refuses; returns stale attempts, as (run, number)."""
        try:
            return self._store.recording.record(batch)
        except OutOfRange as error:
            refused: Exception = error
        except StoreError:
            raise
        except Exception as error:
            refused = error
        halves = batch.halves() if next(iter(splits), None) is not None else None
        if halves is None:
            self._set_aside(sorted(batch.attempts()), asdict(batch), refused)
            return frozenset()
        return self._store_rows(halves[0], splits) | self._store_rows(halves[1], splits)

    def _set_aside(
        self, attempts: list[tuple[int, int]], rows: Mapping[str, object], error: Exception
    ) -> None:
        """Keeps rows that the database refuses in a file, and writes an event of their run.

        The event comes first: a database that refuses that as well refuses more than these rows.
        """
        path = rejected_file(self._folder, self._attempt)
        for run_id, attempt in attempts:
            if (run_id, attempt) not in self._announced:
                message = f"rows of attempt {attempt} were refused and set aside in {path}: {_line(error)}"
                self._announce(EventKind.run_rows_set_aside, message, run_id)
                self._announced.add((run_id, attempt))
        append_line(path, json.dumps({"error": _line(error), **rows}, default=str, skipkeys=True))

    def _announce(self, kind: EventKind, message: str, run_id: int | None = None) -> None:
        logger.error("%s", message)
        try:
            self._store.drivers.note(self._experiment_id, self._attempt, message, kind=kind, run_id=run_id)
        except StaleAttempt as error:
            logger.error("%s", error)


def _line(error: Exception) -> str:
    """The first line of an error, without the statement that SQLAlchemy adds."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return (lines or [type(error).__name__])[0][:300]
