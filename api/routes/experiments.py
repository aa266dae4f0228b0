"""Experiments: submit, list, follow, manage."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from api import export
from api.access import MANAGE, MANAGE_DELETED, ORGANISE, SEE, SIGNED_IN, SUBMIT, while_permitted
from api.bodies import Archived, NewName, Notes, Priority, RunIds, RunsChange, TagChange
from api.deps import (
    SPEC_BODY,
    SPEC_SCHEMA,
    AfterNumber,
    ChosenRuns,
    CurrentUser,
    Download,
    ExperimentFilter,
    ExperimentId,
    ExperimentOrderBy,
    Filter,
    IdempotencyKey,
    IntakeDep,
    Operations,
    PageOfRuns,
    PageSize,
    PageToken,
    QueueDep,
    StoreDep,
    StreamsDep,
    given,
)
from api.problems import ProblemError
from api.stream import EventStream
from service.db.errors import NotFound, StoreOutage, Unconfirmed, UnusableDatabase
from service.domain.access import Action
from service.domain.formats import TableFormat
from service.domain.ledger import Ledger
from service.domain.records import (
    DeletedExperiment,
    Event,
    Experiment,
    ExperimentDetail,
    ExperimentStatus,
    GroupOfRuns,
    Items,
    ListedExperiment,
    Page,
    Run,
)
from service.domain.serialization import to_json
from service.domain.states import TERMINAL_RUN_STATES, ExperimentState, RunState

router = Operations(prefix="/api/v1/experiments", tags=["experiments"])
across = Operations(prefix="/api/v1", tags=["experiments"])  # What is not about one experiment or their list


def _existing(experiment_id: ExperimentId, store: StoreDep) -> int:
    """Returns the id of an experiment that exists; a stream has no status once it has begun."""
    return store.experiments.get(experiment_id).id


@dataclass
class _Subject:
    """The experiment that a request is about, for whoever sent it."""

    experiment_id: ExperimentId
    store: StoreDep
    queue: QueueDep
    user: CurrentUser

    def changed(self, change: Callable[..., Experiment], **arguments: Any) -> ExperimentDetail:
        """Makes a change of the store, and returns the experiment as it is then."""
        experiment = change(self.experiment_id, **arguments, actor=self.user.actor)
        with _stored():
            return self.detail(experiment)

    def detail(self, experiment: Experiment) -> ExperimentDetail:
        waiting = None
        if experiment.state is ExperimentState.queued:
            with suppress(NotFound):  # A scheduler may have claimed it since it was read.
                waiting = self.queue.position(experiment.id, self.user.visible)
        return ExperimentDetail.of(
            experiment,
            self.store.experiments.run_counts(experiment.id),
            totals=self.store.accounting.totals(experiment.id),
            study=self.store.studies.part_of(experiment.id),
            waiting=waiting,
        )


Subject = Annotated[_Subject, Depends()]


@contextmanager
def _stored() -> Iterator[None]:
    """What reads the result of a change: a failure does not mean that nothing was changed."""
    try:
        yield
    except (StoreOutage, UnusableDatabase) as error:
        raise Unconfirmed("the change is stored, but its result cannot be read") from error


_STORED: dict[int | str, dict[str, Any]] = {
    201: {
        "description": "Stored with all its runs, durably. The same Idempotency-Key and body again "
        "get the same experiment with `Idempotent-Replayed: true`.",
        "headers": {
            "Location": {"description": "Path of the experiment.", "schema": {"type": "string"}},
            "Idempotent-Replayed": {
                "description": "`true` when the key was used before.",
                "schema": {"type": "string"},
            },
        },
    }
}
SUBMITTED: Mapping[str, Any] = {
    "status_code": 201,
    "response_model": ExperimentStatus,
    "responses": _STORED,
    "problems": ["idempotency-mismatch", "conflict"],
}


@router.operation("POST", SUBMIT, "Submit a spec", openapi_extra=SPEC_BODY, **SUBMITTED)
async def submit_experiment(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Check a spec completely, then store it with all its runs in one transaction."""
    return await submitted(request, await request.body(), idempotency_key)


async def submitted(request: Request, text: bytes, idempotency_key: str | None) -> Response:
    # The state is read directly: each dependency costs this path, the busiest, a hundredth of it.
    state = request.app.state
    experiment, created = await state.intake.submit(text, request.state.caller, idempotency_key)
    headers = {"Location": f"/api/v1/experiments/{experiment.id}"}
    if not created:
        headers["Idempotent-Replayed"] = "true"
    if created and b"reuse" not in text:
        states = {RunState.queued: experiment.run_count}
    else:
        with _stored():
            states = await run_in_threadpool(state.store.experiments.run_counts, experiment.id)
    body = to_json(ExperimentStatus.of(experiment, states))
    return Response(body, 201, headers, "application/json")


@router.operation("GET", SIGNED_IN, "List experiments")
def list_experiments(
    store: StoreDep,
    user: CurrentUser,
    filter: ExperimentFilter = None,
    order_by: ExperimentOrderBy = None,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    costs: Annotated[
        bool, given("Also what each costs so far, and is forecast to cost until it ends.")
    ] = False,
) -> Page[ListedExperiment]:
    """The newest first, or as `order_by` says; filters like `state = 'running' and owner = 'ada'`."""
    page = store.experiments.page(
        filter=filter, order_by=order_by, page_size=page_size, page_token=page_token, visible=user.visible
    )
    return Page(store.experiments.listed(page.items, costs=costs), page.next_page_token)


@across.operation("GET /deleted-experiments", SIGNED_IN, "List what can be restored")
def list_deleted_experiments(
    store: StoreDep,
    user: CurrentUser,
    limit: Annotated[int, given("Most entries in the answer.", ge=1, le=10_000)] = 1000,
) -> Items[DeletedExperiment]:
    """Deleted experiments that can be restored, those first whose results are removed first."""
    return Items(store.removal.restorable_experiments(limit=limit, visible=user.visible))


@router.operation("GET /{experiment_id}", SEE, "Get an experiment")
def get_experiment(one: Subject) -> ExperimentDetail:
    """One experiment with its totals and, while it waits, its place in the queue."""
    return one.detail(one.store.experiments.get(one.experiment_id))


@router.operation("DELETE /{experiment_id}", MANAGE, "Delete an experiment that has ended", status_code=204)
def delete_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    user: CurrentUser,
    now: Annotated[bool, given("Free its space at once, for administrators; it cannot be restored.")] = False,
) -> None:
    """Hide it with its runs, points and logs, only when it has ended; it can be restored for some time."""
    if now and (reason := user.principal.lacks(Action.administer)):
        raise ProblemError("forbidden", reason)
    store.removal.delete(experiment_id, at_once=now, actor=user.actor)


@router.operation("POST /{experiment_id}/restore", MANAGE_DELETED, "Restore a deleted experiment")
def restore_experiment(one: Subject) -> ExperimentDetail:
    """Show it to everyone again, as it was; possible until its rows are removed."""
    return one.changed(one.store.removal.restore)


@router.operation("POST /{experiment_id}/cancel", MANAGE, "Cancel an experiment")
def cancel_experiment(one: Subject) -> ExperimentDetail:
    """Ask its runs to end; one that has ended stays as it is, which is not an error."""
    return one.changed(one.store.requests.cancel)


@router.operation("POST /{experiment_id}/pause", MANAGE, "Pause an experiment")
def pause_experiment(one: Subject) -> ExperimentDetail:
    """Hold it: running runs stop at a step boundary with a checkpoint."""
    return one.changed(one.store.requests.pause)


@router.operation("POST /{experiment_id}/resume", MANAGE, "Resume a paused experiment")
def resume_experiment(one: Subject) -> ExperimentDetail:
    """Put it back into the queue; its runs go on from their checkpoints."""
    return one.changed(one.store.requests.resume)


@router.operation("POST /{experiment_id}/retry", MANAGE, "Retry what failed or was cancelled")
def retry_experiment(
    one: Subject,
    disturbed: Annotated[
        bool, given("Instead, measure the runs again, from the beginning, that neighbours disturbed.")
    ] = False,
    failed: Annotated[bool, given("Only the runs that failed.")] = False,
) -> ExperimentDetail:
    """Queue the runs without a result again, or with `disturbed` those whose result was disturbed."""
    if disturbed:
        return one.changed(one.store.requests.retry_disturbed)
    only = {RunState.failed} if failed else TERMINAL_RUN_STATES
    return one.changed(one.store.requests.retry, only=only)


@router.operation("PUT /{experiment_id}/priority", MANAGE, "Set an experiment's priority")
def set_experiment_priority(one: Subject, body: Priority, intake: IntakeDep) -> ExperimentDetail:
    """Move it among what waits."""
    project = one.store.experiments.get(one.experiment_id).project
    intake.projects.refuse_priority(one.user, project, body.priority)
    return one.changed(one.store.requests.set_priority, priority=body.priority)


@router.operation("PATCH /{experiment_id}/tags", ORGANISE, "Change an experiment's tags")
def tag_experiment(one: Subject, body: TagChange) -> ExperimentDetail:
    """Add tags and take others away; `tag = baseline` in a filter finds them."""
    return one.changed(one.store.requests.tag, add=body.add, remove=body.remove)


@router.operation("PUT /{experiment_id}/name", ORGANISE, "Rename an experiment")
def rename_experiment(one: Subject, body: NewName) -> ExperimentDetail:
    """Give it another name; its spec stays as submitted."""
    return one.changed(one.store.requests.rename, name=body.name)


@router.operation("PUT /{experiment_id}/notes", ORGANISE, "Set an experiment's notes")
def annotate_experiment(one: Subject, body: Notes) -> ExperimentDetail:
    """Replace its notes."""
    return one.changed(one.store.requests.annotate, notes=body.notes)


@router.operation("PUT /{experiment_id}/archive", ORGANISE, "Archive an experiment")
def archive_experiment(one: Subject, body: Archived) -> ExperimentDetail:
    """Archive an experiment, or undo that; the filter `archived_s IS NULL` leaves archived ones out."""
    return one.changed(one.store.requests.archive, archived=body.archived)


@router.operation(
    "GET /{experiment_id}/spec",
    SEE,
    "Get the spec as submitted",
    sends={"text/yaml": SPEC_SCHEMA, "application/json": SPEC_SCHEMA},
    described="The text as submitted, or with all defaults.",
)
def get_experiment_spec(
    experiment_id: ExperimentId,
    store: StoreDep,
    form: Annotated[
        Literal["submitted", "canonical"],
        given("submitted = verbatim; canonical = JSON with all defaults, as hashed."),
    ] = "submitted",
) -> Response:
    """The text that makes this experiment: submit it again for the same runs."""
    submitted, canonical = store.experiments.spec(experiment_id)
    if form == "canonical":
        return Response(canonical, media_type="application/json")
    return Response(submitted, media_type="text/yaml")


@router.operation("GET /{experiment_id}/runs", SEE, "List the runs of an experiment")
def list_experiment_runs(experiment_id: ExperimentId, store: StoreDep, page: PageOfRuns) -> Page[Run]:
    """In the order of the grid, or as `order_by` says."""
    return store.runs.page(experiment_id=experiment_id, **page)


@router.operation("GET /{experiment_id}/runs/groups", SEE, "Group the runs of an experiment")
def list_run_groups(
    experiment_id: ExperimentId,
    store: StoreDep,
    by: Annotated[str, given("Axes or columns, as in `order_by`.", min_length=1, max_length=1000)],
    filter: Filter = None,
    figures: Annotated[str, given("Figures to summarise, separated by commas.", max_length=4000)] = "",
) -> Items[GroupOfRuns]:
    """Count, states, and mean and spread of figures of the runs with equal values, over all that match."""
    names = [name.strip() for name in figures.split(",") if name.strip()]
    return Items(store.runs.groups(experiment_id, by, filter=filter, figures=names))


@router.operation("PATCH /{experiment_id}/runs", ORGANISE, "Change several runs")
def change_runs(one: Subject, body: RunsChange) -> Items[Run]:
    """Set the names, stars, tags and notes of several runs at once."""
    return Items(one.store.requests.change_runs(one.experiment_id, **body.model_dump(), actor=one.user.actor))


@router.operation("POST /{experiment_id}/runs/cancel", MANAGE, "Cancel several runs")
def cancel_runs(one: Subject, body: RunIds) -> Items[Run]:
    """Ask them to end; those that have ended stay as they are."""
    return Items(one.store.requests.cancel_runs(one.experiment_id, body.ids, actor=one.user.actor))


@router.operation("POST /{experiment_id}/runs/retry", MANAGE, "Retry several runs")
def retry_runs(one: Subject, body: RunIds) -> Items[Run]:
    """Queue those that have ended without a result again; the others stay as they are."""
    return Items(one.store.requests.retry_runs(one.experiment_id, body.ids, actor=one.user.actor))


@router.operation("GET /{experiment_id}/events", SEE, "List an experiment's events")
def list_events(
    experiment_id: ExperimentId,
    store: StoreDep,
    after: Annotated[int, given("Events after this number.", ge=0, le=2**63 - 1)] = 0,
    limit: Annotated[int, given("Most events in the answer.", ge=1, le=1000)] = 500,
) -> Items[Event]:
    """Events of an experiment, oldest first."""
    return Items(store.experiments.events(experiment_id, after=after, limit=limit))


@router.operation("GET /{experiment_id}/ledger", SEE, "Get the ledger of an experiment")
def get_ledger(experiment_id: ExperimentId, store: StoreDep) -> Ledger:
    """What every attempt is charged in time, money and energy; retries and lost work are charged too."""
    return store.accounting.ledger(experiment_id)


@router.operation("GET /{experiment_id}/stream", SEE, "Follow an experiment", response_class=EventStream)
async def stream_experiment(
    request: Request,
    experiment_id: Annotated[int, Depends(_existing)],
    streams: StreamsDep,
    after: AfterNumber,
) -> EventStream:
    """Server-sent events until the experiment ends.

    `event`: something happened; its id is its number, and a reconnect with Last-Event-ID continues
    after it without a gap. `run`: a run and its latest points, as they are now. `experiment`: its
    state and how many runs are in each. `end`: it has ended, and so does the stream.
    """
    return EventStream(while_permitted(request, streams.follow_experiment(experiment_id, after or 0)))


@router.operation(
    "GET /{experiment_id}/export",
    SEE,
    "Export the runs of an experiment",
    sends=export.TABLES,
    described="The table.",
)
def export_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    chosen: ChosenRuns,
    columns: export.ColumnsParameter = None,
    format: export.FormatParameter = TableFormat.csv,
) -> Download:
    """One row per run, with a column for each axis and each figure; streamed."""
    experiment = store.experiments.get(experiment_id)
    return export.answer(
        store, format, f"experiment-{experiment.id}", columns, experiment_id=experiment_id, **chosen
    )


@across.operation("GET /stream", SIGNED_IN, "Follow all experiments", response_class=EventStream)
async def stream_changes(
    request: Request, user: CurrentUser, streams: StreamsDep, after: AfterNumber
) -> EventStream:
    """Server-sent events of what the reader sees; a list that was read up to 10 s before misses nothing.

    `experiment`: one that is new or has changed, as it is now. `deleted`: one that is gone. `costs`: what
    experiments at work cost by now, by id, every 5 s. `queue`: its order or the clusters have changed.
    `many`: more has changed than is sent one by one; read lists again. A reconnect with Last-Event-ID
    continues from there, and may repeat what was sent.
    """
    return EventStream(
        while_permitted(
            request, streams.follow_changes(user.visible, None if after is None else after / 1000)
        )
    )
