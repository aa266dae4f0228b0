"""One database behind two verbs: `read` gives a connection, `write` runs one transaction.

`Database.write` hides what differs between SQLite and PostgreSQL: SQLite has one writing
connection per process, begun with BEGIN IMMEDIATE under `WriterLock`; PostgreSQL has a pool, and
a transaction that lost a deadlock is run again. Errors of the drivers become the store's own.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import NullPool, QueuePool

from service.db import sqlite
from service.db.errors import NotFound, StoreError, StoreFull, StoreUnavailable

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

READERS = 16
"""Connections that read at a time in one process."""
RETRIES = 5
"""How often a PostgreSQL transaction that lost a deadlock is run again."""
LOCK_TIMEOUT_S = 5.0
"""How long a PostgreSQL statement waits for a lock before the store answers `StoreUnavailable`."""

_RUN_AGAIN = frozenset({"40001", "40P01"})  # serialization_failure, deadlock_detected
_DISK_FULL = "53100"
_OUT_OF_RANGE = "22003"
_SPARE_BYTES = 1 << 20


class Database:
    """The engine of one process; thread-safe."""

    def __init__(self, url: str) -> None:
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
            self.readers = _sqlite_engine(parsed, sqlite.prepare_reader, "BEGIN", QueuePool)
            self.writers = _sqlite_engine(parsed, sqlite.prepare_writer, "BEGIN IMMEDIATE", NullPool)
        else:
            self.lock = None
            self.readers = self.writers = _postgresql_engine(parsed)
        self._writer: Connection | None = None
        self._writer_pid = os.getpid()
        self._closed = threading.Event()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection in a transaction that sees one state of the database and writes nothing.

        Raises:
            StoreUnavailable: when the database is unavailable.
        """
        with translated(self.path), self.readers.connect() as connection, connection.begin():
            yield connection

    def write(self, body: Callable[[Connection], Result]) -> Result:
        """Run `body` in one transaction and commit it; what it raises rolls everything back.

        `body` may be run more than once: it touches nothing but the connection.

        Raises:
            StoreUnavailable: when the database is locked or away.
            StoreFull: when its disk is full.
        """
        with translated(self.path):
            if self.lock is not None:
                with self.lock.held():
                    return self._write_sqlite(body)
            return self._write_postgresql(body)

    def _write_sqlite(self, body: Callable[[Connection], Result]) -> Result:
        connection = self._sqlite_writer()
        try:
            with connection.begin():
                result = body(connection)
        except sa.exc.DBAPIError:
            self._drop_writer()
            raise
        assert self.path is not None
        sqlite.checkpoint(driver_connection(connection), self.path)
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
        for remaining in reversed(range(RETRIES)):
            committing = False
            try:
                with self.writers.connect() as connection, connection.begin():
                    result = body(connection)
                    committing = True
                return result
            except sa.exc.DBAPIError as error:
                # A connection that broke before the commit was sent has changed nothing.
                again = _sqlstate(error) in _RUN_AGAIN or (error.connection_invalidated and not committing)
                if not again or not remaining:
                    raise
                logger.info("retrying a transaction: %s", _first_line(error))
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close all connections."""
        if self.path is not None and not self.path.parent.exists():
            return  # Nothing was ever opened, and the lock's files have no place to be.
        with self.lock.held() if self.lock is not None else nullcontext():
            self._drop_writer()
            self.writers.dispose()
            self.readers.dispose()
        if self.lock is not None:
            self.lock.close()


def driver_connection(connection: Connection) -> Any:
    """The driver's own connection: `sqlite3.Connection` or `psycopg.Connection`."""
    return connection.connection.driver_connection


def _sqlite_engine(
    url: sa.URL, prepare: Callable[[sqlite3.Connection], None], begin: str, pool: type[sa.Pool]
) -> Engine:
    sizes = {"pool_size": READERS, "max_overflow": 0, "pool_timeout": 10} if pool is QueuePool else {}
    engine = sa.create_engine(
        url,
        poolclass=pool,
        connect_args={"isolation_level": None, "check_same_thread": False, "timeout": sqlite.BUSY_TIMEOUT_S},
        **sizes,
    )

    @event.listens_for(engine, "connect")
    def on_connect(connection: sqlite3.Connection, _record: object) -> None:
        prepare(connection)

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _postgresql_engine(url: sa.URL) -> Engine:
    options = (
        f"-c lock_timeout={int(LOCK_TIMEOUT_S * 1000)} "
        # A process that is stopped inside a transaction must not hold its locks for ever.
        "-c idle_in_transaction_session_timeout=60000 "
        # Compiling a statement takes longer than any of ours runs.
        "-c jit=off"
    )
    return sa.create_engine(
        url,
        pool_size=READERS,
        max_overflow=0,
        pool_timeout=10,
        connect_args={
            "connect_timeout": 5,
            "options": options,
            "application_name": "stillhouse",
            "keepalives_idle": 30,
        },
    )


@contextmanager
def translated(database: Path | None) -> Iterator[None]:
    """Turn the drivers' errors into the store's.

    Args:
        database: the SQLite file; None for PostgreSQL.
    """
    try:
        yield
    except StoreError:
        raise
    except OverflowError:
        raise NotFound("record", "beyond 64 bits") from None
    except sa.exc.TimeoutError:
        raise StoreUnavailable("all database connections are busy; try again later") from None
    except sa.exc.DBAPIError as error:
        if _sqlstate(error) == _OUT_OF_RANGE:
            raise NotFound("record", "beyond 64 bits") from None
        kind = _kind(error.orig, database)
        if kind is None:
            raise
        raise kind(_first_line(error)) from error
    except (sqlite3.Error, psycopg.Error) as error:
        kind = _kind(error, database)
        if kind is None:
            raise
        raise kind(str(error).splitlines()[0]) from error


def _kind(error: BaseException | None, database: Path | None) -> type[StoreError] | None:
    if isinstance(error, sqlite3.OperationalError):
        name = getattr(error, "sqlite_errorname", "") or ""
        if name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and _disk_is_full(database)):
            return StoreFull
        if name.startswith(
            ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_READONLY")
        ):
            return StoreUnavailable
        return None
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return StoreFull if error.sqlstate == _DISK_FULL else StoreUnavailable
    return None


def _disk_is_full(database: Path | None) -> bool:
    return database is not None and shutil.disk_usage(database.parent).free < _SPARE_BYTES


def _sqlstate(error: sa.exc.DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _first_line(error: sa.exc.DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
