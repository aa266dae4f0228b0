"""One database behind two verbs: `read` gives a connection, `write` runs one transaction.

`Database.write` hides what differs between SQLite and PostgreSQL: SQLite has one writing
connection per process, begun with BEGIN IMMEDIATE under `WriterLock`; PostgreSQL has a pool, and
a transaction that lost a deadlock is run again. Errors of the drivers become the store's own.
"""

import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import NullPool, QueuePool

from service.db import postgresql, sqlite
from service.db.errors import (
    OutOfRange,
    StoreError,
    StoreFull,
    StoreUnavailable,
    Unconfirmed,
    UnusableDatabase,
    kind_of_sqlite_error,
    kind_of_sqlstate,
    leaves_commit_open,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

READERS = 16  # SQLite connections that read at a time in one process
_TURN_S = 1.0  # How long one of the connections that are kept is waited for, before another is opened
RETRIES = 5  # How often a PostgreSQL transaction that lost a deadlock, or its connection, is run again

_RECONNECTING_S = 5.0
"""How long after its start a PostgreSQL transaction that lost its connection is run again."""
_RUN_AGAIN = frozenset({"40001", "40P01"})  # serialization_failure, deadlock_detected
_OUT_OF_RANGE = "22003"
_SPARE_BYTES = 1 << 20


class Database:
    """The engine of one process; thread-safe.

    Args:
        url: a SQLite file or PostgreSQL; ValueError for anything else.
        statement_timeout_s: longest statement on PostgreSQL; None = no limit, for maintenance.
        present: whether `alone` is refused to others while this has connections.
        pool_size: PostgreSQL connections that are kept open; at most `POOL_SIZE` are in use at a time.
    """

    def __init__(
        self,
        url: str,
        *,
        statement_timeout_s: float | None = postgresql.STATEMENT_TIMEOUT_S,
        present: bool = True,
        pool_size: int = postgresql.POOL_SIZE,
    ) -> None:
        parsed = sa.make_url(url)
        if parsed.get_backend_name() == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        elif parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
            raise ValueError(
                f"database_url {parsed.render_as_string()}: use sqlite:///<file> or postgresql://..."
            )
        self.url = parsed
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self.path = Path(parsed.database).resolve() if self.is_sqlite and parsed.database else None
        if self.path is not None:
            self.lock: sqlite.WriterLock | None = sqlite.WriterLock(self.path)
            self._checkpoints = sqlite.Checkpoints(self.path)
            self._presence = sqlite.Presence(self.path)
            hold = self._presence.hold if present else lambda: None
            self.readers = _sqlite_engine(parsed, sqlite.prepare_reader, "BEGIN", QueuePool, hold)
            self.writers = _sqlite_engine(parsed, sqlite.prepare_writer, "BEGIN IMMEDIATE", NullPool, hold)
        else:
            self.lock = None
            self.writers = postgresql.create_engine(
                parsed, statement_timeout_s, present=present, pool_size=pool_size
            )
            # Transactions that see one state of the database and cannot write; same pool.
            self.readers = self.writers.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        self._turns = threading.BoundedSemaphore(postgresql.POOL_SIZE if self.is_sqlite else pool_size)
        self.observe_write: Callable[[float], None] | None = None
        """Receives how long each write took, in seconds, from waiting for its turn to its commit."""
        self._writer: Connection | None = None
        self._writer_pid = os.getpid()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the database and writes nothing."""
        with translated(self.path), self._turn(), self.readers.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Waits a while for a connection in use, because opening another takes longer than most uses."""
        had = self._turns.acquire(timeout=_TURN_S)
        try:
            yield
        finally:
            if had:
                self._turns.release()

    def write(self, body: Callable[[Connection], Result]) -> Result:
        """Runs `body` in one transaction and commits it; what it raises rolls everything back.

        `body` may be run more than once: it must touch nothing but the connection. `Unconfirmed` is raised
        when the database was lost during the commit.
        """
        started_s = time.perf_counter()
        with translated(self.path):
            if self.lock is not None:
                with self.lock.held():
                    result = self._write_sqlite(body)
            else:
                result = self._write_postgresql(body)
        if self.observe_write is not None:
            self.observe_write(time.perf_counter() - started_s)
        return result

    def _write_sqlite(self, body: Callable[[Connection], Result]) -> Result:
        connection = self._sqlite_writer()
        committing = False
        try:
            with connection.begin():
                result = body(connection)
                committing = True
        except sa.exc.DBAPIError as error:
            self._drop_writer()
            if committing and leaves_commit_open(_sqlite_name(error.orig)):
                raise Unconfirmed(
                    f"the commit failed at its end ({error.orig}); the change may be stored"
                ) from error
            raise
        self._checkpoints.run(driver_connection(connection))
        return result

    def _sqlite_writer(self) -> Connection:
        if self._writer is None or self._writer_pid != os.getpid():
            self._writer = self.writers.connect()
            self._writer_pid = os.getpid()
        return self._writer

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.invalidate()
            writer.close()

    def _write_postgresql(self, body: Callable[[Connection], Result]) -> Result:
        reconnecting_until_s = time.monotonic() + _RECONNECTING_S
        for remaining in reversed(range(RETRIES)):
            committing = False
            try:
                with self._turn(), self.writers.connect() as connection, connection.begin():
                    result = body(connection)
                    committing = True
                return result
            except sa.exc.DBAPIError as error:
                if error.connection_invalidated and committing:
                    raise Unconfirmed(
                        "lost the connection to the database during the commit; the change may be stored"
                    ) from error
                # A connection that broke before the commit was sent has changed nothing.
                again = error.connection_invalidated and time.monotonic() < reconnecting_until_s
                if not (again or _sqlstate(error.orig) in _RUN_AGAIN) or not remaining:
                    raise
                logger.info("retrying a transaction: %s", error.orig)
        raise AssertionError("unreachable")

    def rest(self) -> None:
        """Closes PostgreSQL connections that are not in use; further ones are opened as needed."""
        if not self.is_sqlite:
            self.writers.pool.dispose()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Keeps all other programs out of the database; yields False when one has it open."""
        with (
            translated(self.path),
            self._presence.alone() if self.path is not None else postgresql.alone(self.writers) as had,
        ):
            yield had

    def connections(self) -> dict[str, int]:
        """Returns how many connections of the pool are in use, idle and not opened."""
        pool = self.readers.pool
        assert isinstance(pool, QueuePool)
        in_use, idle = pool.checkedout(), pool.checkedin()
        return {"in_use": in_use, "idle": idle, "unopened": max(0, pool.size() - in_use - idle)}

    def close(self) -> None:
        if self.path is not None and not self.path.parent.exists():
            return  # Nothing was ever opened, and the lock's files have no place to be.
        with self.lock.held() if self.lock is not None else nullcontext():
            self._drop_writer()
            self.writers.dispose()
            self.readers.dispose()
        if self.lock is not None:
            self.lock.close()
            self._presence.release()


def driver_connection(connection: Connection) -> Any:
    """The driver's own connection: `sqlite3.Connection` or `psycopg.Connection`."""
    return connection.connection.driver_connection


def _sqlite_engine(
    url: sa.URL,
    prepare: Callable[[sqlite3.Connection], None],
    begin: str,
    pool: type[sa.Pool],
    hold: Callable[[], None],
) -> Engine:
    sizes = {"pool_size": READERS, "max_overflow": 0, "pool_timeout": 10} if pool is QueuePool else {}
    engine = sa.create_engine(
        url,
        poolclass=pool,
        connect_args={"isolation_level": None, "check_same_thread": False, "timeout": sqlite.BUSY_TIMEOUT_S},
        **sizes,
    )

    @event.listens_for(engine, "do_connect")
    def on_connecting(*_: object) -> None:
        hold()

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        prepare(connection)

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


@contextmanager
def translated(database: Path | None) -> Iterator[None]:
    """Turns the drivers' errors into the store's; `database` is the SQLite file, None for PostgreSQL."""
    try:
        yield
    except StoreError:
        raise
    except OverflowError:
        raise OutOfRange from None
    except sa.exc.TimeoutError:
        raise StoreUnavailable("all database connections are busy; try again later") from None
    except (sa.exc.DBAPIError, sqlite3.Error, psycopg.Error) as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        if (ours := _translation(cause, database)) is None:
            raise
        raise ours from error


def _translation(error: BaseException | None, database: Path | None) -> StoreError | None:
    """None = the statement or its values are wrong."""
    if _sqlstate(error) == _OUT_OF_RANGE:
        return OutOfRange()
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = _kind(error, line, database)
    if kind is UnusableDatabase:
        return UnusableDatabase(
            f"{database or 'the database'}: {line}; run `stillhouse db check`, then upgrade it or restore a "
            "backup"
        )
    return None if kind is None else kind(line)


def _kind(error: BaseException | None, line: str, database: Path | None) -> type[StoreError] | None:
    if isinstance(error, sqlite3.Error):
        name = _sqlite_name(error)
        if name.startswith("SQLITE_IOERR") and database is not None and not has_room(database):
            return StoreFull
        return kind_of_sqlite_error(name, line)
    sqlstate = _sqlstate(error)
    if sqlstate is not None:
        return kind_of_sqlstate(sqlstate)
    # Without one, the error is the connection's and not the server's.
    return StoreUnavailable if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) else None


def has_room(database: Path) -> bool:
    """Whether the disk of a SQLite file takes more of it."""
    try:
        with tempfile.TemporaryFile(dir=database.parent) as file:
            os.posix_fallocate(file.fileno(), 0, _SPARE_BYTES)
    except OSError:
        return False
    return True


def _sqlite_name(error: BaseException | None) -> str:
    return getattr(error, "sqlite_errorname", "") or ""


def _sqlstate(error: BaseException | None) -> str | None:
    return getattr(error, "sqlstate", None)
