"""What routes ask for, as annotated types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query, Request

from api.access import MAX_ID, Caller, current_user
from api.intake import Checks
from api.stream import Streams
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.scheduling.queue import Queue
from service.store import Store

MAX_PAGE_SIZE = 1000


async def _store(request: Request) -> Store:
    store: Store = request.app.state.store
    return store


async def _queue(request: Request) -> Queue:
    queue: Queue = request.app.state.queue
    return queue


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


async def _catalogue(request: Request) -> Mapping[str, Hardware]:
    catalogue: Mapping[str, Hardware] = request.app.state.catalogue
    return catalogue


async def _streams(request: Request) -> Streams:
    streams: Streams = request.app.state.streams
    return streams


async def _checks(request: Request) -> Checks:
    checks: Checks = request.app.state.checks
    return checks


StoreDep = Annotated[Store, Depends(_store)]
QueueDep = Annotated[Queue, Depends(_queue)]
SettingsDep = Annotated[Settings, Depends(_settings)]
CatalogueDep = Annotated[Mapping[str, Hardware], Depends(_catalogue)]
StreamsDep = Annotated[Streams, Depends(_streams)]
ChecksDep = Annotated[Checks, Depends(_checks)]
CurrentUser = Annotated[Caller, Depends(current_user)]
"""Who sent the request, which the rule of its route has let through."""

ExperimentId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the experiment.", examples=[12])]
RunId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the run.", examples=[40])]

Filter = Annotated[
    str | None,
    Query(
        max_length=4000,
        description="Conditions joined by `and`, in MLflow's grammar.",
        examples=["precision = 'fp16' and accuracy > 0.9"],
    ),
]
ExperimentFilter = Annotated[
    str | None,
    Query(
        max_length=4000,
        description="Conditions joined by `and`, in MLflow's grammar.",
        examples=["state = 'running' and owner = 'ada'"],
    ),
]
_ORDER = "Up to 8 fields with `asc` or `desc`, separated by commas; ties are broken by id."
OrderBy = Annotated[
    str | None,
    Query(max_length=1000, description=_ORDER, examples=["accuracy desc, cost_usd"]),
]
ExperimentOrderBy = Annotated[
    str | None,
    Query(max_length=1000, description=_ORDER, examples=["priority desc, created_s"]),
]
PageSize = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE, description="Most items in one page.")]
PageToken = Annotated[str | None, Query(max_length=4000, description="`next_page_token` of the page before.")]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="Any word that names this submission; sending it again replays the first answer.",
        examples=["8f14e45f-ceea-467f-a9ab-0d4b0d2d6c6b"],
    ),
]
LastEventId = Annotated[
    str | None,
    Header(max_length=100, description="Id of the last event received; the stream continues after it."),
]


EXAMPLE = """\
name: precision-by-batch
task: {name: imdb, path: imdb, max_length: 128}
model: {name: mini}
length: {epochs: 1}
search:
  axes: {precision: [fp32, bf16], batch.global_size: [16, 32]}
seeds: [0, 1]
"""

SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The spec, in YAML or JSON, detected from the content. At most 1 MiB.",
        "content": {
            "application/yaml": {
                "schema": {"$ref": "#/components/schemas/ExperimentSpec"},
                "example": EXAMPLE,
            },
            "application/json": {
                "schema": {"$ref": "#/components/schemas/ExperimentSpec"},
                "example": {
                    "name": "one-run",
                    "task": {"name": "imdb", "path": "imdb"},
                    "model": {"name": "tiny"},
                },
            },
        },
    }
}
"""OpenAPI of the body, for `openapi_extra`."""


async def _body(request: Request) -> bytes:
    return await request.body()


SpecBody = Annotated[bytes, Depends(_body)]
