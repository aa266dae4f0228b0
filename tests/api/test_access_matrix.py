"""Every route against everyone: generated from the routes, compared with a table of its own."""

from __future__ import annotations

from collections.abc import Iterator

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
    ACCEPTED,
    EXPECTED,
    FIRST_TOKEN,
    LOOK,
    MANAGE,
    METRICS_TOKEN,
    REFUSED,
    STEER,
    World,
    body_of,
    headers_of,
    outcome,
    populate,
)
from tests.api.conftest import BASE_URL
from trainers.synthetic import write_corpus


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, World]]:
    """A server that asks for tokens, with people and an experiment."""
    folder = tmp_path_factory.mktemp("closed")
    write_corpus(folder / "texts", train=16, test=8, seed=0)
    settings = Settings(
        data_dir=folder / "data",
        data_roots=str(folder),
        model_roots=str(folder),
        token=SecretStr(FIRST_TOKEN),
        metrics_token=SecretStr(METRICS_TOKEN),
    )
    Store.open(settings, migrate=True).close()
    app = create_app(settings)
    app.state.streams.close()  # One that never ends could not be read to its end.
    with TestClient(app, base_url=BASE_URL) as client:
        yield client, populate(app.state.store)


def operations(client: TestClient) -> dict[str, tuple[str, str]]:
    """Method and path of every operation of the application."""
    assert isinstance(client.app, FastAPI)
    return {
        str(route.name): (next(iter(route.methods or ())), str(route.path))
        for route in iter_route_contexts(client.app.routes)
    }


def test_every_route_is_in_the_table(closed: tuple[TestClient, World]) -> None:
    assert operations(closed[0]).keys() == EXPECTED.keys()


@pytest.mark.parametrize("column", [*REFUSED, *ACCEPTED])
def test_everyone_may_do_what_the_table_says(closed: tuple[TestClient, World], column: str) -> None:
    client, world = closed
    found = {}
    for operation, (method, template) in operations(client).items():
        path = world.path(template, steers=EXPECTED[operation] is STEER)
        answer = client.request(method, path, headers=headers_of(column), **body_of(operation))
        assert answer.status_code < 500, (operation, answer.text)
        refused = answer.headers["content-type"] == "application/problem+json"
        found[operation] = outcome(answer.status_code, answer.json()["type"] if refused else None)
    assert found == {operation: row[column] for operation, row in EXPECTED.items()}


MISSING = {
    "experiment_id": "98765",
    "run_id": "98765",
    "project": "nowhere",
    "name": "disabled",
    "figure": "curve",
}


def test_what_is_hidden_answers_as_what_is_missing(closed: tuple[TestClient, World]) -> None:
    client, world = closed
    for operation, (method, template) in operations(client).items():
        if EXPECTED[operation] not in (LOOK, STEER, MANAGE):
            continue
        hidden = world.path(template, steers=False)
        missing = template
        for name, value in MISSING.items():
            missing = missing.replace("{" + name + "}", value)
        headers = headers_of("other") | {"X-Request-ID": "the-same"}
        here, there = (
            client.request(method, path, headers=headers, **body_of(operation)) for path in (hidden, missing)
        )
        number = str(world.experiment_id if "{experiment_id}" in template else world.run_id)
        assert here.status_code == there.status_code == 404, operation
        text = here.text.replace(f"/{number}", "/98765").replace(f"id {number}", "id 98765")
        assert text.replace("nlp", "nowhere") == there.text
        assert dict(here.headers) | {"content-length": ""} == dict(there.headers) | {"content-length": ""}


def test_a_route_without_a_rule_is_refused() -> None:
    app, router = FastAPI(openapi_url=None, docs_url=None, redoc_url=None), APIRouter()

    @router.get("/secrets")
    def list_secrets() -> None: ...

    app.include_router(router)
    with pytest.raises(LookupError, match=r"without a rule .*: list_secrets"):
        refuse_unruled(app)


def test_the_page_of_rules_is_up_to_date() -> None:
    from api import access_page

    written = access_page.PAGE.read_text(encoding="utf-8")
    assert written == access_page.page(written), "run `make docs`"
