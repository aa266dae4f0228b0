"""HTTP connections with bounds that hold before a request is understood, let alone its token checked.

uvicorn leaves these to a proxy. Here they hold without one: how large a request is, how long it takes to
arrive, and how long a client takes nothing of its answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from api.guard import MAX_HEAD_BYTES, SECURITY_HEADERS
from api.problems import ProblemError, respond
from service.config.document import MAX_BYTES

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
