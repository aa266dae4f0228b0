"""What tests of all packages share: databases, real ones, and the store on top of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.postgresql import NoPostgreSQL, PostgreSQLServer
from service.queue import Queue
from service.settings import Settings
from service.store import Store

_numbers = itertools.count()


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


@pytest.fixture
def postgresql_url(postgresql_server: PostgreSQLServer) -> Iterator[str]:
    """An empty PostgreSQL database."""
    name = f"test_{next(_numbers)}"
    yield postgresql_server.create_database(name)
    postgresql_server.drop_database(name)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind in turn."""
    if request.param == "sqlite":
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
    opened = Store.open(settings, migrate=True)
    yield opened
    opened.close()


@pytest.fixture
def queue(store: Store) -> Queue:
    """The queue of the store."""
    return Queue(store)
