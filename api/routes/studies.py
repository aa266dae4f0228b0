"""Studies: several experiments that are submitted, followed and cancelled as one."""

from typing import Annotated, Any

from fastapi import Path, Request, Response

from api.access import MANAGE_STUDY, MAX_ID, SEE_STUDY, SIGNED_IN, SUBMIT
from api.deps import CurrentUser, IdempotencyKey, Operations, StoreDep, given
from service.domain.records import Items
from service.domain.serialization import to_json
from service.domain.studies import StudyDetail

router = Operations(prefix="/api/v1/studies", tags=["experiments"])

StudyId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the study.", examples=[2])]

_EXAMPLE = """\
study: distillation
parts:
  teacher: {task: {name: imdb, path: imdb}, model: {name: mini}, seeds: [0, 1]}
  student:
    task: {name: imdb, path: imdb}
    model: {name: tiny, teacher: {run: teacher/seed}}
    seeds: [0, 1]
"""
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The study, in YAML or JSON: `study`, and `parts` with a spec each. At most 1 MiB.",
        "content": {"application/yaml": {"schema": {"type": "object"}, "example": _EXAMPLE}},
    }
}


@router.operation(
    "POST",
    SUBMIT,
    "Submit a study",
    problems=["idempotency-mismatch", "conflict"],
    status_code=201,
    response_model=StudyDetail,
    openapi_extra=_BODY,
)
async def submit_study(
    request: Request, user: CurrentUser, idempotency_key: IdempotencyKey = None
) -> Response:
    """Check all parts, then store the study with the experiments of those that need no other part.

    A scheduler submits a later part, for its owner, once the parts that it needs have succeeded. The same
    Idempotency-Key and body again get the same study with `Idempotent-Replayed: true`.
    """
    study, created = await request.app.state.intake.submit_study(await request.body(), user, idempotency_key)
    headers = {"Location": f"/api/v1/studies/{study.id}"}
    if not created:
        headers["Idempotent-Replayed"] = "true"
    return Response(to_json(study), 201, headers, "application/json")


@router.operation("GET", SIGNED_IN, "List studies")
def list_studies(
    store: StoreDep,
    user: CurrentUser,
    limit: Annotated[int, given("Most entries in the answer.", ge=1, le=1000)] = 50,
) -> Items[StudyDetail]:
    """The newest first, with the state of their parts."""
    return Items(store.studies.newest(limit=limit, visible=user.visible))


@router.operation("GET /{study_id}", SEE_STUDY, "Get a study")
def get_study(study_id: StudyId, store: StoreDep) -> StudyDetail:
    """One study with the state of its parts and of their experiments."""
    return store.studies.get(study_id)


@router.operation("POST /{study_id}/cancel", MANAGE_STUDY, "Cancel a study")
def cancel_study(study_id: StudyId, store: StoreDep, user: CurrentUser) -> StudyDetail:
    """Ask all its runs to end, and submit no further part; what has ended stays as it is."""
    return store.studies.cancel(study_id, actor=user.actor)
