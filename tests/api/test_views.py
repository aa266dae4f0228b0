"""Saved views of the list of experiments: whose they are, who sees them, who deletes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.app import create_app
from service.config.settings import Settings
from tests.api.access_table import FIRST_TOKEN, headers_of, populate
from tests.api.conftest import BASE_URL

VIEWS = "/api/v1/views"
FAILED = "filter=owner+%3D+%27ada%27&state=failed&order_by=ended_s+desc&columns=id%2Cname"


@pytest.fixture
def team(settings: Settings) -> Iterator[TestClient]:
    """A server with the people of the table of access."""
    app = create_app(settings.model_copy(update={"token": SecretStr(FIRST_TOKEN)}))
    populate(app.state.store)
    with TestClient(app, base_url=BASE_URL) as client:
        yield client


def save(client: TestClient, name: str, query: str = FAILED, *, by: str = "nobody", **fields: Any) -> Any:
    body = {"name": name, "query": query, **fields}
    return client.post(VIEWS, json=body, headers=headers_of(by))


def names(client: TestClient, by: str = "nobody") -> list[str]:
    return [view["name"] for view in client.get(VIEWS, headers=headers_of(by)).json()["items"]]


def test_a_view_is_saved_replaced_listed_and_deleted(client: TestClient) -> None:
    saved = save(client, "  my   failures ")
    assert saved.status_code == 201, saved.text
    view = saved.json()
    assert (view["name"], view["query"], view["project"], view["shared"]) == (
        "my failures", FAILED, None, False,
    )  # fmt: skip
    again = save(client, "my failures", "?state=queued").json()
    assert (again["id"], again["query"]) == (view["id"], "state=queued")
    assert client.get(VIEWS).json()["items"] == [again]
    assert client.delete(f"{VIEWS}/{view['id']}").status_code == 204
    assert names(client) == []
    assert client.delete(f"{VIEWS}/{view['id']}").status_code == 404


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"query": "page=3"},
            "body.query: 'page' is not part of a view; use table, filter, state, order_by, columns, group, "
            "baseline, difference",
        ),
        ({"query": "state=failed&state=queued"}, "body.query: 'state' is there twice; keep one of them"),
        ({"name": "   "}, "body.name: it is empty; give the view a name"),
        ({"shared": True}, "body.project: null: a shared view needs a project"),
    ],
)
def test_a_mistake_is_named_in_one_line(client: TestClient, fields: dict[str, Any], words: str) -> None:
    answer = client.post(VIEWS, json={"name": "view", "query": "", **fields})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-body")
    assert answer.json()["detail"].startswith(words)


def test_a_dashboard_is_a_view_of_its_own_kind(client: TestClient) -> None:
    query = "experiments=id+%3D+1&filter=seed+%3D+0&panel=figure%3Dcurve&panel=figure%3Dmoney"
    listed = save(client, "same name").json()
    saved = save(client, "same name", query, kind="dashboard").json()
    assert (saved["kind"], saved["query"], listed["kind"]) == ("dashboard", query, "list")
    assert saved["id"] != listed["id"], "a view of another kind is not replaced"
    assert client.get(VIEWS).json()["items"] == [listed]
    assert client.get(VIEWS, params={"kind": "dashboard"}).json()["items"] == [saved]
    refused = save(client, "wrong", "state=failed", kind="dashboard").json()["detail"]
    assert refused.startswith("body.query: 'state' is not part of a view; use experiments, filter, panel")


def test_a_project_that_is_missing_is_said(client: TestClient) -> None:
    assert save(client, "view", project="nowhere").json()["type"] == "/problems/not-found"


def test_a_shared_view_is_seen_by_those_who_see_its_project(team: TestClient) -> None:
    assert save(team, "for me", by="member").status_code == 201
    assert save(team, "for us", by="member", project="nlp", shared=True).status_code == 201
    assert save(team, "for me, of us", by="member", project="nlp").status_code == 201
    assert names(team, "member") == ["for me", "for me, of us", "for us"]
    for reader in ("viewer", "owner", "maintainer", "administrator"):
        assert names(team, reader) == ["for us"]
    for reader in ("other", "owner_elsewhere"):
        assert names(team, reader) == []


def test_sharing_takes_a_member_who_sees_the_project(team: TestClient) -> None:
    refused = save(team, "view", by="viewer", project="nlp", shared=True)
    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/forbidden")
    assert refused.json()["detail"].startswith("sharing a view needs role member in project nlp")
    assert save(team, "view", by="other", project="nlp", shared=True).status_code == 404
    assert save(team, "view", by="viewer").status_code == 201
    assert save(team, "view", by="owner_read").status_code == 403


def test_only_its_owner_or_a_maintainer_deletes_a_view(team: TestClient) -> None:
    own = save(team, "own", by="member").json()["id"]
    shared = save(team, "shared", by="member", project="nlp", shared=True).json()["id"]
    for reader, status in (("maintainer", 404), ("administrator", 404), ("other", 404), ("member", 204)):
        assert team.delete(f"{VIEWS}/{own}", headers=headers_of(reader)).status_code == status, reader
    refused = team.delete(f"{VIEWS}/{shared}", headers=headers_of("owner"))
    assert refused.status_code == 403
    assert "belongs to member; they or a maintainer of project nlp can delete it" in refused.json()["detail"]
    for reader, status in (("other", 404), ("viewer", 403), ("maintainer_read", 403), ("maintainer", 204)):
        assert team.delete(f"{VIEWS}/{shared}", headers=headers_of(reader)).status_code == status, reader


def test_one_has_no_more_views_than_the_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.store.views.MOST_VIEWS", 1)
    assert save(client, "first").status_code == 201
    full = save(client, "second")
    assert (full.status_code, full.json()["type"]) == (409, "/problems/conflict")
    assert save(client, "first", "state=queued").status_code == 201
