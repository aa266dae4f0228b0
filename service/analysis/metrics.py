"""What is known of a metric by its name: which direction wins, and on which scale it is modelled."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from service.analysis.errors import BadQuestion
from service.comparison import METRICS, Metric
from service.hardware import nearest
from trainers.figures import DECLARED, SCORES, Better, Figure, on_test

MARGINS: Mapping[str, float] = MappingProxyType(
    {
        name: score.margin
        for own, score in SCORES.items()
        if score.margin is not None
        for name in (own, on_test(own))
        if name is not None
    }
)
"""Equivalence margins by metric, in the metric's unit, the same on both parts; other metrics have none."""

_PERCENTILE = re.compile(r"_p[0-9]+$")
_RATIOS = ("_s", "_ms", "_usd", "_kwh", "_j", "_w", "_mib")


def metric_of(
    text: str, known: Mapping[str, object], parameter: str = "metric", headline: str | None = None
) -> Metric:
    """Read `cost_usd`, or `noise_scale:lower` where no direction is declared.

    Args:
        text: a name, with an optional direction.
        known: names of the figures that any run has, besides the columns of a run.
        parameter: which part of the question is read, for the error.
        headline: by which the runs are judged.

    Raises:
        BadQuestion: for a name that no run has, or a direction that is none or not known.
    """
    name, _, direction = text.strip().partition(":")
    columns = [metric.name for metric in METRICS]
    if name not in columns and name not in known:
        everything = dict.fromkeys([*columns, *known])
        raise BadQuestion(parameter, f"unknown metric '{name[:100]}'; {nearest(name[:100], everything)}")
    if direction in ("lower", "higher"):
        return Metric(name, "lower" if direction == "lower" else "higher")
    if direction:
        raise BadQuestion(
            parameter, f"'{direction[:100]}' is not a direction; write {name}:lower or {name}:higher"
        )
    better = better_of(name, headline)
    if better is None:
        raise BadQuestion(
            parameter,
            f"whether lower or higher {name} is better is unknown; write {name}:lower or {name}:higher",
        )
    return Metric(name, better)


def better_of(name: str, headline: str | None = None) -> Better | None:
    """Which direction wins, as the trainers declare it; None = they declare none.

    Args:
        name: of a figure, score or point.
        headline: by which the runs are judged: what `score` and `best_score` are values of.
    """
    figure = figure_of(name, headline)
    return None if figure is None else figure.better


def figure_of(name: str, headline: str | None = None) -> Figure | None:
    """What the trainers declare of a figure; None = nothing.

    Args:
        name: of a figure, score or point; `test_` before a score means the test part.
        headline: by which the runs are judged: what `score`, `best_score` and `test_score` are values of.
    """
    if name in DECLARED:
        return DECLARED[name]
    name = name.removeprefix("test_")
    if name in ("score", "best_score") and headline is not None:
        name = headline.removeprefix("test_")
    return DECLARED.get(name)


def scale_of(name: str) -> Literal["ratio", "difference"]:
    """`ratio` where shares are the natural language: time, money, energy, memory, throughput."""
    name = _PERCENTILE.sub("", name)
    return "ratio" if name.endswith(_RATIOS) or "_per_s" in name else "difference"


def finite(value: object) -> float | None:
    """A figure that can be calculated with; None for anything else, NaN included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
