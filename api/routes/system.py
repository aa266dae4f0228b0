"""Health and metrics of this process, the OpenAPI document, and what each problem type means."""

import logging
from dataclasses import dataclass
from html import escape
from typing import Annotated

from fastapi import Path, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from api.access import PUBLIC, PUBLIC_ANY_QUERY, SCRAPE, SIGNED_IN
from api.deps import TEXT, Operations, QueueDep, StoreDep
from api.problems import CATALOGUE, ProblemError
from service.db import migrate
from service.db.errors import StoreError
from service.domain.serialization import Serializable

_logger = logging.getLogger(__name__)

router = Operations(tags=["system"])


@dataclass(frozen=True, slots=True)
class Health(Serializable):
    """Whether this process answers."""

    status: str  # Always `ok`


@dataclass(frozen=True, slots=True)
class Readiness(Serializable):
    """Whether this process can do its work."""

    ready: bool  # Whether requests can be answered now
    database: str  # `ok`, or what is wrong
    schedulers_alive: int  # Schedulers with a recent heartbeat; 0 does not make the API unready


# Whoever starts processes must be able to ask.
@router.operation("GET /healthz", PUBLIC_ANY_QUERY, "Whether this process answers")
async def healthz() -> Health:
    """Touches nothing else: a process that answers this need not be restarted."""
    return Health(status="ok")


@router.operation(
    "GET /readyz",
    SIGNED_IN,
    "Whether this process can do its work",
    responses={503: {"model": Readiness, "description": "Not ready; `database` says why."}},
)
def readyz(store: StoreDep, queue: QueueDep, response: Response) -> Readiness:
    """The database answers, its tables are current and its disk has room; schedulers are given as detail."""
    try:
        alive = len(queue.schedulers_alive())
        missing = migrate.readiness_problems(store.database)
        readiness = Readiness(ready=not missing, database="; ".join(missing) or "ok", schedulers_alive=alive)
    except StoreError as error:
        _logger.warning("not ready: %s", error)
        reason = "unavailable; the server's log says why"
        readiness = Readiness(ready=False, database=reason, schedulers_alive=0)
    if not readiness.ready:
        response.status_code, response.headers["Retry-After"] = 503, "2"
    return readiness


@router.operation(
    "GET /metrics",
    SCRAPE,
    "Metrics for Prometheus",
    sends={"text/plain": TEXT},
    described="Prometheus text: requests, states, queue, schedulers and recorders.",
)
def metrics(request: Request) -> Response:
    """Requests of this process, and what the store says now."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


@router.operation("GET /openapi.json", PUBLIC, include_in_schema=False)
async def openapi_document(request: Request) -> JSONResponse:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.operation(
    "GET /problems/{slug}",
    PUBLIC,
    "What a problem type means",
    sends={"text/html": TEXT},
    described="Cause and fix.",
)
async def explain_problem(
    slug: Annotated[
        str, Path(max_length=100, description="The type without `/problems/`.", examples=["unknown-key"])
    ],
) -> HTMLResponse:
    """The page that a problem's `type` leads to."""
    kind = CATALOGUE.get(slug)
    if kind is None:
        raise ProblemError("not-found", "no problem type has that name; docs/errors.md lists them all")
    title, cause, fix = escape(kind.title), escape(kind.cause), escape(kind.fix)
    return HTMLResponse(
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{title}</title><link rel="stylesheet" href="/static/page.css">'
        f'<main><p class="quiet">{kind.status} · {kind.slug}</p><h1>{title}</h1>'
        f"<h2>Cause</h2><p>{cause}</p><h2>Fix</h2><p>{fix}</p></main></html>"
    )
