"""The same table as `test_access_matrix`, by a client without the server's code, on PostgreSQL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.config.settings import Settings
from service.store import Store
from tests.api.access_table import (
    COLUMNS,
    EXPECTED,
    FIRST_TOKEN,
    METRICS_TOKEN,
    World,
    cells,
    outcome,
    populate,
)
from trainers.data.synthetic import write_corpus

pytestmark = [pytest.mark.slow, pytest.mark.postgresql]

UNLISTED = {
    "openapi_document": ("get", "/openapi.json"),
    "documentation": ("get", "/docs"),
    "start_documentation": ("get", "/docs/start.js"),
    "documentation_asset": ("get", "/docs/{name}"),
    "page": ("get", "/"),
    "static": ("get", "/static/{name:path}"),
    "plotly_script": ("get", "/static/vendor/plotly.min.js"),
    "login_page": ("get", "/login"),
    "login_options": ("get", "/login/options"),
    "login_with_token": ("post", "/login/token"),
    "login_with_provider": ("get", "/login/oidc"),
    "login_from_provider": ("get", "/login/oidc/callback"),
    "device_code": ("post", "/device/code"),
    "device_token": ("post", "/device/token"),
    "device_page": ("get", "/device"),
}
"""What the OpenAPI document leaves out."""


@pytest.fixture
def server(postgresql_url: str, tmp_path: Path) -> Iterator[tuple[httpx.Client, World]]:
    """`python -m api` in a process of its own, with people and an experiment."""
    write_corpus(tmp_path / "texts", train=16, test=8, seed=0)
    environment = {
        "STILLHOUSE_DATA_DIR": str(tmp_path / "data"),
        "STILLHOUSE_DATA_ROOTS": str(tmp_path),
        "STILLHOUSE_MODEL_ROOTS": str(tmp_path),
        "STILLHOUSE_TOKEN": FIRST_TOKEN,
        "STILLHOUSE_METRICS_TOKEN": METRICS_TOKEN,
        "STILLHOUSE_WEBHOOK_HOSTS": "hooks.example.com",
        "STILLHOUSE_DATABASE_URL": postgresql_url,
    }
    settings = Settings(
        data_dir=tmp_path / "data",
        data_roots=str(tmp_path),
        model_roots=str(tmp_path),
        database_url=postgresql_url,
    )
    store = Store.open(settings, migrate=True)
    world = populate(store)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "api"], env={**os.environ, **environment, "STILLHOUSE_PORT": str(port)}
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0, trust_env=False) as client:
            _wait_for(client, process)
            yield client, world
    finally:
        process.terminate()
        process.wait(20)
        store.close()


def _wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, "the API did not start"
        try:
            assert client.get("/healthz").status_code == 200
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "the API does not answer"
            time.sleep(0.05)


def test_everyone_may_do_what_the_table_says(server: tuple[httpx.Client, World]) -> None:
    client, world = server
    document: dict[str, Any] = client.get("/openapi.json").json()
    operations = UNLISTED | {
        operation["operationId"]: (method, path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert operations.keys() == EXPECTED.keys()
    wrong = []
    for column in COLUMNS[::8]:  # Each role, scope and place; `test_access_matrix` has them all.
        for make in cells(world, operations, column):
            cell = make()
            # Not read to their end: a stream has none.
            with client.stream(cell.method, cell.path, **cell.sent) as answer:
                refused = answer.headers.get("content-type") == "application/problem+json"
                if refused:
                    answer.read()
            found = outcome(answer.status_code, answer.json()["type"] if refused else None)
            if found != cell.expected or answer.status_code >= 500:
                wrong.append((cell.row, cell.column, answer.status_code, cell.expected))
    assert not wrong
    assert world.untouched()
