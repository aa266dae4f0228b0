"""The database of an installation: a fresh one for each round, and the ways to hurt it."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.postgresql import PostgreSQLServer
from service.config.settings import Settings
from service.db import migrate

Rows = list[tuple[Any, ...]]


class CampaignDatabase(ABC):
    """Where the rows of a round are."""

    name: str
    """Its kind, as on the command line."""

    @abstractmethod
    def fresh(self, folder: Path) -> str:
        """Make a database with all tables and no rows; returns its URL."""

    @abstractmethod
    def rows(self, statement: str) -> Rows:
        """What a query finds, over a connection of the campaign's own.

        Raises:
            OSError: the database is unavailable.
        """

    @abstractmethod
    def busy_process(self, processes: Collection[int]) -> int | None:
        """A process that works on the database now: its killing is the database's; None = there is none.

        Args:
            processes: of the installation.
        """

    @abstractmethod
    def version(self) -> str:
        """Its version."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


class SQLiteDatabase(CampaignDatabase):
    """A file. Whoever holds the lock of writers is the database."""

    name = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template" / "stillhouse.db"
        migrate.upgrade(Settings(data_dir=self._template.parent))
        self._path = self._template

    def fresh(self, folder: Path) -> str:
        """Copies the template."""
        self._path = folder / "stillhouse.db"
        shutil.copy(self._template, self._path)
        return f"sqlite:///{self._path}"

    def rows(self, statement: str) -> Rows:
        """Opens the file anew: what is found is what is on the disk."""
        try:
            with closing(sqlite3.connect(self._path, timeout=5.0)) as connection:
                return connection.execute(statement).fetchall()
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error

    def busy_process(self, processes: Collection[int]) -> int | None:
        """Returns who holds the lock of writers."""
        lock = self._path.with_name(f"{self._path.name}-write.lock")
        try:
            inode = lock.stat().st_ino
        except FileNotFoundError:
            return None
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}") and int(words[4]) in processes:
                return int(words[4])
        return None

    def version(self) -> str:
        """Returns the library's."""
        return sqlite3.sqlite_version

    def close(self) -> None:
        """Leaves the files to whoever made the folder."""


class PostgreSQLDatabase(CampaignDatabase):
    """A server of its own. Any server process that is killed takes the others with it, and all recover."""

    name = "postgresql"

    def __init__(self, folder: Path) -> None:
        # What is committed has left the server's memory, which is what kill -9 takes; a power cut is no part
        # of the campaign, so that nothing waits for the disk.
        self._server = PostgreSQLServer(options=["fsync=off", "shared_buffers=32MB", "checkpoint_timeout=60"])
        self._server.__enter__()
        url = self._server.create_database("template")
        migrate.upgrade(Settings(data_dir=folder, database_url=url))
        self._round = 0
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def _name(self) -> str:
        return f"round{self._round}"

    def fresh(self, folder: Path) -> str:
        """Copies the template; the round before goes."""
        self._disconnect()
        if self._round:
            self._server.drop_database(self._name)
        self._round += 1
        return self._server.create_database(self._name, template="template")

    def rows(self, statement: str) -> Rows:
        """Asks over one connection, which is opened again when the server has restarted."""
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self._server.url(self._name), autocommit=True)
            return self._connection.execute(statement.encode()).fetchall()
        except psycopg.OperationalError as error:
            self._disconnect()
            raise OSError(str(error)) from error

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def busy_process(self, processes: Collection[int]) -> int | None:
        """Returns a server process that serves the installation, one inside a transaction if there is any."""
        try:
            found = self.rows(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'stillhouse' "
                "AND datname = current_database() ORDER BY (state = 'idle'), backend_start LIMIT 1"
            )
        except OSError:
            return None
        return int(found[0][0]) if found else None

    def version(self) -> str:
        """Returns the server's."""
        return self._server.version()

    def close(self) -> None:
        """Ends the server."""
        self._disconnect()
        self._server.__exit__(None, None, None)


def open_database(name: str, folder: Path) -> CampaignDatabase:
    """A database of a kind.

    Raises:
        NoPostgreSQL: no server can be started here.
    """
    return SQLiteDatabase(folder) if name == "sqlite" else PostgreSQLDatabase(folder)


def strike(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False when the process has ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
