"""Tokens, and what they show and hide, one thing at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api import access
from api.app import create_app
from api.principals import Identity, Via
from service.config.settings import Settings
from service.db import schema
from service.domain.access import Scope
from service.store.people import secret_sha256
from tests.api.access_table import (
    FIRST_TOKEN,
    SPEC,
    World,
    headers_of,
    insert,
    populate,
    token_of,
    token_row,
)
from tests.api.conftest import BASE_URL

EXPERIMENTS = "/api/v1/experiments"


@pytest.fixture
def app(settings: Settings) -> FastAPI:
    """An application that asks for tokens."""
    return create_app(settings.model_copy(update={"token": SecretStr(FIRST_TOKEN)}))


@pytest.fixture
def world(app: FastAPI) -> World:
    """People, projects and an experiment."""
    return populate(app.state.store)


@pytest.fixture
def client(app: FastAPI, world: World) -> Iterator[TestClient]:
    """A client without a token of its own."""
    with TestClient(app, base_url=BASE_URL) as client:
        yield client


def change(world: World, table: sa.Table, key: str, value: str, **columns: object) -> None:
    """Changes rows behind the service's back."""
    statement = sa.update(table).where(table.c[key] == value).values(**columns)
    world.store.database.write(lambda connection: connection.execute(statement))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("malformed", "not a token"),
        ("unknown", "no such token"),
        ("expired", "expired on 20"),
        ("revoked", "was revoked"),
        ("disabled", "is disabled"),
    ],
)
def test_each_refused_token_says_why_and_names_no_one(client: TestClient, column: str, words: str) -> None:
    answer = client.get(EXPERIMENTS, headers=headers_of(column))
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (401, "/problems/invalid-token")
    assert words in problem["detail"]
    assert "\n" not in problem["detail"]
    assert not any(name in problem["detail"] for name in ("administrator'", "owner", "nlp"))
    challenge = answer.headers["www-authenticate"]
    assert challenge == (
        f'Bearer realm="stillhouse", error="invalid_token", error_description="{problem["detail"]}"'
    )


def test_no_token_has_a_challenge_without_an_error(client: TestClient) -> None:
    answer = client.get(EXPERIMENTS)
    assert (answer.status_code, answer.json()["type"]) == (401, "/problems/unauthenticated")
    assert answer.headers["www-authenticate"] == 'Bearer realm="stillhouse"'


@pytest.mark.parametrize(
    ("column", "scope", "words"),
    [
        ("owner_read", "submit", "needs a token with scope submit, and this one has scope read"),
        ("maintainer_submit", "operate", "needs a token with scope operate"),
        ("member", None, "(maintainers: maintainer)"),
        ("viewer", None, "(maintainers: maintainer)"),
    ],
)
def test_a_refusal_names_what_is_missing_and_who_can_grant_it(
    client: TestClient, world: World, column: str, scope: str | None, words: str
) -> None:
    answer = client.post(f"{EXPERIMENTS}/{world.experiment_id}/pause", headers=headers_of(column))
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/forbidden")
    assert words in answer.json()["detail"]
    challenge = None if scope is None else (
        f'Bearer realm="stillhouse", error="insufficient_scope", scope="{scope}"'
    )  # fmt: skip
    assert answer.headers.get("www-authenticate") == challenge


@pytest.mark.parametrize("written", ["+{}", " {}", "{}.0", "0{}", "%2B{}"])
def test_no_way_of_writing_a_number_gets_past_the_rule(
    client: TestClient, world: World, written: str
) -> None:
    here = written.format(world.experiment_id)
    run = written.format(world.run_id)
    mine = submit(client, "other", project="vision").json()["id"]
    headers = headers_of("other")
    assert client.get(f"{EXPERIMENTS}/{here}", headers=headers).status_code in (404, 422)
    assert client.get(f"/api/v1/runs/{run}", headers=headers).status_code in (404, 422)
    answer = client.get(f"{EXPERIMENTS}/{mine}/score", params={"also": here}, headers=headers)
    assert answer.status_code in (404, 422)


def test_every_experiment_of_an_answer_must_be_seen(client: TestClient, world: World) -> None:
    mine = submit(client, "other", project="vision").json()["id"]
    for also in (world.experiment_id, 98765):
        answer = client.get(
            f"{EXPERIMENTS}/{mine}/compare", params={"also": [mine, also]}, headers=headers_of("other")
        )
        assert (answer.status_code, answer.json()["detail"]) == (404, f"no experiment has the id {also}")


def test_lists_and_exports_show_what_their_reader_sees(client: TestClient, world: World) -> None:
    mine = submit(client, "other", project="vision").json()["id"]

    def seen(column: str, path: str, key: str) -> set[int]:
        items = client.get(path, params={"order_by": "id"}, headers=headers_of(column)).json()["items"]
        return {item[key] for item in items}

    both = {mine, world.experiment_id}
    for path, key in ((EXPERIMENTS, "id"), ("/api/v1/runs", "experiment_id")):
        assert seen("other", path, key) == {mine}
        assert seen("viewer", path, key) == {world.experiment_id}
        assert seen("owner", path, key) == both
        assert seen("owner_elsewhere", path, key) == {mine}
        assert seen("administrator", path, key) == both
    for column, expected in (("other", 1), ("owner", 2)):
        exported = client.get(
            "/api/v1/runs/export", params={"format": "jsonl"}, headers=headers_of(column)
        ).text
        assert len(exported.splitlines()) == expected


def test_a_filter_finds_nothing_that_is_hidden(client: TestClient, world: World) -> None:
    for path, filter in ((EXPERIMENTS, "owner = 'owner' or id > 0"), ("/api/v1/runs", "seed = 0 or id > 0")):
        answer = client.get(path, params={"filter": filter}, headers=headers_of("other"))
        assert answer.json()["items"] == []


def test_the_queue_keeps_positions_and_hides_names(client: TestClient, world: World) -> None:
    first, _ = world.submit()
    mine = submit(client, "other", project="vision").json()["id"]
    second, _ = world.submit()
    pages, token = [], None
    while True:
        params = {"page_size": 1, **({"page_token": token} if token else {})}
        page = client.get("/api/v1/queue", params=params, headers=headers_of("other")).json()
        pages += page["items"]
        assert page["total"] == 3
        if (token := page["next_page_token"]) is None:
            break
    shown = [(entry["position"], (entry["experiment"] or {}).get("id")) for entry in pages]
    everything = client.get("/api/v1/queue", headers=headers_of("administrator")).json()["items"]
    order = [entry["experiment"]["id"] for entry in everything]
    assert sorted(order) == [first, mine, second]
    assert shown == [(place, id if id == mine else None) for place, id in enumerate(order, 1)]
    assert client.get(f"{EXPERIMENTS}/{mine}", headers=headers_of("other")).json()["waiting"]["position"] == (
        order.index(mine) + 1
    )


def submit(client: TestClient, column: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """Submits a spec with a token of the table."""
    return client.post(
        EXPERIMENTS, content=json.dumps(SPEC | fields), headers=headers_of(column) | (headers or {})
    )


@pytest.mark.parametrize("project", ["nlp", "nowhere"])
def test_a_hidden_project_answers_as_a_missing_one(client: TestClient, project: str) -> None:
    answer = submit(client, "other", project=project)
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/unknown-project")
    assert answer.json()["detail"].replace(project, "x") == (
        "project: 'x': no such project; `stillhouse project list` lists yours"
    )


def test_an_archived_project_takes_nothing(client: TestClient, world: World) -> None:
    change(world, schema.projects, "name", "vision", archived_s=time.time())
    answer = submit(client, "other", project="vision")
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/archived-project")


def test_a_token_for_one_project_submits_there_only(client: TestClient) -> None:
    assert submit(client, "owner_elsewhere", project="vision").status_code == 201
    answer = submit(client, "owner_elsewhere", project="nlp")
    assert (answer.status_code, "only for project vision" in answer.json()["detail"]) == (403, True)


def test_only_administrators_submit_in_anothers_name(client: TestClient) -> None:
    named = {"Stillhouse-Owner": "eve"}
    assert submit(client, "owner", named).status_code == 403
    assert submit(client, "owner", {"Stillhouse-Owner": "owner"}).json()["owner"] == "owner"
    assert submit(client, "administrator", named).json()["owner"] == "eve"
    assert submit(client, "first_token").json()["owner"] == "admin"


@pytest.mark.parametrize("path", ["", "/../specs/validate", "/../specs/preview"])
def test_a_model_out_of_sight_is_an_unknown_run(client: TestClient, world: World, path: str) -> None:
    details = []
    for run in (world.run_id, 98765):
        spec = SPEC | {"project": "vision", "model": {"name": f"run:{run}"}}
        url = path.replace("/..", "/api/v1") or EXPERIMENTS
        answer = client.post(url, content=json.dumps(spec), headers=headers_of("other"))
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/unknown-run")
        details.append(answer.json()["detail"].replace(str(run), "n"))
    assert details[0] == details[1]


def test_results_are_reused_only_from_what_is_seen(world: World) -> None:
    (run,) = world.store.runs.page(experiment_id=world.experiment_id).items
    change(world, schema.runs, "id", str(run.id), state="succeeded", config_sha256="c" * 64)
    everyone = world.store.people.principal_of_user("owner").visibility
    others = world.store.people.principal_of_user("other").visibility
    assert [equal.run_id for equal in world.store.runs.equal({"c" * 64}, everyone)] == [run.id]
    assert world.store.runs.equal({"c" * 64}, others) == []


def test_a_key_replays_nothing_that_has_gone_out_of_sight(client: TestClient, world: World) -> None:
    key = {"Idempotency-Key": "k"}
    id = submit(client, "owner", key).json()["id"]
    assert submit(client, "owner", key).json()["id"] == id
    answer = submit(client, "owner_elsewhere", key)
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/conflict")
    assert submit(client, "maintainer", key).json()["id"] != id


def test_a_change_counts_at_once_when_this_process_makes_it(
    app: FastAPI, client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.principals.KEPT_S", 3600.0)
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 200
    change(world, schema.tokens, "name", "viewer", revoked_s=time.time())
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 200
    app.state.principals.forget()
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 401


def test_what_is_kept_is_read_again(
    client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.principals.KEPT_S", 0.0)
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 200
    change(world, schema.users, "name", "viewer", disabled_s=time.time())
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 401


def test_a_token_that_is_revoked_while_it_is_looked_up_is_not_kept(world: World) -> None:
    from api.principals import Principals

    async def check() -> None:
        principals = Principals(world.store)
        first = asyncio.ensure_future(principals.of_token(secret_sha256(token_of("viewer"))))
        await asyncio.sleep(0)
        principals.forget()
        await first
        assert principals._kept == {}

    asyncio.run(check())


def test_a_stream_ends_when_its_reader_may_not_read_it_any_more(
    app: FastAPI, client: TestClient, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "RECHECK_S", 0.0)
    closed: list[bool] = []

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            for number in range(10):
                if number == 2:
                    change(world, schema.tokens, "name", "viewer", revoked_s=time.time())
                    app.state.principals.forget()
                yield b": ping\n\n"
        finally:
            closed.append(True)

    monkeypatch.setattr(app.state.streams, "follow_experiment", lambda *_: frames())
    answer = client.get(f"{EXPERIMENTS}/{world.experiment_id}/stream", headers=headers_of("viewer"))
    assert (answer.status_code, answer.text.count("ping"), closed) == (200, 3, [True])


def test_an_identity_stands_for_its_user(app: FastAPI, client: TestClient, world: World) -> None:
    app.state.identities.append(
        lambda request: (
            Identity(request.cookies["who"], Via.proxy, scope=Scope.read) if request.cookies else None
        )
    )
    assert client.get(EXPERIMENTS).status_code == 401
    here = f"{EXPERIMENTS}/{world.experiment_id}"
    for user, status in (("owner", 200), ("other", 404), ("disabled", 401), ("nobody", 401)):
        assert client.get(here, headers={"Cookie": f"who={user}"}).status_code == status
    assert client.post(f"{here}/cancel", headers={"Cookie": "who=owner"}).status_code == 403


def test_the_page_is_shown_without_a_token_and_its_data_are_not(client: TestClient) -> None:
    assert client.get("/").status_code == 200
    assert client.get("/static/app.js").status_code == 200
    assert client.get("/nope").status_code == 401
    assert client.get(EXPERIMENTS).status_code == 401


def test_a_project_that_everyone_sees_is_seen_and_not_managed(client: TestClient, world: World) -> None:
    change(world, schema.projects, "name", "nlp", visible_to_all=True)
    here = f"{EXPERIMENTS}/{world.experiment_id}"
    assert client.get(here, headers=headers_of("other")).status_code == 200
    assert client.post(f"{here}/cancel", headers=headers_of("other")).status_code == 403
    assert submit(client, "other").status_code == 403


def test_a_token_is_found_by_its_hash_alone(world: World) -> None:
    insert(world.store, schema.tokens, [token_row("second", "owner", Scope.read)])
    principal = world.store.people.principal_of_token(token_row("second", "", Scope.read)["sha256"])
    assert (principal.user, principal.scope, principal.token_name) == ("owner", Scope.read, "second")


def test_tokens_are_revoked_by_their_user_or_an_administrator(client: TestClient, world: World) -> None:
    ids = {token.name: token.id for token in world.store.people.tokens()}
    mine = f"/api/v1/tokens/{ids['member']}"
    for path in (mine, "/api/v1/tokens/98765"):
        answer = client.delete(path, headers=headers_of("maintainer"))
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
    assert client.get(EXPERIMENTS, headers=headers_of("member")).status_code == 200
    assert client.delete(mine, headers=headers_of("member")).status_code == 200
    assert client.get(EXPERIMENTS, headers=headers_of("member")).status_code == 401
    other = f"/api/v1/tokens/{ids['viewer']}"
    assert client.delete(other, headers=headers_of("administrator")).status_code == 200
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 401


def test_the_use_of_a_token_is_noted(client: TestClient, world: World) -> None:
    assert client.get(EXPERIMENTS, headers=headers_of("viewer")).status_code == 200
    world.store.people.write_token_uses()
    used = {token.name: token.last_used_s is not None for token in world.store.people.tokens()}
    assert (used["viewer"], used["member"]) == (True, False)


def test_a_subscription_is_to_a_project_that_its_owner_sees(client: TestClient) -> None:
    wanted = {"channel": "webhook", "target": "https://hooks.example.com/x", "topics": ["failure"]}
    for project in ("nlp", "nowhere"):
        body = wanted | {"project": project}
        answer = client.post("/api/v1/subscriptions", json=body, headers=headers_of("other"))
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
