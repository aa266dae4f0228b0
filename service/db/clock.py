"""The clock of the database's server: the one clock that all processes of an installation share."""

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class DatabaseNow(FunctionElement[float]):
    """Unix seconds by the clock of the database's server, at the time of the statement."""

    type = sa.Float(53)
    inherit_cache = True


@compiles(DatabaseNow, "sqlite")
def _sqlite(element: DatabaseNow, compiler: Any, **options: Any) -> str:
    # SQLite's clock is that of the one machine that a file can be used on.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(DatabaseNow, "postgresql")
def _postgresql(element: DatabaseNow, compiler: Any, **options: Any) -> str:
    # Not now(), which is the time at which the transaction began: it may have waited for a lock since.
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


_NOW = sa.select(DatabaseNow())
_JULIAN_MS = 210_866_760_000_000  # From the beginning of Julian days to that of Unix time


def database_time(connection: Connection) -> float:
    if connection.dialect.name == "sqlite":
        # What the statement would answer, to the bit: times of both kinds are compared.
        return ((time.time_ns() // 1_000_000 + _JULIAN_MS) / 86_400_000 - 2440587.5) * 86400.0
    return float(connection.execute(_NOW).scalar_one())


def clock_skew_s(connection: Connection) -> float:
    """Returns by how much this host's clock is certainly ahead of the database's; negative = behind."""
    database_time(connection)  # The first statement of a connection takes longer than the next.
    before = time.time()
    there = database_time(connection)
    after = time.time()
    if there < before:
        return before - there
    return min(0.0, after - there)
