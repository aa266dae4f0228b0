"""What is known of a metric by its name: which direction wins, and on which scale it is modelled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from service.analysis.errors import BadQuestion
from service.analysis.records import Better
from service.comparison import METRICS, Metric
from service.hardware import nearest

NO_LOSS = 0.005
"""Difference in accuracy (half a point) that counts as no loss unless somebody says otherwise."""

MARGINS: Mapping[str, float] = MappingProxyType(
    dict.fromkeys(("accuracy", "f1", "exact_match", "map", "mrr"), NO_LOSS)
)
"""Equivalence margins by metric, in the metric's unit; other metrics have none."""

_BETTER: Mapping[str, Better] = MappingProxyType(
    {
        **{metric.name: metric.better for metric in METRICS},
        **dict.fromkeys(
            (
                "padding_pct",
                "truncated_pct",
                "bubble_pct",
                "bubble_formula_pct",
                "underflow_pct",
                "parameters",
                "steps",
            ),
            "lower",
        ),
        **dict.fromkeys(
            ("precision_macro", "recall_macro", "f1_has_answer", "f1_best_span", "score", "best_score"),
            "higher",
        ),
        **dict.fromkeys(("exact_match_has_answer", "exact_match_no_answer", "precision", "recall"), "higher"),
        **dict.fromkeys(("useful_time_fraction", "mfu", "goodput", "statistical_efficiency"), "higher"),
    }
)
_LOWER = ("_s", "_ms", "_usd", "_kwh", "_j", "_w", "_mib", "loss", "_per_step")
_HIGHER = ("_per_s", "accuracy", "f1", "_pct", "_active_ratio")
_RATIOS = ("_s", "_ms", "_usd", "_kwh", "_j", "_w", "_mib")


def metric_of(text: str, known: Mapping[str, object], parameter: str = "metric") -> Metric:
    """Read `cost_usd`, or `my_figure:higher` where the name alone does not say which direction wins.

    Args:
        text: a name, with an optional direction.
        known: names of the figures that any run has, besides the columns of a run.
        parameter: which part of the question is read, for the error.

    Raises:
        BadQuestion: for a name that no run has, or a direction that is none or not known.
    """
    name, _, direction = text.strip().partition(":")
    columns = [metric.name for metric in METRICS]
    if name not in columns and name not in known:
        everything = dict.fromkeys([*columns, *known])
        raise BadQuestion(parameter, f"no metric is called '{name[:100]}'; {nearest(name[:100], everything)}")
    if direction in ("lower", "higher"):
        return Metric(name, "lower" if direction == "lower" else "higher")
    if direction:
        raise BadQuestion(
            parameter, f"'{direction[:100]}' is no direction; write {name}:lower or {name}:higher"
        )
    better = better_of(name)
    if better is None:
        raise BadQuestion(
            parameter, f"which direction of {name} wins is not known; write {name}:lower or {name}:higher"
        )
    return Metric(name, better)


def better_of(name: str) -> Better | None:
    """Which direction wins, by the metric's name; None when the name does not say."""
    if name in _BETTER:
        return _BETTER[name]
    if name.endswith(_HIGHER) or name.startswith("accuracy_"):
        return "higher"
    return "lower" if name.endswith(_LOWER) else None


def scale_of(name: str) -> Literal["ratio", "difference"]:
    """`ratio` where shares are the natural language: time, money, energy, memory, throughput."""
    return "ratio" if name.endswith(_RATIOS) or "_per_s" in name else "difference"


def finite(value: object) -> float | None:
    """A figure that can be calculated with; None for anything else, NaN included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
