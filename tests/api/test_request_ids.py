"""The id of a request: in its answer, in problems and in the log."""

from __future__ import annotations

import logging
import re

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.config import logs
from tests.api.conftest import BASE_URL, SPEC


def test_a_given_id_comes_back_with_the_answer_and_the_problem(client: TestClient) -> None:
    answer = client.get("/api/v1/experiments/999", headers={"X-Request-ID": "ci-17.a"})
    assert answer.headers["X-Request-ID"] == "ci-17.a"
    assert answer.json()["request_id"] == "ci-17.a"


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 101, 'a"}'])
def test_an_id_is_made_where_none_was_given_that_can_be_used(client: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    first, second = (client.get("/healthz", headers=headers).headers["X-Request-ID"] for _ in range(2))
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second


def test_a_refusal_before_routing_has_an_id(client: TestClient) -> None:
    answer = client.get("/healthz", headers={"Host": "elsewhere"})
    assert answer.status_code == 400
    assert answer.json()["request_id"] == answer.headers["X-Request-ID"]


def test_records_of_a_request_carry_its_id(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[object] = []

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.getMessage().partition(":")[0], logs.current().get("request_id")))

    handler = Watch()
    logging.getLogger("api.guard").addHandler(handler)
    caplog.set_level(logging.INFO, logger="api.guard")
    try:
        client.post("/api/v1/experiments", content=SPEC, headers={"X-Request-ID": "r1"})
        client.get("/api/v1/experiments", headers={"X-Request-ID": "r2"})
    finally:
        logging.getLogger("api.guard").removeHandler(handler)
    assert seen == [("POST /api/v1/experiments", "r1")]


def test_an_unforeseen_error_is_found_by_its_request(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.state.store.experiments, "get", lambda id: 1 / 0)
    with TestClient(app, base_url=BASE_URL, raise_server_exceptions=False) as client:
        answer = client.get("/api/v1/experiments/1", headers={"X-Request-ID": "r9"})
    assert answer.status_code == 500
    assert (answer.headers["X-Request-ID"], answer.json()["request_id"]) == ("r9", "r9")
