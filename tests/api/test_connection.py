"""What a connection may send and how long it may stay, before anyone looks at its token."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from api.guard import MAX_HEAD_BYTES
from api.server import MAX_REQUEST_BYTES, BoundedProtocol
from service.domain.records import LogLine
from service.store import RecordBatch, Store
from tests.api.conftest import Driver, wait_until
from tests.serving import serving

HEAD = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SUBMIT = b"POST /api/v1/experiments HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
        yield connection


def read_to_end(connection: socket.socket) -> bytes:
    answer = b""
    while chunk := connection.recv(65536):
        answer += chunk
    return answer


def problem(answer: bytes) -> tuple[bytes, str]:
    """Status line and type of a problem, which must come with the security headers and say it closes."""
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head.lower()
    assert b"x-content-type-options: nosniff" in head.lower()
    return head.split(b"\r\n", 1)[0], json.loads(body)["type"]


@pytest.fixture
def impatient(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Base URL of a server that waits for next to nothing."""
    for name in ("head_timeout_s", "body_timeout_s", "stalled_timeout_s"):
        monkeypatch.setattr(BoundedProtocol, name, 0.1)
    with serving(app) as url:
        yield url


def test_the_tests_server_leaves_its_loop_no_connection_that_came_last(app: FastAPI) -> None:
    for _ in range(20):
        with ExitStack() as clients, serving(app) as url:
            for _ in range(20):
                clients.enter_context(connected(url))
    gc.collect()  # What was left would be an unclosed resource, which is an error.


def test_headers_without_end_are_refused(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(HEAD)
        sent = 0
        try:
            while sent < 100 * MAX_HEAD_BYTES:
                sent += connection.send(b"X-Filler: " + b"x" * 4096 + b"\r\n")
        except OSError:
            pass
    assert sent < 100 * MAX_HEAD_BYTES, "the server closed the connection"


def test_one_header_that_is_too_large_is_refused(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(HEAD + b"X-Filler: " + b"x" * (MAX_HEAD_BYTES + 1))
        answer = read_to_end(connection)
    assert problem(answer) == (b"HTTP/1.1 431 Request Header Fields Too Large", "/problems/headers-too-large")


def test_complete_headers_that_are_too_large_are_refused(http: httpx.Client) -> None:
    answer = http.get("/healthz", headers={f"X-{number}": "x" * 1000 for number in range(70)})
    assert (answer.status_code, answer.json()["type"]) == (431, "/problems/headers-too-large")
    assert http.get("/healthz", headers={"X-Filler": "x" * 60_000}).status_code == 200


def test_a_request_that_never_ends_is_cut_off(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(SUBMIT + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
        sent = 0
        try:
            while sent < 10 * MAX_REQUEST_BYTES:
                sent += connection.send(b"X-Trailer: " + b"x" * 65536 + b"\r\n")
        except OSError:
            pass
    assert sent < 10 * MAX_REQUEST_BYTES, "the server closed the connection"


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_that_asks_nothing_is_closed(impatient: str, sent: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(sent)
        assert read_to_end(connection) == b""


@pytest.mark.parametrize(
    "sent", [b"GET /hea", HEAD, SUBMIT + b"Content-Length: 10\r\n\r\nname", HEAD + b"\r\n" + HEAD]
)
def test_a_request_that_is_sent_by_halves_is_ended(impatient: str, sent: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(sent)
        answer = read_to_end(connection)
    last = answer[answer.rindex(b"HTTP/1.1") :]
    assert problem(last) == (b"HTTP/1.1 408 Request Timeout", "/problems/request-timeout")


def test_what_is_not_http_is_a_problem_too(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        answer = read_to_end(connection)
    assert problem(answer) == (b"HTTP/1.1 400 Bad Request", "/problems/malformed-request")


def test_a_connection_that_is_used_stays(impatient: str) -> None:
    with httpx.Client(base_url=impatient, trust_env=False) as client:
        for _ in range(5):
            assert client.get("/healthz").status_code == 200


def test_a_follower_that_does_not_read_is_sent_away_and_resumes(
    impatient: str, app: FastAPI, driver: Driver, store: Store
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    numbers = range(1, 2001)
    logs = [LogLine(run.id, 1, number, 0.0, "info", "x" * 8000) for number in numbers]
    store.recording.record(RecordBatch(logs=logs))
    path = f"/api/v1/runs/{run.id}/stream"
    with connected(impatient) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        wait_until(lambda: app.state.streams.polls == 1)
        wait_until(lambda: app.state.streams.polls == 0)  # Nothing is read, so it is sent away.
        received = read_to_end(connection)
    assert len(received) < sum(len(line.message) for line in logs)
    whole = received[: received.rindex(b"\n\n")]
    last_id = whole[whole.rindex(b"\nid: ") + 5 :].split(b"\n")[0].decode()
    driver.finish(experiment, [run])
    with httpx.stream(
        "GET", f"{impatient}{path}", headers={"Last-Event-ID": last_id}, trust_env=False
    ) as answer:
        resumed = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    first = whole.count(b"event: log")
    assert first > 0
    assert [data["number"] for data in resumed if "number" in data] == list(numbers[first:])
