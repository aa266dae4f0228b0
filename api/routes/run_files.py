"""What a run was resolved to and what it keeps on the disk: configuration, checkpoints, model card."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response

from api.access import SEE_RUN
from api.deps import RunId, SettingsDep, StoreDep
from api.problems import ProblemError, declared
from service.domain.records import Items
from service.output.model_folder import read_model_card
from service.output.run_files import SavedCheckpoint, saved_checkpoints
from service.specs.models import NoModel

router = APIRouter(prefix="/api/v1/runs", tags=["runs"])

_NO_SUCH = declared("not-found")


@router.get(
    "/{run_id}/config",
    dependencies=[SEE_RUN],
    response_class=Response,
    responses={
        200: {
            "description": "The spec with all defaults and this run's axis values, as JSON.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ExperimentSpec"}}},
        },
        **_NO_SUCH,
    },
    summary="Get the configuration of a run",
)
def get_run_config(run_id: RunId, store: StoreDep) -> Response:
    """What this run trains, resolved: submitting it as a spec makes this one run."""
    return Response(store.run_config(run_id), media_type="application/json")


@router.get(
    "/{run_id}/checkpoints",
    dependencies=[SEE_RUN],
    responses=_NO_SUCH,
    summary="List the checkpoints of a run",
)
def list_checkpoints(run_id: RunId, store: StoreDep, settings: SettingsDep) -> Items[SavedCheckpoint]:
    """Those that are on the disk, the newest first; older ones are removed as newer ones are complete."""
    return Items(saved_checkpoints(store, settings, run_id))


@router.get(
    "/{run_id}/model-card",
    dependencies=[SEE_RUN],
    response_class=Response,
    responses={
        200: {
            "description": "Markdown with YAML front matter, as in the folder that `model` downloads.",
            "content": {"text/markdown": {"schema": {"type": "string"}}},
        },
        **declared("not-found", "no-model"),
    },
    summary="Get the model card of a run",
)
def get_model_card(
    run_id: RunId,
    store: StoreDep,
    settings: SettingsDep,
    checkpoint: Annotated[
        Literal["best", "last"],
        Query(description="Which of its checkpoints: of the best evaluation, or the newest."),
    ] = "best",
) -> Response:
    """What was trained, on what, to which figures, and how to do it again."""
    try:
        card = read_model_card(store, settings, run_id, checkpoint)
    except NoModel as error:
        raise ProblemError("no-model", str(error)) from None
    return Response(card, media_type="text/markdown")
