from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from service.analysis.errors import AnalysisError
from service.domain.formats import axis_value

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration: its label and its figures by metric name, in the metric's unit."""

    label: str
    values: Mapping[str, float | None]


def label_of(point: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{axis}={axis_value(value)}" for axis, value in point.items()) or "the only configuration"
    )


def matrix(candidates: Sequence[Candidate], metrics: Sequence[str]) -> Matrix:
    """Returns the values as an array (candidates, metrics).

    Raises:
        AnalysisError: a candidate lacks a metric or has NaN there; all such are named, none is dropped.
    """
    if not candidates:
        raise AnalysisError("there is nothing to compare: no run has a result")
    if not metrics:
        raise AnalysisError("no metrics given; name at least one")
    values = np.array(
        [[_number(candidate.values.get(metric)) for metric in metrics] for candidate in candidates]
    )
    absent = np.argwhere(~np.isfinite(values))
    if len(absent):
        named = [f"{candidates[row].label} has no {metrics[column]}" for row, column in absent[:5]]
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise AnalysisError("; ".join(named) + more + "; leave out the metric or those runs")
    return values


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
