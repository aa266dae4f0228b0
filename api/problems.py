"""RFC 9457 problem documents: every error that the API answers, with its stable type.

`CATALOGUE` is the whole list; `make docs` generates `docs/errors.md` from it. A problem's `type` is
`/problems/<slug>`, a path that this server serves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from service.config import logs
from service.config.document import MAX_BYTES, MAX_DEPTH, MAX_NODES, MAX_PROBLEMS, Problem, SpecError
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


_SPEC_PROBLEMS = (
    ("invalid-spec", "The spec is not valid",
     f"There are problems of several kinds; `errors` lists the first {MAX_PROBLEMS} with path and type.",
     "Fix each entry of `errors`; each type has its own row in this table."),
    ("unknown-key", "Unknown key in the spec",
     "A field's name is misspelt or belongs to another section.",
     "Use the name suggested in the message, or look it up in `/api/v1/spec.schema.json`."),
    ("missing-field", "A required field is missing",
     "The spec lacks a field that has no default.", "Add the field named by `path`."),
    ("wrong-type", "A value has the wrong type",
     "For instance a string where a number is expected.", "Use the type named in the message."),
    ("invalid-value", "A value is not allowed",
     "The value is not in the closed list, or contradicts another field.",
     "Follow the message; it names the field to change."),
    ("out-of-range", "A value is out of range",
     "A number, string or list is below its minimum or above its maximum.",
     "Stay within the limit in the message."),
    ("not-finite", "A number is not finite",
     "The value is NaN, infinite, or too large for a float.", "Give a finite number."),
    ("unknown-axis", "An axis is not a field",
     "A name under `search.axes` is not the dotted name of a field.",
     "Use the name suggested in the message."),
    ("unknown-hardware", "The hardware is not in the catalogue",
     "The name is misspelt, or the entry is missing.",
     "Choose from `/api/v1/hardware`, or add an entry to `hardware.yaml` in the data directory."),
    ("precision-not-on-hardware", "The hardware does not support this precision",
     "For instance bf16 on a T4 or V100.", "Choose another precision or other hardware."),
    ("grid-too-large", "The grid has too many runs",
     f"The product of axes and seeds exceeds {MAX_RUNS:,} runs.",
     "Shorten `search.axes` or `seeds`, or sample with `search.name: random`."),
    ("check-too-long", "The spec takes too long to check",
     "Its grid has many values and points, each of which is checked.",
     "List fewer values in `search.axes`, or submit it as several experiments."),
    ("not-utf-8", "The text is not UTF-8", "The file was saved in another encoding.",
     "Save it as UTF-8."),
    ("not-yaml", "The text is neither YAML nor JSON",
     "There is a syntax error; the message names the line.", "Fix the line."),
    ("yaml-alias", "Aliases are not allowed",
     "The document uses `*name`, which lets a small document expand without bound.", "Write the value out."),
    ("too-deep", "The document is nested too deeply",
     f"It has more than {MAX_DEPTH} levels.", "Flatten it; no field of a spec is that deep."),
    ("not-a-mapping", "The document is not a mapping",
     "It is empty, a list or a single value.", "Write fields as `name: value`."),
    ("path-outside-roots", "A path is outside the configured folders",
     "`task.path`, `model.name` or `model.teacher` is outside every allowed folder once links are "
     "resolved.",
     "Move the files, or have the operator add the folder to STILLHOUSE_DATA_ROOTS or "
     "STILLHOUSE_MODEL_ROOTS."),
    ("path-not-found", "A path does not exist",
     "The dataset or model folder is missing, empty or not readable by the service.",
     "Correct the path; relative paths are resolved from the configured folders."),
    ("bad-data", "The data cannot be used",
     "The first rows of `task.path` lack a column or a label, are not UTF-8 or not JSON, or the parts do not "
     "fit together. The message names file, line and field.",
     "Fix the row or name the column in `task.columns`; `stillhouse inspect` shows what a folder holds."),
    ("model-without-weights", "A model folder is incomplete",
     "The folder lacks `config.json`, the weights or a tokenizer, or has its weights in another format.",
     "Add the file, convert the weights with the command in the message, or use a preset."),
    ("unknown-project", "No such project",
     "`project` names a project that does not exist, or of which the sender is not a member.",
     "Use a project listed by `stillhouse project list`, or have its maintainers add you."),
    ("archived-project", "The project is archived",
     "`project` names a project that no longer accepts experiments.",
     "Name another project, or have a maintainer restore it."),
    ("budget-spent", "The project's budget is spent",
     "The project has used its budget of this month.",
     "Wait for the next month, or have an administrator raise the budget."),
    ("too-many-queued", "Too many queued runs",
     "The project limits how many queued runs a user may have, and the submission exceeds that.",
     "Wait until some have run, submit fewer, or have an administrator raise `queued_runs_per_user`."),
    ("unknown-run", "No such run",
     "`run:<id>` as a student or teacher names a run that does not exist.",
     "Use a run listed by `stillhouse runs`."),
    ("run-without-result", "The run has no model",
     "The run that provides the student or teacher failed, was cancelled or was stopped.",
     "Use a run that has succeeded or still may, or retry that run first."),
    ("teacher-of-another-task", "The teacher was trained on another task",
     "The run given as `model.teacher` was trained on a task other than `task.name`.",
     "Use a run of the same task."),
    ("unsatisfiable-resources", "The cluster can never run this",
     "A run needs more workers, CPUs, memory or other hardware than all nodes together have.",
     "Ask for less, add nodes, or set `queue.wait_for_capacity: true` to wait for them."),
    ("budget-too-small", "Not even one run fits the budget",
     "Judging by similar finished runs, the smallest run of the grid exceeds a limit in `budget`.",
     "Raise the limit, or shorten the runs; `stillhouse preview` shows the forecast."),
)  # fmt: skip

_OTHER_PROBLEMS = (
    ("invalid-parameter", 422, "A parameter is not valid",
     "A path, query or header parameter has the wrong type, is out of range or is unknown.",
     "Fix the parameter named in `errors`."),
    ("invalid-body", 422, "The body is not valid",
     "The request body does not have the shape that the operation expects.",
     "Fix the field named in `errors`; `/docs` shows the shape."),
    ("invalid-filter", 400, "The filter is not valid",
     "The filter or `order_by` has a syntax error or an unknown field.",
     "Fix it at the position in `detail`; valid examples are `precision = 'fp16' and accuracy > 0.9` for "
     "runs and `state = 'running' and owner = 'ada'` for experiments."),
    ("invalid-page-token", 400, "The page token is not valid",
     "It was modified, or comes from another list, filter or order.",
     "Start again without `page_token`."),
    ("malformed-request", 400, "The request cannot be read",
     "The HTTP message is malformed, names several hosts, or the client disconnected while sending it.",
     "Send it again."),
    ("unknown-host", 400, "The Host header is not one of this server's names",
     "The request used a host name that this server does not accept; another site may have pointed "
     "its own name here (DNS rebinding).",
     "Use 127.0.0.1 or localhost, or set STILLHOUSE_URL to the name in use."),
    ("unauthenticated", 401, "A token is required",
     "The server requires a token or a session, and the request has neither.",
     "Send `Authorization: Bearer <token>`; the client and the command line read STILLHOUSE_TOKEN."),
    ("invalid-token", 401, "The token is not accepted",
     "It is malformed, unknown, expired or revoked, or its user is disabled; `detail` says which.",
     "Create another with `stillhouse token create`, or ask an administrator."),
    ("forbidden", 403, "Not allowed",
     "The token's scope or the user's role in the project does not include this.",
     "`detail` names what is missing and who can grant it."),
    ("cross-origin", 403, "Cross-origin request refused",
     "The request changes something, and its Origin header is not this server's.",
     "Use this server's web page, or a client that sends no Origin."),
    ("csrf-failed", 403, "The change did not come from this server's page",
     "It came with a session's cookie, which another site can send too, without the session's own header.",
     "Send `Stillhouse-CSRF` with the value that `GET /api/v1/whoami` gives; programs send a token instead."),
    ("insecure-login", 403, "Sessions need https",
     "The browser reached the server over plain http from another machine, where a session could be read.",
     "Put TLS in front of the server and set STILLHOUSE_URL to its https address."),
    ("not-found", 404, "Not found",
     "There is no experiment, run or path of that name; it may have been deleted.",
     "Check the id and the path."),
    ("method-not-allowed", 405, "The path does not support this method",
     "The path exists but takes other methods; the Allow header lists them.", "Use one of those methods."),
    ("request-timeout", 408, "The request took too long",
     "The client sent only part of a request and then nothing for too long.",
     "Send it again; if a slow link cannot send it in time, make the body smaller."),
    ("conflict", 409, "Not allowed in the current state",
     "For instance, the experiment to delete is still running.",
     "Bring it into the state named in `detail`; for instance, cancel it first."),
    ("no-answer", 409, "The runs cannot answer this",
     "For instance, no run has finished, an axis has only one value, or there is only one seed per "
     "configuration.",
     "Wait for the runs, or submit the ones named in `detail`."),
    ("not-comparable", 409, "The runs cannot be compared",
     "They are of different tasks, or were trained or evaluated on different data.",
     "Narrow them down with `filter`, as `detail` says."),
    ("no-model", 409, "The run has no such checkpoint",
     "None has been saved, none was evaluated, or its files are damaged or not on this machine.",
     "Follow `detail`; the other of `best` and `last` may exist."),
    ("unanswerable", 409, "What was sent cannot be answered",
     "A file holds nothing that a task can read, a model takes no such texts, or others are being answered.",
     "Follow `detail`."),
    ("no-trace", 409, "The run has no timeline",
     "It traces no steps, has not reached them yet, or its files are not on this machine.",
     "Follow `detail`; set `telemetry.trace_steps` in the spec for a timeline, `telemetry.profile_steps` for "
     "a kernel trace."),
    ("no-predictions", 409, "The run has no predictions",
     "It has no test part, has not scored it yet, or its files are not on this machine.",
     "Follow `detail`; `task.test: auto` in the spec gives a run a test part."),
    ("body-too-large", 413, "The body is too large",
     f"Bodies are limited to {MAX_BYTES:,} bytes, and documents to {MAX_NODES:,} values.",
     "Shorten the spec; refer to data by path instead of sending it."),
    ("unsupported-encoding", 415, "The body is compressed",
     "The request has a Content-Encoding; this server reads bodies as they are.",
     "Send the body without Content-Encoding."),
    ("idempotency-mismatch", 422, "The idempotency key was used for another request",
     "An Idempotency-Key identifies one request, and this one differs from the first.",
     "Use a new key for a new request."),
    ("too-many-requests", 429, "Too many attempts",
     "Wrong tokens, failed logins, codes or polls came too fast from one address or user.",
     "Wait as long as Retry-After says."),
    ("headers-too-large", 431, "The headers are too large",
     "The request line and the headers of a request are limited to 64 KiB.",
     "Leave out headers that this server does not read, and shorten the query."),
    ("internal-error", 500, "Internal server error",
     "An unexpected error occurred; the server's log has it under the incident id in `detail`.",
     "Report it with that id."),
    ("unavailable", 503, "The database is unavailable",
     "It is locked, restarting or unreachable, or its schema is not up to date.",
     "Wait as long as Retry-After says and repeat the request; for submits, an Idempotency-Key makes that "
     "safe."),
    ("unconfirmed", 504, "The change is not confirmed",
     "The database was lost during the commit, or before its result could be read: the change may be stored.",
     "Read the object, and repeat the request only if the change is not there; an Idempotency-Key makes "
     "submits safe to repeat."),
    ("storage-full", 507, "The disk is full",
     "The database cannot grow; nothing in the request was stored.",
     "Free space on the database's disk, then repeat the request."),
)  # fmt: skip

CATALOGUE: Mapping[str, ProblemType] = {
    kind.slug: kind
    for kind in (
        *(ProblemType(slug, 422, title, cause, fix) for slug, title, cause, fix in _SPEC_PROBLEMS),
        *(ProblemType(*entry) for entry in _OTHER_PROBLEMS),
    )
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


SPEC_PROBLEMS = tuple(entry[0] for entry in _SPEC_PROBLEMS)
