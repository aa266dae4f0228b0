"""The clock of the database's server: the one clock that all processes of an installation share."""

from __future__ import annotations

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
