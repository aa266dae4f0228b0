"""The OpenAPI document: what FastAPI derives, with problem documents under their own media type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.routing import RouteContext, iter_route_contexts

from api.access import On, query_names, rule_of
from api.examples import EXAMPLES
from api.problems import EVERYWHERE, MEDIA_TYPE, SPEC_PROBLEMS, ProblemDocument, declared
from api.stream import CHANGES_EVENTS, EXPERIMENT_EVENTS, RUN_EVENTS
from service.domain.access import Action
from service.domain.serialization import NUMBER_SCHEMA, adapter
from service.specs.experiment import ExperimentSpec

_REFERENCE = "#/components/schemas/{model}"

TAGS = [
    {"name": "experiments", "description": "Submit specs, follow and manage them."},
    {"name": "answers", "description": "Compare, score, recommend: decisions with their evidence."},
    {"name": "runs", "description": "Points of the grid: figures, curves, logs."},
    {"name": "queue", "description": "What waits and why; the cluster and the hardware catalogue."},
    {"name": "specs", "description": "Check and preview a spec without submitting it."},
    {"name": "notifications", "description": "Be told by webhook or e-mail what happens."},
    {"name": "system", "description": "Health and metrics of this process."},
]

DESCRIPTION: dict[str, Any] = {
    "title": "Stillhouse",
    "version": version("stillhouse"),
    "summary": "Find the cheapest way to train a BERT without losing accuracy.",
    "description": (
        "Errors are RFC 9457 problem documents with a stable `type`. Lists are paged by `page_token`. "
        'Times are Unix seconds. A number that is not finite is the string "NaN", "Infinity" or '
        '"-Infinity".'
    ),
    "openapi_tags": TAGS,
    "openapi_url": None,
    "docs_url": None,
    "redoc_url": None,
    "redirect_slashes": False,
    "generate_unique_id_function": lambda route: route.name,
    "telemetry": {"tracing": False, "metrics": False, "logs": False, "operation_spans": False,
                  "auto_configure": False},
}  # fmt: skip


def install(app: FastAPI) -> None:
    derived = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _finished(derived(), app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _finished(document: dict[str, Any], app: FastAPI) -> dict[str, Any]:
    for route in iter_route_contexts(app.routes):
        for method in route.methods or () if route.include_in_schema else ():
            _declare_problems(route, document["paths"][route.path_format][method.lower()]["responses"])
    schemas = document["components"]["schemas"]
    _add(ProblemDocument, schemas)
    for path, events in _STREAMS.items():
        answer = document["paths"][path]["get"]["responses"]["200"]
        answer["description"] = "Server-sent events; the schema is of one of them."
        answer["content"]["text/event-stream"]["schema"] = _event_schema(events, schemas)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for answer, example in EXAMPLES.items():
        schemas[answer.__name__]["example"] = example
    schemas["ExperimentSpec"] = _spec_schema(schemas)
    document = _sharing(document)
    document["components"]["schemas"]["Number"] = {
        **NUMBER_SCHEMA,
        "description": "A number; one that is not finite is a string.",
    }
    document["components"]["securitySchemes"] = {
        "token": {
            "type": "http",
            "scheme": "bearer",
            "description": "Needed when access is closed; see docs/security.md.",
        }
    }
    document["security"] = [{}, {"token": []}]
    return document


_STREAMS = {
    "/api/v1/stream": CHANGES_EVENTS,
    "/api/v1/experiments/{experiment_id}/stream": EXPERIMENT_EVENTS,
    "/api/v1/runs/{run_id}/stream": RUN_EVENTS,
}


def _event_schema(events: Mapping[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of one event, which is how OpenAPI 3.1 describes a stream of them; data is JSON text."""
    kinds = []
    for event, kind in events.items():
        content = _add(kind, schemas)
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
        kinds.append(
            {
                "type": "object",
                "properties": {"event": {"const": event}, "data": data, "id": {"type": "string"}},
                "required": ["event", "data"],
            }
        )
    return {"oneOf": kinds}


def _add(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Adds the components of a type to the others, and returns the schema that refers to them."""
    content = adapter(kind).json_schema(mode="serialization", ref_template=_REFERENCE)
    schemas.update(content.pop("$defs", {}))
    if not isinstance(kind, type):
        return content
    schemas[kind.__name__] = content
    return {"$ref": _REFERENCE.format(model=kind.__name__)}


def _sharing(value: Any) -> Any:
    if isinstance(value, list):
        return [_sharing(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    options = value.get("anyOf")
    if isinstance(options, list) and all(option in options for option in NUMBER_SCHEMA["anyOf"]):
        others = [option for option in options if option not in NUMBER_SCHEMA["anyOf"]]
        value = {name: inner for name, inner in value.items() if name not in ("anyOf", "title")}
        number = {"$ref": _REFERENCE.format(model="Number")}
        value |= {"anyOf": [number, *others]} if others else number
    return {name: _sharing(inner) for name, inner in value.items()}


def _declare_problems(route: RouteContext, answers: dict[str, Any]) -> None:
    """Completes the answers of an operation with those problems that it did not name itself."""
    contents = [answer.get("content", {}) for answer in answers.values()]
    named = {slug for content in contents for slug in content.get(MEDIA_TYPE, {}).get("examples", ())}
    answers.pop("422", None)  # FastAPI's own.
    for status, answer in declared(*named, *_problems_of(route)).items():
        answer["content"] |= answers.get(str(status), {}).get("content", {}) | answer["content"]
        answers[str(status)] = answer


def _problems_of(route: RouteContext) -> Iterator[str]:
    rule, parameters = rule_of(route), set(query_names(route.dependant))
    reads = route.methods == {"GET"}
    yield from EVERYWHERE
    if "{" in str(route.path_format):
        yield "not-found"
    if rule.action not in (None, Action.see):
        yield "forbidden"
    if not reads:
        yield "csrf-failed"
    if not reads and route.name not in _CHECKS:
        yield from ("storage-full", "unconfirmed")
        if rule.action in (Action.manage_own, Action.manage_project, Action.administer):
            yield "conflict"
    if route.openapi_extra is not None:
        yield from (*SPEC_PROBLEMS, "body-too-large")
    elif route.body_field is not None:
        yield from ("invalid-body", "body-too-large")
    if "page_token" in parameters:
        yield "invalid-page-token"
    if "filter" in parameters:
        yield "invalid-filter"
        if rule.on is On.experiments or "with_overhead" in parameters:
            yield from ("no-answer", "not-comparable")


_CHECKS = ("validate_spec", "preview_spec")  # Operations that are no GET and change nothing


def _spec_schema(schemas: dict[str, Any]) -> dict[str, Any]:
    schema = ExperimentSpec.model_json_schema(ref_template=_REFERENCE.format(model="Spec{model}"))
    definitions = schema.pop("$defs", {})
    schemas.update((f"Spec{name}", definition) for name, definition in definitions.items())
    return {**schema, "title": "Stillhouse experiment spec"}
