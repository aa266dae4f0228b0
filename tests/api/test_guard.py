"""Who may ask, from where, and how much."""

from __future__ import annotations

import gzip
import logging
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.app import create_app
from api.server import UnsafeAddress, refuse_unsafe, serve
from service.config.document import MAX_BYTES
from service.config.settings import Settings
from tests.api.conftest import BASE_URL, SPEC, TOKEN, Driver
from tests.serving import serving

EXPERIMENTS = "/api/v1/experiments"


@pytest.fixture
def guarded(settings: Settings) -> Iterator[TestClient]:
    """A client without the token of a server that has one."""
    app = create_app(settings.model_copy(update={"token": SecretStr(TOKEN)}))
    with TestClient(app, base_url=BASE_URL) as client:
        yield client


PUBLIC = ("/healthz", "/openapi.json", "/problems/x", "/", "/docs", "/static/app.js")


def test_every_operation_with_data_needs_the_token(guarded: TestClient) -> None:
    document = guarded.get("/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    paths = [
        (method, path.replace("{experiment_id}", "1").replace("{run_id}", "1").replace("{slug}", "x"))
        for path, operations in document["paths"].items()
        for method in operations
    ]
    assert len(paths) > 30
    for method, path in [*paths, ("get", "/"), ("get", "/docs"), ("get", "/openapi.json"), ("get", "/nope"),
                         ("patch", EXPERIMENTS), ("get", "/static/app.js")]:  # fmt: skip
        answer = guarded.request(method, path)
        if path in PUBLIC:
            assert answer.status_code in (200, 404), path
            continue
        assert (answer.status_code, answer.json()["type"]) == (401, "/problems/unauthenticated"), path
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xe9"],
)
def test_anything_but_the_token_is_refused(guarded: TestClient, header: str) -> None:
    answer = guarded.get("/readyz", headers={b"Authorization": header.encode("latin-1")})
    assert answer.status_code == 401


def test_the_token_is_the_first_administrators(guarded: TestClient) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = guarded.post(EXPERIMENTS, content=SPEC, headers=headers)
    assert (answer.status_code, answer.json()["owner"]) == (201, "admin")


def test_the_token_is_never_logged(guarded: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        guarded.get("/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
        guarded.get("/readyz", headers={"Authorization": f"Bearer {TOKEN}x"})
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_other_addresses_need_a_token(settings: Settings, host: str) -> None:
    with pytest.raises(UnsafeAddress, match=r"STILLHOUSE_TOKEN") as refusal:
        serve(settings.model_copy(update={"host": host}))
    assert "\n" not in str(refusal.value)
    refuse_unsafe(settings.model_copy(update={"host": host, "token": SecretStr(TOKEN)}))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_loopback_needs_none(settings: Settings, host: str) -> None:
    refuse_unsafe(settings.model_copy(update={"host": host}))


@pytest.mark.parametrize("token", ["short", "x" * 31, "x" * 31 + "\n", "é" * 40])
def test_weak_tokens_are_refused(settings: Settings, token: str) -> None:
    with pytest.raises(UnsafeAddress):
        refuse_unsafe(settings.model_copy(update={"token": SecretStr(token)}))


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[::1", "localhost.evil"])
def test_a_foreign_host_is_refused(client: TestClient, host: str) -> None:
    answer = client.get("/healthz", headers={"Host": host})
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/unknown-host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8400", "LOCALHOST:8400"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8400", "http://[::1", "x"],
)
def test_pages_of_other_origins_change_nothing(client: TestClient, origin: str) -> None:
    answer = client.post(EXPERIMENTS, content=SPEC, headers={"Origin": origin})
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/cross-origin")
    assert client.get(EXPERIMENTS).json()["items"] == []
    assert client.post(EXPERIMENTS, content=SPEC, headers={"Origin": BASE_URL}).status_code == 201


def test_answers_carry_a_strict_policy(client: TestClient) -> None:
    for path in ("/", "/healthz", "/nope"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


@pytest.fixture
def failing(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client, over real HTTP, of an application whose list of experiments fails."""

    def fail(**_: object) -> None:
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(app.state.store.experiments, "page", fail)
    with serving(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def test_a_mistake_is_answered_with_the_policy_and_says_that_the_connection_closes(
    failing: httpx.Client,
) -> None:
    answer = failing.get(EXPERIMENTS)
    assert (answer.status_code, answer.json()["type"]) == (500, "/problems/internal-error")
    assert answer.headers["connection"] == "close"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert failing.get("/healthz").status_code == 200, "the next request is not sent on a closed connection"


def test_a_method_that_a_path_does_not_take_is_told_all_that_it_takes(client: TestClient) -> None:
    for method, path, allowed in (
        ("PATCH", EXPERIMENTS, "GET, HEAD, POST"),
        ("POST", f"{EXPERIMENTS}/1", "GET, HEAD, DELETE"),
        ("HEAD", f"{EXPERIMENTS}/1/cancel", "POST"),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_head_is_answered_like_get_without_the_body(http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit()
    for path in ("/healthz", EXPERIMENTS, f"{EXPERIMENTS}/{experiment.id}", "/api/v1/runs/export"):
        got, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
        assert head.headers.get("content-length") == got.headers.get("content-length")
    assert http.head(f"{EXPERIMENTS}/77").status_code == 404
    stream = http.head(f"{EXPERIMENTS}/{experiment.id}/stream")
    assert stream.headers["content-type"].startswith("text/event-stream")


def test_several_host_headers_are_refused(client: TestClient) -> None:
    answer = client.get("/healthz", headers=[("Host", "127.0.0.1"), ("Host", "127.0.0.1")])
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/malformed-request")


def test_a_compressed_body_is_refused_not_read_as_text(client: TestClient) -> None:
    answer = client.post(
        EXPERIMENTS, content=gzip.compress(SPEC.encode()), headers={"Content-Encoding": "gzip"}
    )
    assert (answer.status_code, answer.json()["type"]) == (415, "/problems/unsupported-encoding")
    assert answer.headers["accept-encoding"] == "identity"
    answer = client.post(EXPERIMENTS, content=SPEC, headers={"Content-Encoding": "Identity"})
    assert answer.status_code == 201


def test_large_body_is_refused_by_its_length(client: TestClient) -> None:
    answer = client.post(EXPERIMENTS, content=b"#" * (MAX_BYTES + 1))
    assert (answer.status_code, answer.json()["type"]) == (413, "/problems/body-too-large")
    padded = SPEC.encode() + b"#" * (MAX_BYTES - len(SPEC))
    assert client.post(EXPERIMENTS, content=padded).status_code == 201


def test_large_chunked_body_is_refused_while_it_streams(http: httpx.Client) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1 << 20
            yield b"#" * (1 << 20)

    try:
        answer = http.post(EXPERIMENTS, content=chunks())
    except httpx.TransportError:  # The server has answered and closed while the client still sent.
        assert sent < 100 << 20
    else:
        assert (answer.status_code, answer.json()["type"]) == (413, "/problems/body-too-large")
    assert http.get("/healthz").status_code == 200


def raw(url: str, request: bytes) -> bytes:
    """What the server answers to bytes as they are."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=5) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
            if b"\r\n\r\n" in answer and not answer.endswith(b"\r\n\r\n"):
                break
    return answer


def test_a_lying_content_length_is_refused_before_the_body(url: str) -> None:
    head = f"POST {EXPERIMENTS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 104857600\r\n\r\n"
    assert raw(url, head.encode() + b"name: a").startswith(b"HTTP/1.1 413")


def test_a_chunked_body_is_limited_although_it_says_it_is_short(url: str) -> None:
    chunk = b"100000\r\n" + b"#" * (1 << 20) + b"\r\n"
    head = f"POST {EXPERIMENTS} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(url, head.encode() + chunk + b"1\r\n#\r\n0\r\n\r\n").startswith(b"HTTP/1.1 413")
