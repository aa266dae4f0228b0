"""Statements of points, logs and measurements: the ones that run for every batch of a recorder.

They are the driver's own SQL, because a batch has thousands of rows and the time of a batch is
spent per row. SQLite takes rows; PostgreSQL takes points by COPY and the rest as one array per
column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import psycopg
import sqlalchemy as sa
from psycopg.adapt import Dumper
from psycopg.pq import Format
from sqlalchemy import Connection, Select, bindparam, func, select, update

from service.db.engine import driver_connection
from service.db.schema import (
    attempts,
    latest_points,
    measurements,
    metric_names,
    point_extremes,
    points,
    runs,
)
from service.db.statements import ACTIVE_RUN_STATES, VISIBLE_RUN

_p = points.c

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
        ("low_step", "bigint"), ("high", "float8"), ("high_step", "bigint"), ("nan_step", "bigint"),
    ),
}  # fmt: skip
"""Columns with their types; `bigint` is an `int8` that may be missing, which the binary form cannot be."""
_NAN_IS_NULL = frozenset({"value", "low", "high"})

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
    chosen = ", ".join(f"NULLIF({name}, 'NaN')" if name in _NAN_IS_NULL else name for name, _ in columns)
    sql = f"INSERT INTO {table} ({names}) SELECT {chosen} FROM unnest({arrays}) AS rows ({names}) {conflict}"
    transposed = zip(*rows, strict=True)
    with driver_connection(connection).cursor() as cursor:
        cursor.execute(
            sql, [_array(column, kind) for column, (_, kind) in zip(transposed, columns, strict=True)]
        )


def _copied(connection: Connection, points: Sequence[tuple[Any, ...]]) -> bool:
    """Copies points; False, and nothing is changed, when one of them is there already.

    COPY takes a third of the time of an INSERT that asks for conflicts, and that a batch is
    written twice is rare.
    """
    names = ", ".join(name for name, _ in _TABLES["points"])
    driver: psycopg.Connection[Any] = driver_connection(connection)
    try:
        with (
            driver.transaction(),  # A savepoint: the transaction around it continues after a conflict.
            driver.cursor() as cursor,
            cursor.copy(f"COPY points ({names}) FROM STDIN (FORMAT BINARY)") as copy,
        ):
            copy.write(_copy_file(points))
    except psycopg.errors.UniqueViolation:
        return False
    return True


def _copy_file(points: Sequence[tuple[Any, ...]]) -> bytes:
    """Points in PostgreSQL's binary COPY format, those without a value after the others."""
    kinds = [_BINARY[kind][1] for _, kind in _TABLES["points"]]
    columns = [
        np.array(column, dtype=kind) for column, kind in zip(zip(*points, strict=True), kinds, strict=True)
    ]
    missing = np.isnan(columns[-1])  # None has become NaN.
    parts = [b"PGCOPY\n\xff\r\n\x00", bytes(8)]
    for chosen, present in ((~missing, len(kinds)), (missing, len(kinds) - 1)):
        fields = [("fields", ">i2")]
        for place, kind in enumerate(kinds):
            fields += [(f"size{place}", ">i4"), (f"value{place}", kind)]
        rows = np.empty(int(chosen.sum()), dtype=fields if present == len(kinds) else fields[:-1])
        rows["fields"] = len(kinds)
        for place, column in enumerate(columns):
            rows[f"size{place}"] = column.itemsize if place < present else -1
            if place < present:
                rows[f"value{place}"] = column[chosen]
        parts.append(rows.tobytes())
    return b"".join([*parts, b"\xff\xff"])


@dataclass(frozen=True, slots=True)
class _Int4Array:
    wire: bytes


@dataclass(frozen=True, slots=True)
class _Int8Array:
    wire: bytes


@dataclass(frozen=True, slots=True)
class _Float8Array:
    wire: bytes


_BINARY: dict[str, tuple[type[_Int4Array] | type[_Int8Array] | type[_Float8Array], str, int, int]] = {
    "int4": (_Int4Array, ">i4", psycopg.postgres.types["int4"].oid, psycopg.postgres.types["int4"].array_oid),
    "int8": (_Int8Array, ">i8", psycopg.postgres.types["int8"].oid, psycopg.postgres.types["int8"].array_oid),
    "float8": (
        _Float8Array, ">f8", psycopg.postgres.types["float8"].oid, psycopg.postgres.types["float8"].array_oid,
    ),
}  # fmt: skip
"""Wrapper, number format, and object ids of element and array, by PostgreSQL's type."""


def _array(column: tuple[Any, ...], kind: str) -> object:
    """A column as one array; numbers in PostgreSQL's binary form, which costs no Python per element."""
    if kind not in _BINARY:
        return list(column)
    wrapper, number, element_oid, _ = _BINARY[kind]
    elements = np.empty(len(column), dtype=[("size", ">i4"), ("value", number)])
    elements["value"] = np.array(column, dtype=number[1:])  # None becomes NaN.
    elements["size"] = elements.dtype["value"].itemsize
    header = np.array([1, 0, element_oid, len(column), 1], dtype=">i4")
    return wrapper(header.tobytes() + elements.tobytes())


def _register(wrapper: type, array_oid: int) -> None:
    class WireDumper(Dumper):
        """Sends what is in PostgreSQL's binary form already."""

        format = Format.BINARY
        oid = array_oid

        def dump(self, obj: Any) -> bytes:
            wire: bytes = obj.wire
            return wire

    psycopg.adapters.register_dumper(wrapper, WireDumper)


for _entry in _BINARY.values():
    _register(_entry[0], _entry[3])


LockedRun: TypeAlias = "sa.Row[Any, Any, Any, Any]"
"""Id, experiment, attempt and state of a locked run."""


def lock_attempts(connection: Connection, run_ids: Iterable[int]) -> dict[int, LockedRun]:
    """Locks runs in the order of their ids; (id, experiment, attempt, state) of each that exists."""
    statement = (
        select(runs.c.id, runs.c.experiment_id, runs.c.attempt, runs.c.state)
        .where(runs.c.id.in_(sorted(run_ids)), VISIBLE_RUN)
        .order_by(runs.c.id)
        .with_for_update(key_share=True)
    )
    return {row.id: row for row in connection.execute(statement)}


# Written out, because a list of parameters cannot be part of a statement that runs for many rows.
_active = runs.c.state.in_([sa.literal_column(f"'{state}'") for state in sorted(ACTIVE_RUN_STATES)])

SET_PROGRESS = (
    update(runs)
    .where(runs.c.id == bindparam("run"), runs.c.attempt == bindparam("current"), _active)
    .values(
        step=bindparam("at_step"),
        total_steps=func.coalesce(bindparam("of_steps", type_=sa.BigInteger()), runs.c.total_steps),
        phase=bindparam("in_phase"),
    )
)
"""Where a run is; only while its attempt is open."""

SET_LAST_STEP = (
    update(attempts)
    .where(
        attempts.c.run_id == bindparam("run"),
        attempts.c.number == bindparam("current"),
        attempts.c.last_step < bindparam("at_step"),
    )
    .values(last_step=bindparam("at_step"))
)
"""How far an attempt got."""

SET_SEEN = (
    update(attempts)
    .where(
        attempts.c.run_id == bindparam("run"),
        attempts.c.number == bindparam("current"),
        func.coalesce(attempts.c.seen_s, 0.0) < bindparam("at"),
    )
    .values(seen_s=bindparam("at"))
)
"""When an attempt was last known to be alive."""


def windows_of(run_ids: Iterable[int], names: Iterable[str]) -> Select[Any]:
    """(run, name, scope, seconds, sum weighted by seconds) of what the present measurements told."""
    m = measurements.c
    seconds = m.end_s - m.start_s
    return (
        select(
            m.run_id, m.name, m.scope,
            func.sum(seconds).label("seconds"), func.sum(m.value * seconds).label("weighted"),
        )
        .join(runs, runs.c.id == m.run_id)
        .where(
            m.run_id.in_(sorted(run_ids)),
            m.name.in_(list(names)),
            m.attempt >= runs.c.first_attempt,
            m.value.is_not(None),
        )
        .group_by(m.run_id, m.name, m.scope)
    )  # fmt: skip


SET_CHECKPOINT = (
    update(runs)
    .where(
        runs.c.id == bindparam("run"),
        runs.c.attempt == bindparam("current"),
        func.coalesce(runs.c.checkpoint_step, -1) <= bindparam("at_step"),
    )
    .values(checkpoint=bindparam("path"), checkpoint_step=bindparam("at_step"))
)
"""The last verified checkpoint of a run."""

# -- Reading ---------------------------------------------------------------------------------


def resumptions(run_id: int) -> Select[Any]:
    """From which step each attempt went on, oldest first."""
    c = attempts.c
    return select(c.number, c.resumed_from_step).where(c.run_id == run_id).order_by(c.number)


def names_of_run(run_id: int) -> Select[Any]:
    """Returns the names that a run has points of."""
    return (
        select(metric_names.c.name, metric_names.c.id)
        .join(latest_points, latest_points.c.name_id == metric_names.c.id)
        .where(latest_points.c.run_id == run_id)
        .order_by(metric_names.c.name)
    )


def latest_of_run(run_id: int) -> Select[Any]:
    """Returns the latest point of each name of a run."""
    c = latest_points.c
    return (
        select(metric_names.c.name, c.step, c.attempt, c.at_s, c.value)
        .join(metric_names, metric_names.c.id == c.name_id)
        .where(c.run_id == run_id)
        .order_by(metric_names.c.name)
    )


_series = (_p.run_id == bindparam("run"), _p.name_id == bindparam("name"), _p.attempt == bindparam("number"))
_between = _p.step.between(bindparam("low"), bindparam("high"))

SERIES = select(_p.step, _p.at_s, _p.value).where(*_series, _between).order_by(_p.step)
"""Points of one name and attempt in a range of steps."""

SERIES_BOUNDS = select(
    select(func.min(_p.step)).where(*_series, _between).scalar_subquery().label("first"),
    select(func.max(_p.step)).where(*_series, _between).scalar_subquery().label("last"),
)
"""First and last step of a series in a range."""

SERIES_PAGE = SERIES.limit(bindparam("most", type_=sa.Integer()))
"""The first points of one name and attempt in a range of steps."""

SERIES_AT = select(_p.step, _p.at_s, _p.value).where(
    *_series, _p.step.in_(bindparam("steps", expanding=True))
)
"""Points of one name and attempt at given steps.

Without a range of steps, which SQLite would scan in place of looking each step up.
"""

_e = point_extremes.c
EXTREMES = select(_e.low_step, _e.low, _e.high_step, _e.high, _e.nan_step).where(
    _e.run_id == bindparam("run"),
    _e.name_id == bindparam("name"),
    _e.attempt == bindparam("number"),
    _e.bucket.between(bindparam("first_bucket"), bindparam("last_bucket")),
)
"""Least, greatest and first NaN value of the buckets of one name and attempt."""
