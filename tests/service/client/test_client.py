"""The client: what it repeats and what it does not, and what it makes of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from api.app import create_app
from service.client import ApiError, Client, ClientError, Ended, Unreachable
from service.client.wire import Operation
from service.config.settings import Settings
from service.domain.records import Event, ExperimentStatus, Run, RunProgress
from service.domain.states import ExperimentState, RunState
from service.store import Store

Handler = Callable[[httpx.Request], httpx.Response]

EXPERIMENT: dict[str, Any] = {
    **dict.fromkeys(field.name for field in fields(ExperimentStatus)),
    "id": 3, "name": "n", "owner": "o", "state": "queued", "priority": 50, "attempt": 0,
    "spec_sha256": "0", "run_count": 1, "not_before_s": 0.0, "created_s": 1.0, "queued_s": 1.0,
    "project": "default", "pool": "default", "tags": [], "notes": "", "run_states": {"queued": 1},
}  # fmt: skip
RUN: dict[str, Any] = {
    **dict.fromkeys(field.name for field in fields(Run)),
    "id": 7, "experiment_id": 3, "index": 0, "cell": "c", "seed": 0, "repeat": 0,
    "point": {"precision": "fp32"},
    "state": "running", "attempt": 1, "own_failures": 0, "infrastructure_failures": 0, "not_before_s": 0.0,
    "step": 5, "task": "imdb", "student": "tiny", "precision": "fp32", "optimizer": "adamw",
    "implementation": "auto", "global_batch_size": 16, "strategy": "single", "workers": 1,
    "hardware": "cpu", "train_loss": "NaN", "first_attempt": 1,
    "name": "", "starred": False, "tags": [], "notes": "",
}  # fmt: skip


class Server:
    """Answers requests in turn from a list, and remembers what was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def client_of(server: Server, slept: list[float] | None = None, **arguments: Any) -> Client:
    slept = [] if slept is None else slept
    transport = httpx.MockTransport(server)
    return Client("http://127.0.0.1:1", transport=transport, sleep=slept.append, **arguments)


def problem(status: int, type: str, detail: str = "d", **more: Any) -> httpx.Response:
    body = {
        "type": f"/problems/{type}",
        "title": "t",
        "status": status,
        "detail": detail,
        "instance": "/",
        **more,
    }
    return httpx.Response(status, json=body, headers={"Retry-After": "2"} if status == 503 else {})


def stream(*chunks: str) -> httpx.Response:
    return httpx.Response(
        200, headers={"content-type": "text/event-stream"}, content=(chunk.encode() for chunk in chunks)
    )


def sse(event: str, data: Any, id: str | None = None) -> str:
    return f"event: {event}\ndata: {json.dumps(data)}\n" + (f"id: {id}\n" if id else "") + "\n"


def test_submit_is_repeated_under_one_key_until_it_is_answered() -> None:
    server = Server(
        httpx.ConnectError("refused"), httpx.ReadTimeout("slow"), problem(503, "unavailable"),
        httpx.Response(201, json=EXPERIMENT),
    )  # fmt: skip
    slept: list[float] = []
    experiment = client_of(server, slept).submit("name: n", owner="ada")
    assert (experiment.id, experiment.state) == (3, ExperimentState.queued)
    assert experiment.run_states == {RunState.queued: 1}
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1
    assert {request.headers["stillhouse-owner"] for request in server.requests} == {"ada"}
    assert len(slept) == 3
    assert slept[2] >= 2.0, "Retry-After is kept"


def test_what_cannot_be_repeated_is_not() -> None:
    server = Server(httpx.ReadTimeout("slow"))
    with pytest.raises(Unreachable):
        client_of(server).retry(3)
    assert len(server.requests) == 1
    server = Server(httpx.ConnectError("refused"), problem(503, "unavailable"), httpx.Response(204))
    client_of(server).delete(3)
    assert len(server.requests) == 3, "nothing had been sent or changed"


def test_what_may_be_stored_is_repeated_only_where_that_is_safe() -> None:
    server = Server(problem(504, "unconfirmed"))
    with pytest.raises(ApiError) as error:
        client_of(server).retry(3)
    assert (error.value.status, len(server.requests)) == (504, 1)
    server = Server(problem(504, "unconfirmed"), httpx.Response(201, json=EXPERIMENT))
    assert client_of(server).submit("name: n").id == 3
    assert len({request.headers["idempotency-key"] for request in server.requests}) == 1


def test_an_absent_server_is_unreachable_in_one_line() -> None:
    server = Server(*[httpx.ConnectError("[Errno 111] Connection refused")] * 5)
    with pytest.raises(Unreachable, match=r"cannot reach http://127\.0\.0\.1:1") as error:
        client_of(server).experiment(3)
    assert "\n" not in str(error.value)


def test_a_problem_is_a_typed_error_with_its_fields() -> None:
    errors = [{"type": "unknown-key", "path": "precison", "message": "unknown key"}]
    server = Server(problem(422, "unknown-key", "precison: unknown key", errors=errors))
    with pytest.raises(ApiError) as refusal:
        client_of(server).submit("name: n")
    error = refusal.value
    assert (error.type, error.status, str(error)) == ("unknown-key", 422, "precison: unknown key")
    assert str(error.errors[0]) == "precison: unknown key"
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1]", b"{}"])
def test_an_error_of_something_else_than_the_api_is_told(body: bytes) -> None:
    with pytest.raises(ApiError, match="502"):
        client_of(Server(httpx.Response(502, content=body))).queue()


def test_an_answer_of_another_version_is_told() -> None:
    with pytest.raises(ClientError, match="same version"):
        client_of(Server(httpx.Response(200, json={"id": 1}))).run(1)


def test_fields_of_a_newer_server_are_ignored_and_words_become_numbers() -> None:
    run = client_of(Server(httpx.Response(200, json={**RUN, "new_field": 1}))).run(7)
    assert run.train_loss is not None
    assert run.train_loss != run.train_loss, "NaN"
    assert run.state is RunState.running


def test_lists_are_read_page_by_page() -> None:
    server = Server(
        httpx.Response(200, json={"items": [RUN], "next_page_token": "more"}),
        httpx.Response(200, json={"items": [{**RUN, "id": 8}], "next_page_token": None}),
    )
    runs = list(client_of(server).all_runs(experiment_id=3, filter="seed = 0"))
    assert [run.id for run in runs] == [7, 8]
    assert server.requests[1].url.params["page_token"] == "more"
    assert server.requests[1].url.params["filter"] == "seed = 0"


def test_follow_connects_again_after_the_last_event() -> None:
    event = {"experiment_id": 3, "number": 1, "run_id": None, "attempt": None, "at_s": 1.0, "kind": "k",
             "message": "m", "data": None, "actor": None}  # fmt: skip

    def broken() -> Iterator[bytes]:
        yield sse("event", {**event, "number": 2}, "2").encode()
        raise httpx.ReadError("reset")

    payload = {"run": RUN, "latest": {"loss": {"step": 5, "value": "Infinity"}}}
    server = Server(
        stream(sse("event", event, "1"), ": ping\n\n"),
        httpx.Response(200, content=broken()),
        problem(503, "unavailable"),
        stream(sse("event", {**event, "number": 3}, "3"), sse("run", payload), sse("experiment", EXPERIMENT),
               sse("end", EXPERIMENT), sse("event", event)),
    )  # fmt: skip
    messages = list(client_of(server).follow(3))
    assert [m.number for m in messages if isinstance(m, Event)] == [1, 2, 3]
    assert isinstance(messages[-1], Ended)
    changed = next(m for m in messages if isinstance(m, RunProgress))
    assert changed.latest["loss"].value == float("inf")
    assert [request.headers.get("last-event-id") for request in server.requests] == [None, "1", "2", "2"]


def test_follow_gives_up_when_the_server_stays_away() -> None:
    server = Server(*[httpx.ConnectError("refused")] * 5)
    with pytest.raises(Unreachable):
        list(client_of(server).follow(3))
    with pytest.raises(ApiError):
        list(client_of(Server(problem(404, "not-found"))).follow_run(3))


def test_follow_run_reads_points() -> None:
    points = {"loss": {"steps": [1, 2], "values": [0.5, "NaN"], "at_s": [1.0, 2.0]}}
    server = Server(stream(sse("points", points, "1-2-0"), sse("end", {"run": RUN, "latest": {}})))
    first, last = list(client_of(server).follow_run(7))
    assert isinstance(first, dict)
    assert first["loss"].steps == [1, 2]
    assert isinstance(last, Ended)


def test_preview_reads_as_many_pages_as_asked() -> None:
    run = {"index": 0, "cell": "c", "seed": 0, "point": {}, "hardware": "cpu", "workers": 1,
           "min_workers": 1, "cpus": 1, "accelerators": 0, "memory_gib": None, "price_usd_per_hour": 0.05,
           "min_price_usd_per_hour": 0.05, "feasible": True, "reason": None}  # fmt: skip
    page = {
        "run_count": 5,
        "cell_count": 5,
        "infeasible_cells": {},
        "reused_count": 0,
        "cluster_age_s": None,
        "items": [run, run],
        "next_page_token": "r2",
    }
    server = Server(httpx.Response(200, json=page), httpx.Response(200, json={**page, "items": [run]}))
    preview = client_of(server).preview("name: n", limit=3)
    assert (preview.run_count, len(preview.items)) == (5, 3)
    assert server.requests[1].url.params["page_size"] == "1"


def test_wait_ends_with_the_experiment_or_in_time() -> None:
    detail = {
        **EXPERIMENT,
        "totals": {"cost_usd": 0.0, "energy_kwh": 0.0, "device_hours": 0.0, "overhead_usd": 0.0},
        "study": None,
        "waiting": None,
    }
    server = Server(httpx.Response(200, json=detail), httpx.Response(200, json={**detail, "state": "failed"}))
    assert client_of(server).wait(3).state is ExperimentState.failed
    with pytest.raises(TimeoutError, match="queued after 0"):
        client_of(Server(httpx.Response(200, json=detail))).wait(3, timeout_s=0.0)


def test_the_token_comes_from_the_settings_and_is_sent() -> None:
    settings = Settings(token=SecretStr("t" * 32))
    with Client.from_settings(settings) as client:
        assert client._http.headers["authorization"] == "Bearer " + "t" * 32
        assert client.url == "http://127.0.0.1:8400"


def test_a_change_of_nothing_is_sent_as_an_empty_body() -> None:
    user = {"name": "ada", "kind": "person", "email": None, "created_s": 1.0, "disabled_s": None}
    server = Server(httpx.Response(200, json={**user, "administrator": False, "subject": None}))
    client_of(server).change_user("ada")
    assert server.requests[0].content == b"{}"


def test_values_that_an_operation_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        client_of(Server()).events(3, 100)


def test_an_export_takes_what_its_operation_takes() -> None:
    server = Server(httpx.Response(200, content=b"run_id"))
    assert list(client_of(server).export_chunks(3, order_by="cost_usd")) == [b"run_id"]
    assert dict(server.requests[0].url.params) == {"format": "csv", "order_by": "cost_usd"}


def test_every_operation_is_one_of_the_api(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    Store.open(settings, migrate=True).close()
    described = {
        re.sub(r"{\w+}", "{}", path): {method.upper(): operation for method, operation in operations.items()}
        for path, operations in create_app(settings).openapi()["paths"].items()
    }
    for name, operation in vars(Client).items():
        if isinstance(operation, Operation):
            path = "/api/v1" + re.sub(r"{\w+}", "{}", operation.path)
            assert operation.method in described[path], name
            takes_body = "requestBody" in described[path][operation.method]
            assert not (takes_body and operation.in_query), name
