"""Every route against everyone: generated from the routes, compared with a table of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.access import refuse_unruled
from api.app import create_app
from service.config.settings import Settings
from service.store import Store
from tests.api.access_table import (
    CASES,
    COLUMNS,
    ELSEWHERE,
    EXPECTED,
    FIRST_TOKEN,
    HERE,
    LOOK,
    MANAGE,
    MANAGE_PROJECT,
    MEMBERS,
    METRICS_TOKEN,
    SENDERS,
    SPEC,
    STUDY_ID,
    WEBHOOK,
    World,
    body_of,
    cells,
    headers_of,
    outcome,
    populate,
    some_fast,
)
from tests.api.conftest import BASE_URL
from trainers.data.synthetic import write_corpus


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, World]]:
    """A server that asks for tokens, with people and an experiment."""
    with served(tmp_path_factory.mktemp("closed")) as found:
        yield found


@contextmanager
def served(folder: Path) -> Iterator[tuple[TestClient, World]]:
    write_corpus(folder / "texts", train=16, test=8, seed=0)
    settings = Settings(
        data_dir=folder / "data",
        data_roots=str(folder),
        model_roots=str(folder),
        token=SecretStr(FIRST_TOKEN),
        metrics_token=SecretStr(METRICS_TOKEN),
        webhook_hosts="hooks.example.com",  # Nothing is sent: no scheduler runs.
    )
    Store.open(settings, migrate=True).close()
    app = create_app(settings)
    app.state.streams.close()  # One that never ends could not be read to its end.
    with TestClient(app, base_url=BASE_URL) as client:
        yield client, populate(app.state.store)


def operations(client: TestClient) -> dict[str, tuple[str, str]]:
    """Method and path of every operation of the application; a further path of one is `name#2`."""
    assert isinstance(client.app, FastAPI)
    found: dict[str, tuple[str, str]] = {}
    for route in iter_route_contexts(client.app.routes):
        for method in sorted(route.methods or ()):
            name, number = str(route.name), 2
            while name in found:
                name, number = f"{route.name}#{number}", number + 1
            found[name] = (method, str(route.path))
    return found


def test_every_route_is_in_the_table(closed: tuple[TestClient, World]) -> None:
    assert {name.partition("#")[0] for name in operations(closed[0])} == EXPECTED.keys()


def test_every_path_names_something_that_is_there(closed: tuple[TestClient, World]) -> None:
    client, world = closed
    known = {case.operation for case in CASES.values() if case.target}
    for name, (_, template) in operations(client).items():
        if name not in known and not template.endswith(("/{id}", "/{tab}")):  # Pages, for their scripts.
            assert "{" not in world.path(template, manages=False), f"{name} needs a target in CASES"


@pytest.mark.parametrize("column", some_fast(COLUMNS, pytest.mark.slow))
def test_everyone_may_do_what_the_table_says(closed: tuple[TestClient, World], column: str) -> None:
    client, world = closed
    wrong = []
    for make in cells(world, operations(client), column):
        cell = make()
        answer = client.request(cell.method, cell.path, **cell.sent)
        refused = answer.headers.get("content-type") == "application/problem+json"
        found = outcome(answer.status_code, answer.json()["type"] if refused else None)
        if found != cell.expected or answer.status_code >= 500:
            wrong.append((cell.row, cell.path, cell.expected, answer.status_code, answer.text[:200]))
    assert not wrong
    assert world.untouched()


MISSING = {
    "experiment_id": "98765",
    "run_id": "98765",
    "study_id": "98765",
    "project": "nowhere",
    "name": "disabled",
    "figure": "curve",
}


def same_answer(here: httpx.Response, there: httpx.Response, *hidden: tuple[str, str]) -> bool:
    """Whether two answers differ only by what their requests named."""
    text = here.text
    for one, other in hidden:
        text = text.replace(one, other)
    headers = [dict(answer.headers) | {"content-length": ""} for answer in (here, there)]
    return (here.status_code, text, headers[0]) == (there.status_code, there.text, headers[1])


@pytest.mark.parametrize("column", ["other", "owner_elsewhere", "administrator_elsewhere"])
def test_what_is_hidden_answers_as_what_is_missing(closed: tuple[TestClient, World], column: str) -> None:
    client, world = closed
    headers = headers_of(column) | {"X-Request-ID": "the-same"}
    for operation, (method, template) in operations(client).items():
        if EXPECTED[operation.partition("#")[0]] not in (LOOK, MANAGE, MANAGE_PROJECT):
            continue
        hidden = world.path(template, manages=False)
        missing = template
        for name, value in MISSING.items():
            missing = missing.replace("{" + name + "}", value)
        here, there = (
            client.request(method, path, headers=headers, **body_of(operation)) for path in (hidden, missing)
        )
        numbers = {"{experiment_id}": world.experiment_id, "{study_id}": STUDY_ID}
        number = next((str(numbers[name]) for name in numbers if name in template), str(world.run_id))
        replaced = (f"/{number}", "/98765"), (f"id {number}", "id 98765"), ("nlp", "nowhere")
        assert here.status_code == 404, operation
        assert same_answer(here, there, *replaced), operation


NAMING: dict[str, Callable[[str], dict[str, Any]]] = {
    "/api/v1/experiments": lambda project: {"content": json.dumps({**SPEC, "project": project})},
    "/api/v1/specs/validate": lambda project: {"content": json.dumps({**SPEC, "project": project})},
    "/api/v1/specs/preview": lambda project: {"content": json.dumps({**SPEC, "project": project})},
    "/api/v1/studies": lambda project: {
        "json": {"study": "a", "project": project, "parts": {"only": {**SPEC, "project": project}}}
    },
    "/api/v1/tokens": lambda project: {"json": {"name": "new", "scope": "read", "project": project}},
    "/api/v1/views": lambda project: {"json": {"name": "new", "query": "", "project": project}},
    "/api/v1/subscriptions": lambda project: {
        "json": {"channel": "webhook", "target": WEBHOOK, "topics": ["end"], "project": project}
    },
}
"""What names a project in its body."""


@pytest.mark.parametrize("path", NAMING)
@pytest.mark.parametrize(
    "column", ["other", "owner_elsewhere", "maintainer_elsewhere", "administrator_elsewhere"]
)
def test_a_hidden_project_in_a_body_answers_as_a_missing_one(
    closed: tuple[TestClient, World], column: str, path: str
) -> None:
    client, _ = closed
    headers = headers_of(column) | {"X-Request-ID": "the-same"}
    here, there = (
        client.post(path, headers=headers, **NAMING[path](project)) for project in (HERE, "nowhere")
    )
    assert here.status_code in (403, 404, 422)
    assert same_answer(here, there, (HERE, "nowhere"))


TARGETS = (
    ("token", "operate", None), ("token", "read", HERE), ("token", "read", ELSEWHERE),
    ("subscription", None, None), ("subscription", HERE, None), ("subscription", ELSEWHERE, None),
    ("subscription", None, HERE), ("subscription", None, ELSEWHERE),
    ("view", None, False), ("view", HERE, False), ("view", ELSEWHERE, False), ("view", HERE, True),
    ("session", None, None), ("session", "read", HERE), ("session", "operate", ELSEWHERE),
)  # fmt: skip
"""What `owner` has, by kind and limits."""


def project_of(kind: str, *limits: Any) -> str | None:
    """The only project that something of `owner` is about."""
    return (limits[0] or limits[1]) if kind == "subscription" else limits[0 if kind == "view" else 1]


@pytest.mark.parametrize("column", some_fast(SENDERS, pytest.mark.slow))
def test_lists_have_what_a_token_reaches(closed: tuple[TestClient, World], column: str) -> None:
    client, world = closed
    sender = SENDERS[column]
    numbers = {target: world.own(*target, fresh=False) for target in TARGETS}
    for target in TARGETS:
        if target[0] == "subscription" and not world.store.notifications.deliveries(
            subscription_id=int(numbers[target])
        ):
            world.store.notifications.test_subscription(int(numbers[target]))
    for project in MEMBERS:
        world.own("experiment", project, fresh=False)

    def listed(path: str, field: str = "id") -> set[str]:
        answer = client.get(path, headers=headers_of(column))
        assert answer.status_code == 200, answer.text
        return {str(item[field]) for item in answer.json()["items"]}

    for kind in ("token", "subscription", "view", "session"):
        shown = listed(f"/api/v1/{kind}s")
        assert {target for target, number in numbers.items() if target[0] == kind and number in shown} == {
            target
            for target in TARGETS
            if target[0] == kind
            and sender.reaches(project_of(*target))
            and (sender.user == "owner" or (kind == "view" and target[2] and sender.sees(target[1])))
        }
    delivered = listed("/api/v1/deliveries?page_size=500", "subscription_id")
    assert delivered & set(numbers.values()) == {
        number
        for target, number in numbers.items()
        if target[0] == "subscription" and sender.user == "owner" and sender.reaches(project_of(*target))
    }
    projects = {name for name in MEMBERS if sender.sees(name)}
    assert listed("/api/v1/projects", "name") == projects
    assert listed("/api/v1/experiments?page_size=1000", "project") == projects
    of_runs = listed("/api/v1/runs?page_size=1000", "experiment_id")
    assert {world.store.experiments.get(int(id)).project for id in of_runs} == projects
    roles = client.get("/api/v1/whoami", headers=headers_of(column)).json()["roles"]
    held = {name for name, roles in MEMBERS.items() if sender.user in roles and sender.reaches(name)}
    assert roles.keys() == held


def test_a_route_without_a_rule_is_refused() -> None:
    app, router = FastAPI(openapi_url=None, docs_url=None, redoc_url=None), APIRouter()

    @router.get("/secrets")
    def list_secrets() -> None: ...

    app.include_router(router)
    with pytest.raises(LookupError, match=r"/secrets \(list_secrets\) needs one rule"):
        refuse_unruled(app)


def test_the_page_of_rules_is_up_to_date() -> None:
    from tests import generated_docs

    written = generated_docs.SECURITY.read_text(encoding="utf-8")
    assert written == generated_docs.security_page(written), "run `make docs`"


AUDITED: dict[str, tuple[str, dict[str, Any]]] = {
    "delete_experiment": ("experiment.deleted", {}),
    "restore_experiment": ("experiment.restored", {}),
    "cancel_experiment": ("experiment.cancelled", {}),
    "pause_experiment": ("experiment.paused", {}),
    "resume_experiment": ("experiment.resumed", {}),
    "retry_experiment": ("experiment.retried", {}),
    "set_experiment_priority": ("experiment.priority", {"priority": 10}),
    "tag_experiment": ("experiment.tagged", {"add": ["baseline"]}),
    "rename_experiment": ("experiment.renamed", {"name": "baseline"}),
    "annotate_experiment": ("experiment.annotated", {"notes": "why"}),
    "archive_experiment": ("experiment.archived", {"archived": True}),
    "submit_study": ("study.submit", {"study": "audited", "project": HERE, "parts": {"only": SPEC}}),
    "cancel_study": ("study.cancel", {}),
    "cancel_run": ("run.cancelled", {}),
    "retry_run": ("run.retried", {}),
    "change_run": ("run.annotated", {"starred": True}),
    "add_user": ("user.add", {"name": "eve"}),
    "change_user": ("user.set", {"email": "other@example.com"}),
    "create_token": ("token.create", {"user": "owner", "name": "audited", "scope": "read"}),
    "revoke_token": ("token.revoke", {}),
    "create_project": ("project.create", {"name": "new"}),
    "change_project": ("project.set", {"notes": "why"}),
    "set_project_limits": ("project.limits", {"weight": 2.0}),
    "set_member": ("project.member_set", {"role": "maintainer"}),
    "remove_member": ("project.member_remove", {}),
    "add_subscription": ("subscription.add", {"channel": "webhook", "target": WEBHOOK, "topics": ["end"]}),
    "remove_subscription": ("subscription.remove", {}),
    "pause_subscription": ("subscription.pause", {"paused": True}),
    "save_view": ("view.save", {"name": "audited", "query": "state=failed"}),
    "delete_view": ("view.delete", {}),
    "login_with_token": ("session.begin", {"token": FIRST_TOKEN}),
    "end_session": ("session.end", {}),
    "decide_device_login": ("device.deny", {"approve": False}),
    "archive_project": ("project.archive", {"archived": True}),  # The last: it takes no more changes.
}
"""What each change leaves in the audit log, and the body of its request."""
NOT_AUDITED = {
    "submit_experiment": "the experiment's first event has who submitted it",
    "continue_run": "the same",
    "retrain_run": "the same",
    **dict.fromkeys(("change_runs", "cancel_runs", "retry_runs"), "each run has a row, as by itself"),
    "validate_spec": "changes nothing",
    "preview_spec": "changes nothing",
    "inspect_data": "changes nothing",
    "evaluate_texts": "changes nothing",
    "test_subscription": "the log of deliveries has it",
    "device_code": "no one is known yet",
    "device_token": "approval and token have rows of their own",
    "logout": "of a session; `tests.api.login` has it",
}
_BEFORE = {
    "restore_experiment": ("cancel", "delete"),
    "delete_experiment": ("cancel",),
    "retry_experiment": ("cancel",),
    "resume_experiment": ("pause",),
    "retry_run": ("cancel",),
}
"""What comes first."""
_OF_OWNER: dict[str, tuple[Any, ...]] = {
    "{token_id}": ("token", "read", None),
    "{subscription_id}": ("subscription", HERE, None),
    "{view_id}": ("view", HERE, True),
    "{session_id}": ("session", "read", None),
}


def test_every_change_leaves_a_row_with_its_author(tmp_path: Path) -> None:
    with served(tmp_path) as (client, world):
        leave_rows(client, world)


_BY_OWNER = ("remove_subscription", "pause_subscription", "save_view")


def leave_rows(client: TestClient, world: World) -> None:
    changes = {name for name, (method, _) in operations(client).items() if method != "GET"}
    assert changes == AUDITED.keys() | NOT_AUDITED.keys()
    store = world.store
    for operation, (action, body) in AUDITED.items():
        method, template = operations(client)[operation]
        path = world.path(template, manages=EXPECTED[operation] is MANAGE)
        for name, target in _OF_OWNER.items():
            path = path.replace(name, world.own(*target) if name in path else "")
        author = "owner" if operation in _BY_OWNER else "administrator"
        for verb in _BEFORE.get(operation, ()):
            whole = path if operation == "delete_experiment" else path.rpartition("/")[0]
            how, where = ("DELETE", whole) if verb == "delete" else ("POST", f"{whole}/{verb}")
            before = client.request(how, where, headers=headers_of(author))
            assert before.is_success, (operation, before.text)
        last = max((row.id for row in store.audit.rows()), default=0)
        answer = client.request(method, path, headers=headers_of(author), json=body or None)
        assert answer.is_success, (operation, answer.text)
        rows = {row.action: row.actor for row in store.audit.page(after=last).items}
        assert rows.get(action) == ("admin" if operation == "login_with_token" else author), (operation, rows)
