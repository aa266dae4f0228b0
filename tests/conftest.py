"""What tests of all packages share: databases, real ones, and the store on top of them."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sqlite3
import ssl
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import certifi
import pytest
import sqlalchemy as sa
import typer.testing
from httpx import create_ssl_context

import tests.drawing  # noqa: F401  # Loads the profile of Hypothesis.
from benchmarks.postgresql import NoPostgreSQL, PostgreSQLServer
from service.config.settings import Settings
from service.db import migrate, sqlite
from service.db.schema import accepted_writers, metadata, projects
from service.scheduling.queue import Queue
from service.store import Store
from tests.compiled_statements import share_compiled_statements
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
    _build_commands_once()
    _share_authorities()
    share_compiled_statements()
    _let_writes_return_at_once()


def _let_writes_return_at_once() -> None:
    """Lets SQLite not wait for the disk, which only a loss of power would miss; processes of tests wait."""

    @wraps(prepare := sqlite.prepare_writer)
    def prepare_writer(connection: sqlite3.Connection) -> None:
        prepare(connection)
        connection.execute("PRAGMA synchronous = OFF")

    sqlite.prepare_writer = prepare_writer


def _build_commands_once() -> None:
    """Lets the runner of command lines build the tree of all commands once: it takes 12 ms."""
    typer.testing._get_command = cache(typer.testing._get_command)


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import test modules without garbage collections, and let those that begin by themselves be rare."""
    gc.disable()
    try:
        return (yield)
    finally:
        _skip_in_collections()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let collections skip what a file's tests leave: modules that they imported, what libraries keep."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        _skip_in_collections()
    return done


def _skip_in_collections() -> None:
    """Lets collections skip what exists: each run of a trainer collects twice, 0.3 s each with all of it."""
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
def postgresql_template(postgresql_server: PostgreSQLServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Name of a PostgreSQL database with all tables, to be copied; nobody is connected to it."""
    url = postgresql_server.create_database(name := "template")
    migrate.upgrade(Settings(data_dir=tmp_path_factory.mktemp("postgresql"), database_url=url))
    return name


@pytest.fixture(scope="session")
def migrated_postgresql_url(postgresql_server: PostgreSQLServer, postgresql_template: str) -> str:
    """A PostgreSQL database with all tables, shared by one test after the other."""
    return postgresql_server.create_database("shared", postgresql_template)


@pytest.fixture(scope="session")
def clear_postgresql(migrated_postgresql_url: str) -> Iterator[Callable[[], None]]:
    """Leaves no rows in the shared database but those of the migrations, and no other connections.

    To truncate all takes PostgreSQL 50 ms: each table and index gets a new file. Most hold a few rows, which
    are deleted; what has grown and no key leads to is truncated.
    """
    url = sa.make_url(migrated_postgresql_url).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, pool_pre_ping=True)
    tables = [table for table in metadata.sorted_tables if table is not accepted_writers]
    led_to = {key.column.table for table in tables for key in table.foreign_keys}
    grown = sa.text(
        "SELECT oid::regclass::text FROM pg_class WHERE oid = ANY(CAST(:tables AS regclass[])) "
        "AND pg_relation_size(oid) > 1 << 20"
    ).bindparams(tables=[table.name for table in tables if table not in led_to])

    def clear() -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            # Waits for the ends of their transactions.
            connection.exec_driver_sql(f"LOCK TABLE {', '.join(table.name for table in tables)}")
            # As a replica, no trigger refuses to empty the audit log and no key is looked up.
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            for table in connection.execute(grown).scalars().all():
                connection.exec_driver_sql(f"TRUNCATE {table}")
            connection.exec_driver_sql("; ".join(f"DELETE FROM {table.name}" for table in tables))
            connection.exec_driver_sql(
                "SELECT setval(sequencename::regclass, start_value, false) FROM pg_sequences"
            )
            connection.execute(projects.insert().values(_DEFAULT_PROJECT))

    yield clear
    engine.dispose()


@pytest.fixture
def empty_postgresql_url(postgresql_server: PostgreSQLServer) -> Iterator[str]:
    """A PostgreSQL database without tables."""
    name = f"test_{next(_numbers)}"
    yield postgresql_server.create_database(name)
    postgresql_server.drop_database(name)


@pytest.fixture
def postgresql_url(migrated_postgresql_url: str, clear_postgresql: Callable[[], None]) -> Iterator[str]:
    """A PostgreSQL database with all tables, and no rows but those of the migrations."""
    yield migrated_postgresql_url
    clear_postgresql()


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


@pytest.fixture(scope="module", params=KINDS)
def lasting_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    """A store for all tests of a file, on each database in turn: they read what its fixtures write."""
    folder, url, name = tmp_path_factory.mktemp("lasting"), None, f"lasting_{next(_numbers)}"
    if request.param == "sqlite":
        shutil.copy(request.getfixturevalue("sqlite_template"), folder / "stillhouse.db")
    else:
        server: PostgreSQLServer = request.getfixturevalue("postgresql_server")
        url = server.create_database(name, request.getfixturevalue("postgresql_template"))
    opened = Store.open(Settings(data_dir=folder, database_url=url))
    yield opened
    opened.close()
    if url is not None:
        server.drop_database(name)


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
