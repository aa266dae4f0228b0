"""The OpenAPI document is valid, complete and true."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openapi_spec_validator import validate

from api.app import create_app
from api.openapi import EXAMPLES
from api.problems import CATALOGUE
from service.config import document
from service.config.settings import Settings
from service.domain.records import Points
from service.domain.serialization import Serializable, adapter
from service.planner.forecasting import budget_problems
from service.scheduling.admission import admit
from service.specs import experiment, paths, rules, wording
from service.store import Store, StoreUnavailable
from tests import generated_docs


@pytest.fixture(scope="module")
def openapi(migrated: Path) -> dict[str, Any]:
    """The application's OpenAPI document."""
    app = create_app(Settings(data_dir=migrated.parent))
    app.state.store.close()
    return app.openapi()


def operations(openapi: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    }


def test_document_is_valid(openapi: dict[str, Any]) -> None:
    validate(openapi)


def test_every_operation_is_described_and_declares_its_errors(openapi: dict[str, Any]) -> None:
    for name, operation in operations(openapi).items():
        assert operation["summary"], name
        assert operation["description"], name
        assert operation["tags"], name
        answers = operation["responses"]
        assert {"400", "401", "403", "422", "500", "503"} <= set(answers), name
        for status, answer in answers.items():
            if status >= "4" and not (name == "GET /readyz" and status == "503"):
                content = answer["content"]["application/problem+json"]
                assert content["schema"] == {"$ref": "#/components/schemas/ProblemDocument"}, (name, status)
                assert content["examples"], (name, status)


def test_operation_ids_are_unique_names(openapi: dict[str, Any]) -> None:
    ids = [operation["operationId"] for operation in operations(openapi).values()]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z][a-z_]+", id) for id in ids)


def test_every_parameter_is_described(openapi: dict[str, Any]) -> None:
    silent = [
        (name, parameter["name"])
        for name, operation in operations(openapi).items()
        for parameter in operation.get("parameters", [])
        if not parameter.get("description") and "step" not in parameter["name"]
    ]
    assert silent == []


def test_every_field_of_an_answer_is_described(openapi: dict[str, Any]) -> None:
    silent = [
        (name, field)
        for name, schema in openapi["components"]["schemas"].items()
        if not name.startswith(("Spec", "ExperimentSpec"))  # The spec's own schema has a test of its own.
        for field, described in schema.get("properties", {}).items()
        if not described.get("description")
    ]
    assert silent == []


def test_a_number_that_need_not_be_finite_is_one_component(openapi: dict[str, Any]) -> None:
    assert json.dumps(openapi).count('"NaN"') == 1 + json.dumps(EXAMPLES[Points]).count('"NaN"')
    accuracy = openapi["components"]["schemas"]["Run"]["properties"]["accuracy"]
    assert accuracy["anyOf"] == [{"$ref": "#/components/schemas/Number"}, {"type": "null"}]


@pytest.mark.parametrize(
    ("path", "events"),
    [
        ("/api/v1/experiments/{experiment_id}/stream", {"event", "run", "experiment", "end"}),
        ("/api/v1/stream", {"experiment", "deleted", "costs", "queue", "many"}),
        ("/api/v1/runs/{run_id}/stream", {"run", "log", "points", "end"}),
    ],
)
def test_every_event_of_a_stream_has_a_type(openapi: dict[str, Any], path: str, events: set[str]) -> None:
    answer = openapi["paths"][path]["get"]["responses"]["200"]
    kinds = answer["content"]["text/event-stream"]["schema"]["oneOf"]
    assert {kind["properties"]["event"]["const"] for kind in kinds} == events
    for kind in kinds:
        content = kind["properties"]["data"]["contentSchema"]
        reference = content.get("$ref") or content["additionalProperties"]["$ref"]
        assert reference.rsplit("/", 1)[-1] in openapi["components"]["schemas"]


def test_examples_of_filters_and_orders_are_accepted(openapi: dict[str, Any], client: TestClient) -> None:
    tried = 0
    for path in ("/api/v1/experiments", "/api/v1/runs", "/api/v1/runs/export"):
        for parameter in openapi["paths"][path]["get"]["parameters"]:
            if parameter["name"] in ("filter", "order_by"):
                (example,) = parameter["schema"]["examples"]
                answer = client.get(path, params={parameter["name"]: example})
                assert answer.status_code == 200, (path, example, answer.text)
                tried += 1
    assert tried == 6


@pytest.mark.parametrize("answer", EXAMPLES, ids=lambda answer: answer.__name__)
def test_examples_are_answers(answer: type[Serializable], openapi: dict[str, Any]) -> None:
    component = openapi["components"]["schemas"][answer.__name__]
    assert component["example"] == EXAMPLES[answer]
    assert list(EXAMPLES[answer]) == component["required"]
    adapter(answer).validate_python(EXAMPLES[answer])


def test_every_promised_path_is_there(openapi: dict[str, Any]) -> None:
    promised = """
        POST /api/v1/experiments; GET /api/v1/experiments; GET /api/v1/experiments/{experiment_id};
        DELETE /api/v1/experiments/{experiment_id}; POST /api/v1/experiments/{experiment_id}/cancel;
        POST /api/v1/experiments/{experiment_id}/pause; POST /api/v1/experiments/{experiment_id}/resume;
        POST /api/v1/experiments/{experiment_id}/retry; PUT /api/v1/experiments/{experiment_id}/priority;
        GET /api/v1/experiments/{experiment_id}/spec; GET /api/v1/experiments/{experiment_id}/runs;
        GET /api/v1/experiments/{experiment_id}/events; GET /api/v1/experiments/{experiment_id}/stream;
        GET /api/v1/experiments/{experiment_id}/export; GET /api/v1/runs; GET /api/v1/runs/{run_id};
        POST /api/v1/runs/{run_id}/cancel; POST /api/v1/runs/{run_id}/retry;
        GET /api/v1/runs/{run_id}/points; GET /api/v1/runs/{run_id}/measurements;
        GET /api/v1/runs/{run_id}/summary; GET /api/v1/runs/{run_id}/attempts;
        GET /api/v1/runs/{run_id}/logs; GET /api/v1/runs/{run_id}/stream; GET /api/v1/runs/export;
        GET /api/v1/queue; GET /api/v1/hardware; GET /api/v1/cluster; GET /api/v1/spec.schema.json;
        POST /api/v1/specs/validate; POST /api/v1/specs/preview; GET /healthz; GET /readyz; GET /metrics
    """
    assert {name.strip() for name in promised.split(";")} <= set(operations(openapi))


def test_the_errors_page_is_up_to_date() -> None:
    assert generated_docs.ERRORS.read_text(encoding="utf-8") == generated_docs.errors_page(), (
        "run `make docs`"
    )


def test_every_problem_that_the_domain_names_is_catalogued() -> None:
    sources = [Path(module.__file__ or "") for module in (document, paths, experiment, rules, wording)]
    sources += [Path(asked.__code__.co_filename) for asked in (admit, budget_problems)]
    named: set[str] = set()
    for source in sources:
        text = source.read_text(encoding="utf-8")
        named |= set(re.findall(r'(?:Problem|refusal)\(\s*"([a-z0-9-]+)"', text))
        named |= set(re.findall(r'^    "[a-z_]+": "([a-z]+-[a-z-]+)"', text, re.MULTILINE))
    assert "unknown-key" in named
    assert "unsatisfiable-resources" in named
    assert named - {"too-large"} <= set(CATALOGUE)  # too-large is answered as body-too-large


def test_a_problems_type_leads_to_its_explanation(client: TestClient) -> None:
    type = client.get("/api/v1/runs/1").json()["type"]
    page = client.get(type)
    assert page.status_code == 200
    assert CATALOGUE["not-found"].cause.split(",")[0] in page.text
    assert client.get("/problems/nonsense").status_code == 404


def test_documentation_needs_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert "http" not in page.text.replace("http-equiv", "")
    for asset in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert client.get(asset).status_code == 200, asset
    assert client.get("/docs/other.js").status_code == 404


def test_metrics_count_requests_and_states(client: TestClient) -> None:
    client.get("/api/v1/runs/77")
    text = client.get("/metrics").text
    assert (
        'stillhouse_http_requests_total{method="GET",route="/api/v1/runs/{run_id}",status="404"} 1.0' in text
    )
    assert "stillhouse_queue_length 0.0" in text
    assert "stillhouse_store_up 1.0" in text
    assert 'stillhouse_schedulers_alive{pool="default"} 0.0' in text


def test_readiness_tells_what_is_wrong(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get("/readyz").json() == {"ready": True, "database": "ok", "schedulers_alive": 0}
    monkeypatch.setattr("service.db.migrate.newest_revision", lambda: "0002")
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "this program needs 0002; run: stillhouse db upgrade" in answer.json()["database"]
    assert client.get("/healthz").status_code == 200


def test_a_prober_may_add_parameters(client: TestClient) -> None:
    assert client.get("/healthz", params={"from": "balancer"}).status_code == 200


def test_readiness_names_no_host(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable('connection to server at "db.internal" (10.0.0.5) failed')

    monkeypatch.setattr("service.db.migrate.readiness_problems", away)
    answer = client.get("/readyz")
    assert (answer.status_code, "db.internal" in answer.text) == (503, False)
    assert "db.internal" in caplog.text


def test_readiness_does_not_read_the_whole_database(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []
    monkeypatch.setattr("service.db.sqlite.integrity_problems", lambda connection: checked.append(1) or [])
    assert client.get("/readyz").status_code == 200
    assert checked == []


def test_a_full_disk_is_not_ready(client: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["database"] == f"the disk of {store.path} is full; free space"
