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
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
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

_u, _r, _a, _p = schema.attempt_usage.c, schema.runs.c, schema.attempts.c, schema.points.c

LONGEST_LOG_LINE = 16_000  # Log messages are cut to this many characters
LONGEST_NAME = 200  # Names of metrics are cut to this many characters
_KEYS = 500  # Measurements that one statement looks up
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
FEWEST_COPIED = 200  # Points that PostgreSQL takes by COPY, which needs two statements more than an INSERT
_POSTGRESQL_TYPES = {sa.BigInteger: "int8", sa.Integer: "int4", sa.Float: "float8", sa.Text: "text"}
_KEEP = "ON CONFLICT DO NOTHING"
_NEWER_POINT = """
    ON CONFLICT (run_id, name_id) DO UPDATE
    SET attempt = excluded.attempt, step = excluded.step, at_s = excluded.at_s, value = excluded.value
    WHERE (excluded.attempt, excluded.step) > (latest_points.attempt, latest_points.step)
"""
_BEYOND = """(
    (point_extremes.{0} IS NULL AND excluded.{0} IS NOT NULL) OR excluded.{0} {1} point_extremes.{0}
    OR (excluded.{0} = point_extremes.{0} AND excluded.{0}_step < point_extremes.{0}_step)
)"""
_LOWER, _HIGHER = _BEYOND.format("low", "<"), _BEYOND.format("high", ">")
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
LockedRun: TypeAlias = "sa.Row[Any, Any, Any, Any]"  # Id, experiment, attempt and state of a locked run
# Written out, because a list of parameters cannot be part of a statement that runs for many rows.
_active = _r.state.in_([sa.literal_column(f"'{state}'") for state in sorted(ACTIVE_RUN_STATES)])
_current_run = (_r.id == bindparam("run"), _r.attempt == bindparam("current"))
_attempt = (_a.run_id == bindparam("run"), _a.number == bindparam("current"))
SET_PROGRESS = (
    update(schema.runs)
    .where(*_current_run, _active)
    .values(
        step=bindparam("at_step"),
        total_steps=func.coalesce(bindparam("of_steps", type_=sa.BigInteger()), _r.total_steps),
        phase=bindparam("in_phase"),
    )
)
"""Where a run is; only while its attempt is open."""
SET_LAST_STEP = (
    update(schema.attempts)
    .where(*_attempt, _a.last_step < bindparam("at_step"))
    .values(last_step=bindparam("at_step"))
)
"""How far an attempt got."""
SET_SEEN = (
    update(schema.attempts)
    .where(*_attempt, func.coalesce(_a.seen_s, 0.0) < bindparam("at"))
    .values(seen_s=bindparam("at"))
)
"""When an attempt was last known to be alive."""
SET_CHECKPOINT = (
    update(schema.runs)
    .where(*_current_run, func.coalesce(_r.checkpoint_step, -1) <= bindparam("at_step"))
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
    at_s: float = field(default_factory=time.time)


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

    def of(self, attempts: Collection[tuple[int, int]]) -> RecordBatch:
        """What is of these (run, attempt)."""
        parts = (
            [row for row in getattr(self, part.name) if (row.run_id, row.attempt) in attempts]
            for part in fields(self)
        )
        return RecordBatch(*parts)

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
            runs = lock_attempts(connection, {run_id for run_id, _ in attempts})
            current = {pair for pair in attempts if (run := runs.get(pair[0])) and run.attempt == pair[1]}
            _write(connection, batch.of(current), names, runs)
            _settle_ended(connection, current, runs)
            return attempts - {pair for pair in current if runs[pair[0]].state is not RunState.queued}

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


def _write(
    connection: Connection, batch: RecordBatch, names: dict[str, int], runs: Mapping[int, LockedRun]
) -> None:
    _write_points(connection, batch.points, names)
    logs = [(*astuple(row)[:5], storable(row.message[:LONGEST_LOG_LINE]), row.stream) for row in batch.logs]
    _insert(connection, schema.log_lines, logs, _KEEP)
    _count_measurements(connection, batch.measurements, runs)
    _write_measurements(connection, batch.measurements)
    _write_neighbours(connection, batch.measurements)
    _write_progress(connection, batch.progress)
    checkpoints = [
        {"run": row.run_id, "current": row.attempt, "at_step": row.step, "path": storable(row.path)}
        for row in batch.checkpoints
    ]
    if checkpoints:
        connection.execute(SET_CHECKPOINT, checkpoints)
        times = [{"run": row.run_id, "current": row.attempt, "at": row.at_s} for row in batch.checkpoints]
        connection.execute(
            update(schema.attempts).where(*_attempt).values(checkpoint_s=bindparam("at")), times
        )
    seen = [
        {"run": run_id, "current": attempt, "at": at_s}
        for (run_id, attempt), at_s in sorted(batch.last_signs_of_life().items())
    ]
    if seen:
        connection.execute(SET_SEEN, seen)


def _write_points(connection: Connection, batches: list[PointBatch], names: dict[str, int]) -> None:
    rows: list[tuple[Any, ...]] = []
    latest: dict[tuple[int, int], tuple[Any, ...]] = {}
    series: dict[tuple[int, int, int], tuple[list[int], list[float]]] = {}
    for batch in batches:
        if not batch.steps:
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
    copyable = len(rows) >= FEWEST_COPIED and connection.dialect.name == "postgresql"
    if not (copyable and _copied(connection, rows)):
        _insert(connection, schema.points, rows, _KEEP)
    _insert(connection, schema.latest_points, list(latest.values()), _NEWER_POINT)
    # Points that are written a second time change nothing, in whatever order batches come.
    buckets = [(*key, *bucket) for key in sorted(series) for bucket in extremes(*series[key], BUCKET_STEPS)]
    _insert(connection, schema.point_extremes, buckets, _WIDER_EXTREMES)


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


def _count_measurements(
    connection: Connection, measured: list[MeasurementRow], runs: Mapping[int, LockedRun]
) -> None:
    """Adds measurements that are not stored yet to the running sums of their attempts."""
    new: dict[tuple[Any, ...], MeasurementRow] = {}
    for row in measured:
        if counts_towards_usage(row):
            new.setdefault(
                (row.run_id, row.attempt, row.name, storable(row.scope), row.start_s, row.end_s), row
            )
    keys, columns = list(new), list(schema.measurements.primary_key)
    for first in range(0, len(keys), _KEYS):
        some = sa.tuple_(*columns).in_(keys[first : first + _KEYS])
        for key in connection.execute(select(*columns).where(some)):
            del new[tuple(key)]
    sums: dict[tuple[int, int], dict[str, Any]] = {}
    nothing = {"covered": 0.0, "energy": 0.0, "overhead": 0.0}
    for row in new.values():
        if not math.isfinite(row.value):
            continue
        attempt = {"run": row.run_id, "current": row.attempt, "experiment": runs[row.run_id].experiment_id}
        of = sums.setdefault((row.run_id, row.attempt), attempt | nothing)
        if row.name == OVERHEAD_TIME:
            of["overhead"] += row.value
        else:
            of["covered"] += row.end_s - row.start_s
            of["energy"] += row.value
    if sums:
        connection.execute(ADD_MEASURED, list(sums.values()))


def _settle_ended(
    connection: Connection, attempts: Iterable[tuple[int, int]], runs: Mapping[int, LockedRun]
) -> None:
    """Charges attempts that have ended up to signs of life that came late."""
    ended: dict[int, list[tuple[int, int]]] = {}
    for run_id, number in attempts:
        if runs[run_id].state not in ACTIVE_RUN_STATES:
            ended.setdefault(runs[run_id].experiment_id, []).append((run_id, number))
    for experiment_id, pairs in sorted(ended.items()):
        connection.execute(settle_attempts(experiment_id, pairs))


def _write_measurements(connection: Connection, measured: list[MeasurementRow]) -> None:
    rows = []
    for row in measured:
        window = row.run_id, row.attempt, storable(row.name[:LONGEST_NAME]), storable(row.scope)
        value = row.value if row.value == row.value else None
        rows.append((*window, row.start_s, row.end_s, value, storable(row.unit), str(row.provenance)))
    _insert(connection, schema.measurements, rows, _KEEP)


def _write_neighbours(connection: Connection, measured: list[MeasurementRow]) -> None:
    """Brings runs' shares of disturbed time up to date with all measurements of their attempts."""
    run_ids = {row.run_id for row in measured if row.name in schema.NEIGHBOUR_COLUMNS}
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


def _write_progress(connection: Connection, progress: list[ProgressRow]) -> None:
    last = {(row.run_id, row.attempt): row for row in progress}
    rows = [row for _, row in sorted(last.items())]
    if rows:
        steps = [{"run": row.run_id, "current": row.attempt, "at_step": row.step} for row in rows]
        more = [{"of_steps": row.total_steps, "in_phase": row.phase} for row in rows]
        connection.execute(SET_PROGRESS, [{**step, **of} for step, of in zip(steps, more, strict=True)])
        connection.execute(SET_LAST_STEP, steps)


def _insert(connection: Connection, table: sa.Table, rows: Sequence[tuple[Any, ...]], conflict: str) -> None:
    """Inserts rows of all columns; each row that is there meets at most one of them."""
    if not rows:
        return
    into = f"INSERT INTO {table.name} ({', '.join(table.columns.keys())})"
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(table.columns))
        connection.exec_driver_sql(f"{into} VALUES ({marks}) {conflict}", list(rows))
        return
    kinds = _postgresql_types(table)
    arrays = ", ".join(f"%s::{kind}[]" for kind in kinds)
    sql = f"{into} SELECT * FROM unnest({arrays}) {conflict}"
    # An array is of one type, and a figure may be a whole number.
    values = [
        [value if value is None else float(value) for value in column] if kind == "float8" else list(column)
        for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)
    ]
    with driver_connection(connection).cursor() as cursor:
        cursor.execute(sql, values)


def _copied(connection: Connection, points: Sequence[tuple[Any, ...]]) -> bool:
    """Copies points; False, and nothing is changed, when one of them is there already.

    COPY takes a third of the time of an INSERT that asks for conflicts, and a batch is rarely written twice.
    """
    driver: psycopg.Connection[Any] = driver_connection(connection)
    try:
        with (
            driver.transaction(),  # A savepoint: the transaction around it continues after a conflict.
            driver.cursor() as cursor,
            cursor.copy(f"COPY points ({', '.join(_p.keys())}) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.set_types(_postgresql_types(schema.points))
            for point in points:
                copy.write_row(point)
    except psycopg.errors.UniqueViolation:
        return False
    return True


def _postgresql_types(table: sa.Table) -> list[str]:
    return [_POSTGRESQL_TYPES[type(column.type)] for column in table.columns]


def lock_attempts(connection: Connection, run_ids: Iterable[int]) -> dict[int, LockedRun]:
    """Locks runs in the order of their ids."""
    statement = (
        select(_r.id, _r.experiment_id, _r.attempt, _r.state)
        .where(_r.id.in_(sorted(run_ids)), statements.VISIBLE_RUN)
        .order_by(_r.id)
        .with_for_update(key_share=True)
    )
    return {row.id: row for row in connection.execute(statement)}
