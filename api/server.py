"""Serve the application with uvicorn, on loopback unless a token guards it."""

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from api.access import MIN_TOKEN_LENGTH
from api.app import create_app
from api.guard import MAX_HEAD_BYTES, SECURITY_HEADERS
from api.login import refuse_invalid
from api.problems import ProblemError, respond
from service.config.document import MAX_BYTES
from service.config.examples import keep_demo_texts
from service.config.process import freeze_loaded
from service.config.settings import Settings

MAX_REQUEST_BYTES = 8 * MAX_BYTES
"""Most bytes of one request as sent: a body in chunks of one byte is six times as long as what it holds."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose client can neither fill the memory nor hold it open in silence."""

    head_timeout_s = 20.0  # Longest wait for a first request, and for the headers of one that has begun
    body_timeout_s = 60.0  # Longest time from the headers of a request to the end of its body
    stalled_timeout_s = 30.0  # Longest time that a client takes nothing of an answer; a stream can be resumed

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._began = self._in_head = False
        self._received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_at_most(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self._began:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._wait_at_most(self.head_timeout_s)  # Empty lines between two requests.
            return
        self._received += len(data)
        if self._in_head and self._received > MAX_HEAD_BYTES:
            detail = f"the headers have more than {MAX_HEAD_BYTES:,} bytes"
            self._refuse(ProblemError("headers-too-large", detail))
        elif self._received > MAX_REQUEST_BYTES:
            self._refuse(ProblemError("body-too-large", f"the body exceeds {MAX_BYTES:,} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began = self._in_head = True
        self._received = 0
        self._wait_at_most(self.head_timeout_s)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._wait_at_most(self.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._began = False
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.stalled_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ProblemError("malformed-request", msg))

    def _wait_at_most(self, seconds: float) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if not self._began:
            self.transport.close()
            return
        self._refuse(ProblemError("request-timeout", "the rest of the request did not arrive in time"))

    def _refuse(self, error: ProblemError) -> None:
        """Answers a request that no route will see, and closes the connection."""
        before = self.cycle is not None and not self.cycle.response_complete
        if before and (self._in_head or self.pipeline or self.cycle.response_started):
            self.transport.abort()  # Another answer is on its way; this one has no place.
            return
        answer = respond(error, "/")
        headers = [*answer.raw_headers, (b"connection", b"close")]
        headers += [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS]
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.kind.status], lines, bytes(answer.body)))
        self.transport.close()


_BACKLOG = 512
_SHUTDOWN_S = 3
_IDLE_S = 10  # Longest pause between two requests of a connection; longer than common clients keep one unused


class UnsafeAddress(ValueError):
    """The settings would let others in; the message says what to set."""


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends live streams before it waits for connections to end."""
        application = self.config.loaded_app
        while not hasattr(application, "state") and hasattr(application, "app"):
            application = application.app
        application.state.streams.close()
        await super().shutdown(sockets)


def serve(settings: Settings, *, listener: socket.socket | None = None) -> None:
    """Runs the API in this process until SIGINT or SIGTERM, on the `listener` or the settings' address."""
    refuse_unsafe(settings)
    with contextlib.suppress(OSError):  # The page's first draft reads them.
        keep_demo_texts(settings)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        backlog=_BACKLOG,
        access_log=False,
        log_config=None,
        server_header=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        timeout_keep_alive=_IDLE_S,
        http=BoundedProtocol,
    )
    freeze_loaded()
    _Server(config).run(sockets=[listener] if listener is not None else None)


def refuse_unsafe(settings: Settings) -> None:
    """Raises UnsafeAddress, or ValueError for provider and proxy, in one line that says what to set."""
    token = settings.token.get_secret_value() if settings.token is not None else None
    if token is not None and (
        len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()
    ):
        raise UnsafeAddress(
            f"STILLHOUSE_TOKEN needs {MIN_TOKEN_LENGTH} or more printable ASCII characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    refuse_invalid(settings)
    if not settings.asks_who() and not is_loopback(settings.host):
        raise UnsafeAddress(
            f"refusing to listen on {settings.host} without a token: set STILLHOUSE_TOKEN to "
            f"{MIN_TOKEN_LENGTH} or more random characters, or STILLHOUSE_HOST to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
