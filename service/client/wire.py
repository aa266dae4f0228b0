"""HTTP to one server: requests that are repeated when that is safe, downloads and live streams.

What can be repeated safely is repeated when the network or the database falters. Everything else
that the server refuses is an `ApiError` with its stable type.
"""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, Generic, Self, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import httpx
import orjson
from pydantic import ValidationError

from service.client.credentials import load, token_for
from service.config.document import Problem
from service.config.settings import Settings
from service.domain.records import Items
from service.domain.serialization import adapter

T = TypeVar("T")
_ATTEMPTS = 5
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 8.0
_STREAM_SILENCE_S = 45.0
"""A live stream that is silent for this long is dead: the server sends something every 15 s."""


class ClientError(Exception):
    """Base of the client's errors; the message is one line."""


class Unreachable(ClientError):
    """The server cannot be reached, or the connection broke."""


class ApiError(ClientError):
    """The server refused: `type` is the problem's slug (see `docs/errors.md`), `errors` the wrong fields."""

    def __init__(self, type: str, status: int, detail: str, errors: tuple[Problem, ...] = ()) -> None:
        self.type = type
        self.status = status
        self.detail = detail
        self.errors = errors
        super().__init__(detail)


class Operation(Generic[T]):
    """An operation of the API as a method of a `Wire`.

    Its arguments: values for the placeholders of the path, then for `fields`, in order; all others by
    keyword. They become the JSON body of a PUT, PATCH or POST, and otherwise query parameters.

    Args:
        kind: type of the answer: a record, a list of records, `str` or `bytes` for the body as it is.
        operation: method and path below `/api/v1`, such as `GET /runs/{id}`.
        fields: names of parameters that can be given by position.
        repeat: whether it is safe to send again after an answer that was lost; None = unless a POST.
        in_query: send the parameters in the query in any case.
    """

    def __init__(
        self, kind: type[T], operation: str, *fields: str, repeat: bool | None = None, in_query: bool = False
    ) -> None:
        self.kind = kind
        self.method, self.path = operation.split(" ")
        self.names = (*re.findall(r"{(\w+)}", self.path), *fields)
        self.repeat = self.method != "POST" if repeat is None else repeat
        self.in_query = in_query or self.method in ("GET", "DELETE")

    def __get__(self, wire: Wire, owner: type | None = None) -> Callable[..., T]:
        return functools.partial(wire.call, self)


class Wire:
    """One connection pool to one server; thread-safe.

    Args:
        url: where the server is; unset = `STILLHOUSE_URL`.
        token: unset = that of a stored login, or of `STILLHOUSE_TOKEN` where `url` is unset too.
        transport: instead of the network, in tests.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        attempts: int = _ATTEMPTS,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if url is None:
            settings = Settings()
            url, token = str(settings.url), token or token_for(settings)
        elif token is None and (login := load(url)) is not None:
            token = login.token
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._sleep = sleep
        host = (urlsplit(self.url).hostname or "").lower()
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # No proxy stands between a process and its own machine.
            trust_env=host not in ("localhost", "127.0.0.1", "::1"),
            transport=transport,
        )

    @classmethod
    def from_settings(cls, settings: Settings, *, attempts: int = _ATTEMPTS) -> Self:
        """Connects to the server of the settings, with their token or the one kept by a login."""
        return cls(str(settings.url), token=token_for(settings), attempts=attempts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, operation: Operation[T], /, *values: Any, **parameters: Any) -> T:
        """Sends an operation's request and reads the answer; parameters that are None are left out."""
        given = dict(zip(operation.names, values, strict=len(values) > len(operation.names))) | parameters
        if "{ids}" in operation.path and not isinstance(given["ids"], int):
            given["ids"], *given["also"] = given["ids"]  # A question about several experiments.
        path = "/api/v1" + re.sub(r"{(\w+)}", lambda name: str(given.pop(name[1])), operation.path)
        fields = {name: value for name, value in given.items() if value is not None}
        query = {name: _written(value) for name, value in fields.items()} if operation.in_query else None
        body = None if operation.in_query or (operation.method == "POST" and not fields) else fields
        answer = self._send(operation.method, path, repeat=operation.repeat, params=query, json=body)
        return read(operation.kind, answer)

    def _send(self, method: str, path: str, *, repeat: bool, **arguments: Any) -> bytes:
        """Sends a request, again when that is safe and could help; returns the answer's body.

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

    @contextmanager
    def _download(self, path: str, **parameters: Any) -> Iterator[Iterator[bytes]]:
        query = {name: value for name, value in parameters.items() if value is not None}
        try:
            with self._http.stream("GET", f"/api/v1{path}", params=query) as answer:
                if answer.status_code != 200:
                    raise api_error(answer.status_code, answer.read())
                yield answer.iter_bytes()
        except httpx.TransportError as error:
            raise Unreachable(f"lost the connection to {self.url} ({_reason(error)})") from None

    def _stream(self, path: str, last_id: str | None) -> Iterator[tuple[str, bytes]]:
        """Yields a live stream's events as (name, payload); reconnects after the last id until `end`."""
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
    """Reads the JSON of an answer into a record, or into a list where the answer wraps one in `items`."""
    value: Any
    try:
        if kind is bytes:
            value = answer
        elif kind is str:
            value = answer.decode()
        elif kind is NoneType:
            value = None
        elif get_origin(kind) is list:
            value = adapter(Items[get_args(kind)[0]]).validate_json(answer).items  # type: ignore[misc]
        else:
            value = adapter(kind).validate_json(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ClientError(
            f"unexpected response from the server ({place}: {first['msg']}); check that client and server "
            "have the same version"
        ) from None
    result: T = value
    return result


def api_error(status: int, content: bytes) -> ApiError:
    """Returns the problem in an answer, which may come from something else than the API, such as a proxy."""
    problem: dict[str, Any] = {}
    with suppress(orjson.JSONDecodeError):
        decoded = orjson.loads(content)
        problem = decoded if isinstance(decoded, dict) else {}
    slug = str(problem.get("type", "")).rsplit("/", 1)[-1] or "not-a-problem-document"
    errors = tuple(
        Problem(str(entry.get("type", "")), str(entry.get("path", "")), str(entry.get("message", "")))
        for entry in problem.get("errors") or ()
    )
    return ApiError(slug, status, str(problem.get("detail", f"the server returned {status}")), errors)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a file that takes the place of an earlier one when all of it is written."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _written(value: Any) -> Any:
    """Writes figures by name as `name=value`, one parameter each."""
    return [f"{name}={figure!r}" for name, figure in value.items()] if isinstance(value, Mapping) else value


def _backoff_s(attempt: int) -> float:
    # With jitter, so that many clients do not come back at once.
    delay = min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (attempt - 1))
    return delay * random.uniform(0.5, 1.0)


def _retry_after_s(answer: httpx.Response) -> float:
    value = answer.headers.get("Retry-After", "")
    return min(30.0, float(value)) if value.isdigit() else 0.0


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
