"""Places in a folder and in a store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.object_store import ObjectStore, in_environment, object_store
from trainers.data import storage


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        yield store


@pytest.fixture
def bucket(served: ObjectStore) -> Iterator[storage.Place]:
    yield storage.place(served.make_bucket(f"b{uuid.uuid4().hex}")) / "prefix"
    served.failing.clear()
    served.slow_s = 0.0
    served.methods = ObjectStore.methods


@pytest.fixture(params=["folder", "s3"])
def root(request: pytest.FixtureRequest) -> storage.Place:
    """An empty place; tests that use it hold for every kind of storage."""
    if request.param == "folder":
        return request.getfixturevalue("tmp_path") / "storage"
    return request.getfixturevalue("bucket")
