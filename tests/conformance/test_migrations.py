"""Migrations make exactly the tables that the program expects, once, whoever starts first."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import migrate
from service.db.engine import Database
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


def test_a_trigger_that_is_missing_is_said(empty: Settings) -> None:
    migrate.upgrade(empty)
    database = Database(empty.resolved_database_url())
    on = "" if database.is_sqlite else " ON experiments"
    database.write(
        lambda connection: connection.execute(sa.text(f"DROP TRIGGER experiment_ends_after_its_runs{on}"))
    )
    database.close()
    (problem,) = migrate.check(empty)
    assert "experiment_ends_after_its_runs is missing" in problem


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


def test_rows_of_an_older_form_stay(empty: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate.upgrade(empty)
    database = Database(empty.resolved_database_url())
    database.write(lambda c: c.execute(sa.text("INSERT INTO metric_names (name) VALUES ('x')")))
    older = migrate.newest_revision()
    later = shutil.copytree(migrate.MIGRATIONS, tmp_path / "migrations")
    (later / "versions" / "9000_later.py").write_text(_LATER.format(older=older))
    monkeypatch.setattr(migrate, "MIGRATIONS", later)
    assert f"revision {older}, this program needs 9000; run: stillhouse db upgrade" in migrate.check(empty)[0]
    migrate.upgrade(empty)
    with database.readers.connect() as connection:
        assert connection.execute(sa.text("SELECT name, later FROM metric_names")).all() == [("x", 7)]
    database.close()


_LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9000", "{older}"


def upgrade() -> None:
    op.add_column("metric_names", sa.Column("later", sa.Integer(), nullable=False, server_default="7"))
"""


def test_tables_of_a_newer_program_are_left_alone(empty: Settings) -> None:
    migrate.upgrade(empty)
    database = Database(empty.resolved_database_url())
    database.write(lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(UnusableDatabase, match="newer Stillhouse"):
        migrate.upgrade(empty)
    database.write(lambda c: c.execute(sa.text("UPDATE accepted_writers SET oldest = 2, newest = 3")))
    database.close()
    refused = (
        "the database takes writers of protocol 2 to 3, and this program writes protocol 1, which is too "
        "old; use the release that upgraded it"
    )
    with pytest.raises(UnusableDatabase, match=refused):
        Store.open(empty)
    assert migrate.check(empty) == [refused]


def test_a_newer_database_that_takes_this_program_is_used(empty: Settings) -> None:
    migrate.upgrade(empty)
    database = Database(empty.resolved_database_url())
    database.write(lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = '9999'")))
    database.write(lambda c: c.execute(sa.text("UPDATE accepted_writers SET newest = 2")))
    database.close()
    Store.open(empty).close()
    assert migrate.check(empty) == []


def test_threads_and_processes_that_start_at_once_take_turns(empty: Settings) -> None:
    program = (
        "import sys, pathlib; from service.db import migrate; from service.config.settings import Settings; "
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
