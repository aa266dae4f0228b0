"""Query parameters that an operation does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant

from api.problems import ProblemError
from service.config.document import MAX_PROBLEMS, MAX_SUGGESTIONS, Problem


def refuse_unknown_parameters(request: Request) -> None:
    """Raises `invalid-parameter` with the nearest known name: a misspelt filter is not ignored."""
    if not request.query_params:
        return
    known = set(query_names(request.scope["route"].dependant))
    unknown = [name for name in request.query_params if name not in known][:MAX_PROBLEMS]
    hints = [_nearest(name, known) for name in unknown[:MAX_SUGGESTIONS]]
    hints += [_listed(known)] * (len(unknown) - len(hints))
    problems = [
        Problem("unknown-key", f"query.{name[:100]}", "unknown parameter; " + hint)
        for name, hint in zip(unknown, hints, strict=True)
    ]
    if problems:
        raise ProblemError("invalid-parameter", str(problems[0]), errors=problems)


def query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from query_names(inner)


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name[:100], sorted(known), n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return _listed(known)


def _listed(known: set[str]) -> str:
    return "this operation takes " + (", ".join(sorted(known)) or "none")
