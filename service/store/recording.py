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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import psycopg
import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select, update

from service.config.settings import Settings
from service.db import schema, statements, writers
from service.db.engine import Database, driver_connection
from service.db.errors import StoreUnavailable
from service.db.schema import BUCKET_STEPS
from service.db.statements import ACTIVE_RUN_STATES
from service.domain.ledger import OVERHEAD_TIME, counts_towards_usage
from service.domain.records import LogLine, MeasurementRow
from service.domain.states import RunState
from service.store.accounting import settle_attempts
from service.store.base import Clocks, StorePart, storable

_u = schema.attempt_usage.c


LONGEST_LOG_LINE = 16_000
"""Log messages are cut to this many characters."""
LONGEST_NAME = 200
"""Names of metrics are cut to this many characters."""
_KEYS = 500
"""Measurements that one statement looks up."""


ADD_MEASURED = (
    update(schema.attempt_usage)
    .where(
        _u.experiment_id == bindparam("experiment"),
        _u.run_id == bindparam("run"),
        _u.number == bindparam("current"),
    )
    .values(
        covered_s=_u.covered_s + bindparam("covered", type_=schema.Real),
        energy_kwh=_u.energy_kwh + bindparam("energy", type_=schema.Real),
        overhead_s=_u.overhead_s + bindparam("overhead", type_=schema.Real),
    )
)
"""Add new measurements of an attempt to its sums."""
_MEASUREMENT_KEY = ("run_id", "attempt", "name", "scope", "start_s", "end_s")


FEWEST_COPIED = 200
"""Points that PostgreSQL takes by COPY, which needs two statements more than an INSERT."""
_TABLES: dict[str, tuple[tuple[str, str], ...]] = {
    "points": (
        ("run_id", "int8"), ("name_id", "int4"), ("attempt", "int4"), ("step", "int8"),
        ("at_s", "float8"), ("value", "float8"),
    ),
    "log_lines": (
        ("run_id", "int8"), ("attempt", "int4"), ("number", "int4"), ("at_s", "float8"),
        ("level", "text"), ("message", "text"),
    ),
    "measurements": (
        ("run_id", "int8"), ("attempt", "int4"), ("name", "text"), ("scope", "text"),
        ("start_s", "float8"), ("end_s", "float8"), ("value", "float8"), ("unit", "text"),
        ("provenance", "text"),
    ),
    "point_extremes": (
        ("run_id", "int8"), ("name_id", "int4"), ("attempt", "int4"), ("bucket", "int8"), ("low", "float8"),
        ("low_step", "int8"), ("high", "float8"), ("high_step", "int8"), ("nan_step", "int8"),
    ),
}  # fmt: skip
_NEWER_POINT = """
    ON CONFLICT (run_id, name_id) DO UPDATE
    SET attempt = excluded.attempt, step = excluded.step, at_s = excluded.at_s, value = excluded.value
    WHERE (excluded.attempt, excluded.step) > (latest_points.attempt, latest_points.step)
"""
_LOWER = """(
    (point_extremes.low IS NULL AND excluded.low IS NOT NULL) OR excluded.low < point_extremes.low
    OR (excluded.low = point_extremes.low AND excluded.low_step < point_extremes.low_step)
)"""
_HIGHER = """(
    (point_extremes.high IS NULL AND excluded.high IS NOT NULL) OR excluded.high > point_extremes.high
    OR (excluded.high = point_extremes.high AND excluded.high_step < point_extremes.high_step)
)"""
_EARLIER_NAN = """(
    (point_extremes.nan_step IS NULL AND excluded.nan_step IS NOT NULL)
    OR excluded.nan_step < point_extremes.nan_step
)"""
_WIDER_EXTREMES = f"""
    ON CONFLICT (run_id, name_id, attempt, bucket) DO UPDATE SET
      low = CASE WHEN {_LOWER} THEN excluded.low ELSE point_extremes.low END,
      low_step = CASE WHEN {_LOWER} THEN excluded.low_step ELSE point_extremes.low_step END,
      high = CASE WHEN {_HIGHER} THEN excluded.high ELSE point_extremes.high END,
      high_step = CASE WHEN {_HIGHER} THEN excluded.high_step ELSE point_extremes.high_step END,
      nan_step = CASE WHEN {_EARLIER_NAN} THEN excluded.nan_step ELSE point_extremes.nan_step END
    WHERE {_LOWER} OR {_HIGHER} OR {_EARLIER_NAN}
"""
LockedRun: TypeAlias = "sa.Row[Any, Any, Any, Any]"
"""Id, experiment, attempt and state of a locked run."""
# Written out, because a list of parameters cannot be part of a statement that runs for many rows.
_active = schema.runs.c.state.in_(
    [sa.literal_column(f"'{state}'") for state in sorted(statements.ACTIVE_RUN_STATES)]
)
SET_PROGRESS = (
    update(schema.runs)
    .where(schema.runs.c.id == bindparam("run"), schema.runs.c.attempt == bindparam("current"), _active)
    .values(
        step=bindparam("at_step"),
        total_steps=func.coalesce(bindparam("of_steps", type_=sa.BigInteger()), schema.runs.c.total_steps),
        phase=bindparam("in_phase"),
    )
)
"""Where a run is; only while its attempt is open."""
SET_LAST_STEP = (
    update(schema.attempts)
    .where(
        schema.attempts.c.run_id == bindparam("run"),
        schema.attempts.c.number == bindparam("current"),
        schema.attempts.c.last_step < bindparam("at_step"),
    )
    .values(last_step=bindparam("at_step"))
)
"""How far an attempt got."""
SET_SEEN = (
    update(schema.attempts)
    .where(
        schema.attempts.c.run_id == bindparam("run"),
        schema.attempts.c.number == bindparam("current"),
        func.coalesce(schema.attempts.c.seen_s, 0.0) < bindparam("at"),
    )
    .values(seen_s=bindparam("at"))
)
"""When an attempt was last known to be alive."""
SET_CHECKPOINT = (
    update(schema.runs)
    .where(
        schema.runs.c.id == bindparam("run"),
        schema.runs.c.attempt == bindparam("current"),
        func.coalesce(schema.runs.c.checkpoint_step, -1) <= bindparam("at_step"),
    )
    .values(checkpoint=bindparam("path"), checkpoint_step=bindparam("at_step"))
)
"""The last verified checkpoint of a run."""


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
        """Returns the latest time in the batch by (run, attempt), in Unix seconds."""
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
    def __init__(self, database: Database, settings: Settings, clocks: Clocks) -> None:
        super().__init__(database, settings, clocks)
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
            current = lock_attempts(connection, {run_id for run_id, _ in attempts})
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
    metric_ids = select(schema.metric_names.c.name, schema.metric_names.c.id).where(
        schema.metric_names.c.name.in_(list(set(stored.values())))
    )
    ids = {row.name: row.id for row in connection.execute(metric_ids)}
    return {name: ids[text] for name, text in stored.items()}


def _is_latest(run: LockedRun | None, attempt: int) -> bool:
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
    add_rows(connection, "points", rows)
    raise_latest(connection, list(latest.values()))
    widen_extremes(
        connection,
        [(*key, *bucket) for key in sorted(series) for bucket in extremes(*series[key], BUCKET_STEPS)],
    )


Extremes = tuple[int, float | None, int | None, float | None, int | None, int | None]
"""Number of a bucket; least value and its step, greatest value and its step; step of the first NaN."""


def extremes(steps: list[int], values: list[float], width: int) -> list[Extremes]:
    """Extremes of each bucket of `width` steps, in order; of equal values the first counts."""
    if any(map(operator.gt, steps, steps[1:])):
        order = sorted(range(len(steps)), key=steps.__getitem__)
        steps, values = [steps[place] for place in order], [values[place] for place in order]
    buckets: list[Extremes] = []
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
                buckets.append((bucket, None, None, None, None, nan_step))
                continue
        low, high = min(part), max(part)
        buckets.append((bucket, low, at[part.index(low)], high, at[part.index(high)], nan_step))
    return buckets


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
    add_rows(connection, "log_lines", rows)


def _count_measurements(
    connection: Connection,
    measured: list[MeasurementRow],
    stale: frozenset[tuple[int, int]],
    current: Mapping[int, LockedRun],
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
        stored = connection.execute(_stored_measurements(keys[first : first + _KEYS]))
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
        connection.execute(ADD_MEASURED, list(sums.values()))


def _settle_ended(
    connection: Connection, attempts: frozenset[tuple[int, int]], current: Mapping[int, LockedRun]
) -> None:
    """Charges attempts that have ended up to signs of life that came late."""
    ended: dict[int, list[tuple[int, int]]] = {}
    for run_id, number in attempts:
        if current[run_id].state not in ACTIVE_RUN_STATES:
            ended.setdefault(current[run_id].experiment_id, []).append((run_id, number))
    for experiment_id, pairs in sorted(ended.items()):
        connection.execute(settle_attempts(experiment_id, pairs))


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
    add_rows(connection, "measurements", rows)


def _write_neighbours(
    connection: Connection, measured: list[MeasurementRow], stale: frozenset[tuple[int, int]]
) -> None:
    """Brings runs' shares of disturbed time up to date with all measurements of their attempts."""
    run_ids = {
        row.run_id
        for row in measured
        if row.name in schema.NEIGHBOUR_COLUMNS and (row.run_id, row.attempt) not in stale
    }
    if not run_ids:
        return
    shares: dict[int, dict[str, float]] = {}
    m = schema.measurements.c
    seconds = m.end_s - m.start_s
    windows_of = (
        select(
            m.run_id,
            m.name,
            m.scope,
            func.sum(seconds).label("seconds"),
            func.sum(m.value * seconds).label("weighted"),
        )
        .join(schema.runs, schema.runs.c.id == m.run_id)
        .where(
            m.run_id.in_(sorted(run_ids)),
            m.name.in_(list(schema.NEIGHBOUR_COLUMNS)),
            m.attempt >= schema.runs.c.first_attempt,
            m.value.is_not(None),
        )
        .group_by(m.run_id, m.name, m.scope)
    )
    for row in connection.execute(windows_of):
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
        connection.execute(SET_PROGRESS, rows)
        connection.execute(
            SET_LAST_STEP, [{name: row[name] for name in ("run", "current", "at_step")} for row in rows]
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
        connection.execute(SET_CHECKPOINT, rows)


def _write_signs_of_life(
    connection: Connection, seen: Mapping[tuple[int, int], float], stale: frozenset[tuple[int, int]]
) -> None:
    rows = [
        {"run": run_id, "current": attempt, "at": at_s}
        for (run_id, attempt), at_s in sorted(seen.items())
        if (run_id, attempt) not in stale
    ]
    if rows:
        connection.execute(SET_SEEN, rows)


def _stored_measurements(keys: Iterable[tuple[Any, ...]]) -> sa.Select[Any]:
    key = [schema.measurements.c[name] for name in _MEASUREMENT_KEY]
    return select(*key).where(sa.tuple_(*key).in_(list(keys)))


def add_rows(connection: Connection, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Inserts rows of `points`, `log_lines` or `measurements`; one that is there is left as it is."""
    copyable = table == "points" and len(rows) >= FEWEST_COPIED and connection.dialect.name == "postgresql"
    if copyable and _copied(connection, rows):
        return
    _insert(connection, table, _TABLES[table], rows, "ON CONFLICT DO NOTHING")


def raise_latest(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Replaces the latest point of (run, name) by a newer one; at most one row per (run, name)."""
    _insert(connection, "latest_points", _TABLES["points"], rows, _NEWER_POINT)


def widen_extremes(connection: Connection, rows: Sequence[tuple[Any, ...]]) -> None:
    """Takes new points into the extremes of their buckets; at most one row per bucket.

    Points that are written a second time change nothing, in whatever order batches come.
    """
    _insert(connection, "point_extremes", _TABLES["point_extremes"], rows, _WIDER_EXTREMES)


def _insert(
    connection: Connection,
    table: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[tuple[Any, ...]],
    conflict: str,
) -> None:
    if not rows:
        return
    names = ", ".join(name for name, _ in columns)
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(columns))
        connection.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({marks}) {conflict}", list(rows))
        return
    arrays = ", ".join(f"%s::{kind}[]" for _, kind in columns)
    sql = f"INSERT INTO {table} ({names}) SELECT * FROM unnest({arrays}) {conflict}"
    # An array is of one type, and a figure may be a whole number.
    values = [
        [value if value is None else float(value) for value in column] if kind == "float8" else list(column)
        for column, (_, kind) in zip(zip(*rows, strict=True), columns, strict=True)
    ]
    with driver_connection(connection).cursor() as cursor:
        cursor.execute(sql, values)


def _copied(connection: Connection, points: Sequence[tuple[Any, ...]]) -> bool:
    """Copies points; False, and nothing is changed, when one of them is there already.

    COPY takes a third of the time of an INSERT that asks for conflicts, and a batch is rarely written twice.
    """
    names = ", ".join(name for name, _ in _TABLES["points"])
    driver: psycopg.Connection[Any] = driver_connection(connection)
    try:
        with (
            driver.transaction(),  # A savepoint: the transaction around it continues after a conflict.
            driver.cursor() as cursor,
            cursor.copy(f"COPY points ({names}) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types([kind for _, kind in _TABLES["points"]])
            for point in points:
                copy.write_row(point)
    except psycopg.errors.UniqueViolation:
        return False
    return True


def lock_attempts(connection: Connection, run_ids: Iterable[int]) -> dict[int, LockedRun]:
    """Locks runs in the order of their ids."""
    statement = (
        select(schema.runs.c.id, schema.runs.c.experiment_id, schema.runs.c.attempt, schema.runs.c.state)
        .where(schema.runs.c.id.in_(sorted(run_ids)), statements.VISIBLE_RUN)
        .order_by(schema.runs.c.id)
        .with_for_update(key_share=True)
    )
    return {row.id: row for row in connection.execute(statement)}
