"""How routes are declared, and what they ask for, as annotated types."""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.access import MAX_ID, Caller, current_user
from api.intake import Intake
from api.problems import declared
from api.stream import Streams, parse_number
from api.throttle import Throttle
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.output.bounded import BoundedProcess
from service.scheduling.queue import Queue
from service.store import Store

MAX_PAGE_SIZE = 1000


def _state(name: str) -> Any:
    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


StoreDep = Annotated[Store, _state("store")]
QueueDep = Annotated[Queue, _state("queue")]
SettingsDep = Annotated[Settings, _state("settings")]
CatalogueDep = Annotated[Mapping[str, Hardware], _state("catalogue")]
StreamsDep = Annotated[Streams, _state("streams")]
BoundedDep = Annotated[BoundedProcess, _state("bounded")]
IntakeDep = Annotated[Intake, _state("intake")]
ThrottleDep = Annotated[Throttle, _state("throttle")]
CurrentUser = Annotated[Caller, Depends(current_user)]  # Whom the rule of the route has let through

ExperimentId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the experiment.", examples=[12])]
RunId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the run.", examples=[40])]


def given(description: str, *examples: Any, **limits: Any) -> Any:
    """Describes a parameter of the query."""
    return Query(description=description, examples=list(examples) or None, **limits)


def _filter(example: str) -> Any:
    described = "Conditions joined by `and`, in MLflow's grammar."
    return given(described, example, max_length=4000)


def _order(example: str) -> Any:
    described = "Up to 8 fields with `asc` or `desc`, separated by commas; ties are broken by id."
    return given(described, example, max_length=1000)


Filter = Annotated[str | None, _filter("precision = 'fp16' and accuracy > 0.9")]
OrderBy = Annotated[str | None, _order("accuracy desc, cost_usd")]
ExperimentFilter = Annotated[str | None, _filter("state = 'running' and owner = 'ada'")]
ExperimentOrderBy = Annotated[str | None, _order("priority desc, created_s")]
PageSize = Annotated[int, given("Most items in one page.", ge=1, le=MAX_PAGE_SIZE)]
PageToken = Annotated[str | None, given("`next_page_token` of the page before.", max_length=4000)]


async def _runs(filter: Filter = None, order_by: OrderBy = None) -> dict[str, Any]:
    return {"filter": filter, "order_by": order_by}


ChosenRuns = Annotated[dict[str, Any], Depends(_runs)]  # Filter and order of runs, as for `Store.runs`


async def _page(
    chosen: ChosenRuns,
    page_size: PageSize = 100,
    page_token: PageToken = None,
    offset: Annotated[
        int | None, given("Items to skip; with it, `total` counts all.", ge=0, le=MAX_ID)
    ] = None,
) -> dict[str, Any]:
    return {**chosen, "page_size": page_size, "page_token": page_token, "offset": offset}


PageOfRuns = Annotated[dict[str, Any], Depends(_page)]  # The same, and which page of them
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


async def _last_number(last_event_id: LastEventId = None) -> int | None:
    return None if last_event_id is None else parse_number(last_event_id)


AfterNumber = Annotated[int | None, Depends(_last_number)]

EXAMPLE = """\
name: precision-by-batch
task: {name: imdb, path: imdb, max_length: 128}
model: {name: mini}
length: {epochs: 1}
search:
  axes: {precision: [fp32, bf16], batch.global_size: [16, 32]}
seeds: [0, 1]
"""

SPEC_SCHEMA = {"$ref": "#/components/schemas/ExperimentSpec"}
SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The spec, in YAML or JSON, detected from the content. At most 1 MiB.",
        "content": {
            "application/yaml": {"schema": SPEC_SCHEMA, "example": EXAMPLE},
            "application/json": {
                "schema": SPEC_SCHEMA,
                "example": {
                    "name": "one-run",
                    "task": {"name": "imdb", "path": "imdb"},
                    "model": {"name": "tiny"},
                },
            },
        },
    }
}


async def _body(request: Request) -> bytes:
    return await request.body()


SpecBody = Annotated[bytes, Depends(_body)]

TEXT, BINARY = {"type": "string"}, {"type": "string", "format": "binary"}


Route = TypeVar("Route", bound=Callable[..., Any])


class Operations(APIRouter):
    """Operations of the API, which cannot be declared without a rule of `api.access`."""

    def operation(
        self,
        operation: str,
        rule: Any,
        summary: str | None = None,
        *dependencies: Any,
        sends: Mapping[str, Mapping[str, Any]] | None = None,
        described: str = "",
        problems: Sequence[str] = (),
        **options: Any,
    ) -> Callable[[Route], Route]:
        """Adds an operation: its method and path, such as `GET /{run_id}`, and who may ask for it.

        Args:
            sends: of an answer that is not a record, schema by media type; `described` is what it holds.
            problems: slugs of those that `api.openapi` cannot derive.
            options: as for `APIRouter.api_route`.
        """
        method, _, path = operation.partition(" ")
        responses = {**declared(*problems), **options.pop("responses", {})}
        if sends is not None:
            content = {media_type: {"schema": schema} for media_type, schema in sends.items()}
            responses[200] = {"description": described, "content": content}
            options = {"response_class": Response, **options}
        return self.api_route(
            path,
            methods=[method],
            dependencies=[rule, *dependencies],
            summary=summary,
            responses=responses,
            **options,
        )


def attached(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}


class Download(StreamingResponse):
    """A file in chunks, the first read at once, so that a file that cannot be read is an error.

    What their generator holds open is closed at the end, and when the client has gone.
    """

    def __init__(
        self, chunks: Generator[bytes], media_type: str, name: str, headers: Mapping[str, str] | None = None
    ) -> None:
        content = itertools.chain((next(chunks, b""),), chunks)
        super().__init__(content, media_type=media_type, headers={**attached(name), **(headers or {})})
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._chunks.close()
