"""A running API over a SQLite file, for each test of the command line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.app import create_app
from service.config.settings import Settings
from service.scheduling.queue import Queue
from service.store import Store
from tests.service.cli.house import House
from tests.serving import serving
from tests.shared_routes import share_routes
from trainers.data.synthetic import write_corpus

share_routes()


@pytest.fixture
def house(tmp_path: Path, sqlite_template: Path) -> Iterator[House]:
    """The API in a thread on a free port, over a migrated SQLite file of the test's own."""
    with running(tmp_path, sqlite_template) as found:
        yield found


@pytest.fixture(scope="module")
def full_house(tmp_path_factory: pytest.TempPathFactory, sqlite_template: Path) -> Iterator[House]:
    """One for all tests that only look: experiment 1 has succeeded, experiment 2 waits."""
    with running(tmp_path_factory.mktemp("house"), sqlite_template) as found:
        found.whole_experiment()
        found.submitted()
        yield found


@contextmanager
def running(folder: Path, template: Path, **changes: Any) -> Iterator[House]:
    """The API over a copy of the template in this folder, with these settings changed."""
    write_corpus(folder / "texts", train=16, test=8, seed=0)
    (folder / "data").mkdir()
    shutil.copy(template, folder / "data" / "stillhouse.db")
    settings = Settings(data_dir=folder / "data", data_roots=str(folder), token=None, **changes)
    store = Store.open(settings)
    try:
        with serving(create_app(settings)) as url:
            yield House(url, folder, settings, store, Queue(store))
    finally:
        store.close()
