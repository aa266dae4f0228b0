"""A server of the S3 protocol in a process of its own, and a proxy in front of it that fails when told to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from trainers.data import storage

KEY, SECRET = "AKIAQPLEASANTKEY", "pleasant-secret-of-the-store"
_START_S = 120.0


_REFUSALS = {503: "SlowDown", 500: "InternalError"}


@dataclass(frozen=True, slots=True)
class Mishap:
    """What happens to a request; lost answers are those of requests that the store has carried out."""

    refused: int | None = None  # By this status
    slow_s: float = 0.0
    cut: bool = False  # Before the store has it
    answered_share: float = 1.0  # Of the answer; below 1, the connection ends there


@dataclass
class ObjectStore:
    """`failing`: answers, by status, to the next requests of those `methods`; others have a `mishap`."""

    port: int
    target: str
    failing: list[int] = field(default_factory=list)
    methods: frozenset[str] = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
    slow_s: float = 0.0
    mib_per_s: float = float("inf")  # Of each connection
    mishap: Callable[[], Mishap] = Mishap
    requests: int = 0

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> str:
        httpx.put(f"{self.target}/{name}").raise_for_status()
        return f"s3://{name}"


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    target = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                httpx.get(target)
                break
            except httpx.TransportError:
                assert server.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)
        with _proxy(target) as store:
            yield store
    finally:
        server.terminate()
        server.wait()


@contextmanager
def in_environment(store: ObjectStore) -> Iterator[None]:
    """Has this process, and those that it starts, use the store."""
    before = dict(os.environ)
    os.environ.update(store.environment)
    storage._opened.cache_clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        storage._opened.cache_clear()


def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process ask a store that refuses twice, not over 10 to 40 s."""
    monkeypatch.setattr(storage, "_ATTEMPTS", 2)
    storage._opened.cache_clear()


@contextmanager
def _proxy(target: str) -> Iterator[ObjectStore]:
    store = ObjectStore(0, target)
    client = httpx.Client(base_url=target, timeout=60.0)

    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self._body()
            store.requests += 1
            planned = store.failing and self.command in store.methods
            mishap = Mishap(store.failing.pop(0), store.slow_s) if planned else store.mishap()
            time.sleep(max(store.slow_s, mishap.slow_s))
            if mishap.refused is not None:
                code = _REFUSALS[mishap.refused]
                answer = f"<Error><Code>{code}</Code><Message>of a test</Message></Error>".encode()
                self._answer(mishap.refused, {"Content-Type": "application/xml"}, answer)
                return
            if mishap.cut:
                self._cut()
                return
            kept = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            found = client.request(self.command, self.path, content=body, headers=kept)
            names = {name: value for name, value in found.headers.items() if name.lower() not in _DECODED}
            of_head = found.headers.get("content-length") if self.command == "HEAD" else None
            if mishap.answered_share < 1.0:
                if mishap.answered_share > 0.0:
                    part = found.content[: int(len(found.content) * mishap.answered_share)]
                    length = of_head or str(len(found.content))
                    self._answer(found.status_code, names, part, length)
                self._cut()
                return
            self._answer(found.status_code, names, found.content, of_head)

        def _cut(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward

        def _body(self) -> bytes:
            """Returns all of it; of half a body, whose sender was killed, a store keeps nothing."""
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.send_response_only(100)
                self.end_headers()
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if len(body) < length:
                    raise ConnectionResetError
                return body
            parts = []
            while line := self.rfile.readline():
                size = int(line.split(b";")[0], 16)
                parts.append(self.rfile.read(size))
                self.rfile.readline()
                if size == 0:
                    return b"".join(parts)
            raise ConnectionResetError

        def _answer(
            self, status: int, headers: Mapping[str, str], body: bytes, length: str | None = None
        ) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                for begin in range(0, len(body), 1 << 20):
                    self.wfile.write(body[begin : begin + (1 << 20)])
                    time.sleep(1.0 / store.mib_per_s)

        def handle_expect_100(self) -> bool:
            return True  # `_body` answers it.

        def log_message(self, format: str, *args: object) -> None: ...

    server = _Server(("127.0.0.1", 0), Forward)
    store.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        client.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # Of a client that was killed
            super().handle_error(request, client_address)


_HOP = {"content-length", "transfer-encoding", "connection", "host", "expect"}
_DECODED = _HOP | {"content-encoding"}
