"""What a client is answered is what was stored: after the commit nothing takes an answer back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from fastapi.testclient import TestClient

from api.app import create_app
from service.config.settings import Settings
from service.db import sqlite
from service.store import Store
from tests.api.conftest import BASE_URL, SPEC, files_up_to
from tests.silent_proxy import SilentProxy

EXPERIMENTS = "/api/v1/experiments"


def test_what_a_full_disk_refuses_is_not_stored_and_what_it_takes_is(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log takes commits after the database itself cannot grow: their checkpoints fail, and they stand."""
    monkeypatch.setattr(sqlite, "CHECKPOINT_BYTES", 1)
    app = create_app(settings)
    store: Store = app.state.store
    assert store.database.path is not None
    answers: list[int] = []
    with TestClient(app, base_url=BASE_URL) as client:
        assert client.post(EXPERIMENTS, content=SPEC).status_code == 201
        with files_up_to(store.database.path.stat().st_size):
            while 507 not in answers[-2:]:
                answers.append(client.post(EXPERIMENTS, content=SPEC).status_code)
        assert client.post(EXPERIMENTS, content=SPEC).status_code == 201
        stored = client.get(EXPERIMENTS, params={"page_size": 1000}).json()["items"]
    assert "cannot be copied back (disk I/O error)" in caplog.text
    assert set(answers) == {201, 507}
    assert len(stored) == answers.count(201) + 2


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[SilentProxy]:
    """Between the application and its server."""
    folder = sa.make_url(postgresql_url).query["host"]
    assert isinstance(folder, str)
    with SilentProxy(Path(folder) / ".s.PGSQL.5432") as proxy:
        yield proxy


@pytest.fixture
def behind_proxy(settings: Settings, proxy: SilentProxy) -> Iterator[TestClient]:
    """A client of an application on PostgreSQL whose connections can break."""
    url = f"postgresql://stillhouse@127.0.0.1:{proxy.port}/shared?sslmode=disable"
    with TestClient(
        create_app(settings.model_copy(update={"database_url": url})), base_url=BASE_URL
    ) as client:
        yield client


@pytest.mark.postgresql
@pytest.mark.parametrize(
    ("last_words", "says"),
    [
        ((b"INSERT INTO audit", b"COMMIT"), "during the commit; the change may be stored"),
        ((b"GROUP BY runs.state",), "the change is stored"),
    ],
    ids=["the answer to the commit is lost", "the connection is lost after the commit"],
)
def test_a_change_that_may_be_stored_is_not_called_refused(
    behind_proxy: TestClient, proxy: SilentProxy, last_words: tuple[bytes, ...], says: str
) -> None:
    created = behind_proxy.post(EXPERIMENTS, content=SPEC).json()["id"]
    proxy.break_after(*last_words)
    answer = behind_proxy.post(f"{EXPERIMENTS}/{created}/cancel")
    assert (answer.status_code, answer.json()["type"]) == (504, "/problems/unconfirmed")
    assert says in answer.json()["detail"]
    assert behind_proxy.get(f"{EXPERIMENTS}/{created}").json()["state"] == "cancelled"


@pytest.mark.postgresql
def test_a_submit_whose_commit_was_not_confirmed_is_replayed_by_its_key(
    behind_proxy: TestClient, proxy: SilentProxy
) -> None:
    headers = {"Idempotency-Key": "one"}
    proxy.break_after(b"INSERT INTO experiments", b"COMMIT")
    assert behind_proxy.post(EXPERIMENTS, content=SPEC, headers=headers).status_code == 504
    again = behind_proxy.post(EXPERIMENTS, content=SPEC, headers=headers)
    assert (again.status_code, again.headers["Idempotent-Replayed"]) == (201, "true")
    assert len(behind_proxy.get(EXPERIMENTS).json()["items"]) == 1
