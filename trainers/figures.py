"""What every figure of a run is: its unit, how it comes to be, and which direction wins.

`docs/metrics.md` defines each in words. Imports no torch: whoever compares runs reads this too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from trainers.reporting import Provenance
from trainers.telemetry.timeline import Phase

Better = Literal["lower", "higher"]
Share = Literal["all", "some"]

_S, _PCT = "s", "%"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that a run reports.

    Attributes:
        unit: of its value; empty for words.
        provenance: how it comes to be; None = told by the run (energy).
        scope: what it covers.
        better: which direction wins; None = neither, or it depends on the question.
        share: a mean over what lies between 0 and 1 for each unit of the evaluated part: over `all` of
            them, or over `some`, such as the questions that have an answer; None = it is no such mean.
    """

    unit: str
    provenance: Provenance | None = Provenance.counter
    scope: str = "run"
    better: Better | None = None
    share: Share | None = None


EVERY_DEVICE = "mean over the run's devices"
_PROFILED = "worker:0, profiled steps"

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "train_loss": Figure("nat", better="lower"),
        "total_time_s": Figure(_S, better="lower"),
        "train_time_s": Figure(_S, better="lower"),
        **{f"{phase}_time_s": Figure(_S, scope="worker:0", better="lower") for phase in Phase},
        "overhead_time_s": Figure(_S, better="lower"),
        "queue_time_s": Figure(_S, better="lower"),
        "samples_per_s": Figure("1/s", better="higher"),
        "tokens_per_s": Figure("1/s", better="higher"),
        "padding_pct": Figure(_PCT, better="lower"),
        "truncated_pct": Figure(_PCT, better="lower"),
        "peak_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
        "evaluation_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
        "weight_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
        "example_ms_p50": Figure("ms", scope="last evaluation", better="lower"),
        "example_ms_p95": Figure("ms", scope="last evaluation", better="lower"),
        "preparation_memory_mib": Figure("MiB", scope="worker with the most", better="lower"),
        "cost_usd": Figure("USD", Provenance.modelled, better="lower"),
        "energy_kwh": Figure("kWh", None, "all devices that train", better="lower"),
        "energy_provenance": Figure(""),
        "achieved_tflops": Figure("TFLOP/s", scope="all devices", better="higher"),
        "teacher_tflops": Figure("TFLOP/s", scope="all devices"),
        "mfu_pct": Figure(_PCT, scope=EVERY_DEVICE, better="higher"),
        "cpu_utilisation_pct": Figure(_PCT, scope="CPUs reserved", better="higher"),
        "gpu_utilisation_pct": Figure(_PCT, Provenance.sampled, EVERY_DEVICE, better="higher"),
        "memory_utilisation_pct": Figure(_PCT, Provenance.sampled, EVERY_DEVICE),
        "mean_power_w": Figure("W", Provenance.sampled, EVERY_DEVICE, better="lower"),
        "peak_power_w": Figure("W", Provenance.sampled, "device with the most", better="lower"),
        "sm_clock_mhz": Figure("MHz", Provenance.sampled, EVERY_DEVICE),
        "kernel_active_ratio": Figure("1", scope=_PROFILED, better="higher"),
        "kernel_launches_per_step": Figure("1", scope=_PROFILED, better="lower"),
        "sm_occupancy_pct": Figure(_PCT, Provenance.modelled, _PROFILED, better="higher"),
        "sm_occupancy_wall_pct": Figure(_PCT, Provenance.modelled, _PROFILED, better="higher"),
        "bubble_pct": Figure(_PCT, scope="mean over stages", better="lower"),
        "bubble_formula_pct": Figure(_PCT, Provenance.modelled, better="lower"),
        "noise_scale": Figure("base batches", Provenance.sampled),
        "statistical_efficiency": Figure("1", Provenance.sampled, better="higher"),
        "goodput": Figure("1/s", Provenance.sampled, better="higher"),
        "hidden_communication_s": Figure(_S, scope="worker:0"),
        "bytes_sent_per_step": Figure("B", scope="worker:0", better="lower"),
        "validation_examples": Figure("1"),
        "test_examples": Figure("1"),
        "parameters": Figure("1", better="lower"),
        "steps": Figure("1", better="lower"),
    }
)
"""All that a summary may have beside scores; which of them depends on the device and on `telemetry`."""

_SHARE = Figure("1", better="higher", share="all")
_SHARE_OF_SOME = Figure("1", better="higher", share="some")

SCORES: Mapping[str, Figure] = MappingProxyType(
    {
        "validation_loss": Figure("nat", better="lower"),
        "sequence_ms": Figure("ms", better="lower"),
        "accuracy": _SHARE,
        **{f"accuracy_level_{level}": _SHARE for level in (2, 4, 6, 8)},
        "top5_accuracy": _SHARE,
        **dict.fromkeys(
            ("f1", "precision_macro", "recall_macro", "precision", "recall", "map", "mrr"), _SHARE
        ),
        "exact_match": _SHARE,
        **dict.fromkeys(
            ("exact_match_has_answer", "exact_match_no_answer", "f1_has_answer", "f1_best_span"),
            _SHARE_OF_SOME,
        ),
        "unseen_pct": Figure(_PCT, better="lower"),
        "threshold": Figure("1"),
        "null_threshold": Figure("1"),
    }
)
"""All that the evaluation of some task says; a name means the same direction in all of them."""

_THRESHOLDS = ("threshold", "null_threshold")
"""Scores that the validation part decides and the test part takes over."""


def on_test(score: str) -> str | None:
    """What a score is called on the test part; None = it is not measured there."""
    if score in _THRESHOLDS:
        return None
    return "test_loss" if score == "validation_loss" else f"test_{score}"


TEST_SCORES: Mapping[str, Figure] = MappingProxyType(
    {name: figure for score, figure in SCORES.items() if (name := on_test(score)) is not None}
)
"""The same on the test part, which is scored once."""

POINTS: Mapping[str, Figure] = MappingProxyType(
    {
        "loss": Figure("nat", better="lower"),
        "learning_rate": Figure("1"),
        "grad_norm": Figure("1"),
        "epoch": Figure("1"),
        "communication_ms": Figure("ms", better="lower"),
        "hidden_communication_ms": Figure("ms"),
        "loss_scale": Figure("1"),
        "skipped_steps": Figure("1", better="lower"),
        "underflow_pct": Figure(_PCT, better="lower"),
        "gpu_memory_used_mib": Figure("MiB", Provenance.sampled, "worker:0"),
        "gpu_temperature_c": Figure("°C", Provenance.sampled, "worker:0"),
        **dict.fromkeys(("task_loss", "soft_loss", "relation_loss"), Figure("nat", better="lower")),
        **dict.fromkeys(("hidden_loss", "embedding_loss", "cosine_loss"), Figure("1", better="lower")),
    }
)
"""Points that no run ends with; the other points are figures and scores that have a value at a step."""

DECLARED: Mapping[str, Figure] = MappingProxyType({**POINTS, **FIGURES, **SCORES, **TEST_SCORES})
"""Everything that a run reports by name and number, beside `MEASURED_BESIDE` of `run_figures`."""
