"""RFC 9457 problem documents: every error that the API answers, with its stable type.

`CATALOGUE` is the whole list; `docs/errors.md` explains each to people, and a test holds the two
together. A problem's `type` is `/problems/<slug>`, a path that this server answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from service.document import MAX_BYTES, MAX_DEPTH, MAX_NODES, Problem, SpecError
from service.grid import MAX_RUNS

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
"""What a client is told to wait while the database is away, in seconds."""


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of problem: its stable name, its status, and what people do about it."""

    slug: str
    status: int
    title: str
    cause: str
    fix: str


_SPEC_PROBLEMS = (
    ("invalid-spec", "The spec is not valid",
     "Several things of different kinds are wrong; `errors` lists each with path and type.",
     "Mend each entry of `errors`; each has its own line in this list."),
    ("unknown-key", "A key of the spec is not known",
     "A field's name is misspelt or belongs to another section.",
     "Use the name that the message offers, or look it up in `/api/v1/spec.schema.json`."),
    ("missing-field", "A required field is missing",
     "The spec lacks a field that has no default.", "Add the field named by `path`."),
    ("wrong-type", "A value has the wrong type",
     "For instance a text where a number is expected.", "Write the value in the type the message names."),
    ("invalid-value", "A value is not allowed",
     "The value is outside the closed list, or contradicts another field.",
     "Choose as the message says; it names the field to change."),
    ("out-of-range", "A value is out of range",
     "A number, text or list is smaller or larger than its limit.", "Keep to the limit in the message."),
    ("not-finite", "A number is not finite",
     "NaN or an infinity was given, or a number too large for a float.", "Give a finite number."),
    ("unknown-axis", "An axis is not a field",
     "A name under `search.axes` is no dotted field of the spec.", "Use the name that the message offers."),
    ("unknown-hardware", "The hardware is not in the catalogue",
     "The name is misspelt, or the entry is missing.",
     "Choose from `/api/v1/hardware`, or add an entry to `hardware.yaml` in the data directory."),
    ("precision-not-on-hardware", "The hardware does not compute this precision",
     "For instance bf16 on a T4 or V100.", "Choose another precision or other hardware."),
    ("grid-too-large", "The grid has too many runs",
     f"The product of axes and seeds is past {MAX_RUNS:,} runs.",
     "Shorten `search.axes` or `seeds`, or draw with `search.name: random`."),
    ("not-utf-8", "The text is not UTF-8", "The file was saved in another encoding.",
     "Save it as UTF-8."),
    ("not-yaml", "The text is neither YAML nor JSON",
     "A syntax error; the message names the line.", "Mend the line."),
    ("yaml-alias", "Aliases are not allowed",
     "The document uses `*name`, by which a small text can grow without bound.", "Write the value out."),
    ("too-deep", "The document is nested too deep",
     f"More than {MAX_DEPTH} levels.", "Flatten it; no field of a spec is that deep."),
    ("not-a-mapping", "The document is not a mapping",
     "It is empty, a list or a single value.", "Write fields as `name: value`."),
    ("path-outside-roots", "A path lies outside the configured folders",
     "`task.path`, `model.student` or `model.teacher` leads, after resolving links, out of every "
     "allowed folder.",
     "Move the files, or let the operator add the folder to STILLHOUSE_DATA_ROOTS or "
     "STILLHOUSE_MODEL_ROOTS."),
    ("path-not-found", "A path does not exist",
     "The dataset or model folder is missing, empty or not readable by the service.",
     "Correct the path; relative paths start at the configured folders."),
    ("model-without-weights", "A model folder has no weights",
     "The folder lacks `config.json` or the weights file.",
     "Save the model with `save_pretrained`, or use a preset."),
    ("unknown-run", "There is no such run",
     "`run:<id>` as a student or teacher names a run that does not exist.",
     "Name one that `stillhouse runs` lists."),
    ("run-without-result", "The run has no model",
     "The run that the student or teacher comes from has failed, was cancelled or was stopped.",
     "Name a run that succeeded or that may still, or retry that run first."),
    ("teacher-of-another-task", "The teacher learned another task",
     "The run named as `model.teacher` was trained on another task than `task.name`.",
     "Name a run of the same task."),
    ("unsatisfiable-resources", "The cluster can never serve this",
     "A run needs more workers, CPUs, memory or other hardware than all nodes together have.",
     "Ask for less, add nodes, or set `queue.wait_for_capacity: true` to wait for them."),
    ("budget-too-small", "Not even one run fits into the budget",
     "By finished runs like it, the smallest run of the grid takes more than a limit of `budget`.",
     "Raise the limit, or shorten the runs; `stillhouse preview` shows the forecast."),
)  # fmt: skip

_OTHER_PROBLEMS = (
    ("invalid-parameter", 422, "A parameter is not valid",
     "A path, query or header parameter has the wrong type, is out of range or is not known.",
     "Mend the parameter named in `errors`."),
    ("invalid-body", 422, "The body is not valid",
     "The body of the request does not have the shape that the operation takes.",
     "Mend the field named in `errors`; `/docs` shows the shape."),
    ("invalid-filter", 400, "The filter is not valid",
     "The filter or `order_by` does not follow the grammar or names a field that is not known.",
     "Mend it at the position in `detail`; for instance `precision = 'fp16' and accuracy > 0.9`."),
    ("invalid-page-token", 400, "The page token is not valid",
     "It was altered, or comes from another list, filter or order.",
     "Start again without `page_token`."),
    ("malformed-request", 400, "The request cannot be read",
     "The HTTP message itself is broken or the client went away half-way.", "Send it again."),
    ("unknown-host", 400, "The Host header names another server",
     "The request came by a name that this server does not answer to; a page elsewhere may have "
     "pointed its own name here (DNS rebinding).",
     "Use 127.0.0.1 or localhost, or set STILLHOUSE_URL to the name in use."),
    ("unauthenticated", 401, "A token is needed",
     "The server has a token configured and the request carries none, or another.",
     "Send `Authorization: Bearer <token>`; the client and the command line read STILLHOUSE_TOKEN."),
    ("cross-origin", 403, "A page of another origin may not do this",
     "The Origin header of a request that changes something is not this server's.",
     "Use the web page of this server, or a client that sends no Origin."),
    ("not-found", 404, "There is no such thing",
     "No experiment, run or path of that name; it may have been deleted.", "Check the id and the path."),
    ("method-not-allowed", 405, "The method does not fit the path",
     "The path exists, with other methods; the Allow header lists them.", "Use one of those."),
    ("conflict", 409, "The state does not allow this",
     "For instance to delete an experiment that is still running.",
     "Bring it into the state that `detail` names, for instance cancel it first."),
    ("no-answer", 409, "The runs cannot answer this",
     "For instance no run has finished, an axis has one value only, or there is one seed per "
     "configuration.",
     "Wait for the runs, or submit those that `detail` asks for."),
    ("not-comparable", 409, "The runs cannot be compared",
     "They are of different tasks or were trained or judged on different data.",
     "Narrow them down with `filter`, as `detail` says."),
    ("no-model", 409, "The run has no such checkpoint",
     "It has not saved one, none was evaluated, or its files are damaged or not on this machine.",
     "Act as `detail` says; the other of `best` and `last` may be there."),
    ("no-trace", 409, "The run has no timeline",
     "It traces no steps, has not passed them yet, or its files are not on this machine.",
     "Act as `detail` says; `telemetry.trace_steps` of the spec asks for one, `telemetry.profile_steps` for "
     "a kernel trace."),
    ("no-predictions", 409, "The run has no predictions",
     "It has no test part, has not scored it yet, or its files are not on this machine.",
     "Act as `detail` says; `task.test: auto` in the spec gives a run a test part."),
    ("body-too-large", 413, "The body is too large",
     f"Bodies are limited to {MAX_BYTES:,} bytes, and documents to {MAX_NODES:,} values.",
     "Shorten the spec; data is named by path, never sent."),
    ("idempotency-mismatch", 422, "The key was used with another body",
     "An Idempotency-Key stands for one request; this one differs from the first.",
     "Use a new key for a new request."),
    ("internal-error", 500, "The server made a mistake",
     "An error that nobody foresaw; it is in the server's log under the number in `detail`.",
     "Report it with that number."),
    ("unavailable", 503, "The database is away",
     "It is locked, restarting or not reachable, or its tables are not migrated.",
     "Wait as Retry-After says and send the same again; an Idempotency-Key makes that safe for submits."),
    ("storage-full", 507, "The disk is full",
     "The database cannot grow; nothing of the request was stored.",
     "Free space where the database lies, then send the same again."),
)  # fmt: skip

CATALOGUE: Mapping[str, ProblemType] = {
    kind.slug: kind
    for kind in (
        *(ProblemType(slug, 422, title, cause, fix) for slug, title, cause, fix in _SPEC_PROBLEMS),
        *(ProblemType(*entry) for entry in _OTHER_PROBLEMS),
    )
}
"""Every problem type by slug."""


class FieldError(BaseModel):
    """One thing that is wrong, with the field it is wrong in."""

    type: str = Field(description="Slug of the problem type, `unknown-key` for instance.")
    path: str = Field(description="Dotted path of the field; empty for the document as a whole.")
    message: str = Field(description="One line with value, constraint and fix.")


class ProblemDocument(BaseModel):
    """An RFC 9457 problem: what went wrong, in a form that programs can act on."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "/problems/unknown-key",
                "title": "A key of the spec is not known",
                "status": 422,
                "detail": "precison: unknown key; did you mean 'precision'?",
                "instance": "/api/v1/experiments",
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
    errors: list[FieldError] | None = Field(
        default=None, description="Each wrong field, when fields are what is wrong."
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


def from_spec_error(error: SpecError) -> ProblemError:
    """The problem of a refused spec: of the errors' own type when they share one."""
    slugs = {problem.type for problem in error.problems}
    slug = slugs.pop() if len(slugs) == 1 else "invalid-spec"
    if slug == "too-large":
        slug = "body-too-large"
    first, *others = error.problems
    detail = str(first) + (f" (and {len(others)} more)" if others else "")
    return ProblemError(slug, detail, errors=error.problems)


def respond(error: ProblemError, instance: str) -> Response:
    """The problem as an HTTP response."""
    body: dict[str, Any] = {
        "type": f"/problems/{error.kind.slug}",
        "title": error.kind.title,
        "status": error.kind.status,
        "detail": error.detail,
        "instance": instance,
    }
    if error.errors:
        body["errors"] = [
            {"type": entry.type, "path": entry.path, "message": entry.message} for entry in error.errors
        ]
    headers = dict(error.headers or {})
    if error.kind.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", str(RETRY_AFTER_S))
    return Response(
        # A lone surrogate that a client sent must not break the answer that tells of it.
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


_EVERYWHERE = (
    "unknown-host", "unauthenticated", "cross-origin", "invalid-parameter", "internal-error", "unavailable",
)  # fmt: skip


def declared(*slugs: str) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for these problems and those that any operation can answer."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for kind in _kinds((*slugs, *_EVERYWHERE)):
        entry = by_status.setdefault(
            kind.status,
            {"model": ProblemDocument, "description": "", "content": {MEDIA_TYPE: {"examples": {}}}},
        )
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


def _kinds(slugs: Iterable[str]) -> list[ProblemType]:
    return sorted((CATALOGUE[slug] for slug in set(slugs)), key=lambda kind: (kind.status, kind.slug))


SPEC_PROBLEMS = tuple(entry[0] for entry in _SPEC_PROBLEMS)
"""Slugs of everything that can be wrong with a spec."""
