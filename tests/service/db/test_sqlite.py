"""SQLite's own dangers: other writers, checkpoints, places where it must not be, a full disk."""

from __future__ import annotations

import inspect
import itertools
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import sqlite
from service.db.clock import DatabaseNow, database_time
from service.db.engine import Database, driver_connection
from service.db.errors import StoreFull, StoreUnavailable, UnusableDatabase
from service.db.migrate import upgrade
from service.store import Store

ADD = sa.text("INSERT INTO metric_names (name) VALUES (:name)")


@pytest.fixture
def database(tmp_path: Path, sqlite_template: Path) -> Database:
    """A SQLite database with all tables."""
    path = tmp_path / "stillhouse.db"
    path.write_bytes(sqlite_template.read_bytes())
    return Database(f"sqlite:///{path}")


def names(database: Database) -> list[str]:
    """What was written with ADD."""
    with database.read() as connection:
        return list(connection.execute(sa.text("SELECT name FROM metric_names ORDER BY id")).scalars())


@pytest.fixture
def durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes wait for the disk, unlike those of other tests."""
    monkeypatch.setattr(sqlite, "prepare_writer", inspect.unwrap(sqlite.prepare_writer))


def test_writes_are_durable_and_reads_cannot_write(durable: None, database: Database) -> None:
    def pragmas(connection: sa.Connection) -> list[object]:
        return [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "wal_autocheckpoint", "query_only")
        ]

    assert database.write(pragmas) == ["wal", 2, 1, 0, 0]
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA query_only").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000
    database.close()


def test_a_failed_write_leaves_nothing(database: Database) -> None:
    def body(connection: sa.Connection) -> None:
        connection.execute(ADD, {"name": "a"})
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        database.write(body)
    with pytest.raises(sa.exc.IntegrityError):
        database.write(lambda connection: [connection.execute(ADD, {"name": "b"}) for _ in range(2)])
    database.write(lambda connection: connection.execute(ADD, {"name": "c"}))
    assert names(database) == ["c"]
    database.close()


def test_a_locked_database_is_unavailable(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    assert database.path is not None
    database.write(lambda connection: connection.execute(ADD, {"name": "a"}))
    other = sqlite3.connect(database.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # Another program, which does not know our lock.
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.05)
    again = Database(str(database.url))
    with pytest.raises(StoreUnavailable, match="locked"):
        again.write(lambda connection: connection.execute(ADD, {"name": "b"}))
    other.execute("ROLLBACK")
    again.write(lambda connection: connection.execute(ADD, {"name": "c"}))
    assert names(database) == ["a", "c"]
    other.close()
    again.close()
    database.close()


def test_a_full_disk_is_said_and_stores_nothing(database: Database) -> None:
    def limit(connection: sa.Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

    database.write(limit)
    with pytest.raises(StoreFull, match="full"):
        database.write(
            lambda connection: [connection.execute(ADD, {"name": "x" * 5000 + str(n)}) for n in range(100)]
        )
    assert names(database) == []
    database.write(lambda connection: connection.execute(ADD, {"name": "a"}))
    assert names(database) == ["a"]
    database.close()


def test_a_vanished_folder_is_unavailable(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'gone' / 'stillhouse.db'}")
    with pytest.raises(StoreUnavailable), database.read():
        pass
    database.close()


def test_writers_of_two_processes_take_turns(database: Database) -> None:
    assert database.path is not None
    program = (
        "import pathlib, sys, time\n"
        "from service.db.sqlite import WriterLock\n"
        "lock = WriterLock(pathlib.Path(sys.argv[1]))\n"
        "print('ready', flush=True)\n"
        "end = time.monotonic() + 3\n"
        "while time.monotonic() < end:\n"
        "    with lock.held():\n"
        "        time.sleep(0.01)\n"
    )
    busy = subprocess.Popen(
        [sys.executable, "-c", program, str(database.path)], stdout=subprocess.PIPE, text=True
    )
    assert busy.stdout is not None
    busy.stdout.readline()
    waits = []
    for number in range(20):
        begin = time.monotonic()
        database.write(lambda connection, n=number: connection.execute(ADD, {"name": str(n)}))  # type: ignore[misc]
        waits.append(time.monotonic() - begin)
    busy.kill()
    busy.wait()
    busy.stdout.close()
    assert sorted(waits)[10] < 0.1  # It writes without pause, and yet the door is open after each write.
    database.close()


def test_the_lock_gives_up_and_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    program = (
        "import pathlib, sys, time\n"
        "from service.db.sqlite import WriterLock\n"
        "with WriterLock(pathlib.Path(sys.argv[1])).held():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    lock = sqlite.WriterLock(path)
    with pytest.raises(StoreUnavailable), lock.held(0.05):
        pass
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with lock.held(1.0):
        pass
    lock.close()


def test_a_waiting_writer_looks_for_its_turn_every_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(sqlite, "time", clock)
    first, second = (sqlite.WriterLock(tmp_path / "x.db") for _ in range(2))
    with first.held(), pytest.raises(StoreUnavailable), second.held(timeout_s=1.0):
        pass
    assert max(pauses) == 0.001
    first.close()
    second.close()


def test_threads_wait_for_the_lock_too(tmp_path: Path) -> None:
    lock = sqlite.WriterLock(tmp_path / "x.db")
    inside = threading.Event()
    leave = threading.Event()

    def hold() -> None:
        with lock.held():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(10)
    with pytest.raises(StoreUnavailable), lock.held(0.05):
        pass
    leave.set()
    thread.join()
    with lock.held(1.0):
        pass
    lock.close()


def test_the_log_is_copied_back_when_it_has_grown(database: Database) -> None:
    assert database.path is not None
    database.write(lambda connection: connection.execute(ADD, {"name": "a"}))
    wal = database.path.with_name(database.path.name + "-wal")
    assert wal.stat().st_size > 0
    size = database.path.stat().st_size

    def grow(connection: sa.Connection) -> None:
        for number in range(200):
            connection.execute(ADD, {"name": "x" * 4000 + str(number)})

    database.write(grow)
    assert database.path.stat().st_size == size
    with database.writers.connect() as connection:
        sqlite.Checkpoints(database.path, at_least=1000).run(driver_connection(connection))
    assert database.path.stat().st_size > size
    database.close()


def test_the_log_is_copied_back_in_small_portions(database: Database) -> None:
    """Writers wait for each of them: 32 MiB took longer than a recorder's write may."""
    assert database.path is not None
    log = database.path.with_name(database.path.name + "-wal")
    sizes = []
    for _ in range(12):  # MiB.
        database.write(lambda c: [c.execute(ADD, {"name": os.urandom(2_000).hex()}) for _ in range(220)])
        sizes.append(log.stat().st_size >> 20)
    assert max(sizes) <= 6
    database.close()


def test_writes_do_not_wait_for_a_reader_of_a_large_log(
    tmp_path: Path, sqlite_template: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 120.0)
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 100)
    path = tmp_path / "stillhouse.db"
    path.write_bytes(sqlite_template.read_bytes())
    database = Database(f"sqlite:///{path}")
    database.write(lambda connection: connection.execute(ADD, {"name": "a"}))

    def write() -> None:
        for number in range(20):
            database.write(lambda connection, n=number: connection.execute(ADD, {"name": f"{n}"}))  # type: ignore[misc]

    with database.read() as connection:
        connection.execute(sa.text("SELECT 1 FROM metric_names")).all()
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(20.0)
        waited = thread.is_alive()
    thread.join()
    assert not waited
    assert caplog.text.count("is copied back when a reader that holds its pages ends") == 1
    assert len(names(database)) == 21
    database.close()


def test_a_log_that_readers_hold_up_is_tried_again_after_growing_pauses(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert database.path is not None
    now = [0.0]
    monkeypatch.setattr(sqlite, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(sqlite, "SHORTEST_COPY_PAUSE_S", 0.125)
    checkpoints = sqlite.Checkpoints(database.path, at_least=1000)
    tried: list[float] = []
    with database.writers.connect() as connection, database.read() as reader:
        reader.execute(sa.text("SELECT 1 FROM metric_names")).all()
        connection.execute(ADD, {"name": "x" * 20_000})
        connection.commit()
        driver = driver_connection(connection)
        driver.set_trace_callback(lambda text: tried.append(now[0]) if "wal_checkpoint" in text else None)
        for eighth in range(1 + 8 * 18):
            now[0] = eighth / 8
            checkpoints.run(driver)
        driver.set_trace_callback(None)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert pauses == [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    database.close()


def test_old_versions_are_warned_of() -> None:
    assert sqlite.version_warning((3, 51, 3)) is None
    assert sqlite.version_warning((3, 52, 0)) is None
    assert "3.40.1 is older than 3.51.3" in (sqlite.version_warning((3, 40, 1)) or "")


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = namedtuple("partition", "mountpoint fstype")
    mounts = [partition("/", "ext4"), partition(str(tmp_path), "nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    with pytest.raises(UnusableDatabase, match="network file system"):
        upgrade(Settings(data_dir=tmp_path))
    assert sqlite.file_system_problem(Path("/elsewhere/x.db")) is None
    assert not (tmp_path / "stillhouse.db").exists()


def test_the_clock_that_python_reads_is_the_one_of_statements(database: Database) -> None:
    with database.read() as connection:
        for _ in range(1000):
            before = database_time(connection)
            in_statement = connection.execute(sa.select(DatabaseNow())).scalar_one()
            if before == database_time(connection):  # The same millisecond.
                assert in_statement == before
                return
    pytest.fail("no statement took less than a millisecond")


def test_the_store_opens_and_closes_without_leaving_open_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store = Store.open(Settings(data_dir=tmp_path), migrate=True)
        store.experiments.page()
        store.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_an_old_frame_that_shrinking_the_log_cut_is_not_damage(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    path = database.path
    assert path is not None
    large = [{"name": f"{number:06}" + "x" * 500} for number in range(6_000)]
    database.write(lambda connection: connection.execute(ADD, large))  # More than the log keeps.
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    connection.close()
    database.write(lambda connection: connection.execute(ADD, {"name": "after"}))
    log = path.with_name(path.name + "-wal")
    assert log.stat().st_size == 1 << 20, "it has begun again, and was cut within a frame"
    assert sqlite.log_damage(path) is None
    assert not log.with_name(log.name + ".damaged").exists()
