"""Experiments: submit, list, follow, steer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from api import export
from api.access import ORGANISE, SEE, SIGNED_IN, STEER, STEER_DELETED, SUBMIT, Caller, while_permitted
from api.deps import (
    SPEC_BODY,
    CurrentUser,
    ExperimentFilter,
    ExperimentId,
    ExperimentOrderBy,
    Filter,
    IdempotencyKey,
    LastEventId,
    OrderBy,
    PageSize,
    PageToken,
    QueueDep,
    StoreDep,
    StreamsDep,
)
from api.people_shapes import Archived, Notes, TagChange
from api.problems import SPEC_PROBLEMS, ProblemError, declared
from api.stream import EventStream, parse_event_number, parse_moment
from service.db.errors import NotFound
from service.domain.access import Action
from service.domain.formats import TableFormat
from service.domain.ledger import Ledger
from service.domain.records import (
    DeletedExperiment,
    Event,
    Experiment,
    ExperimentDetail,
    ExperimentStatus,
    Items,
    ListedExperiment,
    Page,
    Run,
)
from service.domain.serialization import to_json
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import Store, StoreOutage, Unconfirmed, UnusableDatabase

router = APIRouter(prefix="/api/v1/experiments", tags=["experiments"])
across = APIRouter(prefix="/api/v1", tags=["experiments"])
"""What is not about one experiment or their list."""

_NO_SUCH = declared("not-found")
_LIST = declared("invalid-filter", "invalid-page-token")
_STEER = declared("not-found", "conflict", "forbidden", "storage-full")
_ORGANISE = declared(
    "invalid-body", "not-found", "forbidden", "malformed-request", "body-too-large", "storage-full"
)


async def existing(experiment_id: ExperimentId, store: StoreDep) -> int:
    """Returns the id of an experiment that exists; a stream has no status once it has begun."""
    return (await run_in_threadpool(store.experiment, experiment_id)).id


async def _after_event(last_event_id: LastEventId = None) -> int:
    return parse_event_number(last_event_id)


Existing = Annotated[int, Depends(existing)]
AfterEvent = Annotated[int, Depends(_after_event)]


class Priority(BaseModel):
    """A new place among others."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"priority": 80}})

    priority: int = Field(ge=0, le=100, strict=True, description="0 to 100; higher runs first.")


@router.post(
    "",
    dependencies=[SUBMIT],
    status_code=201,
    response_model=ExperimentStatus,
    summary="Submit a spec",
    openapi_extra=SPEC_BODY,
    responses={
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
        },
        **declared(
            *SPEC_PROBLEMS,
            "malformed-request",
            "body-too-large",
            "idempotency-mismatch",
            "conflict",
            "forbidden",
            "storage-full",
        ),
    },
)
async def submit_experiment(request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Check a spec completely, then store it with all its runs in one transaction."""
    # The state is read directly: each dependency costs this path, the busiest, a hundredth of it.
    state = request.app.state
    text = await request.body()
    experiment, created = await state.intake.submit(text, request.state.caller, idempotency_key)
    headers = {"Location": f"/api/v1/experiments/{experiment.id}"}
    if not created:
        headers["Idempotent-Replayed"] = "true"
    if created and b"reuse" not in text:
        states = {RunState.queued: experiment.run_count}
    else:
        with _stored():
            states = await run_in_threadpool(state.store.run_counts, experiment.id)
    body = to_json(ExperimentStatus.of(experiment, states))
    return Response(body, 201, headers, "application/json")


@router.get("", dependencies=[SIGNED_IN], responses=_LIST, summary="List experiments")
def list_experiments(
    store: StoreDep,
    user: CurrentUser,
    filter: ExperimentFilter = None,
    order_by: ExperimentOrderBy = None,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    costs: Annotated[
        bool, Query(description="Also what each costs so far, and is forecast to cost until it ends.")
    ] = False,
) -> Page[ListedExperiment]:
    """The newest first, or as `order_by` says; filters like `state = 'running' and owner = 'ada'`."""
    page = store.experiments(
        filter=filter,
        order_by=order_by,
        page_size=page_size,
        page_token=page_token,
        visible=user.visible,
    )
    return Page(store.listed(page.items, costs=costs), page.next_page_token)


@across.get(
    "/deleted-experiments",
    dependencies=[SIGNED_IN],
    responses=declared(),
    summary="List what can be restored",
)
def list_deleted_experiments(
    store: StoreDep,
    user: CurrentUser,
    limit: Annotated[int, Query(ge=1, le=10_000, description="Most entries in the answer.")] = 1000,
) -> Items[DeletedExperiment]:
    """Deleted experiments that can be restored, those first whose results are removed first."""
    return Items(store.restorable_experiments(limit=limit, visible=user.visible))


@router.get("/{experiment_id}", dependencies=[SEE], responses=_NO_SUCH, summary="Get an experiment")
def get_experiment(
    experiment_id: ExperimentId, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """One experiment with its totals and, while it waits, its place in the queue."""
    return _detail(store.experiment(experiment_id), store, queue, user)


@router.delete(
    "/{experiment_id}",
    dependencies=[STEER],
    status_code=204,
    responses=_STEER,
    summary="Delete an experiment that has ended",
)
def delete_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    user: CurrentUser,
    now: Annotated[
        bool, Query(description="Free its space at once, for administrators; it cannot be restored.")
    ] = False,
) -> Response:
    """Hide it with its runs, points and logs, only when it has ended; it can be restored for some time."""
    if now and (reason := user.principal.lacks(Action.administer)):
        raise ProblemError("forbidden", reason)
    store.delete(experiment_id, at_once=now, actor=user.actor)
    return Response(status_code=204)


@router.post(
    "/{experiment_id}/restore",
    dependencies=[STEER_DELETED],
    responses=_STEER,
    summary="Restore a deleted experiment",
)
def restore_experiment(
    experiment_id: ExperimentId, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Show it to everyone again, as it was; possible until its rows are removed."""
    return _changed(store.restore(experiment_id, actor=user.actor), store, queue, user)


@router.post(
    "/{experiment_id}/cancel",
    dependencies=[STEER],
    responses=_STEER,
    summary="Cancel an experiment",
)
def cancel_experiment(
    experiment_id: ExperimentId, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Ask its runs to end; one that has ended stays as it is, which is not an error."""
    return _changed(store.request_cancel(experiment_id, actor=user.actor), store, queue, user)


@router.post(
    "/{experiment_id}/pause",
    dependencies=[STEER],
    responses=_STEER,
    summary="Pause an experiment",
)
def pause_experiment(
    experiment_id: ExperimentId, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Hold it: running runs stop at a step boundary with a checkpoint."""
    return _changed(store.request_pause(experiment_id, actor=user.actor), store, queue, user)


@router.post(
    "/{experiment_id}/resume",
    dependencies=[STEER],
    responses=_STEER,
    summary="Resume a paused experiment",
)
def resume_experiment(
    experiment_id: ExperimentId, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Put it back into the queue; its runs go on from their checkpoints."""
    return _changed(store.resume(experiment_id, actor=user.actor), store, queue, user)


@router.post(
    "/{experiment_id}/retry",
    dependencies=[STEER],
    responses=_STEER,
    summary="Retry what failed or was cancelled",
)
def retry_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    queue: QueueDep,
    user: CurrentUser,
    disturbed: Annotated[
        bool,
        Query(description="Instead, measure the runs again, from the beginning, that neighbours disturbed."),
    ] = False,
) -> ExperimentDetail:
    """Queue the runs without a result again, or with `disturbed` those whose result was disturbed."""
    again = store.retry_disturbed if disturbed else store.retry
    return _changed(again(experiment_id, actor=user.actor), store, queue, user)


@router.put(
    "/{experiment_id}/priority",
    dependencies=[STEER],
    responses=declared(
        "invalid-body",
        "not-found",
        "conflict",
        "forbidden",
        "malformed-request",
        "body-too-large",
        "storage-full",
    ),
    summary="Set an experiment's priority",
)
def set_experiment_priority(
    experiment_id: ExperimentId,
    priority: Priority,
    request: Request,
    store: StoreDep,
    queue: QueueDep,
    user: CurrentUser,
) -> ExperimentDetail:
    """Move it among what waits."""
    project = store.experiment(experiment_id).project
    request.app.state.projects.refuse_priority(user, project, priority.priority)
    return _changed(
        store.set_priority(experiment_id, priority.priority, actor=user.actor), store, queue, user
    )


@router.patch(
    "/{experiment_id}/tags",
    dependencies=[ORGANISE],
    responses=_ORGANISE,
    summary="Change an experiment's tags",
)
def tag_experiment(
    experiment_id: ExperimentId, body: TagChange, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Add tags and take others away; `tags LIKE '% baseline %'` in a filter finds them."""
    changed = store.tag(experiment_id, add=body.add, remove=body.remove, actor=user.actor)
    return _changed(changed, store, queue, user)


@router.put(
    "/{experiment_id}/notes",
    dependencies=[ORGANISE],
    responses=_ORGANISE,
    summary="Set an experiment's notes",
)
def annotate_experiment(
    experiment_id: ExperimentId, body: Notes, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Replace its notes."""
    return _changed(store.annotate(experiment_id, body.notes, actor=user.actor), store, queue, user)


@router.put(
    "/{experiment_id}/archive", dependencies=[ORGANISE], responses=_ORGANISE, summary="Archive an experiment"
)
def archive_experiment(
    experiment_id: ExperimentId, body: Archived, store: StoreDep, queue: QueueDep, user: CurrentUser
) -> ExperimentDetail:
    """Archive an experiment, or undo that; the filter `archived_s IS NULL` leaves archived ones out."""
    return _changed(store.archive(experiment_id, body.archived, actor=user.actor), store, queue, user)


@router.get(
    "/{experiment_id}/spec",
    dependencies=[SEE],
    response_class=Response,
    summary="Get the spec as submitted",
    responses={
        200: {
            "description": "The text as submitted, or with all defaults.",
            "content": {
                "text/yaml": {"schema": {"$ref": "#/components/schemas/ExperimentSpec"}},
                "application/json": {"schema": {"$ref": "#/components/schemas/ExperimentSpec"}},
            },
        },
        **_NO_SUCH,
    },
)
def get_experiment_spec(
    experiment_id: ExperimentId,
    store: StoreDep,
    form: Annotated[
        Literal["submitted", "canonical"],
        Query(description="submitted = verbatim; canonical = JSON with all defaults, as hashed."),
    ] = "submitted",
) -> Response:
    """The text that makes this experiment: submit it again for the same runs."""
    submitted, canonical = store.experiment_spec(experiment_id)
    if form == "canonical":
        return Response(canonical, media_type="application/json")
    return Response(submitted, media_type="text/yaml")


@router.get(
    "/{experiment_id}/runs",
    dependencies=[SEE],
    responses=declared("invalid-filter", "invalid-page-token", "not-found"),
    summary="List the runs of an experiment",
)
def list_experiment_runs(
    experiment_id: ExperimentId,
    store: StoreDep,
    filter: Filter = None,
    order_by: OrderBy = None,
    page_size: PageSize = 100,
    page_token: PageToken = None,
) -> Page[Run]:
    """In the order of the grid, or as `order_by` says."""
    return store.runs(
        experiment_id=experiment_id,
        filter=filter,
        order_by=order_by,
        page_size=page_size,
        page_token=page_token,
    )


@router.get(
    "/{experiment_id}/events",
    dependencies=[SEE],
    responses=_NO_SUCH,
    summary="List an experiment's events",
)
def list_events(
    experiment_id: ExperimentId,
    store: StoreDep,
    after: Annotated[int, Query(ge=0, le=2**63 - 1, description="Events after this number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most events in the answer.")] = 500,
) -> Items[Event]:
    """Events of an experiment, oldest first."""
    return Items(store.events(experiment_id, after=after, limit=limit))


@router.get(
    "/{experiment_id}/ledger",
    dependencies=[SEE],
    responses=_NO_SUCH,
    summary="Get the ledger of an experiment",
)
def get_ledger(experiment_id: ExperimentId, store: StoreDep) -> Ledger:
    """What every attempt is charged in time, money and energy; retries and lost work are charged too."""
    return store.ledger(experiment_id)


@router.get(
    "/{experiment_id}/stream",
    dependencies=[SEE],
    response_class=EventStream,
    summary="Follow an experiment",
    responses=_NO_SUCH,
)
async def stream_experiment(
    request: Request, experiment_id: Existing, streams: StreamsDep, after: AfterEvent
) -> EventStream:
    """Server-sent events until the experiment ends.

    `event`: something happened; its id is its number, and a reconnect with Last-Event-ID continues
    after it without a gap. `run`: a run and its latest points, as they are now. `experiment`: its
    state and how many runs are in each. `end`: it has ended, and so does the stream.
    """
    return EventStream(while_permitted(request, streams.follow_experiment(experiment_id, after)))


@router.get(
    "/{experiment_id}/export",
    dependencies=[SEE],
    response_class=StreamingResponse,
    summary="Export the runs of an experiment",
    responses={200: export.DECLARED, **declared("not-found", "invalid-filter")},
)
def export_experiment(
    experiment_id: ExperimentId,
    store: StoreDep,
    format: export.FormatParameter = TableFormat.csv,
    filter: Filter = None,
    order_by: OrderBy = None,
) -> StreamingResponse:
    """One row per run, with a column for each axis and each figure; streamed."""
    experiment = store.experiment(experiment_id)
    return export.answer(
        store,
        format,
        f"experiment-{experiment.id}",
        experiment_id=experiment_id,
        filter=filter,
        order_by=order_by,
    )


def _changed(experiment: Experiment, store: Store, queue: Queue, user: Caller) -> ExperimentDetail:
    with _stored():
        return _detail(experiment, store, queue, user)


@contextmanager
def _stored() -> Iterator[None]:
    """What reads the result of a change: a failure does not mean that nothing was changed."""
    try:
        yield
    except (StoreOutage, UnusableDatabase) as error:
        raise Unconfirmed("the change is stored, but its result cannot be read") from error


def _detail(experiment: Experiment, store: Store, queue: Queue, user: Caller) -> ExperimentDetail:
    waiting = None
    if experiment.state is ExperimentState.queued:
        with suppress(NotFound):  # A scheduler may have claimed it since it was read.
            waiting = queue.position(experiment.id, user.visible)
    return ExperimentDetail.of(
        experiment,
        store.run_counts(experiment.id),
        totals=store.experiment_totals(experiment.id),
        waiting=waiting,
    )


async def _after(last_event_id: LastEventId = None) -> float | None:
    return parse_moment(last_event_id)


@across.get(
    "/stream",
    dependencies=[SIGNED_IN],
    response_class=EventStream,
    summary="Follow all experiments",
    responses=declared(),
)
async def stream_changes(
    request: Request, user: CurrentUser, streams: StreamsDep, after: Annotated[float | None, Depends(_after)]
) -> EventStream:
    """Server-sent events of what the reader sees; a list that was read up to 10 s before misses nothing.

    `experiment`: one that is new or has changed, as it is now. `deleted`: one that is gone. `costs`: what
    experiments at work cost by now, by id, every 5 s. `queue`: its order or the clusters have changed.
    `many`: more has changed than is sent one by one; read lists again. A reconnect with Last-Event-ID
    continues from there, and may repeat what was sent.
    """
    return EventStream(while_permitted(request, streams.follow_changes(user.visible, after)))
