"""A database as one file and back, while others use it: SQLite's online backup, PostgreSQL's own tools."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import Connection

from service.db import migrate, schema, sqlite
from service.db.engine import Database
from service.db.errors import StoreError, UnusableDatabase

LOCK_TIMEOUT_S = 30
"""How long PostgreSQL's tools wait for tables that others hold locked."""


class DumpError(StoreError):
    """A database cannot be copied or put back; the message is one line."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a database holds, compared after a restore. `revision` is None without tables."""

    revision: str | None
    experiments: int
    runs: int


def contents(connection: Connection) -> Contents:
    revision = migrate.revision_of(connection)
    if revision is None:
        return Contents(None, 0, 0)
    experiments, runs = (
        connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
        for table in (schema.experiments, schema.runs)
    )
    return Contents(revision, experiments, runs)


def dump(database: Database, file: Path) -> Contents:
    """Copies a database into a new file, as it is at one moment; others may write meanwhile."""
    if database.path is not None:
        return _dump_sqlite(database.path, file)
    return _dump_postgresql(database, file)


def load(database: Database, file: Path) -> Contents:
    """Replaces what a database holds by a dump of the same kind: the whole of it, or nothing."""
    if database.path is not None:
        _load_sqlite(database, database.path, file)
    else:
        # No owners: the role that restores may be another.
        _run(
            database,
            ["pg_restore", "--clean", "--if-exists", "--no-owner", "--no-privileges", "--exit-on-error",
             "--single-transaction", f"--dbname={_address(database)}", str(file)],
        )  # fmt: skip
        database.readers.dispose()
    with database.read() as connection:
        return contents(connection)


def _dump_sqlite(path: Path, file: Path) -> Contents:
    if not path.exists():
        raise UnusableDatabase(f"{path} does not exist; there is nothing to back up")
    try:
        with (
            closing(sqlite3.connect(path.as_uri() + "?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(file)) as copy,
        ):
            # All pages in one step, which reads one state of the database while others write on.
            source.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode = DELETE")
            problems = sqlite.integrity_problems(copy)
    except sqlite3.Error as error:
        raise DumpError(f"{path} cannot be copied ({error}); try: stillhouse db check") from None
    if problems:
        raise UnusableDatabase(f"{path}: {problems[0]}")
    engine = sa.create_engine(f"sqlite:///{file}")
    try:
        with engine.connect() as connection:
            return contents(connection)
    finally:
        engine.dispose()


def _load_sqlite(database: Database, path: Path, file: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    sqlite.refuse_unsafe_place(path)
    assert database.lock is not None
    try:
        # One transaction of the file that is there: what has it open sees the old rows, then the new ones.
        with (
            database.lock.held(),
            closing(sqlite3.connect(file.as_uri() + "?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(path)) as target,
        ):
            sqlite.prepare_writer(target)
            source.backup(target, pages=-1)
    except sqlite3.Error as error:
        raise DumpError(
            f"{path} cannot be replaced ({error}); move it away with its -wal and -shm files, and try again"
        ) from None


def _dump_postgresql(database: Database, file: Path) -> Contents:
    with _snapshot(database) as (connection, snapshot):
        found = contents(connection)
        if found.revision is None:
            raise UnusableDatabase("the database has no tables; there is nothing to back up")
        _run(
            database,
            ["pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}",
             f"--file={file}", f"--dbname={_address(database)}"],
        )  # fmt: skip
        return found


@contextmanager
def _snapshot(database: Database) -> Iterator[tuple[Connection, str]]:
    """A connection to one state of the database, and that state's name for other sessions."""
    engine = database.writers.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        # It waits for pg_dump, longer than a transaction of ours may be idle.
        connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        yield connection, str(connection.execute(sa.text("SELECT pg_export_snapshot()")).scalar_one())


def _address(database: Database) -> str:
    """URL without the password, which everyone could read among a process's arguments."""
    bare = database.url.set(drivername="postgresql", password=None)
    return bare.render_as_string(hide_password=False)


def _run(database: Database, command: Sequence[str]) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise DumpError(
            f"{command[0]} was not found; install PostgreSQL's client programs, not older than the server"
        )
    options = {"PGOPTIONS": f"-c lock_timeout={LOCK_TIMEOUT_S * 1000}"}
    if database.url.password is not None:
        options["PGPASSWORD"] = str(database.url.password)
    done = subprocess.run(
        [program, *command[1:]],
        env={**os.environ, **options},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise DumpError(f"{command[0]} failed: {lines[0] if lines else f'exit code {done.returncode}'}")
