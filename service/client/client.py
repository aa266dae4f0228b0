"""The client: the API's operations as methods, and what takes more than one request."""

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar

import httpx
import orjson

from service.analysis import answers
from service.client.results import ExperimentResults
from service.client.wire import ClientError, Operation, T, Unreachable, Wire, api_error, read, whole_file
from service.config.hardware import Hardware
from service.domain.access import Scope
from service.domain.ledger import Account, Ledger
from service.domain.notifications import Delivery, NewSubscription, Subscription
from service.domain.people import AuditPage, AuditRow, NewToken, Project, ProjectDetail, Token, User, Whoami
from service.domain.records import (
    Attempt,
    DeletedExperiment,
    Event,
    ExperimentDetail,
    ExperimentStatus,
    GroupOfRuns,
    LogLine,
    MeasurementRow,
    MetricSeries,
    NewSeries,
    Page,
    Points,
    QueueListing,
    Run,
    RunProgress,
    RunSummary,
)
from service.domain.shares import ProjectUse, Share
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from service.domain.studies import StudyDetail
from service.output.model_archive import unpack
from service.planner.preview import Preview, Validated
from service.scheduling.cluster import Cluster
from service.specs.project_limits import ProjectLimits

P = TypeVar("P", Preview, QueueListing)
_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_SLOWER_S = 5.0  # What each `slow_down` adds to the interval; RFC 8628, section 3.5


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """The last message of a live stream: the experiment or run as it ended."""

    target: T


class LoginRefused(ClientError):
    """The device login ended without a token; the message says why."""

    def __init__(self, message: str, error: str = "unknown") -> None:
        self.error = error
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class DeviceCode:
    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str
    expires_in: float
    interval: float


class Client(Wire):
    """The API of one server; thread-safe.

    The API's reference (`/docs`) describes each operation and its parameters. Everything raises
    `ApiError` where the server refuses, and `Unreachable` where it is not there.
    """

    # Experiments.
    experiments = Operation(Page[ExperimentStatus], "GET /experiments")
    _experiment = Operation(ExperimentDetail, "GET /experiments/{id}")
    ledger = Operation(Ledger, "GET /experiments/{id}/ledger")
    spec = Operation(str, "GET /experiments/{id}/spec", "form")
    events = Operation(list[Event], "GET /experiments/{id}/events")
    cancel = Operation(ExperimentDetail, "POST /experiments/{id}/cancel", repeat=True)
    pause = Operation(ExperimentDetail, "POST /experiments/{id}/pause", repeat=True)
    resume = Operation(ExperimentDetail, "POST /experiments/{id}/resume", repeat=True)
    retry = Operation(ExperimentDetail, "POST /experiments/{id}/retry", in_query=True)
    set_priority = Operation(ExperimentDetail, "PUT /experiments/{id}/priority", "priority")
    delete = Operation(NoneType, "DELETE /experiments/{id}", repeat=False)
    deleted_experiments = Operation(list[DeletedExperiment], "GET /deleted-experiments")
    restore = Operation(ExperimentDetail, "POST /experiments/{id}/restore")
    tag = Operation(ExperimentDetail, "PATCH /experiments/{id}/tags")
    rename = Operation(ExperimentDetail, "PUT /experiments/{id}/name", "name")
    annotate = Operation(ExperimentDetail, "PUT /experiments/{id}/notes", "notes")
    archive = Operation(ExperimentDetail, "PUT /experiments/{id}/archive", "archived")

    # Questions about one experiment, or about several together.
    compare = Operation(answers.ComparisonAnswer, "GET /experiments/{ids}/compare")
    score = Operation(answers.ScoreAnswer, "GET /experiments/{ids}/score")
    frontier = Operation(answers.FrontierAnswer, "GET /experiments/{ids}/frontier")
    effects = Operation(answers.EffectsAnswer, "GET /experiments/{ids}/effects")
    recommend = Operation(answers.Recommendation, "GET /experiments/{ids}/recommend")
    speedup = Operation(answers.SpeedupAnswer, "GET /experiments/{ids}/speedup")
    tasks = Operation(answers.TasksAnswer, "GET /experiments/{ids}/tasks")
    report = Operation(bytes, "GET /experiments/{ids}/report")
    guide = Operation(answers.Guide, "GET /guide")

    # Studies.
    studies = Operation(list[StudyDetail], "GET /studies")
    study = Operation(StudyDetail, "GET /studies/{id}")
    cancel_study = Operation(StudyDetail, "POST /studies/{id}/cancel", repeat=True)

    # Runs.
    run = Operation(Run, "GET /runs/{id}")
    cancel_run = Operation(Run, "POST /runs/{id}/cancel", repeat=True)
    retry_run = Operation(Run, "POST /runs/{id}/retry")
    change_run = Operation(Run, "PATCH /runs/{id}/marks")
    run_groups = Operation(list[GroupOfRuns], "GET /experiments/{id}/runs/groups", "by")
    change_runs = Operation(list[Run], "PATCH /experiments/{id}/runs", "ids")
    cancel_runs = Operation(list[Run], "POST /experiments/{id}/runs/cancel", "ids", repeat=True)
    retry_runs = Operation(list[Run], "POST /experiments/{id}/runs/retry", "ids")
    continue_run = Operation(ExperimentStatus, "POST /runs/{id}/continue")
    retrain_run = Operation(ExperimentStatus, "POST /runs/{id}/retrain", "on")
    measurements = Operation(list[MeasurementRow], "GET /runs/{id}/measurements")
    account = Operation(Account, "GET /runs/{id}/ledger")
    attempts = Operation(list[Attempt], "GET /runs/{id}/attempts")
    logs = Operation(list[LogLine], "GET /runs/{id}/logs")
    trace = Operation(bytes, "GET /runs/{id}/trace")
    kernel_trace = Operation(bytes, "GET /runs/{id}/trace/kernels", "rank")
    _all_runs = Operation(Page[Run], "GET /runs")
    _runs_of = Operation(Page[Run], "GET /experiments/{id}/runs")
    _points = Operation(Points, "GET /runs/{id}/points", "name")
    run_config = Operation(str, "GET /runs/{id}/config")
    _summary = Operation(RunSummary, "GET /runs/{id}/summary")

    # The installation.
    hardware = Operation(list[Hardware], "GET /hardware")
    cluster = Operation(Cluster, "GET /cluster")
    shares = Operation(list[Share], "GET /shares")
    whoami = Operation(Whoami, "GET /whoami")
    _queue = Operation(QueueListing, "GET /queue")

    # People.
    users = Operation(list[User], "GET /users")
    add_user = Operation(User, "POST /users", "name")
    change_user = Operation(User, "PATCH /users/{name}")
    tokens = Operation(list[Token], "GET /tokens")
    create_token = Operation(NewToken, "POST /tokens", "name")
    revoke_token = Operation(Token, "DELETE /tokens/{id}")
    projects = Operation(list[Project], "GET /projects")
    project = Operation(ProjectDetail, "GET /projects/{name}")
    create_project = Operation(ProjectDetail, "POST /projects", "name")
    change_project = Operation(ProjectDetail, "PATCH /projects/{name}")
    archive_project = Operation(ProjectDetail, "PUT /projects/{name}/archive", "archived")
    project_limits = Operation(ProjectLimits, "GET /projects/{name}/limits")
    set_project_limits = Operation(ProjectLimits, "PUT /projects/{name}/limits")
    project_use = Operation(ProjectUse, "GET /projects/{name}/usage", "month")
    set_member = Operation(ProjectDetail, "PUT /projects/{name}/members/{user}", "role")
    remove_member = Operation(ProjectDetail, "DELETE /projects/{name}/members/{user}", repeat=False)
    _audit = Operation(AuditPage, "GET /audit")

    # Notifications.
    subscriptions = Operation(list[Subscription], "GET /subscriptions")
    subscribe = Operation(NewSubscription, "POST /subscriptions", "channel", "target", "topics")
    unsubscribe = Operation(NoneType, "DELETE /subscriptions/{id}")
    pause_subscription = Operation(Subscription, "PUT /subscriptions/{id}/paused", "paused")
    test_subscription = Operation(Delivery, "POST /subscriptions/{id}/test")
    deliveries = Operation(list[Delivery], "GET /deliveries")

    # -- Specs -------------------------------------------------------------------------------------

    def submit(
        self, text: str | bytes, *, idempotency_key: str | None = None, owner: str | None = None
    ) -> ExperimentStatus:
        """Submits a spec, YAML or JSON; repeated safely until the server has answered.

        A second submission under the same key returns the same experiment. With a token, only an
        administrator may name another owner.
        """
        return self._submit(ExperimentStatus, "/experiments", text, idempotency_key, owner)

    def submit_study(
        self, text: str | bytes, *, idempotency_key: str | None = None, owner: str | None = None
    ) -> StudyDetail:
        """Submits a study as `submit` does a spec."""
        return self._submit(StudyDetail, "/studies", text, idempotency_key, owner)

    def _submit(
        self, kind: type[T], path: str, text: str | bytes, idempotency_key: str | None, owner: str | None
    ) -> T:
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        if owner is not None:
            headers["Stillhouse-Owner"] = owner
        return self._send_spec(kind, path, text, headers=headers)

    def validate(self, text: str | bytes) -> Validated:
        """Checks a spec as a submission does, and stores nothing."""
        return self._send_spec(Validated, "/specs/validate", text)

    def preview(self, text: str | bytes, *, limit: int = 100, find_runs: bool = True) -> Preview:
        """Returns the first `limit` runs that a spec would create.

        With `find_runs` False the numbers of runs that it starts from stand for others.
        """
        more = {} if find_runs else {"find_runs": False}
        pages = _first_pages(
            lambda **page: self._send_spec(Preview, "/specs/preview", text, params={**page, **more}), limit
        )
        return replace(
            pages[-1],
            items=[run for page in pages for run in page.items],
            forecast=pages[0].forecast,
            notes=pages[0].notes,
        )

    def _send_spec(self, kind: type[T], path: str, text: str | bytes, **more: Any) -> T:
        return read(kind, self._send("POST", f"/api/v1{path}", repeat=True, content=text, **more))

    def experiment(self, id: int) -> ExperimentResults:
        return ExperimentResults.from_detail(self._experiment(id), self)

    # -- Lists -------------------------------------------------------------------------------------

    def runs(self, *, experiment_id: int | None = None, **parameters: Any) -> Page[Run]:
        """Returns one page of runs: of one experiment in grid order, or of all, the newest first."""
        if experiment_id is None:
            return self._all_runs(**parameters)
        return self._runs_of(experiment_id, **parameters)

    def all_runs(self, **parameters: Any) -> Iterator[Run]:
        yield from _pages(self.runs, **parameters)

    def all_experiments(self, **parameters: Any) -> Iterator[ExperimentStatus]:
        yield from _pages(self.experiments, **parameters)

    def queue(self, *, limit: int = 1000) -> QueueListing:
        """Returns the first `limit` waiting experiments with the reason, and runs waiting for capacity."""
        pages = _first_pages(self._queue, limit)
        return replace(
            pages[-1],
            items=[entry for page in pages for entry in page.items],
            at_work=[each for page in pages for each in page.at_work],
        )

    def audit(self, **chosen: Any) -> Iterator[AuditRow]:
        """Yields the rows of the audit log that the parameters of `GET /audit` select."""
        after: int | None = 0
        while after is not None:
            page = self._audit(after=after, limit=1000, **chosen)
            yield from page.items
            after = page.next_after

    # -- Figures -----------------------------------------------------------------------------------

    def points(self, id: int, **parameters: Any) -> dict[str, MetricSeries]:
        """Returns a run's points by metric; a long series is sampled to about `max_points`."""
        return self._points(id, **parameters).series

    def all_points(self, id: int, name: str) -> Iterator[MetricSeries]:
        """Yields every point of a metric, page by page as they are read."""
        step: int | None = 0
        while step is not None:
            page = self._points(id, name, exact=True, min_step=step, max_points=10_000)
            yield from page.series.values()
            step = page.next_step

    def summary(self, id: int) -> dict[str, float | int | str | None]:
        """Returns the figures of a whole run; empty until it ends."""
        return self._summary(id).values

    # -- Files -------------------------------------------------------------------------------------

    def export_chunks(
        self,
        experiment_id: int | None = None,
        *,
        format: Literal["csv", "parquet", "jsonl"] = "csv",
        **parameters: Any,
    ) -> Iterator[bytes]:
        """Yields a table of the runs of an experiment, or of all, as it arrives."""
        path = "/runs/export" if experiment_id is None else f"/experiments/{experiment_id}/export"
        with self._download(path, format=format, **parameters) as chunks:
            yield from chunks

    def export_audit(self, format: Literal["jsonl", "csv"], **chosen: Any) -> Iterator[bytes]:
        with self._download("/audit/export", format=format, **chosen) as chunks:
            yield from chunks

    def predictions(self, id: int, file: Path, *, format: Literal["parquet", "jsonl"] = "parquet") -> int:
        """Writes the predictions of a run's test part to a file; returns its size in bytes."""
        with self._download(f"/runs/{id}/predictions", format=format) as chunks, whole_file(file) as stream:
            return sum(map(stream.write, chunks))

    def export_model(
        self, id: int, folder: Path, *, checkpoint: Literal["best", "last"] = "best"
    ) -> dict[str, Any]:
        """Writes a run's model, verified and whole, to a folder for transformers; returns its manifest."""
        with self._download(f"/runs/{id}/model", checkpoint=checkpoint) as chunks:
            return unpack(chunks, folder)

    # -- Waiting and following ---------------------------------------------------------------------

    def wait(self, id: int, *, timeout_s: float | None = None, every_s: float = 1.0) -> ExperimentDetail:
        """Waits until an experiment has ended; raises TimeoutError where it has not after `timeout_s`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while (experiment := self.experiment(id)).state not in TERMINAL_EXPERIMENT_STATES:
            if until is not None and time.monotonic() + every_s > until:
                raise TimeoutError(f"experiment {id} is {experiment.state} after {timeout_s:g} s")
            self._sleep(every_s)
        return experiment

    def follow(
        self, id: int, *, after: int = 0
    ) -> Iterator[Event | RunProgress | ExperimentStatus | Ended[ExperimentStatus]]:
        """Yields every event after number `after`, and changes of runs, until the end, across reconnects."""
        kinds = {"event": Event, "run": RunProgress, "experiment": ExperimentStatus}
        for kind, payload in self._stream(f"/api/v1/experiments/{id}/stream", str(after) if after else None):
            if kind == "end":
                yield Ended(read(ExperimentStatus, payload))
            elif kind in kinds:
                yield read(kinds[kind], payload)

    def follow_run(self, id: int) -> Iterator[RunProgress | dict[str, NewSeries] | LogLine | Ended[Run]]:
        """Yields a run's new points by metric and its log lines until it ends, across reconnects.

        A point replaces an earlier one with the same metric and step.
        """
        kinds = {"run": RunProgress, "points": dict[str, NewSeries], "log": LogLine}
        for kind, payload in self._stream(f"/api/v1/runs/{id}/stream", None):
            if kind == "end":
                yield Ended(read(RunProgress, payload).run)
            elif kind in kinds:
                yield read(kinds[kind], payload)

    # -- Login by a code (RFC 8628) ----------------------------------------------------------------

    def begin_device_login(self, name: str, scope: Scope | None = None) -> DeviceCode:
        """Asks for a code that someone approves on the server's page; the name is that of this machine.

        Raises LoginRefused for a name or a scope that the server refuses.
        """
        form = {"client_id": "stillhouse", "name": name, **({"scope": str(scope)} if scope else {})}
        answer = self._send_form("/device/code", form)
        if answer.status_code != 200:
            raise _refusal(answer)
        document = orjson.loads(answer.content)
        return DeviceCode(**{field: document[field] for field in DeviceCode.__slots__})

    def await_device_login(self, begun: DeviceCode, clock: Callable[[], float] = time.monotonic) -> str:
        """Polls until someone has approved; returns the token, or raises LoginRefused with the reason."""
        interval_s = begun.interval
        end_s = clock() + begun.expires_in
        form = {"grant_type": _DEVICE_GRANT, "device_code": begun.device_code, "client_id": "stillhouse"}
        while True:
            self._sleep(interval_s)
            if clock() > end_s:
                raise LoginRefused("the code has expired; run `stillhouse login` again")
            try:
                answer = self._send_form("/device/token", form)
            except Unreachable:
                interval_s *= 2  # RFC 8628, section 3.5: back off when the connection fails.
                continue
            if answer.status_code == 200:
                return str(orjson.loads(answer.content)["access_token"])
            if answer.status_code == 429 or (refusal := _refusal(answer)).error == "slow_down":
                interval_s += _SLOWER_S
            elif refusal.error != "authorization_pending":
                raise refusal

    def _send_form(self, path: str, form: dict[str, str]) -> httpx.Response:
        try:
            answer = self._http.post(path, data=form)
        except httpx.TransportError as error:
            raise Unreachable(f"cannot reach {self.url} ({error})") from None
        is_problem = answer.headers.get("Content-Type", "").startswith("application/problem+json")
        if is_problem and answer.status_code != 429:
            raise api_error(answer.status_code, answer.content)
        return answer


def _first_pages(read: Callable[..., P], limit: int) -> list[P]:
    """Returns as many pages as have the first `limit` items."""
    pages: list[P] = []
    token, left = None, limit
    while not pages or (token and left > 0):
        pages.append(read(page_size=min(1000, left), **({"page_token": token} if token else {})))
        token, left = pages[-1].next_page_token, left - len(pages[-1].items)
    return pages


def _pages(listing: Callable[..., Page[T]], **parameters: Any) -> Iterator[T]:
    token: str | None = None
    while True:
        page = listing(page_size=1000, page_token=token, **parameters)
        yield from page.items
        if (token := page.next_page_token) is None:
            return


def _refusal(answer: httpx.Response) -> LoginRefused:
    try:
        document = orjson.loads(answer.content)
        error = str(document["error"])
        return LoginRefused(str(document.get("error_description") or error), error)
    except (ValueError, KeyError, TypeError):
        return LoginRefused(f"unexpected answer from the server (status {answer.status_code})")
