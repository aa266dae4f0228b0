"""The clock of the database's server: the one clock that all processes of an installation share."""

from __future__ import annotations

import time

import sqlalchemy as sa
from sqlalchemy import Connection

# SQLite's clock is that of the one machine that a file can be used on.
_SQLITE = sa.text("SELECT (julianday('now') - 2440587.5) * 86400.0")
# Not now(), which is the time at which the transaction began: it may have waited for a lock since.
_POSTGRESQL = sa.text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)")


def database_time(connection: Connection) -> float:
    """Returns Unix seconds by the clock of the database's server."""
    statement = _SQLITE if connection.dialect.name == "sqlite" else _POSTGRESQL
    return float(connection.execute(statement).scalar_one())


def clock_skew_s(connection: Connection) -> float:
    """Returns by how much this host's clock is certainly ahead of the database's; negative = behind."""
    database_time(connection)  # The first statement of a connection takes longer than the next.
    before = time.time()
    there = database_time(connection)
    after = time.time()
    if there < before:
        return before - there
    return min(0.0, after - there)
