"""The OpenAPI document: what FastAPI derives, with problem documents under their own media type."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.examples import EXAMPLES
from api.problems import MEDIA_TYPE
from api.stream import CHANGES_EVENTS, EXPERIMENT_EVENTS, RUN_EVENTS
from service.domain.serialization import NUMBER_SCHEMA, adapter
from service.specs.experiment import json_schema

_REFERENCE = "#/components/schemas/{model}"

TAGS = [
    {"name": "experiments", "description": "Submit specs, follow and steer them."},
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
    """Makes `app.openapi()` give the finished document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def build(app: FastAPI) -> dict[str, Any]:
    """Derives the document from the routes."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        tags=app.openapi_tags,
        routes=app.routes,
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                _move_problem(status, answer)
    schemas = document["components"]["schemas"]
    for path, events in _STREAMS.items():
        answer = document["paths"][path]["get"]["responses"]["200"]
        answer["description"] = "Server-sent events; the schema is of one of them."
        answer["content"]["text/event-stream"]["schema"] = _event_schema(events, schemas)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for answer, example in EXAMPLES.items():
        schemas[answer.__name__]["example"] = example
    schemas["ExperimentSpec"] = _spec_schema(schemas)
    document = _with_shared_number(document)
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
        content = adapter(kind).json_schema(mode="serialization", ref_template=_REFERENCE)
        schemas.update(content.pop("$defs", {}))
        if isinstance(kind, type):
            schemas[kind.__name__] = content
            content = {"$ref": _REFERENCE.format(model=kind.__name__)}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": content}
        kinds.append(
            {
                "type": "object",
                "properties": {"event": {"const": event}, "data": data, "id": {"type": "string"}},
                "required": ["event", "data"],
            }
        )
    return {"oneOf": kinds}


def _with_shared_number(document: dict[str, Any]) -> dict[str, Any]:
    """The document with one component for the number that need not be finite, wherever it is allowed."""
    shared: dict[str, Any] = _sharing(document)
    shared["components"]["schemas"]["Number"] = {
        **NUMBER_SCHEMA,
        "description": "A number; one that is not finite is a string.",
    }
    return shared


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


def _move_problem(status: str, answer: dict[str, Any]) -> None:
    content = answer.get("content", {})
    if status >= "4" and MEDIA_TYPE in content:
        content[MEDIA_TYPE]["schema"] = {"$ref": "#/components/schemas/ProblemDocument"}
        for other in [name for name in content if name != MEDIA_TYPE]:
            del content[other]


def _spec_schema(schemas: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec's JSON Schema as a component, its definitions among the other components."""
    schema = json_schema()
    definitions = schema.pop("$defs", {})
    names = {name: f"Spec{name}" for name in definitions}
    for name, definition in definitions.items():
        schemas[names[name]] = _renamed(definition, names)
    for key in ("$schema", "$id"):
        schema.pop(key, None)
    renamed: dict[str, Any] = _renamed(schema, names)
    return renamed


def _renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {
            key: f"#/components/schemas/{names[inner.rsplit('/', 1)[-1]]}"
            if key == "$ref"
            else _renamed(inner, names)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_renamed(inner, names) for inner in value]
    return value
