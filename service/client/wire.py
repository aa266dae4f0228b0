"""The wire: requests that are repeated when that is safe, live streams, and what is refused.

What can be repeated safely is repeated when the network or the database falters. Everything else
that the server refuses is an `ApiError` with its stable type.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson
from pydantic import ValidationError

from service.config.document import Problem
from service.config.settings import Settings
from service.domain.records import Items
from service.domain.serialization import adapter

T = TypeVar("T")
TOKEN_HEADER = "Authorization"
_ATTEMPTS = 5
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 8.0
_STREAM_SILENCE_S = 45.0
"""A live stream that says nothing for this long is dead: the server speaks every 15 s."""


class ClientError(Exception):
    """Base of what a call of the client can end with; the message is one line."""


class Unreachable(ClientError):
    """Nobody answers at the server's address, or the answer broke off."""


class ApiError(ClientError):
    """The server refused.

    Attributes:
        type: slug of the problem's type, `unknown-key` for instance; `docs/errors.md` lists them.
        status: HTTP status.
        detail: one line with the fix.
        errors: the fields that are wrong, when fields are.
    """

    def __init__(self, type: str, status: int, detail: str, errors: Sequence[Problem] = ()) -> None:
        self.type = type
        self.status = status
        self.detail = detail
        self.errors = tuple(errors)
        super().__init__(detail)


class Wire:
    """One connection pool to one server; thread-safe.

    Args:
        url: base URL of the API.
        token: Token required by the server; None = none required.
        timeout_s: longest wait for an answer.
        attempts: Number of tries for a repeatable call.
        transport: another way to the server, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = _ATTEMPTS,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = str(url).rstrip("/")
        self._attempts = attempts
        self._sleep = sleep
        host = (urlsplit(self.url).hostname or "").lower()
        self._http = httpx.Client(
            base_url=self.url,
            headers={TOKEN_HEADER: f"Bearer {token}"} if token else None,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # No proxy stands between a process and its own machine.
            trust_env=host not in ("localhost", "127.0.0.1", "::1"),
            transport=transport,
        )

    @classmethod
    def from_settings(cls, settings: Settings, *, attempts: int = _ATTEMPTS) -> Self:
        """The client of the server that the settings name, with their token or the one that a login kept.

        Raises:
            UnsafeCredentials: others may have read the one that was kept.
        """
        from service.client.credentials import token_for

        return cls(str(settings.url), token=token_for(settings), attempts=attempts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def _get(
        self,
        kind: type[T],
        place: str,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int | None = None,
        page_token: str | None = None,
    ) -> T:
        params = given(filter=filter, order_by=order_by, page_size=page_size, page_token=page_token)
        return read(kind, self._call("GET", f"/api/v1{place}", repeat=True, params=params))

    def _items(self, kind: type[T], place: str, params: Mapping[str, Any]) -> list[T]:
        answer = self._call("GET", f"/api/v1{place}", repeat=True, params=dict(params))
        items: list[T] = read(Items[kind], answer).items  # type: ignore[valid-type]
        return items

    def _call(self, method: str, path: str, *, repeat: bool, **arguments: Any) -> bytes:
        """Send a request, again when that is safe and could help; the answer's body.

        A 503 changed nothing, and a connection that was not made sent nothing: those are repeated
        whatever the call. After a 504, or an answer that never came, the change may be stored: the call is
        repeated only with `repeat`.
        """
        for attempt in range(1, self._attempts + 1):
            last = attempt == self._attempts
            try:
                answer = self._http.request(method, path, **arguments)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last:
                    raise Unreachable(f"cannot reach {self.url} ({_reason(error)})") from None
                delay_s = _backoff_s(attempt)
            except httpx.TransportError as error:
                if last or not repeat:
                    raise Unreachable(f"lost the connection to {self.url} ({_reason(error)})") from None
                delay_s = _backoff_s(attempt)
            else:
                if answer.status_code < 400:
                    return answer.content
                if last or not (answer.status_code == 503 or (answer.status_code == 504 and repeat)):
                    raise api_error(answer.status_code, answer.content)
                delay_s = max(_backoff_s(attempt), _retry_after_s(answer))
            self._sleep(delay_s)
        raise AssertionError("the last attempt returns or raises")

    def _stream(self, path: str, last_id: str | None) -> Iterator[tuple[str, bytes]]:
        """Events of a live stream as (name, payload), connecting again after the last id until `end`."""
        failures = 0
        while True:
            headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
            try:
                with self._http.stream(
                    "GET", path, headers=headers, timeout=httpx.Timeout(_STREAM_SILENCE_S, connect=5.0)
                ) as answer:
                    if answer.status_code == 503:
                        raise httpx.RemoteProtocolError("the server is busy")
                    if answer.status_code != 200:
                        raise api_error(answer.status_code, answer.read())
                    for name, id, payload in server_sent(answer.iter_lines()):
                        failures = 0
                        last_id = id or last_id
                        yield name, payload
                        if name == "end":
                            return
            except httpx.TransportError as error:
                failures += 1
                if failures >= self._attempts:
                    raise Unreachable(f"lost the connection to {self.url} ({_reason(error)})") from None
            self._sleep(_backoff_s(max(1, failures)))


def server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str | None, bytes]]:
    """Server-sent events as (name, id, data)."""
    name, id = "message", None
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield name, id, "\n".join(data).encode()
            name, id, data = "message", None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            id = value


def read(kind: type[T], answer: bytes) -> T:
    """An answer's JSON as a record.

    Raises:
        ClientError: it has another form, as between two versions.
    """
    try:
        value: T = adapter(kind).validate_json(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ClientError(
            f"unexpected response from the server ({place}: {first['msg']}); check that client and server "
            "have the same version"
        ) from None
    return value


def api_error(status: int, content: bytes) -> ApiError:
    """The problem in an answer, or one of our own words when something else than the API answered."""
    problem: dict[str, Any] = {}
    with suppress(orjson.JSONDecodeError):
        decoded = orjson.loads(content)
        problem = decoded if isinstance(decoded, dict) else {}
    slug = str(problem.get("type", "")).rsplit("/", 1)[-1] or "not-a-problem-document"
    errors = [
        Problem(str(entry.get("type", "")), str(entry.get("path", "")), str(entry.get("message", "")))
        for entry in problem.get("errors") or ()
    ]
    return ApiError(slug, status, str(problem.get("detail", f"the server returned {status}")), errors)


def encoded(text: str | bytes) -> bytes:
    """A spec as it is sent."""
    return text.encode() if isinstance(text, str) else text


def given(**parameters: Any) -> dict[str, Any]:
    """Query parameters without those that were left out."""
    return {name: value for name, value in parameters.items() if value is not None}


def _backoff_s(attempt: int) -> float:
    """Doubling, with jitter so that many clients do not come back at once."""
    delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (attempt - 1))
    return delay * random.uniform(0.5, 1.0)


def _retry_after_s(answer: httpx.Response) -> float:
    value = answer.headers.get("Retry-After", "")
    return min(30.0, float(value)) if value.isdigit() else 0.0


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Turn what the network raises while an answer is read into `Unreachable`."""
    try:
        yield
    except httpx.TransportError as error:
        raise Unreachable(f"lost the connection to {url} ({_reason(error)})") from None
