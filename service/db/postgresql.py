"""What PostgreSQL needs to be safe over a network: limits on every wait, and reads that see one snapshot.

Behind a pooler that lends a server connection for one transaction (PgBouncer) nothing may outlive the
transaction on the server: no prepared statement, no session lock, no setting. Such a connection is
recognised, and its limits are set in each transaction.

A server that vanishes without closing its connections (a lost network, a failed host, a proxy in between)
would hold a caller for as long as the kernel repeats its packets, a quarter of an hour. Three limits end the
wait: the kernel's for packets that are not acknowledged, the server's for a statement, and the client's for
an answer.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.abc import PQGen
from sqlalchemy import Engine, event

from service.db.errors import UnusableDatabase

POOL_SIZE = 16  # Connections of one process at most
LOCK_TIMEOUT_S = 5.0  # How long a statement waits for a lock
STATEMENT_TIMEOUT_S = 15.0
"""How long a statement may run. Together with `_GRACE_S`, less than a lease lasts: a heartbeat that meets a
dead connection can be repeated on another before the lease lapses."""
_GRACE_S = 3.0  # How much longer than the server's limit the client waits for its answer
_CONNECT_TIMEOUT_S = 5
_ACKNOWLEDGED_WITHIN_S = 10  # How long the kernel waits for the server's machine to acknowledge a packet
_IDLE_S = 2.0  # A connection that was idle for longer is tried before it is used
_PING_TIMEOUT_S = 3.0
_PRESENCE = 7305412  # Advisory lock that each connection shares, and that a restore has alone
_APPLICATION = "stillhouse"

Returned = TypeVar("Returned")


class ServerSilent(psycopg.OperationalError):
    """The server did not answer in time; the connection is closed."""


class LimitedConnection(psycopg.Connection[Any]):
    """Closes when the server is silent for `silence_s` while an answer is due; None = no limit."""

    silence_s: float | None = None
    pooled = False
    """Whether a pooler is between this and the server."""

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


def create_engine(
    url: sa.URL, statement_timeout_s: float | None, *, present: bool = True, pool_size: int = POOL_SIZE
) -> Engine:
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
        pool_size=pool_size,
        max_overflow=POOL_SIZE - pool_size,
        pool_timeout=10,
        connect_args={
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            "application_name": _APPLICATION,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": _ACKNOWLEDGED_WITHIN_S * 1000,
        },
    )

    @event.listens_for(engine, "do_connect")
    def on_connecting(_dialect: object, _record: object, arguments: Any, fields: Any) -> LimitedConnection:
        try:
            connection = LimitedConnection.connect(*arguments, **fields)
        except psycopg.OperationalError as error:
            if "unsupported startup parameter" not in str(error):
                raise
            connection = LimitedConnection.connect(*arguments, **{**fields, "options": None})
        if statement_timeout_s is not None:
            connection.silence_s = statement_timeout_s + _GRACE_S
        try:
            _greet(connection, present)
        except BaseException:
            connection.close()  # Else the garbage collector finds it open, whenever that is.
            raise
        return connection

    set_in_transaction = sa.select(
        *(sa.func.set_config(name, str(value), True) for name, value in settings.items())
    )

    @event.listens_for(engine, "begin")
    def on_begin(connection: sa.Connection) -> None:
        if is_pooled(connection):
            connection.execute(set_in_transaction)

    @event.listens_for(engine, "checkin")
    def on_checkin(_connection: object, record: Any) -> None:
        record.info["idle_since_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def on_checkout(connection: LimitedConnection, record: Any, _proxy: object) -> None:
        if time.monotonic() - record.info.get("idle_since_s", time.monotonic()) > _IDLE_S:
            _ping(engine, connection)

    return engine


def is_pooled(connection: sa.Connection) -> bool:
    return bool(getattr(connection.connection.driver_connection, "pooled", False))


def _greet(connection: LimitedConnection, present: bool) -> None:
    """Finds out whether a pooler answers, and raises while the database is being restored."""
    try:
        connection.autocommit = True
        # A pooler tells its clients a process id of its own making.
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        connection.pooled = row is not None and row[0] != connection.pgconn.backend_pid
        if connection.pooled:
            connection.prepare_threshold = None
        if present and connection.pooled:
            lock = f"SELECT pg_try_advisory_xact_lock_shared({_PRESENCE})"
            if connection.execute(lock).fetchone() != (True,):
                raise psycopg.errors.LockNotAvailable
        elif present:
            connection.execute(f"SELECT pg_advisory_lock_shared({_PRESENCE})")
        connection.autocommit = False
    except psycopg.errors.LockNotAvailable:
        raise psycopg.OperationalError("the database is being restored; try again later") from None


_POOLED_PROGRAMS = sa.text(
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
    f"AND pid <> pg_backend_pid() AND application_name LIKE '{_APPLICATION}%'"
)
"""Sessions that hold no lock, because a pooler lends them out; it keeps some for minutes after their use."""


@contextmanager
def alone(engine: Engine) -> Iterator[bool]:
    """For an engine whose connections are not `present`, see `Database.alone`."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        refuse_pooler(connection)
        try:
            lock = sa.text(f"SELECT pg_try_advisory_lock({_PRESENCE})")
            yield (
                bool(connection.execute(lock).scalar_one())
                and not connection.execute(_POOLED_PROGRAMS).scalar_one()
            )
        finally:
            connection.invalidate()  # The lock ends with its connection.


def refuse_pooler(connection: sa.Connection) -> None:
    if is_pooled(connection):
        raise UnusableDatabase(
            "the database URL leads to a connection pooler; backup and restore need the server itself: give "
            "them STILLHOUSE_DATABASE_URL with its address"
        )


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
