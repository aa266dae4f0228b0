"""What tests of all packages share: databases, real ones, and the store on top of them."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sqlite3
import ssl
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import certifi
import pytest
from httpx import create_ssl_context

import tests.drawing  # noqa: F401  # Loads the profile of Hypothesis.
from benchmarks.postgresql import NoPostgreSQL, PostgreSQLServer
from service.config.settings import Settings
from service.db import migrate, sqlite
from service.db.engine import Database
from service.db.schema import accepted_writers, metadata, projects
from service.scheduling.queue import Queue
from service.store import Store
from tests.execution.cluster import add_node, local_ray, running, storage_url, texts
from tests.progress import Progress, is_open
from tests.quick import left_out, quick
from tests.thorough import mark

__all__ = ["add_node", "local_ray", "running", "storage_url", "texts"]

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    """Let test processes share the CPUs: read when torch is imported, by processes of tests as well."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (name := config.getoption("progress")) and "PYTEST_XDIST_WORKER" not in os.environ and is_open():
        config.pluginmanager.register(Progress(name))
    _share_authorities()
    _let_writes_return_at_once()


def _let_writes_return_at_once() -> None:
    """Lets SQLite not wait for the disk, which only a loss of power would miss; processes of tests wait."""

    @wraps(prepare := sqlite.prepare_writer)
    def prepare_writer(connection: sqlite3.Connection) -> None:
        prepare(connection)
        connection.execute("PRAGMA synchronous = OFF")

    sqlite.prepare_writer = prepare_writer


def _share_authorities() -> None:
    """Lets the HTTP clients of a process read once what they check certificates against: it takes 20 ms."""
    create, shared = ssl.create_default_context, create_ssl_context(trust_env=False)

    def create_or_share(*arguments: Any, **named: Any) -> ssl.SSLContext:
        by_default = not arguments and named == {"cafile": certifi.where()}
        return shared if by_default else create(*arguments, **named)

    ssl.create_default_context = create_or_share


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Let `make quick` import nothing of what it leaves out."""
    return True if config.getoption("quick") and left_out(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark variants, let what needs Ray begin, and start the session's cluster before anything imports Ray.

    Ray reads how it authenticates when it is imported.
    """
    mark(items)
    if config.getoption("quick"):
        kept = set(selection := quick(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = selection
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("ray"):
            item.fixturenames.insert(0, "local_ray")
    for name in ("alone", "ray", "slow"):
        for path in {item.path for item in items if item.get_closest_marker(name)}:
            if f"mark.{name}" not in path.read_text(encoding="utf-8"):
                raise pytest.UsageError(
                    f"{path}: write pytest.mark.{name} in this file; make finds it by that"
                )
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, *_begins(item)))


LONGEST = (
    "execution/test_mixed_cluster.py",
    "test_wheel.py",
    "execution/test_leaving_nodes.py",
    "browser/test_newcomer.py",
    "browser/test_pages.py",
    "faults/test_campaign.py",
    "trainers/parallel/test_pipeline.py",
    "conformance/test_stranded.py",
)
"""Files with slow tests of a minute and more: they begin first, so that no pass waits for one in the end."""


def _begins(item: pytest.Item) -> tuple[bool, int]:
    file = item.nodeid.removeprefix("tests/").partition("::")[0]
    long = item.get_closest_marker("slow") is not None and file in LONGEST
    return not long, LONGEST.index(file) if long else 0


def pytest_collection_finish() -> None:
    """Let collections skip the imported modules: each run of a trainer collects twice, 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQLServer]:
    """A PostgreSQL server for the session; skips where none can be started."""
    try:
        server = PostgreSQLServer(durable=False)
        server.__enter__()
    except NoPostgreSQL as error:
        pytest.skip(str(error))
    yield server
    server.__exit__(None, None, None)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with all tables and no rows, to be copied."""
    folder = tmp_path_factory.mktemp("sqlite-template")
    migrate.upgrade(Settings(data_dir=folder))
    return folder / "stillhouse.db"


@pytest.fixture(scope="session")
def migrated_postgresql_url(
    postgresql_server: PostgreSQLServer, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A PostgreSQL database with all tables, shared by one test after the other."""
    url = postgresql_server.create_database("shared")
    migrate.upgrade(Settings(data_dir=tmp_path_factory.mktemp("postgresql"), database_url=url))
    return url


@pytest.fixture
def empty_postgresql_url(postgresql_server: PostgreSQLServer) -> Iterator[str]:
    """A PostgreSQL database without tables."""
    name = f"test_{next(_numbers)}"
    yield postgresql_server.create_database(name)
    postgresql_server.drop_database(name)


@pytest.fixture
def postgresql_url(postgresql_server: PostgreSQLServer, migrated_postgresql_url: str) -> Iterator[str]:
    """A PostgreSQL database with all tables, and no rows but those of the migrations."""
    yield migrated_postgresql_url
    tables = [table.name for table in metadata.sorted_tables if table is not accepted_writers]
    postgresql_server.clear_database("shared", tables)
    database = Database(migrated_postgresql_url)
    database.write(lambda connection: connection.execute(projects.insert().values(_DEFAULT_PROJECT)))
    database.close()


_DEFAULT_PROJECT = {
    "name": "default", "title": "Default", "visible_to_all": True, "notes": "", "created_s": 0.0,
    "settings": {},
}  # fmt: skip


KINDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)]


@pytest.fixture(params=KINDS)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'stillhouse.db'}"
    url: str = request.getfixturevalue("empty_postgresql_url")
    return url


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with all tables and no rows, of each kind in turn."""
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "stillhouse.db")
        return f"sqlite:///{tmp_path / 'stillhouse.db'}"
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> Settings:
    """Settings of an installation in a temporary folder, on each database in turn."""
    return Settings(data_dir=tmp_path, database_url=database_url)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """An empty store, on each database in turn."""
    opened = Store.open(settings)
    yield opened
    opened.close()


@pytest.fixture
def queue(store: Store) -> Queue:
    """The queue of the store."""
    return Queue(store)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Counts of the fault tests, the selection of `make quick`, and the progress of a pass."""
    parser.addoption("--kills", type=int, default=2, help="processes to kill on each database")
    parser.addoption("--histories", type=int, default=4, help="random concurrent histories on each database")
    parser.addoption(
        "--progress", metavar="NAME", help="how far the pass of this name is (tests/progress.py)"
    )
    parser.addoption("--quick", action="store_true", help="only what tests/quick.py selects")
