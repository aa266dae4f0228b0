"""What PostgreSQL needs to be safe over a network: limits on every wait, and reads that see one snapshot.

A server that vanishes without closing its connections (a lost network, a failed host, a proxy in between)
would hold a caller for as long as the kernel repeats its packets, a quarter of an hour. Three limits end the
wait: the kernel's for packets that are not acknowledged, the server's for a statement, and the client's for
an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.abc import PQGen
from sqlalchemy import Engine, event

POOL_SIZE = 16
"""Connections of one process."""
LOCK_TIMEOUT_S = 5.0
"""How long a statement waits for a lock."""
STATEMENT_TIMEOUT_S = 15.0
"""How long a statement may run. Together with `_GRACE_S`, less than a lease lasts: a heartbeat that meets a
dead connection can be repeated on another before the lease lapses."""
_GRACE_S = 3.0
"""How much longer than the server's limit the client waits for its answer."""
_CONNECT_TIMEOUT_S = 5
_ACKNOWLEDGED_WITHIN_S = 10
"""How long the kernel waits for the server's machine to acknowledge a packet."""
_IDLE_S = 2.0
"""A connection that was idle for longer is tried before it is used."""
_PING_TIMEOUT_S = 3.0
_PRESENCE = 7305412
"""Advisory lock that each connection shares, and that a restore has alone."""

Returned = TypeVar("Returned")


class ServerSilent(psycopg.OperationalError):
    """The server did not answer in time; the connection is closed."""


class LimitedConnection(psycopg.Connection[Any]):
    """Closes when the server is silent for `silence_s` while an answer is due; None = no limit."""

    silence_s: float | None = None

    def wait(self, gen: PQGen[Returned], interval: float = 0.1, timeout: float | None = None) -> Returned:
        if self.silence_s is not None:
            gen = _limited(gen, self.silence_s)
        try:
            return super().wait(gen, interval, timeout)
        except ServerSilent:
            self.close()
            raise


def _limited(gen: PQGen[Returned], silence_s: float) -> PQGen[Returned]:
    """Ends a generator of psycopg that has not been ready for `silence_s`."""
    try:
        wanted = next(gen)
        heard_s = time.monotonic()
        while True:
            ready = yield wanted
            if ready:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > silence_s:
                raise ServerSilent(f"the server has not answered for {silence_s:g} s")
            wanted = gen.send(ready)
    except StopIteration as done:
        returned: Returned = done.value
        return returned


def create_engine(url: sa.URL, statement_timeout_s: float | None, *, present: bool = True) -> Engine:
    """An engine whose every wait is limited; for the arguments see `Database`."""
    settings = {
        "lock_timeout": int(LOCK_TIMEOUT_S * 1000),
        "statement_timeout": int((statement_timeout_s or 0) * 1000),
        # A process that is stopped inside a transaction must not hold its locks forever.
        "idle_in_transaction_session_timeout": 60_000,
        # Compiling a statement takes longer than any of ours runs.
        "jit": "off",
    }
    engine = sa.create_engine(
        url,
        pool_size=POOL_SIZE,
        max_overflow=0,
        pool_timeout=10,
        connect_args={
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            "application_name": "stillhouse",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": _ACKNOWLEDGED_WITHIN_S * 1000,
        },
    )

    @event.listens_for(engine, "do_connect")
    def on_connecting(_dialect: object, _record: object, arguments: Any, fields: Any) -> LimitedConnection:
        connection = LimitedConnection.connect(*arguments, **fields)
        if statement_timeout_s is not None:
            connection.silence_s = statement_timeout_s + _GRACE_S
        if present:
            _hold_presence(connection)
        return connection

    @event.listens_for(engine, "checkin")
    def on_checkin(_connection: object, record: Any) -> None:
        record.info["idle_since_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def on_checkout(connection: LimitedConnection, record: Any, _proxy: object) -> None:
        if time.monotonic() - record.info.get("idle_since_s", time.monotonic()) > _IDLE_S:
            _ping(engine, connection)

    return engine


def _hold_presence(connection: LimitedConnection) -> None:
    try:
        connection.autocommit = True
        connection.execute(f"SELECT pg_advisory_lock_shared({_PRESENCE})")
        connection.autocommit = False
    except psycopg.errors.LockNotAvailable:
        connection.close()
        raise psycopg.OperationalError("the database is being restored; try again later") from None
    except BaseException:
        connection.close()
        raise


@contextmanager
def alone(engine: Engine) -> Iterator[bool]:
    """For an engine whose connections are not `present`, see `Database.alone`."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        try:
            yield bool(connection.execute(sa.text(f"SELECT pg_try_advisory_lock({_PRESENCE})")).scalar_one())
        finally:
            connection.invalidate()  # The lock ends with its connection.


_LETS_DIRTY_PAGES_PILE_UP = sa.text(
    """
    SELECT database.datname
    FROM pg_settings AS setting, pg_database AS database
    WHERE setting.name = 'backend_flush_after' AND setting.setting = '0'
      AND setting.max_val::int >= 32 -- 0 where the system cannot do it
      AND database.datname = current_database() AND pg_has_role(database.datdba, 'USAGE')
    """
)
"""Name of the database, where its setting has not been made and may be made by this user."""


def flush_early(connection: sa.Connection) -> None:
    """Has the server write pages to the disk soon after a connection or autovacuum has evicted them.

    By default they pile up in the system's cache until the next checkpoint, whose fsync makes every commit
    wait for all of them: 0.26 s when ten million rows had been removed. Autovacuum evicts many of them, so
    this is a setting of the database. What an operator has set stays.
    """
    name = connection.execute(_LETS_DIRTY_PAGES_PILE_UP).scalar()
    if name is not None:
        quoted = connection.dialect.identifier_preparer.quote(name)
        connection.execute(sa.text(f"ALTER DATABASE {quoted} SET backend_flush_after = '256kB'"))


def _ping(engine: Engine, connection: LimitedConnection) -> None:
    """Replaces the pool's connections if this one is dead: so are those from the same time, most likely."""
    usual_s, connection.silence_s = connection.silence_s, _PING_TIMEOUT_S
    try:
        engine.dialect.do_ping(connection)  # type: ignore[arg-type]
    except psycopg.Error as error:
        raise sa.exc.InvalidatePoolError from error
    connection.silence_s = usual_s
