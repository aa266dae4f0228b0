"""Full disks: a script of writes runs while its database's disk fills up, compared with an undisturbed run.

What a step acknowledged is there, whole; what it refused has left nothing, not even in the files that a crash
would leave. Once there is room, the refused step succeeds. Each disk is a small file system in memory, in a
mount namespace of the lane's own. PostgreSQL's server is on one: it runs out of pages for its tables, or of
room for its log, which crashes the server.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import random
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from benchmarks.postgresql import PostgreSQLServer
from service.config.settings import Settings
from service.db import engine, migrate, sqlite
from service.db.errors import Unconfirmed
from service.store import Store, StoreError
from tests.faults.campaign.plan import Round
from tests.faults.campaign.rounds import Outcome
from tests.faults.campaign.script import BEGAN_S, SCRIPT, STEP_S, ScriptRun
from tests.faults.disk.full import SmallDisk

_SQLITE_BYTES = 24 << 20
_POSTGRESQL_BYTES = 224 << 20
_SEGMENT_BYTES = 1 << 20
_MOST_LEFT = 40_000
_EMPTY = 0.3
"""Share of the runs that begin with a migration on a full disk."""
_FILLED = 0.4
"""Share of the steps before which a disk with room is filled."""
_FULL_FOR = 6
"""Steps that a disk stays full at most, when none is refused."""
_RESTART_S = 60.0
_NEW_NAMESPACE = 0x00020000

Content = dict[str, list[tuple[Any, ...]]]
"""Rows by table, in an order of their own."""
Counters = list[tuple[Any, ...]]
"""Name and last value."""


class FullDisk(ABC):
    """A database on a small disk."""

    disk: SmallDisk

    @abstractmethod
    def fresh(self, *, empty: bool) -> str:
        """Makes a database, with tables or `empty`, and returns its URL."""

    @abstractmethod
    def fill(self, chance: random.Random) -> None:
        """Leaves little room, for this or that."""

    @abstractmethod
    def free(self) -> None:
        """Makes room, and waits until the database can be used."""

    @abstractmethod
    def content(self) -> Content:
        """Returns all rows."""

    @abstractmethod
    def content_after_crash(self) -> Content:
        """Returns all rows as they would be after a crash of all processes."""

    @abstractmethod
    def counters(self) -> Counters:
        """Returns where the counters of ids are."""

    @abstractmethod
    def rewind(self, counters: Counters) -> None:
        """Puts the counters of ids back."""

    @abstractmethod
    def close(self) -> None:
        """Ends it and takes the disk away."""


class FullSQLite(FullDisk):
    """A file on a small disk.

    Args:
        folder: for the disk and a template.
    """

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template"
        migrate.upgrade(Settings(data_dir=self._template))
        self.disk = SmallDisk(folder / "disk", _SQLITE_BYTES)
        self._path = self.disk.folder / "stillhouse.db"

    def fresh(self, *, empty: bool) -> str:
        """Removes what there is, and copies the template."""
        self.disk.free()
        for old in self.disk.folder.iterdir():
            old.unlink()
        if not empty:
            shutil.copy(self._template / self._path.name, self._path)
        return f"sqlite:///{self._path}"

    def fill(self, chance: random.Random) -> None:
        """Leaves some pages at most."""
        self.disk.fill(chance.randrange(_MOST_LEFT))

    def free(self) -> None:
        """Removes the ballast."""
        self.disk.free()

    def content(self) -> Content:
        """Reads the file."""
        return _content(self._path)

    def content_after_crash(self) -> Content:
        """Reads a copy of the file and its log, without what processes share."""
        with tempfile.TemporaryDirectory(dir=self._template) as copied:
            path = Path(copied) / self._path.name
            for suffix in ("", "-wal"):
                with suppress(FileNotFoundError):
                    shutil.copy(f"{self._path}{suffix}", f"{path}{suffix}")
            return _content(path)

    def counters(self) -> Counters:
        """Returns nothing: a transaction that is rolled back takes its ids back."""
        return []

    def rewind(self, counters: Counters) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Takes the disk away."""
        self.disk.close()


def _content(path: Path) -> Content:
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {
            name: connection.execute(f'SELECT * FROM "{name}"').fetchall()
            for (name,) in names
            if not name.startswith("sqlite_")
        }


class FullPostgreSQL(FullDisk):
    """A server whose files lie on a small disk. It may crash when its disk is full, and is started again.

    Args:
        folder: for nothing: the server's user may not be able to read it.
    """

    def __init__(self, folder: Path) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="stillhouse-full-"))
        self._home.chmod(0o755)
        self.disk = SmallDisk(self._home / "disk", _POSTGRESQL_BYTES)
        if not self.disk.mounted:
            shutil.rmtree(self._home)
            raise NoSmallDisk("a server's disk needs a file system of its own, which may not be mounted here")
        options = ["fsync=off", "shared_buffers=16MB", "max_wal_size=8MB", "min_wal_size=2MB",
                   "wal_recycle=off", "checkpoint_timeout=1h", "autovacuum=off"]  # fmt: skip
        self._server = PostgreSQLServer(options=options, parent=self.disk.folder, wal_segment_mib=1)
        self._server.__enter__()
        migrate.upgrade(Settings(data_dir=folder, database_url=self._server.create_database("template")))
        self._server.create_database("script")

    def fresh(self, *, empty: bool) -> str:
        """Copies the template."""
        self.free()
        self._server.drop_database("script")
        return self._server.create_database("script", template="template0" if empty else "template")

    def fill(self, chance: random.Random) -> None:
        """Leaves few pages for tables, or little of the segment of the log and no room for the next."""
        with self._connection() as connection:
            connection.execute("CHECKPOINT")  # Removes old segments of the log.
            if chance.random() < 0.5:
                connection.execute("SELECT pg_switch_wal()")
                connection.execute("SELECT pg_logical_emit_message(false, '', 'begins a segment')")
            else:
                row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
                assert row is not None
                rest = _SEGMENT_BYTES - int(row[0]) % _SEGMENT_BYTES - chance.randrange(_MOST_LEFT)
                if rest > 0:
                    connection.execute(f"SELECT pg_logical_emit_message(false, '', repeat('x', {rest}))")
        self.disk.fill(chance.randrange(_MOST_LEFT))

    def free(self) -> None:
        """Removes the ballast, and starts the server again when it has ended."""
        self.disk.free()
        deadline = time.monotonic() + _RESTART_S
        while True:
            try:
                self._connection("postgres").close()
                return
            except psycopg.OperationalError:
                if not self._server.is_running():
                    self._server.start()
                elif time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def content(self) -> Content:
        """Asks over a connection of its own."""
        with self._connection() as connection:
            names = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"
            ).fetchall()
            return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for (name,) in names}

    def content_after_crash(self) -> Content:
        """Returns what there is: the server crashes when its log finds no room."""
        return self.content()

    def counters(self) -> Counters:
        """Returns the last value of each sequence."""
        with self._connection() as connection:
            return connection.execute("SELECT sequencename, last_value FROM pg_sequences").fetchall()

    def rewind(self, counters: Counters) -> None:
        """Sets the sequences, which keep what a transaction took that was rolled back."""
        with self._connection() as connection:
            for name, last in counters:
                connection.execute("SELECT setval(%s::regclass, %s, %s)", (name, last or 1, last is not None))

    def _connection(self, name: str = "script") -> psycopg.Connection[Any]:
        return psycopg.connect(self._server.url(name), autocommit=True)

    def close(self) -> None:
        """Ends the server and takes the disk away."""
        self.disk.free()
        self._server.__exit__(None, None, None)
        self.disk.close()
        shutil.rmtree(self._home, ignore_errors=True)


class NoSmallDisk(Exception):
    """No small disk can be made here; the message says why."""


def _keep_mounts_private() -> None:
    """Keeps what this process mounts from all others, where it may: it ends with the process."""
    if ctypes.CDLL(None).unshare(_NEW_NAMESPACE) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)


class FullDisks:
    """Rounds of full disks on one database; a context.

    Args:
        name: kind of the database.
        folder: new; for the disk, and files that are not on it.

    Raises:
        NoSmallDisk: no small disk can be made here.
    """

    def __init__(self, name: str, folder: Path) -> None:
        _keep_mounts_private()
        folder.mkdir(parents=True)
        self.disk = FullSQLite(folder) if name == "sqlite" else FullPostgreSQL(folder)
        self.folder = folder / "script"
        self._contents: list[Content] = []  # Before the first step, and after each, undisturbed.
        self._varying: dict[str, set[int]] = {}  # Columns whose values differ from run to run.

    def __enter__(self) -> Self:
        try:
            self._prepare()
        except BaseException:
            self.disk.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disk.close()

    def _prepare(self) -> None:
        """Runs the script twice undisturbed, and looks at what differs."""
        first, second = self._undisturbed(empty=False), self._undisturbed(empty=True)
        for one, other in zip(first, second, strict=True):
            for table, rows in one.items():
                columns = zip(zip(*rows, strict=True), zip(*other[table], strict=True), strict=True)
                varying = {number for number, (a, b) in enumerate(columns) if _sorted(a) != _sorted(b)}
                self._varying.setdefault(table, set()).update(varying)
        self._contents = [self._compared(content) for content in first]

    def carry_out(self, round: Round) -> Outcome:
        """Fills the disk as often as the round says; the targets are what the full disk refused."""
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        outcome, running = Outcome(round), 0
        with _impatient():
            while outcome.count < round.size and not outcome.problems:
                try:
                    self._disturbed(round.chance("script", running), outcome)
                except (StoreError, AssertionError) as error:
                    outcome.problems.append(f"run {running}: {type(error).__name__}: {error}")
                running += 1
        outcome.wall_s = time.monotonic() - began_s
        outcome.cpu_s = time.process_time() - began_cpu_s
        return outcome

    def _undisturbed(self, *, empty: bool) -> list[Content]:
        with self._running(empty=empty) as running:
            contents = [self.disk.content()]
            for number, step in enumerate(SCRIPT):
                running.now_s = BEGAN_S + number * STEP_S
                step.act(running)
                contents.append(self.disk.content())
        return contents

    def _disturbed(self, chance: random.Random, outcome: Outcome) -> None:
        """Runs the script while the disk is filled now and then."""
        full_for = 0
        with self._running(empty=chance.random() < _EMPTY, outcome=outcome) as running:
            for number, step in enumerate(SCRIPT):
                running.now_s = BEGAN_S + number * STEP_S
                counters = self.disk.counters()
                if not full_for and outcome.count < outcome.round.size and chance.random() < _FILLED:
                    outcome.count, full_for = outcome.count + 1, chance.randint(1, _FULL_FOR)
                    self.disk.fill(chance)
                error = _refusal(running, number)
                if error is not None:
                    if not full_for:
                        raise error
                    self.disk.free()
                    full_for = 0
                    outcome.by_target[step.name] += 1
                    outcome.unconfirmed += isinstance(error, Unconfirmed)
                    if isinstance(error, Unconfirmed) or step.in_parts:
                        allowed = (number, number + 1)
                    else:
                        allowed = (number,)
                    if not step.in_parts:
                        self._expect(outcome, "refused_stored", number, allowed, thorough=True)
                    if number + 1 in allowed and self._is_after(number + 1, self.disk.content()):
                        continue
                    self.disk.rewind(counters)
                    if (error := _refusal(running, number)) is not None:
                        raise error
                self._expect(outcome, "acknowledged_missing", number, (number + 1,), thorough=full_for > 0)
                if full_for == 1:
                    self.disk.free()
                full_for -= full_for > 0

    def _expect(
        self, outcome: Outcome, fault: str, number: int, allowed: Collection[int], *, thorough: bool
    ) -> None:
        """Counts a fault unless the rows are those of an undisturbed run after so many steps."""
        found = [self.disk.content(), *([self.disk.content_after_crash()] if thorough else [])]
        for where, content in zip(("", " after a crash"), found, strict=False):
            if not any(self._is_after(place, content) for place in allowed):
                compared, expected = self._compared(content), self._contents[min(allowed)]
                tables = [name for name in expected if compared.get(name) != expected[name]]
                line = f"step {number} ({SCRIPT[number].name}): {', '.join(tables)} differ{where}"
                outcome.findings.add(fault, line)

    def _is_after(self, steps: int, content: Content) -> bool:
        """Whether these are the rows of an undisturbed run after so many steps."""
        return self._compared(content) == self._contents[steps]

    def _compared(self, content: Content) -> Content:
        return {
            table: _sorted(
                tuple(value for place, value in enumerate(row) if place not in self._varying.get(table, ()))
                for row in rows
            )
            for table, rows in content.items()
        }

    @contextmanager
    def _running(self, *, empty: bool, outcome: Outcome | None = None) -> Iterator[ScriptRun]:
        """An installation before the first step; from `empty`, its tables are made, on a full disk first."""
        shutil.rmtree(self.folder, ignore_errors=True)
        settings = Settings(
            data_dir=self.folder,
            database_url=self.disk.fresh(empty=empty),
            keep_deleted_days=1.0,
            offline=True,
        )
        self.folder.mkdir(parents=True)
        if empty and outcome is not None:
            self._migrate(settings, outcome)
        elif empty:
            migrate.upgrade(settings)
        backup = self.disk.disk.folder / "backup.tar"
        backup.unlink(missing_ok=True)
        store = Store.open(settings)
        running = ScriptRun(settings, store, backup)
        store.clocks.simulated = lambda: running.now_s
        try:
            yield running
        finally:
            self.disk.free()
            store.close()
            backup.unlink(missing_ok=True)

    def _migrate(self, settings: Settings, outcome: Outcome) -> None:
        self.disk.disk.fill(100_000)
        outcome.count += 1
        try:
            migrate.upgrade(settings)
        except StoreError:
            outcome.by_target["migration"] += 1
            self.disk.free()
            if tables := self.disk.content():
                outcome.findings.add("refused_stored", f"migration: {', '.join(tables)} are there")
            migrate.upgrade(settings)
        self.disk.free()


def _refusal(running: ScriptRun, number: int) -> StoreError | None:
    """Takes a step; returns the error of one that is refused."""
    try:
        SCRIPT[number].act(running)
    except StoreError as error:
        left = [path.name for path in running.backup.parent.iterdir() if "backup" in path.name]
        assert not left, f"a refused backup left {left}"
        return error
    if SCRIPT[number].name == "backup":
        _verify(running.backup)
    return None


def _verify(backup: Path) -> None:
    """Compares the files of an archive with its manifest."""
    with tarfile.open(backup) as archive:
        found: dict[str, str] = {}
        for member in archive:
            stream = archive.extractfile(member)
            assert stream is not None
            text = stream.read()
            found[member.name] = hashlib.sha256(text).hexdigest()
        sealed = json.loads(text)["sealed"]
    assert {name: each["sha256"] for name, each in sealed.items()}.items() <= found.items()


@contextmanager
def _impatient() -> Iterator[None]:
    """A crashed server is not waited for, SQLite's log is copied back often, and warnings are not printed."""
    quiet, logger = logging.NullHandler(), logging.getLogger("service")
    logger.addHandler(quiet)
    with ExitStack() as restored:
        restored.callback(logger.removeHandler, quiet)
        for module, name, value in (
            (engine, "_RECONNECTING_S", 0.1),
            (sqlite, "CHECKPOINT_BYTES", 100_000),
        ):
            restored.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def _sorted(values: Any) -> list[Any]:
    return sorted(values, key=repr)
