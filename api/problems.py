"""RFC 9457 problem documents: every error that the API answers, with its stable type.

`problems.yaml` is the whole list; `make docs` generates `docs/errors.md` from it. A problem's `type` is
`/problems/<slug>`, a path that this server serves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from service.config import logs
from service.config.document import MAX_BYTES, MAX_DEPTH, MAX_NODES, MAX_PROBLEMS, Problem, SpecError, parse
from service.domain.grid import MAX_RUNS

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2  # Wait that clients are told while the database is unavailable


@dataclass(frozen=True, slots=True)
class ProblemType:
    slug: str
    status: int
    title: str
    cause: str
    fix: str


_LIMITS = {
    "MAX_BYTES": f"{MAX_BYTES:,}", "MAX_DEPTH": MAX_DEPTH, "MAX_NODES": f"{MAX_NODES:,}",
    "MAX_PROBLEMS": MAX_PROBLEMS, "MAX_RUNS": f"{MAX_RUNS:,}",
}  # fmt: skip
_BY_SUBJECT: Any = parse(Path(__file__).with_name("problems.yaml").read_text().format_map(_LIMITS).encode())
SPEC_PROBLEMS = tuple(_BY_SUBJECT["spec"])
CATALOGUE: Mapping[str, ProblemType] = {
    slug: ProblemType(slug, **{"status": 422, **entry})
    for entries in _BY_SUBJECT.values()
    for slug, entry in entries.items()
}


class ProblemDocument(BaseModel):
    """An RFC 9457 problem: what went wrong, in a form that programs can act on."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "/problems/unknown-key",
                "title": "Unknown key in the spec",
                "status": 422,
                "detail": "precison: unknown key; did you mean 'precision'?",
                "instance": "/api/v1/experiments",
                "request_id": "5d4c8c1ffa2b4b9b9d0b0f3a0f1c2d3e",
                "errors": [
                    {
                        "type": "unknown-key",
                        "path": "precison",
                        "message": "unknown key; did you mean 'precision'?",
                    }
                ],
            }
        }
    )

    type: str = Field(description="Stable path of the problem's kind; GET it for cause and fix.")
    title: str = Field(description="The kind in a few words; the same for every instance.")
    status: int = Field(ge=400, le=599, description="The HTTP status.")
    detail: str = Field(description="This instance in one line, with the fix.")
    instance: str = Field(description="Path of the request.")
    request_id: str | None = Field(
        default=None, description="Id of the request, as in the header X-Request-ID and in the server's log."
    )
    errors: list[Problem] | None = Field(
        default=None, description="The invalid fields, if the problem is with fields."
    )


class ProblemError(Exception):
    """An answer other than success, raised anywhere below a route."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        errors: Sequence[Problem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = CATALOGUE[slug]
        self.detail = detail
        self.errors = errors
        self.headers = headers
        super().__init__(detail)


def invalid(slug: str, path: str, message: str) -> ProblemError:
    """Returns the problem of one value that is not valid: `path` is `body.<field>` or `query.<parameter>`."""
    problem = Problem("invalid-value", path, message)
    return ProblemError(slug, str(problem), errors=[problem])


def from_spec_error(error: SpecError) -> ProblemError:
    """Returns the problem of a refused spec: of the errors' own type when they share one."""
    slugs = {problem.type for problem in error.problems}
    slug = slugs.pop() if len(slugs) == 1 else "invalid-spec"
    if slug == "too-large":
        slug = "body-too-large"
    first, *others = error.problems
    count = f"at least {len(others) + 1}" if error.more else len(others)
    detail = str(first) + (f" (and {count} more)" if others else "")
    return ProblemError(slug, detail, errors=error.problems)


def respond(error: ProblemError, instance: str) -> Response:
    body: dict[str, Any] = {
        "type": f"/problems/{error.kind.slug}",
        "title": error.kind.title,
        "status": error.kind.status,
        "detail": error.detail,
        "instance": instance,
    }
    if (request_id := logs.current().get("request_id")) is not None:
        body["request_id"] = request_id
    if error.errors:
        body["errors"] = [asdict(entry) for entry in error.errors]
    headers = dict(error.headers or {})
    if error.kind.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return Response(
        # A lone surrogate that a client sent must not break the answer that quotes it.
        orjson.dumps(_encodable(body)), error.kind.status, headers=headers, media_type=MEDIA_TYPE,
    )  # fmt: skip


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _encodable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_encodable(inner) for inner in value]
    return value


EVERYWHERE = (
    "unknown-host", "malformed-request", "unauthenticated", "invalid-token", "cross-origin",
    "request-timeout", "unsupported-encoding", "invalid-parameter", "headers-too-large", "internal-error",
    "unavailable",
)  # fmt: skip
"""Slugs of what any operation can answer."""


def declared(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """Returns the OpenAPI responses for problems; a route names those that `api.openapi` cannot derive."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for kind in sorted((CATALOGUE[slug] for slug in set(slugs)), key=lambda kind: (kind.status, kind.slug)):
        schema = {"$ref": "#/components/schemas/ProblemDocument"}
        content = {MEDIA_TYPE: {"schema": schema, "examples": {}}}
        entry = by_status.setdefault(kind.status, {"description": "", "content": content})
        entry["description"] = "; ".join(filter(None, (entry["description"], kind.title)))
        entry["content"][MEDIA_TYPE]["examples"][kind.slug] = {
            "summary": kind.title,
            "value": {
                "type": f"/problems/{kind.slug}",
                "title": kind.title,
                "status": kind.status,
                "detail": kind.cause,
                "instance": "/api/v1/experiments",
            },
        }
    return by_status
