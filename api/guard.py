"""What every request passes before it is routed: Host, Origin, size and encoding, then headers and metrics.

Plain ASGI, because it is on the path of every request and must not buffer streams.
"""

import logging
import re
import time
import uuid
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.metrics import RequestMetrics
from api.problems import ProblemError, respond
from service.config.document import MAX_BYTES
from service.config.logs import about
from service.config.settings import Settings

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_HEAD_BYTES = 64 * 1024  # Most bytes in the names and values of a request's headers
REQUEST_ID = "X-Request-ID"  # The client's id of the request, or a new one; logs and problems carry it
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
_WILDCARDS = frozenset({"0.0.0.0", "::", ""})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors "
)
"""Of the page, up to who may show it in a frame."""
SECURITY_HEADERS = (
    ("content-security-policy", f"{CONTENT_SECURITY_POLICY}'none'"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
)


class Guard:
    """Numbers requests, refuses foreign Host and Origin headers, adds security headers and counts."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics
        # None = any: a server on every address cannot know its names, but has a token, which no rebound page
        # can send.
        own = {settings.host.lower(), (settings.url.host or "").strip("[]").lower()}
        self._hosts = None if settings.host in _WILDCARDS else LOOPBACK_NAMES | own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        # Kept in the scope as well, for the handler of unforeseen errors, which is outside of the guard.
        request_id = scope["request_id"] = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        with about(request_id=request_id):
            await self._guarded(scope, receive, send, request_id)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        started = time.perf_counter()
        status = 500

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS:
                    headers.setdefault(name, value)
                headers[REQUEST_ID] = request_id
            await send(message)

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send_with_headers(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > MAX_BYTES:
                    # Counted as it streams: Content-Length may be missing or lie.
                    raise HTTPException(413, headers={"Connection": "close"})
            return message

        head = scope["method"] == "HEAD"
        routed = {**scope, "method": "GET"} if head else scope
        try:
            refusal = self._refusal(scope)
            app = self._app if refusal is None else respond(refusal, scope["path"])
            await app(routed, receive_limited, send_head if head else send_with_headers)
        finally:
            elapsed_s = time.perf_counter() - started
            self._metrics.observe(scope["method"], routed.get("route"), status, elapsed_s)
            if status >= 500 or scope["method"] not in SAFE_METHODS:
                logger.info("%s %s: %d in %.4f s", scope["method"], scope["path"], status, elapsed_s)

    def _refusal(self, scope: Scope) -> ProblemError | None:
        headers = Headers(scope=scope)
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            return ProblemError(
                "headers-too-large",
                f"the headers have more than {MAX_HEAD_BYTES:,} bytes; leave some out",
                headers={"Connection": "close"},
            )
        if len(headers.getlist("host")) > 1:
            return ProblemError("malformed-request", "the request has several Host headers; send one")
        authority = headers.get("host", "")
        if self._hosts is not None and _host(authority) not in self._hosts:
            return ProblemError(
                "unknown-host",
                f"{authority!r} is not a name of this server; use 127.0.0.1 or localhost, "
                "or set STILLHOUSE_URL to the name in use",
            )
        origin = headers.get("origin")
        changes = scope["method"] not in SAFE_METHODS
        if origin is not None and changes and _netloc(origin) != authority.lower():
            return ProblemError(
                "cross-origin",
                f"a page from {origin!r} may not change anything here; use this server's own page",
            )
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            return ProblemError(
                "unsupported-encoding",
                f"Content-Encoding {encoding[:100]!r} is not supported; send the body as it is",
                headers={"Accept-Encoding": "identity"},
            )
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > MAX_BYTES:
            return ProblemError(
                "body-too-large",
                f"the body has {length[:20]} bytes, more than the limit of {MAX_BYTES:,}; refer to data "
                "by path",
                headers={"Connection": "close"},
            )
        return None


def _netloc(origin: str) -> str | None:
    """None for an Origin without a host, as a sandboxed page sends."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _host(authority: str) -> str:
    try:
        return (urlsplit("//" + authority).hostname or "").lower()
    except ValueError:
        return ""


def takes_gzip(accepted: str) -> bool:
    for part in accepted.split(","):
        name, _, weight = part.strip().partition(";")
        if name.strip().lower() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
