"""The OpenAPI document: what FastAPI derives, with problem documents under their own media type."""

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.routing import RouteContext, iter_route_contexts

from api.access import On, query_names, rule_of
from api.problems import EVERYWHERE, MEDIA_TYPE, SPEC_PROBLEMS, ProblemDocument, declared
from api.stream import CHANGES_EVENTS, EXPERIMENT_EVENTS, RUN_EVENTS
from service.analysis import answers
from service.domain.access import Action
from service.domain.records import ExperimentDetail, ExperimentStatus, Points
from service.domain.serialization import NUMBER_SCHEMA, Serializable, adapter
from service.specs.experiment import ExperimentSpec

_EXPERIMENT: dict[str, Any] = {
    "id": 12, "name": "precision-by-batch", "owner": "ada", "state": "running", "priority": 50, "attempt": 1,
    "spec_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "run_count": 8,
    "submission_id": "stillhouse-12-1", "lease_owner": "driver-4711", "lease_until_s": 1790000031.5,
    "cancel_requested_s": None, "pause_requested_s": None, "not_before_s": 0.0,
    "failure_class": None, "failure_message": None,
    "created_s": 1790000000.0, "queued_s": 1790000000.0, "started_s": 1790000004.2, "ended_s": None,
    "project": "default", "pool": "default", "tags": ["baseline"], "notes": "", "archived_s": None,
    "run_states": {"succeeded": 3, "running": 2, "queued": 3},
}  # fmt: skip
_BF16, _FP32 = ({"label": f"precision={of}", "point": {"precision": of}} for of in ("bf16", "fp32"))
_LOWER_COST = {"name": "cost_usd", "better": "lower"}

EXAMPLES: Mapping[type[Serializable], dict[str, Any]] = {
    ExperimentStatus: _EXPERIMENT,
    ExperimentDetail: {
        **_EXPERIMENT,
        "totals": {"cost_usd": 1.24, "energy_kwh": 0.31, "device_hours": 2.5, "overhead_usd": 0.04},
        "study": None,
        "waiting": None,
    },
    Points: {
        "run_id": 40,
        "series": {
            "loss": {
                "steps": [1, 2, 3], "values": [0.70, 0.66, "NaN"],
                "at_s": [1790000001.1, 1790000001.4, 1790000001.7], "attempts": [1, 1, 1],
                "bucket_steps": None,
            }
        },
        "next_step": None,
    },
    answers.ComparisonAnswer: {
        "axes": ["precision"],
        "metrics": [_LOWER_COST],
        "rows": [
            {
                **_FP32, "figures": {"cost_usd": {"mean": 0.62, "sd": 0.01, "n": 5}},
                "finished": 5, "planned": 5, "incomplete": 0, "failures": {}, "energy_provenance": "counter",
                "shared": 0, "disturbed": 0, "disturbed_by": {},
            }
        ],
        "best": {}, "claims": [], "notes": [], "kernels": [], "agreement": [], "tuning": None,
        "published": None,
    },
    answers.ScoreAnswer: {
        "strategy": "balance", "definitions": "stillhouse",
        "criteria": [{"metric": "cost_usd", "weight": 0.3, "better": "lower"}],
        "ranking": [{**_BF16, "score": 0.12, "parts": {"cost_usd": 0.12}}],
        "sensitivity": {"cost_usd": [{"low": 0.0, "high": 1.0, "winner": "precision=bf16"}]},
        "left_out": {"precision=fp16": "out_of_memory: does not fit"},
        "notes": [],
    },
    answers.FrontierAnswer: {
        "metrics": [_LOWER_COST, {"name": "accuracy", "better": "higher"}],
        "members": [{**_BF16, "values": {"cost_usd": 0.31, "accuracy": 0.91}}],
        "others": [{**_FP32, "values": {"cost_usd": 0.62, "accuracy": 0.91}}],
        "dominated": {"precision=fp32": ["precision=bf16"]},
        "left_out": {}, "notes": [],
    },
    answers.EffectsAnswer: {
        "items": [
            {
                "model": {
                    "metric": "total_time_s", "scale": "ratio",
                    "levels": [
                        {
                            "axis": "precision", "level": "fp16", "baseline": "fp32",
                            "effect": -0.6, "low": -0.62, "high": -0.58, "p_value": 1e-9, "verdict": "better",
                        }
                    ],
                    "terms": [{"axes": ["precision"], "seeds": 5, "p_value": 1e-9, "share": 0.97}],
                    "left_out": [], "r_squared": 0.99, "checks": [],
                },
                "sentences": ["precision=fp16 against fp32: total_time_s -60.0% (-62.0% to -58.0%)"],
            }
        ],
        "unanswered": {}, "notes": [],
    },
    answers.Recommendation: {
        "winner": "precision=bf16", "winner_point": {"precision": "bf16"},
        "objective": "cost_usd", "value": 0.31,
        "runner_up": "precision=fp32", "over_runner_up": None, "against_best": [],
        "excluded": {"precision=fp16": "accuracy 0.88 misses accuracy within 0.005 of the best"},
        "sure": "better than the runner-up, p = 0.001 (paired t-test)",
        "text": "Use precision=bf16: cost_usd 0.31 with accuracy within 0.005 of the best.",
        "per": None, "notes": [],
    },
    answers.SpeedupAnswer: {
        "baseline": "precision=fp32",
        "metrics": [{"name": "total_time_s", "better": "lower"}],
        "rows": [{**_BF16, "ratios": {"total_time_s": {"ratio": 2.1, "low": 2.0, "high": 2.2, "pairs": 3}}}],
        "time_to": {
            "metric": "accuracy", "target": 0.9,
            "rows": [{"label": "precision=bf16", "reached": 3, "of": 3, "mean_s": 41.0, "speedup": 2.0}],
        },
        "left_out": {}, "notes": [], "scaling": [],
    },
    answers.TasksAnswer: {
        "tasks": [{"task": "imdb", "metric": {"name": "accuracy", "better": "higher"}}],
        "standings": [
            {**_BF16, "mean_rank": 1.0, "low": 1.0, "high": 1.5, "wins": 1, "means": {"imdb": 0.91}}
        ],
        "improvements": [
            {"a": "precision=bf16", "b": "precision=fp32", "probability": 0.7, "low": 0.5, "high": 0.9}
        ],
        "left_out": {}, "notes": [],
    },
    answers.Guide: {
        "guidelines": [
            {
                "axis": "precision", "task": "imdb", "hardware": "v100",
                "metric": {"name": "total_time_s", "better": "lower"},
                "a": "precision=bf16", "b": "precision=fp32",
                "a_point": {"precision": "bf16"}, "b_point": {"precision": "fp32"},
                "finding": "A is better", "counts": {"A is better": 2, "undecided": 1},
                "smallest": -0.55, "largest": -0.48, "seeds_fewest": 3, "seeds_most": 5, "evidence": [],
            }
        ],
        "sources": [
            {
                "id": 12, "name": "precision-by-batch", "project": "default", "ended_s": 1_790_000_000.0,
                "tasks": ["imdb"], "models": ["mini"], "hardware": ["v100"],
                "devices": ["Tesla V100-PCIE-16GB"],
                "runs": 12, "planned": 12, "seeds": 3, "disturbed": 0, "energy": ["counter"], "notes": [],
            }
        ],
        "left_out": {}, "notes": [],
    },
}  # fmt: skip
"""By response class; each has every field of its class."""

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
