"""A typed client of the HTTP API: the same records that the store has, over the network.

    with Client("http://127.0.0.1:8400") as client:
        experiment = client.submit(Path("spec.yaml").read_bytes())
        for message in client.follow(experiment.id):
            ...

What can be repeated safely is repeated when the network or the database falters; a submission is
safe because it carries an idempotency key. Everything else that the server refuses is an
`ApiError` with its stable type.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson
from pydantic import TypeAdapter, ValidationError

from service.answers import (
    Cluster,
    Ended,
    Experiment,
    ExperimentChanged,
    ExperimentDetail,
    ExperimentPage,
    Happened,
    HardwareEntry,
    NewLine,
    NewPoints,
    NewSeries,
    Node,
    Preview,
    Queue,
    QueueEntry,
    RunChanged,
    RunEnded,
    RunPage,
    Series,
    Totals,
    Validated,
    Waiting,
)
from service.document import Problem
from service.preview import PlannedRun
from service.records import Attempt, Event, LogLine, MeasurementRow, Run
from service.settings import Settings
from service.states import TERMINAL_EXPERIMENT_STATES

__all__ = [
    "ApiError",
    "Attempt",
    "Client",
    "ClientError",
    "Cluster",
    "Ended",
    "Event",
    "Experiment",
    "ExperimentChanged",
    "ExperimentDetail",
    "ExperimentPage",
    "Happened",
    "HardwareEntry",
    "LogLine",
    "MeasurementRow",
    "NewLine",
    "NewPoints",
    "NewSeries",
    "Node",
    "PlannedRun",
    "Preview",
    "Queue",
    "QueueEntry",
    "Run",
    "RunChanged",
    "RunEnded",
    "RunPage",
    "Series",
    "Totals",
    "Unreachable",
    "Validated",
    "Waiting",
]

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


@dataclass(frozen=True, slots=True)
class _Latest:
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class _RunPayload:
    run: Run
    latest: dict[str, _Latest]


@dataclass(frozen=True, slots=True)
class _Items:
    items: list[Any]


@dataclass(frozen=True, slots=True)
class _Points:
    series: dict[str, Series]


@dataclass(frozen=True, slots=True)
class _Summary:
    values: dict[str, float | int | str | None]


class Client:
    """One connection pool to one server; thread-safe.

    Args:
        url: base URL of the API.
        token: what the server asks for; None = it asks for nothing.
        timeout_s: longest wait for an answer.
        attempts: how often a call that can be repeated is tried.
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
    def from_settings(cls, settings: Settings) -> Self:
        """The client of the server that the settings name."""
        token = settings.token.get_secret_value() if settings.token else None
        return cls(str(settings.url), token=token)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # -- Experiments -----------------------------------------------------------------------

    def submit(
        self, text: str | bytes, *, idempotency_key: str | None = None, owner: str | None = None
    ) -> Experiment:
        """Submit a spec, YAML or JSON; repeated safely until the server has answered.

        Args:
            text: the spec.
            idempotency_key: submitting again under it answers the same experiment; None = a new one.
            owner: name to submit under; a server with a token takes none.

        Raises:
            ApiError: the spec is refused; `errors` names each field.
            Unreachable: nobody answered.
        """
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if owner is not None:
            headers["Stillhouse-Owner"] = owner
        answer = self._call("POST", "/api/v1/experiments", repeat=True, content=_bytes(text), headers=headers)
        return _read(Experiment, answer)

    def experiments(
        self,
        *,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 50,
        page_token: str | None = None,
    ) -> ExperimentPage:
        """One page of experiments, the newest first unless `order_by` says otherwise."""
        return self._get(ExperimentPage, "/experiments", filter, order_by, page_size, page_token)

    def all_experiments(
        self, *, filter: str | None = None, order_by: str | None = None
    ) -> Iterator[Experiment]:
        """All experiments, page by page as they are read."""
        token: str | None = None
        while True:
            page = self.experiments(filter=filter, order_by=order_by, page_size=1000, page_token=token)
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def experiment(self, id: int) -> ExperimentDetail:
        """One experiment with its totals and its place in the queue."""
        return self._get(ExperimentDetail, f"/experiments/{id}")

    def spec(self, id: int, form: Literal["submitted", "canonical"] = "submitted") -> str:
        """The spec's text as submitted, or its canonical JSON."""
        answer = self._call("GET", f"/api/v1/experiments/{id}/spec", repeat=True, params={"form": form})
        return answer.decode()

    def cancel(self, id: int) -> ExperimentDetail:
        """Ask for an experiment's end; one that has ended is answered as it is."""
        return self._steer(f"/experiments/{id}/cancel", repeat=True)

    def pause(self, id: int) -> ExperimentDetail:
        """Hold an experiment."""
        return self._steer(f"/experiments/{id}/pause", repeat=True)

    def resume(self, id: int) -> ExperimentDetail:
        """Let a paused experiment go on."""
        return self._steer(f"/experiments/{id}/resume", repeat=True)

    def retry(self, id: int) -> ExperimentDetail:
        """Queue an ended experiment's runs without a result again."""
        return self._steer(f"/experiments/{id}/retry", repeat=False)

    def set_priority(self, id: int, priority: int) -> ExperimentDetail:
        """Move an experiment among what waits; 0 to 100, higher goes first."""
        answer = self._call(
            "PUT", f"/api/v1/experiments/{id}/priority", repeat=True, json={"priority": priority}
        )
        return _read(ExperimentDetail, answer)

    def delete(self, id: int) -> None:
        """Delete an experiment that has ended."""
        self._call("DELETE", f"/api/v1/experiments/{id}", repeat=False)

    def events(self, id: int, *, after: int = 0, limit: int = 500) -> list[Event]:
        """What happened to an experiment after event number `after`."""
        return self._items(Event, f"/experiments/{id}/events", {"after": after, "limit": limit})

    def follow(
        self, id: int, *, after: int = 0
    ) -> Iterator[Happened | RunChanged | ExperimentChanged | Ended]:
        """What happens to an experiment until it ends, across reconnects; no event is left out.

        Args:
            id: the experiment.
            after: number of the last event that the caller has seen.

        Raises:
            ApiError: there is no such experiment.
            Unreachable: the server stayed away.
        """
        for kind, payload in self._stream(f"/api/v1/experiments/{id}/stream", str(after) if after else None):
            if kind == "event":
                yield Happened(_read(Event, payload))
            elif kind == "run":
                yield _run_changed(payload)
            elif kind == "experiment":
                yield ExperimentChanged(_read(Experiment, payload))
            elif kind == "end":
                yield Ended(_read(Experiment, payload))

    def wait(self, id: int, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Wait until an experiment has ended.

        Raises:
            TimeoutError: it had not ended after `timeout_s`.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (experiment := self.experiment(id)).state not in TERMINAL_EXPERIMENT_STATES:
            if until is not None and time.monotonic() + every_s > until:
                raise TimeoutError(f"experiment {id} is {experiment.state} after {timeout_s:g} s")
            self._sleep(every_s)
        return experiment

    def export(
        self,
        path: Path,
        *,
        experiment_id: int | None = None,
        format: Literal["csv", "parquet", "jsonl"] = "csv",
        filter: str | None = None,
        order_by: str | None = None,
    ) -> None:
        """Write runs as a table to a file; nothing is left of it when the answer breaks off.

        Args:
            path: where to write.
            experiment_id: runs of this experiment; None = all.
            format: how the table is written.
            filter: conditions in MLflow's grammar.
            order_by: order of the rows.
        """
        with path.open("wb") as file:
            try:
                for chunk in self.export_chunks(
                    experiment_id, format=format, filter=filter, order_by=order_by
                ):
                    file.write(chunk)
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    def export_chunks(
        self,
        experiment_id: int | None = None,
        *,
        format: Literal["csv", "parquet", "jsonl"] = "csv",
        filter: str | None = None,
        order_by: str | None = None,
    ) -> Iterator[bytes]:
        """A table of runs as it comes."""
        place = "/runs/export" if experiment_id is None else f"/experiments/{experiment_id}/export"
        params = _given(format=format, filter=filter, order_by=order_by)
        with (
            _reading(self.url),
            self._http.stream("GET", f"/api/v1{place}", params=params) as answer,
        ):
            if answer.status_code != 200:
                raise _api_error(answer.status_code, answer.read())
            yield from answer.iter_bytes()

    # -- Runs ------------------------------------------------------------------------------

    def runs(
        self,
        *,
        experiment_id: int | None = None,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 100,
        page_token: str | None = None,
    ) -> RunPage:
        """One page of runs: of one experiment in grid order, or of all, the newest first."""
        place = "/runs" if experiment_id is None else f"/experiments/{experiment_id}/runs"
        return self._get(RunPage, place, filter, order_by, page_size, page_token)

    def all_runs(
        self, *, experiment_id: int | None = None, filter: str | None = None, order_by: str | None = None
    ) -> Iterator[Run]:
        """All runs, page by page as they are read."""
        token: str | None = None
        while True:
            page = self.runs(
                experiment_id=experiment_id,
                filter=filter,
                order_by=order_by,
                page_size=1000,
                page_token=token,
            )
            yield from page.items
            if (token := page.next_page_token) is None:
                return

    def run(self, id: int) -> Run:
        """One run."""
        return self._get(Run, f"/runs/{id}")

    def cancel_run(self, id: int) -> Run:
        """Ask for a run's end; one that has ended is answered as it is."""
        return _read(Run, self._call("POST", f"/api/v1/runs/{id}/cancel", repeat=True))

    def retry_run(self, id: int) -> Run:
        """Queue a run without a result again."""
        return _read(Run, self._call("POST", f"/api/v1/runs/{id}/retry", repeat=False))

    def points(
        self,
        id: int,
        names: Sequence[str] = (),
        *,
        min_step: int | None = None,
        max_step: int | None = None,
        max_points: int | None = None,
    ) -> dict[str, Series]:
        """Points of a run by metric; with `max_points`, each bucket's least and greatest."""
        params = _given(name=list(names) or None, min_step=min_step, max_step=max_step, max_points=max_points)
        return _read(
            _Points, self._call("GET", f"/api/v1/runs/{id}/points", repeat=True, params=params)
        ).series

    def measurements(self, id: int) -> list[MeasurementRow]:
        """Quantities of a run with unit and provenance."""
        return self._items(MeasurementRow, f"/runs/{id}/measurements", {})

    def summary(self, id: int) -> dict[str, float | int | str | None]:
        """Everything that a run reported as a whole; empty until it ends."""
        return self._get(_Summary, f"/runs/{id}/summary").values

    def attempts(self, id: int) -> list[Attempt]:
        """Each try at a run, the first one first."""
        return self._items(Attempt, f"/runs/{id}/attempts", {})

    def logs(
        self, id: int, *, after: int | None = None, limit: int = 1000, attempt: int | None = None
    ) -> list[LogLine]:
        """Lines of a run's log after the line whose `cursor` is `after`."""
        return self._items(LogLine, f"/runs/{id}/logs", _given(after=after, limit=limit, attempt=attempt))

    def follow_run(self, id: int) -> Iterator[RunChanged | NewPoints | NewLine | RunEnded]:
        """A run's points and log lines until it ends, across reconnects.

        Raises:
            ApiError: there is no such run.
            Unreachable: the server stayed away.
        """
        for kind, payload in self._stream(f"/api/v1/runs/{id}/stream", None):
            if kind == "run":
                yield _run_changed(payload)
            elif kind == "points":
                yield NewPoints(_adapter(dict[str, NewSeries]).validate_json(payload))
            elif kind == "log":
                yield NewLine(_read(LogLine, payload))
            elif kind == "end":
                yield RunEnded(_run_changed(payload).run)

    # -- Specs, queue, cluster ---------------------------------------------------------------

    def validate(self, text: str | bytes) -> Validated:
        """Every check of a submission; nothing is stored.

        Raises:
            ApiError: the spec is refused; `errors` names each field.
        """
        return _read(
            Validated, self._call("POST", "/api/v1/specs/validate", repeat=True, content=_bytes(text))
        )

    def preview(self, text: str | bytes, *, limit: int = 100) -> Preview:
        """The first `limit` runs that a spec would make.

        Raises:
            ApiError: the spec is refused; `errors` names each field.
        """
        items: list[PlannedRun] = []
        token: str | None = None
        while True:
            params = _given(page_size=min(1000, limit - len(items)), page_token=token)
            answer = self._call(
                "POST", "/api/v1/specs/preview", repeat=True, content=_bytes(text), params=params
            )
            page = _read(Preview, answer)
            items += page.items
            token = page.next_page_token
            if token is None or len(items) >= limit:
                return Preview(page.run_count, page.cluster_age_s, items, token)

    def spec_schema(self) -> dict[str, Any]:
        """The JSON Schema of a spec."""
        schema: dict[str, Any] = orjson.loads(self._call("GET", "/api/v1/spec.schema.json", repeat=True))
        return schema

    def queue(self) -> Queue:
        """Everything that waits and why."""
        return self._get(Queue, "/queue")

    def hardware(self) -> list[HardwareEntry]:
        """The hardware catalogue."""
        return self._items(HardwareEntry, "/hardware", {})

    def cluster(self) -> Cluster:
        """The Ray cluster as the scheduler last saw it."""
        return self._get(Cluster, "/cluster")

    def healthy(self) -> bool:
        """Whether the server answers, tried once."""
        try:
            return self._http.get("/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    # -- The wire ----------------------------------------------------------------------------

    def _get(
        self,
        kind: type[T],
        place: str,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int | None = None,
        page_token: str | None = None,
    ) -> T:
        params = _given(filter=filter, order_by=order_by, page_size=page_size, page_token=page_token)
        return _read(kind, self._call("GET", f"/api/v1{place}", repeat=True, params=params))

    def _items(self, kind: type[T], place: str, params: Mapping[str, Any]) -> list[T]:
        answer = self._call("GET", f"/api/v1{place}", repeat=True, params=dict(params))
        adapter = _adapter(kind)
        return [adapter.validate_python(item) for item in _read(_Items, answer).items]

    def _steer(self, place: str, *, repeat: bool) -> ExperimentDetail:
        return _read(ExperimentDetail, self._call("POST", f"/api/v1{place}", repeat=repeat))

    def _call(self, method: str, path: str, *, repeat: bool, **arguments: Any) -> bytes:
        """Send a request, again when that is safe and could help; the answer's body.

        A 503 changed nothing, and a connection that was not made sent nothing: those are repeated
        whatever the call. An answer that never came is repeated only with `repeat`.
        """
        for attempt in range(1, self._attempts + 1):
            last = attempt == self._attempts
            try:
                answer = self._http.request(method, path, **arguments)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                if last:
                    raise Unreachable(f"nobody answers at {self.url} ({_reason(error)})") from None
                delay_s = _backoff_s(attempt)
            except httpx.TransportError as error:
                if last or not repeat:
                    raise Unreachable(f"{self.url} broke off ({_reason(error)})") from None
                delay_s = _backoff_s(attempt)
            else:
                if answer.status_code < 400:
                    return answer.content
                if answer.status_code != 503 or last:
                    raise _api_error(answer.status_code, answer.content)
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
                        raise _api_error(answer.status_code, answer.read())
                    for name, id, payload in _events(answer.iter_lines()):
                        failures = 0
                        last_id = id or last_id
                        yield name, payload
                        if name == "end":
                            return
            except httpx.TransportError as error:
                failures += 1
                if failures >= self._attempts:
                    raise Unreachable(f"{self.url} broke off ({_reason(error)})") from None
            self._sleep(_backoff_s(max(1, failures)))


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str | None, bytes]]:
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


_ADAPTERS: dict[Any, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    """What turns JSON into a record; made once per kind."""
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def _read(kind: type[T], answer: bytes) -> T:
    try:
        value: T = _adapter(kind).validate_json(answer)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ClientError(
            f"the server's answer is not understood ({place}: {first['msg']}); "
            "are client and server of the same version?"
        ) from None
    return value


def _run_changed(payload: bytes) -> RunChanged:
    read = _read(_RunPayload, payload)
    return RunChanged(read.run, {name: point.value for name, point in read.latest.items()})


def _api_error(status: int, content: bytes) -> ApiError:
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
    return ApiError(slug, status, str(problem.get("detail", f"the server answered {status}")), errors)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def _given(**parameters: Any) -> dict[str, Any]:
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
def _reading(url: str) -> Iterator[None]:
    """Turn what the network raises while an answer is read into `Unreachable`."""
    try:
        yield
    except httpx.TransportError as error:
        raise Unreachable(f"{url} broke off ({_reason(error)})") from None
