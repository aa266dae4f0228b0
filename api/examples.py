"""Examples of answers in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.analysis.answers import (
    ComparisonAnswer,
    EffectsAnswer,
    FrontierAnswer,
    Guide,
    Recommendation,
    ScoreAnswer,
    SpeedupAnswer,
    TasksAnswer,
)
from service.domain.records import ExperimentDetail, ExperimentStatus, Points
from service.domain.serialization import Serializable

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
    ComparisonAnswer: {
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
    ScoreAnswer: {
        "strategy": "balance", "definitions": "stillhouse",
        "criteria": [{"metric": "cost_usd", "weight": 0.3, "better": "lower"}],
        "ranking": [{**_BF16, "score": 0.12, "parts": {"cost_usd": 0.12}}],
        "sensitivity": {"cost_usd": [{"low": 0.0, "high": 1.0, "winner": "precision=bf16"}]},
        "left_out": {"precision=fp16": "out_of_memory: does not fit"},
        "notes": [],
    },
    FrontierAnswer: {
        "metrics": [_LOWER_COST, {"name": "accuracy", "better": "higher"}],
        "members": [{**_BF16, "values": {"cost_usd": 0.31, "accuracy": 0.91}}],
        "others": [{**_FP32, "values": {"cost_usd": 0.62, "accuracy": 0.91}}],
        "dominated": {"precision=fp32": ["precision=bf16"]},
        "left_out": {}, "notes": [],
    },
    EffectsAnswer: {
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
    Recommendation: {
        "winner": "precision=bf16", "winner_point": {"precision": "bf16"},
        "objective": "cost_usd", "value": 0.31,
        "runner_up": "precision=fp32", "over_runner_up": None, "against_best": [],
        "excluded": {"precision=fp16": "accuracy 0.88 misses accuracy within 0.005 of the best"},
        "sure": "better than the runner-up, p = 0.001 (paired t-test)",
        "text": "Use precision=bf16: cost_usd 0.31 with accuracy within 0.005 of the best.",
        "per": None, "notes": [],
    },
    SpeedupAnswer: {
        "baseline": "precision=fp32",
        "metrics": [{"name": "total_time_s", "better": "lower"}],
        "rows": [{**_BF16, "ratios": {"total_time_s": {"ratio": 2.1, "low": 2.0, "high": 2.2, "pairs": 3}}}],
        "time_to": {
            "metric": "accuracy", "target": 0.9,
            "rows": [{"label": "precision=bf16", "reached": 3, "of": 3, "mean_s": 41.0, "speedup": 2.0}],
        },
        "left_out": {}, "notes": [], "scaling": [],
    },
    TasksAnswer: {
        "tasks": [{"task": "imdb", "metric": {"name": "accuracy", "better": "higher"}}],
        "standings": [
            {**_BF16, "mean_rank": 1.0, "low": 1.0, "high": 1.5, "wins": 1, "means": {"imdb": 0.91}}
        ],
        "improvements": [
            {"a": "precision=bf16", "b": "precision=fp32", "probability": 0.7, "low": 0.5, "high": 0.9}
        ],
        "left_out": {}, "notes": [],
    },
    Guide: {
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
