"""Migrations make exactly the tables that the program expects, once, whoever starts first."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.command import upgrade as command_upgrade

from service.db import migrate
from service.db.engine import Database
from service.settings import Settings
from service.store import Store, UnusableDatabase


@pytest.fixture
def empty(tmp_path: Path, empty_database_url: str) -> Settings:
    """Settings of an installation whose database has no tables."""
    return Settings(data_dir=tmp_path, database_url=empty_database_url)


def test_migrated_tables_are_the_declared_ones(empty: Settings) -> None:
    migrate.upgrade(empty)
    assert migrate.check(empty) == []
    database = Database(empty.resolved_database_url())
    with database.readers.connect() as connection:
        assert migrate.differences(connection) == []
    database.close()


def test_a_table_that_differs_is_said(empty: Settings) -> None:
    migrate.upgrade(empty)
    database = Database(empty.resolved_database_url())
    database.write(lambda connection: connection.execute(sa.text("ALTER TABLE events ADD COLUMN extra TEXT")))
    database.close()
    (problem,) = migrate.check(empty)
    assert "extra" in problem


def test_without_tables_the_store_does_not_open(empty: Settings) -> None:
    with pytest.raises(UnusableDatabase, match="stillhouse db upgrade"):
        Store.open(empty)
    assert "stillhouse db upgrade" in migrate.check(empty)[0]


def test_upgrade_twice_keeps_what_is_there(empty: Settings) -> None:
    store = Store.open(empty, migrate=True)
    store.database.write(lambda c: c.execute(sa.text("INSERT INTO metric_names (name) VALUES ('x')")))
    store.close()
    store = Store.open(empty, migrate=True)
    with store.database.read() as connection:
        assert connection.execute(sa.text("SELECT name FROM metric_names")).scalar() == "x"
    store.close()


def test_runs_of_the_first_form_keep_their_score(empty: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "newest_revision", lambda: "0001")
    monkeypatch.setattr(migrate.command, "upgrade", lambda config, _: command_upgrade(config, "0001"))
    migrate.upgrade(empty)
    monkeypatch.undo()
    database = Database(empty.resolved_database_url())
    database.write(lambda c: c.execute(sa.text(_EXPERIMENT_OF_0001)))
    for index, accuracy in enumerate(("0.75", "NULL")):
        database.write(
            lambda c, i=index, a=accuracy: c.execute(sa.text(_RUN_OF_0001.format(index=i, accuracy=a)))
        )
    database.close()
    assert f"revision 0001, this program needs {migrate.newest_revision()}" in migrate.check(empty)[0]
    store = Store.open(empty, migrate=True)
    first, second = store.runs(experiment_id=1).items
    assert (first.headline, first.score, first.teacher) == ("accuracy", 0.75, None)
    assert (second.headline, second.score) == (None, None)
    assert store.references(1) == []
    store.close()
    assert migrate.check(empty) == []


_EXPERIMENT_OF_0001 = """
    INSERT INTO experiments (
      id, name, owner, state, priority, attempt, spec_sha256, run_count, event_count, not_before_s,
      created_s, queued_s
    ) VALUES (1, 'old', 'ada', 'succeeded', 50, 1, 'x', 2, 0, 0, 1, 1)
"""
_RUN_OF_0001 = """
    INSERT INTO runs (
      experiment_id, "index", cell, seed, point, state, attempt, own_failures, infrastructure_failures,
      not_before_s, step, task, student, precision, optimizer, implementation, global_batch_size, strategy,
      workers, hardware, devices, price_usd_per_hour, power_w, accuracy
    ) VALUES (
      1, {index}, 'c', 0, '{{}}', 'succeeded', 1, 0, 0, 0, 9, 'imdb', 'tiny', 'fp32', 'adamw', 'auto', 16,
      'single', 1, 'cpu', 1, 0.05, 7.5, {accuracy}
    )
"""


def test_tables_of_a_newer_program_are_left_alone(empty: Settings) -> None:
    migrate.upgrade(empty)
    database = Database(empty.resolved_database_url())
    database.write(lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    database.close()
    for attempt in (lambda: migrate.upgrade(empty), lambda: Store.open(empty)):
        with pytest.raises(UnusableDatabase, match="newer Stillhouse"):
            attempt()
    assert "newer Stillhouse" in migrate.check(empty)[0]


def test_threads_and_processes_that_start_at_once_take_turns(empty: Settings) -> None:
    program = (
        "import sys, pathlib; from service.db import migrate; from service.settings import Settings; "
        "migrate.upgrade(Settings(data_dir=pathlib.Path(sys.argv[1]), database_url=sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(empty.data_dir), empty.resolved_database_url()]
    processes = [subprocess.Popen(command) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: migrate.upgrade(empty), range(3)))
    assert [process.wait(60) for process in processes] == [0, 0]
    assert migrate.check(empty) == []


def test_a_damaged_file_is_said(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    migrate.upgrade(settings)
    path = tmp_path / "stillhouse.db"
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 6] = b"\x5a" * (4096 * 4)
    path.write_bytes(content)
    assert "restore a backup" in migrate.check(settings)[0]
    with pytest.raises(UnusableDatabase, match="restore a backup"):
        Store.open(settings)
    path.write_bytes(b"not a database" * 1000)
    assert "restore a backup" in migrate.check(settings)[0]
    with pytest.raises(UnusableDatabase, match="restore a backup"):
        Store.open(settings)
