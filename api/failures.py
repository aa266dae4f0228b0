"""From exceptions to problems: the handlers that an application installs.

Everything that the store, FastAPI or Starlette can raise has its problem here; what is left is a
mistake of ours, logged under a number that the answer carries.
"""

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from api.access import authenticated
from api.guard import REQUEST_ID, SECURITY_HEADERS
from api.login.sessions import login_instead
from api.problems import CATALOGUE, RETRY_AFTER_S, ProblemError, from_spec_error, invalid, respond
from api.routes import pages
from service.analysis.answers import AnalysisError, BadQuestion, NotComparable
from service.config.document import MAX_BYTES, Problem, SpecError, error_words
from service.config.logs import about
from service.db import errors
from service.output.bounded import Unanswerable
from service.output.run_files import NoPredictions, NoTrace
from service.specs.models import NoModel

_logger = logging.getLogger(__name__)

_PROBLEMS: dict[type, str] = {
    errors.NotFound: "not-found",
    errors.Conflict: "conflict",
    errors.StaleAttempt: "conflict",
    errors.IdempotencyMismatch: "idempotency-mismatch",
    errors.FilterError: "invalid-filter",
    errors.BadPageToken: "invalid-page-token",
    errors.StoreUnavailable: "unavailable",
    errors.Unconfirmed: "unconfirmed",
    errors.UnusableDatabase: "unavailable",
    errors.StoreFull: "storage-full",
    AnalysisError: "no-answer",
    NotComparable: "not-comparable",
    NoModel: "no-model",
    NoTrace: "no-trace",
    Unanswerable: "unanswerable",
    NoPredictions: "no-predictions",
}
_GONE = "the client disconnected while sending the request"
_HTTP_PROBLEMS = {404: "not-found", 405: "method-not-allowed", 413: "body-too-large"}


def install(app: FastAPI) -> None:
    app.add_exception_handler(ProblemError, _answered(lambda error: error))
    app.add_exception_handler(SpecError, _answered(from_spec_error))
    app.add_exception_handler(errors.StoreError, _answered(_from_store_error))
    for kind in (AnalysisError, NoModel, NoTrace, NoPredictions, Unanswerable):
        app.add_exception_handler(kind, _answered(_without_answer))
    app.add_exception_handler(RequestValidationError, _answered(_from_invalid_request))
    app.add_exception_handler(ClientDisconnect, _answered(lambda _: ProblemError("malformed-request", _GONE)))
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_mistake)


def _answered(problem_of: Callable[[Any], ProblemError]) -> Callable[[Request, Any], Awaitable[Response]]:
    async def answer(request: Request, error: Any) -> Response:
        problem = problem_of(error)
        return login_instead(request, problem) or respond(problem, request.url.path)

    return answer


def _slug(error: Exception) -> str:
    for kind in type(error).__mro__:
        if kind in _PROBLEMS:
            return _PROBLEMS[kind]
    raise error


def _from_store_error(error: errors.StoreError) -> ProblemError:
    if isinstance(error, errors.BadValue):
        return invalid("invalid-body", f"body.{error.field}", error.message)
    slug = _slug(error)
    if not isinstance(error, errors.StoreOutage | errors.UnusableDatabase):
        return ProblemError(slug, str(error))
    # The driver's words name hosts, users and files, which are not the sender's to know.
    unconfirmed = isinstance(error, errors.Unconfirmed)
    ours = str(error) if unconfirmed else CATALOGUE[slug].title
    driver = getattr(error.__cause__, "orig", error.__cause__) if unconfirmed else error
    _logger.warning("answered with %s: %s", slug, driver)
    headers = None
    if not isinstance(error, errors.StoreFull):
        headers = {"Retry-After": str(getattr(error, "retry_after_s", RETRY_AFTER_S))}
    return ProblemError(slug, f"{ours}; the server's log says why", headers=headers)


def _without_answer(error: Exception) -> ProblemError:
    if isinstance(error, BadQuestion):
        return invalid("invalid-parameter", f"query.{error.parameter}", str(error))
    return ProblemError(_slug(error), str(error))


def _from_invalid_request(error: RequestValidationError) -> ProblemError:
    problems = [_parameter_problem(entry) for entry in error.errors()]
    in_body = any(entry["loc"][0] == "body" for entry in error.errors())
    return ProblemError("invalid-body" if in_body else "invalid-parameter", str(problems[0]), errors=problems)


def _parameter_problem(entry: dict[str, Any]) -> Problem:
    kind = "missing-field" if entry["type"] == "missing" else "invalid-value"
    return Problem(kind, ".".join(map(str, entry["loc"])), error_words(entry))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    slug = _HTTP_PROBLEMS.get(error.status_code, "malformed-request")
    if slug in ("not-found", "method-not-allowed"):
        # No route took the request, so no dependency has looked at its token yet.
        try:
            await authenticated(request)
        except ProblemError as refusal:
            return login_instead(request, refusal) or respond(refusal, request.url.path)
    allowed = ", ".join(_allowed(request))
    details = {
        "not-found": f"{request.url.path} does not exist; /docs lists the paths",
        "method-not-allowed": f"{request.url.path} takes only {allowed}",
        "body-too-large": f"the body exceeds {MAX_BYTES:,} bytes; refer to data by path",
    }
    if slug == "not-found" and "text/html" in request.headers.get("Accept", ""):
        return pages.missing_page()
    headers = {"Allow": allowed} if slug == "method-not-allowed" else error.headers
    problem = ProblemError(slug, details.get(slug, str(error.detail)), headers=headers)
    return respond(problem, request.url.path)


def _allowed(request: Request) -> list[str]:
    """The methods that a path takes, whichever routes they belong to; the guard answers HEAD like GET."""
    routes = request.app.router.routes
    methods = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return ["GET", "HEAD", *methods[1:]] if methods[:1] == ["GET"] else methods


async def _on_mistake(request: Request, error: Exception) -> Response:
    incident = uuid.uuid4().hex[:12]
    # This answer is sent outside the guard, and the server closes the connection after it.
    request_id = str(request.scope.get("request_id", incident))
    headers = {**dict(SECURITY_HEADERS), "Connection": "close", REQUEST_ID: request_id}
    problem = ProblemError(
        "internal-error", f"incident {incident}; the cause is in the server's log", headers=headers
    )
    with about(request_id=request_id):
        _logger.error("incident %s: %s %s", incident, request.method, request.url.path, exc_info=error)
        return respond(problem, request.url.path)
