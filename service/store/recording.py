"""Batches of points, logs, measurements and progress of many runs, one transaction each.

A batch can be written twice: rows that are there already are left as they are. Rows of an
attempt that is not the current one change nothing, and the answer names it, so that its writer
is stopped.
"""

from __future__ import annotations

import bisect
import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sqlalchemy import Connection

from service.config.settings import Settings
from service.db import point_statements, schema, statements, usage_statements, writers
from service.db.engine import Database
from service.db.errors import StoreUnavailable
from service.db.schema import BUCKET_STEPS
from service.db.statements import ACTIVE_RUN_STATES
from service.domain.ledger import OVERHEAD_TIME, counts_towards_usage
from service.domain.records import LogLine, MeasurementRow
from service.domain.states import RunState
from service.store.base import StorePart, storable

LONGEST_LOG_LINE = 16_000
"""Log messages are cut to this many characters."""
LONGEST_NAME = 200
"""Names of metrics are cut to this many characters."""
_KEYS = 500
"""Measurements that one statement looks up."""


@dataclass(frozen=True, slots=True)
class PointBatch:
    """Values of one metric of one attempt, by step; the three lists are of one length.

    Values may be NaN or infinite; `at_s` are the Unix seconds of each.
    """

    run_id: int
    attempt: int
    name: str
    steps: list[int]
    values: list[float]
    at_s: list[float]

    def halves(self) -> tuple[PointBatch, PointBatch]:
        middle = len(self.steps) // 2
        return (
            replace(self, steps=self.steps[:middle], values=self.values[:middle], at_s=self.at_s[:middle]),
            replace(self, steps=self.steps[middle:], values=self.values[middle:], at_s=self.at_s[middle:]),
        )


@dataclass(frozen=True, slots=True)
class ProgressRow:
    run_id: int
    attempt: int
    step: int
    total_steps: int | None
    phase: str | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    run_id: int
    attempt: int
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class AliveRow:
    run_id: int
    attempt: int
    at_s: float


@dataclass(frozen=True, slots=True)
class RecordBatch:
    points: list[PointBatch] = field(default_factory=list)
    logs: list[LogLine] = field(default_factory=list)
    measurements: list[MeasurementRow] = field(default_factory=list)
    progress: list[ProgressRow] = field(default_factory=list)
    checkpoints: list[CheckpointRow] = field(default_factory=list)
    alive: list[AliveRow] = field(default_factory=list)

    def attempts(self) -> frozenset[tuple[int, int]]:
        """(run, attempt) of everything in the batch."""
        rows: list[Any] = [
            *self.points, *self.logs, *self.measurements, *self.progress, *self.checkpoints, *self.alive,
        ]  # fmt: skip
        return frozenset((row.run_id, row.attempt) for row in rows)

    def halves(self) -> tuple[RecordBatch, RecordBatch] | None:
        """Two batches with half of the rows each; None when there is no more than one."""
        names = [field.name for field in fields(self)]
        count = sum(len(getattr(self, name)) for name in names)
        if count == 1 and self.points and len(self.points[0].steps) > 1:
            first, second = self.points[0].halves()
            return RecordBatch(points=[first]), RecordBatch(points=[second])
        if count < 2:
            return None
        parts, left = (RecordBatch(), RecordBatch()), count // 2
        for name in names:
            rows = getattr(self, name)
            getattr(parts[0], name).extend(rows[:left])
            getattr(parts[1], name).extend(rows[left:])
            left = max(0, left - len(rows))
        return parts

    def last_signs_of_life(self) -> dict[tuple[int, int], float]:
        """The latest time of anything in the batch by (run, attempt), in Unix seconds."""
        seen: dict[tuple[int, int], float] = {}
        for run_id, attempt, at_s in (
            *((row.run_id, row.attempt, max(row.at_s)) for row in self.points if row.at_s),
            *((row.run_id, row.attempt, row.at_s) for row in self.logs),
            *((row.run_id, row.attempt, row.at_s) for row in self.alive),
            *((row.run_id, row.attempt, row.end_s) for row in self.measurements),
        ):
            seen[run_id, attempt] = max(at_s, seen.get((run_id, attempt), at_s))
        return seen


class Recording(StorePart):
    def __init__(
        self, database: Database, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(database, settings, clock)
        self._name_ids: dict[str, int] = {}
        self._name_lock = threading.Lock()

    def record(self, batch: RecordBatch) -> frozenset[tuple[int, int]]:
        """Writes a batch, durable when this returns.

        Points, logs, measurements and checkpoints of an attempt that has ended are still taken (they may come
        late from a spool) until another attempt of the run opens; progress is not.

        Returns (run, attempt) whose writers are to stop: the run has another attempt, and the rows were
        dropped, or it waits for one. On `StoreOutage` nothing was written: keep the batch and repeat it.
        """
        attempts = batch.attempts()
        if not attempts:
            return frozenset()
        names = self._names({points.name[:LONGEST_NAME] for points in batch.points})

        def body(connection: Connection) -> frozenset[tuple[int, int]]:
            if (refusal := writers.refusal(connection)) is not None:
                # The rows stay in this recorder's spool, for one of the release that the database takes.
                raise StoreUnavailable(refusal)
            current = point_statements.lock_attempts(connection, {run_id for run_id, _ in attempts})
            stale = frozenset(pair for pair in attempts if not _is_latest(current.get(pair[0]), pair[1]))
            _write_points(connection, batch.points, stale, names)
            _write_logs(connection, batch.logs, stale)
            _count_measurements(connection, batch.measurements, stale, current)
            _write_measurements(connection, batch.measurements, stale)
            _write_neighbours(connection, batch.measurements, stale)
            _write_progress(connection, batch.progress, stale)
            _write_checkpoints(connection, batch.checkpoints, stale)
            _write_signs_of_life(connection, batch.last_signs_of_life(), stale)
            _settle_ended(connection, attempts - stale, current)
            waiting = {pair for pair in attempts - stale if current[pair[0]].state is RunState.queued}
            return stale | waiting

        return self.database.write(body)

    def _names(self, wanted: set[str]) -> dict[str, int]:
        """Ids of metric names, in a transaction of its own: a name is never taken back."""
        with self._name_lock:
            missing = wanted - self._name_ids.keys()
            if missing:
                self._name_ids.update(self.database.write(lambda connection: _add_names(connection, missing)))
            return {name: self._name_ids[name] for name in wanted}


def _add_names(connection: Connection, names: Iterable[str]) -> dict[str, int]:
    stored = {name: storable(name) for name in names}
    connection.execute(
        statements.insert_or_keep(connection, schema.metric_names, ("name",)),
        [{"name": name} for name in sorted(set(stored.values()))],
    )
    ids = {row.name: row.id for row in connection.execute(statements.metric_ids(set(stored.values())))}
    return {name: ids[kept] for name, kept in stored.items()}


def _is_latest(run: point_statements.LockedRun | None, attempt: int) -> bool:
    return run is not None and run.attempt == attempt


def _write_points(
    connection: Connection,
    batches: list[PointBatch],
    stale: frozenset[tuple[int, int]],
    names: dict[str, int],
) -> None:
    rows: list[tuple[Any, ...]] = []
    latest: dict[tuple[int, int], tuple[Any, ...]] = {}
    series: dict[tuple[int, int, int], tuple[list[int], list[float]]] = {}
    for batch in batches:
        if (batch.run_id, batch.attempt) in stale or not batch.steps:
            continue
        run_id, attempt, name = batch.run_id, batch.attempt, names[batch.name[:LONGEST_NAME]]
        first = len(rows)
        rows += [
            (run_id, name, attempt, step, at_s, value if value == value else None)
            for step, at_s, value in zip(batch.steps, batch.at_s, batch.values, strict=True)
        ]
        newest = rows[first + batch.steps.index(max(batch.steps))]
        key = (run_id, name)
        if key not in latest or (latest[key][2], latest[key][3]) < (attempt, newest[3]):
            latest[key] = newest
        steps, values = series.get((run_id, name, attempt), ([], []))
        series[run_id, name, attempt] = (steps + batch.steps, values + batch.values)
    rows.sort()  # In the order of the key: pages are filled one after the other.
    point_statements.add_rows(connection, "points", rows)
    point_statements.raise_latest(connection, list(latest.values()))
    point_statements.widen_extremes(
        connection,
        [(*key, *found) for key in sorted(series) for found in extremes(*series[key], BUCKET_STEPS)],
    )


Extremes = tuple[int, float | None, int | None, float | None, int | None, int | None]
"""Number of a bucket; least value and its step, greatest value and its step; step of the first NaN."""


def extremes(steps: list[int], values: list[float], width: int) -> list[Extremes]:
    """Extremes of each bucket of `width` steps, in order; of equal values the first counts."""
    if any(map(operator.gt, steps, steps[1:])):
        order = sorted(range(len(steps)), key=steps.__getitem__)
        steps, values = [steps[place] for place in order], [values[place] for place in order]
    found: list[Extremes] = []
    start = 0
    while start < len(steps):
        bucket = steps[start] // width
        end = bisect.bisect_left(steps, (bucket + 1) * width, start)
        part, at = values[start:end], steps[start:end]
        start = end
        total = sum(part)
        nan_step: int | None = None
        if total != total:  # A NaN, or infinities of both signs.
            nan_step = next((step for step, value in zip(at, part, strict=True) if value != value), None)
            at = [step for step, value in zip(at, part, strict=True) if value == value]
            part = [value for value in part if value == value]
            if not part:
                found.append((bucket, None, None, None, None, nan_step))
                continue
        low, high = min(part), max(part)
        found.append((bucket, low, at[part.index(low)], high, at[part.index(high)], nan_step))
    return found


def _write_logs(connection: Connection, lines: list[LogLine], stale: frozenset[tuple[int, int]]) -> None:
    rows = [
        (
            line.run_id,
            line.attempt,
            line.number,
            line.at_s,
            line.level,
            storable(line.message[:LONGEST_LOG_LINE]),
        )
        for line in lines
        if (line.run_id, line.attempt) not in stale
    ]
    point_statements.add_rows(connection, "log_lines", rows)


def _count_measurements(
    connection: Connection,
    measured: list[MeasurementRow],
    stale: frozenset[tuple[int, int]],
    current: Mapping[int, point_statements.LockedRun],
) -> None:
    """Adds measurements that are not stored yet to the running sums of their attempts."""
    new: dict[tuple[Any, ...], MeasurementRow] = {}
    for row in measured:
        if (row.run_id, row.attempt) not in stale and counts_towards_usage(row):
            new.setdefault(
                (row.run_id, row.attempt, row.name, storable(row.scope), row.start_s, row.end_s), row
            )
    keys = list(new)
    for first in range(0, len(keys), _KEYS):
        stored = connection.execute(usage_statements.stored_measurements(keys[first : first + _KEYS]))
        for key in stored:
            del new[tuple(key)]
    sums: dict[tuple[int, int], dict[str, Any]] = {}
    for row in new.values():
        if not math.isfinite(row.value):
            continue
        of = sums.setdefault(
            (row.run_id, row.attempt),
            {
                "experiment": current[row.run_id].experiment_id,
                "run": row.run_id,
                "current": row.attempt,
                "covered": 0.0,
                "energy": 0.0,
                "overhead": 0.0,
            },
        )
        if row.name == OVERHEAD_TIME:
            of["overhead"] += row.value
        else:
            of["covered"] += row.end_s - row.start_s
            of["energy"] += row.value
    if sums:
        connection.execute(usage_statements.ADD_MEASURED, list(sums.values()))


def _settle_ended(
    connection: Connection,
    attempts: frozenset[tuple[int, int]],
    current: Mapping[int, point_statements.LockedRun],
) -> None:
    """Charges attempts that have ended up to signs of life that came late."""
    ended: dict[int, list[tuple[int, int]]] = {}
    for run_id, number in attempts:
        if current[run_id].state not in ACTIVE_RUN_STATES:
            ended.setdefault(current[run_id].experiment_id, []).append((run_id, number))
    for experiment_id, pairs in sorted(ended.items()):
        connection.execute(usage_statements.settle_attempts(experiment_id, pairs))


def _write_measurements(
    connection: Connection, measured: list[MeasurementRow], stale: frozenset[tuple[int, int]]
) -> None:
    rows = [
        (
            row.run_id,
            row.attempt,
            storable(row.name[:LONGEST_NAME]),
            storable(row.scope),
            row.start_s,
            row.end_s,
            row.value if row.value == row.value else None,
            storable(row.unit),
            str(row.provenance),
        )
        for row in measured
        if (row.run_id, row.attempt) not in stale
    ]
    point_statements.add_rows(connection, "measurements", rows)


def _write_neighbours(
    connection: Connection, measured: list[MeasurementRow], stale: frozenset[tuple[int, int]]
) -> None:
    """Brings runs' shares of disturbed time up to date with all measurements of their attempts."""
    told = {
        row.run_id
        for row in measured
        if row.name in schema.NEIGHBOUR_COLUMNS and (row.run_id, row.attempt) not in stale
    }
    if not told:
        return
    shares: dict[int, dict[str, float]] = {}
    for row in connection.execute(point_statements.windows_of(told, schema.NEIGHBOUR_COLUMNS)):
        if row.seconds > 0.0:
            # Workers on several machines wait for each other: the most disturbed machine counts.
            of_run = shares.setdefault(row.run_id, {})
            of_run[row.name] = max(of_run.get(row.name, 0.0), row.weighted / row.seconds)
    for run_id, values in sorted(shares.items()):
        connection.execute(statements.set_run(run_id, **values))


def _write_progress(
    connection: Connection, progress: list[ProgressRow], stale: frozenset[tuple[int, int]]
) -> None:
    last = {(row.run_id, row.attempt): row for row in progress}
    rows = [
        {
            "run": row.run_id,
            "current": row.attempt,
            "at_step": row.step,
            "of_steps": row.total_steps,
            "in_phase": row.phase,
        }
        for pair, row in sorted(last.items())
        if pair not in stale
    ]
    if rows:
        connection.execute(point_statements.SET_PROGRESS, rows)
        connection.execute(
            point_statements.SET_LAST_STEP,
            [{name: row[name] for name in ("run", "current", "at_step")} for row in rows],
        )


def _write_checkpoints(
    connection: Connection, checkpoints: list[CheckpointRow], stale: frozenset[tuple[int, int]]
) -> None:
    rows = [
        {"run": row.run_id, "current": row.attempt, "at_step": row.step, "path": storable(row.path)}
        for row in checkpoints
        if (row.run_id, row.attempt) not in stale
    ]
    if rows:
        connection.execute(point_statements.SET_CHECKPOINT, rows)


def _write_signs_of_life(
    connection: Connection, seen: Mapping[tuple[int, int], float], stale: frozenset[tuple[int, int]]
) -> None:
    rows = [
        {"run": run_id, "current": attempt, "at": at_s}
        for (run_id, attempt), at_s in sorted(seen.items())
        if (run_id, attempt) not in stale
    ]
    if rows:
        connection.execute(point_statements.SET_SEEN, rows)
