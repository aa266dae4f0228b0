"""Users, tokens, projects and the audit log over HTTP, on a service that asks for tokens."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from service.config.settings import Settings
from service.store import Store
from tests.api.conftest import BASE_URL, SPEC, TOKEN

API = "/api/v1"
Ask = Callable[..., httpx.Response]


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    """A client of a service with a token; each request brings its own."""
    closed = settings.model_copy(update={"token": Settings(token=TOKEN).token})
    with TestClient(create_app(closed), base_url=BASE_URL) as client:
        yield client


@pytest.fixture
def ask(client: TestClient) -> Ask:
    """Send a request, as the first administrator unless another token is given."""

    def send(method: str, path: str, token: str = TOKEN, **more: Any) -> httpx.Response:
        return client.request(method, API + path, headers={"Authorization": f"Bearer {token}"}, **more)

    return send


def user(ask: Ask, name: str, scope: str = "operate", **fields: Any) -> str:
    """Adds a user; returns a token of theirs."""
    assert ask("POST", "/users", json={"name": name}).status_code == 201
    made = ask("POST", "/tokens", json={"name": "first", "scope": scope, "user": name, **fields})
    assert made.status_code == 201, made.text
    secret: str = made.json()["secret"]
    return secret


def test_a_token_works_until_it_is_revoked(ask: Ask) -> None:
    secret = user(ask, "ada")
    (token,) = ask("GET", "/tokens", secret).json()["items"]
    assert secret.startswith(token["prefix"]) and "secret" not in token
    assert ask("DELETE", f"/tokens/{token['id']}", secret).json()["revoked_s"] is not None
    refused = ask("GET", "/tokens", secret)
    assert (refused.status_code, refused.json()["type"]) == (401, "/problems/invalid-token")
    assert "revoked" in refused.json()["detail"]


def test_a_disabled_user_is_refused_at_once_and_may_return(ask: Ask) -> None:
    secret = user(ask, "ada")
    assert ask("GET", "/projects", secret).status_code == 200
    assert ask("PATCH", "/users/ada", json={"disabled": True}).json()["disabled_s"] is not None
    assert "disabled" in ask("GET", "/projects", secret).json()["detail"]
    ask("PATCH", "/users/ada", json={"disabled": False})
    assert ask("GET", "/projects", secret).status_code == 200


def test_the_last_use_of_a_token_is_shown(ask: Ask) -> None:
    secret = user(ask, "ada")
    ask("GET", "/projects", secret)
    assert ask("GET", "/tokens", secret).json()["items"][0]["last_used_s"] is not None


def test_nobody_gives_more_than_they_have(ask: Ask) -> None:
    secret = user(ask, "ada", "submit")
    user(ask, "bob")
    for body, status in (
        ({"name": "a", "scope": "submit"}, 201),
        ({"name": "b", "scope": "operate"}, 403),
        ({"name": "c", "scope": "read", "user": "bob"}, 403),
    ):
        assert ask("POST", "/tokens", secret, json=body).status_code == status
    (of_bob,) = ask("GET", "/tokens", params={"user": "bob"}).json()["items"]
    assert ask("GET", "/tokens", secret, params={"user": "bob"}).status_code == 403
    assert ask("GET", "/tokens", secret, params={"everyone": True}).status_code == 403
    assert ask("DELETE", f"/tokens/{of_bob['id']}", secret).status_code == 404
    assert ask("DELETE", f"/tokens/{of_bob['id']}").status_code == 200
    reader = ask("POST", "/tokens", secret, json={"name": "d", "scope": "read"}).json()["secret"]
    assert ask("POST", "/tokens", reader, json={"name": "e", "scope": "read"}).status_code == 403


def test_a_maintainer_manages_members_of_their_project_alone(ask: Ask) -> None:
    ada = user(ask, "ada")
    user(ask, "bob")
    for name in ("nlp", "cv"):
        assert ask("POST", "/projects", json={"name": name}).status_code == 201
    assert ask("GET", "/projects/nlp", ada).status_code == 404, "hidden as if missing"
    assert [found["name"] for found in ask("GET", "/projects", ada).json()["items"]] == ["default"]
    assert ask("PUT", "/projects/nlp/members/ada", json={"role": "maintainer"}).status_code == 200
    assert ask("PUT", "/projects/nlp/members/bob", ada, json={"role": "viewer"}).status_code == 200
    assert ask("PUT", "/projects/cv/members/bob", ada, json={"role": "viewer"}).status_code == 404
    assert ask("PATCH", "/projects/nlp", ada, json={"title": "Language"}).json()["title"] == "Language"
    assert ask("PUT", "/projects/nlp/archive", ada, json={"archived": True}).json()["archived_s"] is not None
    assert ask("PUT", "/projects/cv/archive", ada, json={"archived": True}).status_code == 404
    members = ask("DELETE", "/projects/nlp/members/bob", ada).json()["members"]
    assert members == [{"user": "ada", "role": "maintainer"}]


def test_an_archived_or_unknown_project_refuses_a_spec_in_one_line(ask: Ask) -> None:
    ask("POST", "/projects", json={"name": "nlp"})
    text = SPEC + "project: nlp\n"
    assert ask("POST", "/experiments", content=text).status_code == 201
    ask("PUT", "/projects/nlp/archive", json={"archived": True})
    for content, slug in ((text, "archived-project"), (SPEC + "project: cv\n", "unknown-project")):
        answer = ask("POST", "/experiments", content=content)
        assert (answer.status_code, answer.json()["type"]) == (422, f"/problems/{slug}")
        assert answer.json()["errors"][0]["path"] == "project"


def test_deletion_is_taken_back_by_its_owner_and_hastened_by_administrators(ask: Ask) -> None:
    ada, bob = user(ask, "ada"), user(ask, "bob")
    number = ask("POST", "/experiments", ada, content=SPEC).json()["id"]
    place = f"/experiments/{number}"
    ask("POST", f"{place}/cancel", ada)
    assert ask("DELETE", place, ada, params={"now": True}).status_code == 403
    assert ask("DELETE", place, ada).status_code == 204
    assert ask("GET", place, ada).status_code == 404
    assert ask("POST", f"{place}/restore", bob).status_code == 403
    assert ask("POST", f"{place}/restore", ada).json()["state"] == "cancelled"
    assert ask("DELETE", place, params={"now": True}).status_code == 204
    assert ask("POST", f"{place}/restore", ada).status_code == 409


def test_tags_notes_and_archive_are_the_owners(ask: Ask) -> None:
    ada, bob = user(ask, "ada"), user(ask, "bob")
    number = ask("POST", "/experiments", ada, content=SPEC).json()["id"]
    place = f"/experiments/{number}"
    assert ask("PATCH", f"{place}/tags", ada, json={"add": ["b", "a"]}).json()["tags"] == ["a", "b"]
    assert ask("PUT", f"{place}/notes", ada, json={"notes": "hm"}).json()["notes"] == "hm"
    assert ask("PUT", f"{place}/archive", ada, json={"archived": True}).json()["archived_s"] is not None
    assert ask("PATCH", f"{place}/tags", bob, json={"add": ["c"]}).status_code == 403
    refused = ask("PATCH", f"{place}/tags", ada, json={"add": ["two words"]})
    assert (refused.status_code, refused.json()["type"]) == (422, "/problems/invalid-body")
    assert refused.json()["errors"][0]["path"] == "body.tags"
    events = ask("GET", f"{place}/events", ada).json()["items"]
    assert {event["actor"] for event in events} == {"ada"}


def test_the_audit_log_names_token_and_address(ask: Ask) -> None:
    ada = user(ask, "ada")
    number = ask("POST", "/experiments", ada, content=SPEC).json()["id"]
    ask("POST", f"/experiments/{number}/cancel", ada)
    assert ask("GET", "/audit", ada).status_code == 403
    (row,) = ask("GET", "/audit", params={"object": f"experiment:{number}"}).json()["items"]
    assert (row["actor"], row["action"]) == ("ada", "experiment.cancelled")
    assert row["token_id"] == ask("GET", "/tokens", ada).json()["items"][0]["id"]
    assert row["address"] == "testclient"
    assert (row["before"]["state"], row["after"]["state"]) == ("queued", "cancelled")


def test_the_audit_log_is_exported(ask: Ask) -> None:
    user(ask, "ada")
    ask("POST", "/projects", json={"name": "nlp", "notes": "=1+1"})
    listed = ask("GET", "/audit").json()["items"]
    lines = ask("GET", "/audit/export").text.splitlines()
    assert len(lines) == len(listed) == 3
    table = list(csv.DictReader(io.StringIO(ask("GET", "/audit/export", params={"format": "csv"}).text)))
    assert [row["action"] for row in table] == ["user.add", "token.create", "project.create"]
    only = ask("GET", "/audit/export", params={"action": "token"}).text.splitlines()
    assert len(only) == 1 and '"token.create"' in only[0]


BAD: list[tuple[str, str, dict[str, Any], int, str]] = [
    (
        "POST",
        "/tokens",
        {"name": "x", "scope": "read", "user": "ada", "expires": "soon"},
        422,
        "12h, 90d or 8w",
    ),
    (
        "POST",
        "/tokens",
        {"name": "x", "scope": "read", "user": "ada", "expires": "-3d"},
        422,
        "12h, 90d or 8w",
    ),
    ("POST", "/tokens", {"name": "x", "scope": "root", "user": "ada"}, 422, "'read', 'submit'"),
    ("POST", "/tokens", {"name": "x", "scope": "read", "user": "bob"}, 404, "there is no user bob"),
    (
        "POST",
        "/tokens",
        {"name": "first", "scope": "read", "user": "ada"},
        409,
        "has a token 'first' already",
    ),
    ("POST", "/users", {"name": "ada"}, 409, "user ada exists already"),
    ("POST", "/users", {"name": "a b"}, 422, "body.name"),
    ("PATCH", "/users/bob", {"disabled": True}, 404, "there is no user bob"),
    ("POST", "/projects", {"name": "default"}, 409, "exists already"),
    ("POST", "/projects", {"name": "NLP"}, 422, "body.name"),
    ("PUT", "/projects/default/members/ada", {"role": "king"}, 422, "'viewer', 'member' or 'maintainer'"),
    ("PUT", "/projects/default/archive", {"archived": True}, 409, "cannot be archived"),
    ("PUT", "/projects/cv/members/ada", {"role": "member"}, 404, "there is no project cv"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "says"), BAD)
def test_bad_input_is_refused_in_one_line(
    ask: Ask, method: str, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    user(ask, "ada")
    before = ask("GET", "/audit").json()
    answer = ask(method, path, json=body)
    assert answer.status_code == status
    assert says in answer.json()["detail"] and "\n" not in answer.json()["detail"]
    assert ask("GET", "/audit").json() == before


def test_secrets_are_in_no_file(ask: Ask, settings: Settings, store: Store) -> None:
    secret = user(ask, "ada")
    ask("GET", "/projects", secret)
    folder = Path(settings.data_dir)
    assert not any(secret.encode() in file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_limits_are_an_administrators_and_priorities_a_maintainers(ask: Ask) -> None:
    ask("POST", "/projects", json={"name": "nlp"})
    ada, bob = user(ask, "ada"), user(ask, "bob")
    ask("PUT", "/projects/nlp/members/ada", json={"role": "maintainer"})
    ask("PUT", "/projects/nlp/members/bob", json={"role": "member"})
    limits = "/projects/nlp/limits"
    assert ask("PUT", limits, json={"weight": 2, "ceiling": {"cpu": 4}}).json()["weight"] == 2.0
    known = ask("GET", limits, bob).json()
    assert known["ceiling"] == {"cpu": 4}
    refused = ask("PUT", limits, ada, json=known | {"weight": 5})
    assert refused.status_code == 403 and "weight: only an administrator" in refused.json()["detail"]
    assert ask("PUT", limits, ada, json=known | {"priorities": {"member": "normal"}}).status_code == 200
    for body in ({"weight": 0}, {"ceiling": {"cpus": 1}}):
        wrong = ask("PUT", limits, json=body)
        assert wrong.status_code == 422 and "\n" not in wrong.json()["detail"]
    assert ask("GET", limits).json()["weight"] == 2.0


def test_a_priority_above_ones_class_is_refused_everywhere(ask: Ask) -> None:
    ask("POST", "/projects", json={"name": "nlp"})
    bob = user(ask, "bob")
    ask("PUT", "/projects/nlp/members/bob", json={"role": "member"})
    ask("PUT", "/projects/nlp/limits", json={"priorities": {"member": "normal"}})
    spec = SPEC + "project: nlp\n"
    urgent = spec + "queue: {priority: urgent}\n"
    for path in ("/experiments", "/specs/preview", "/specs/validate"):
        refused = ask("POST", path, bob, content=urgent)
        assert refused.status_code == 403, refused.text
        assert "urgent is above normal" in refused.json()["detail"]
    id = ask("POST", "/experiments", bob, content=spec).json()["id"]
    raised = ask("PUT", f"/experiments/{id}/priority", bob, json={"priority": 75})
    assert raised.status_code == 403 and "high is above normal" in raised.json()["detail"]
    assert ask("PUT", f"/experiments/{id}/priority", json={"priority": 75}).status_code == 200


def test_too_many_queued_runs_are_refused(ask: Ask) -> None:
    ask("PUT", "/projects/default/limits", json={"queued_runs_per_user": 0})
    bob = user(ask, "bob")
    for path in ("/experiments", "/specs/preview"):
        refused = ask("POST", path, bob, content=SPEC)
        assert (refused.status_code, refused.json()["type"]) == (422, "/problems/too-many-queued")
    assert ask("GET", "/experiments").json()["items"] == []


def test_a_submission_to_a_project_without_budget_is_refused(ask: Ask) -> None:
    ask("PUT", "/projects/default/limits", json={"budgets": {"usd": 0}})
    for path in ("/experiments", "/specs/preview"):
        refused = ask("POST", path, content=SPEC)
        assert (refused.status_code, refused.json()["type"]) == (422, "/problems/budget-spent")
        assert "budget of 0 USD" in refused.json()["detail"]
    assert ask("GET", "/experiments").json()["items"] == []
    ask("PUT", "/projects/default/limits", json={"budgets": {"usd": 5}})
    assert ask("POST", "/experiments", content=SPEC).status_code == 201
