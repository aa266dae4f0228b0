"""Rankings of configurations: a weighted score over max-normalised metrics, and the Pareto set.

score = sum over metrics of weight x (value / largest value), with a minus sign where higher is better; the
lowest wins. Seven named strategies order time, cost and energy by weight. They come from Chen and Sköld
(2023), whose figures are not ours, so each exists by both definitions. The score is linear in each weight, so
the weight at which the winner changes is found exactly, as a corner of a lower envelope of lines.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from service.analysis.answers import AnalysisError, Criterion, Definitions, ScoredConfiguration, WeightRange
from service.domain.formats import axis_value
from trainers.metrics import Better

Matrix = npt.NDArray[np.float64]
_WEIGHTS: Mapping[str, tuple[float, float, float]] = {
    "balance": (0.3, 0.3, 0.3),
    "time_cost_energy": (0.5, 0.3, 0.1),
    "time_energy_cost": (0.5, 0.1, 0.3),
    "cost_time_energy": (0.3, 0.5, 0.1),
    "cost_energy_time": (0.1, 0.5, 0.3),
    "energy_time_cost": (0.3, 0.1, 0.5),
    "energy_cost_time": (0.1, 0.3, 0.5),
}
"""Of time, cost and energy; occupancy has 0.1 everywhere (section 5.1)."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One cell of the grid."""

    label: str
    point: Mapping[str, Any]
    figures: dict[str, Mapping[int, float]]  # By metric, then by replicate
    failures: Mapping[int, str]  # In words by seed, such as `does not fit (out_of_memory)`
    runs: dict[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)  # Ids behind each figure

    def mean(self, metric: str) -> float | None:
        values = self.figures.get(metric)
        return statistics.fmean(values.values()) if values else None


def label_of(point: Mapping[str, Any]) -> str:
    return (
        ", ".join(f"{axis}={axis_value(value)}" for axis, value in point.items()) or "the only configuration"
    )


def matrix(candidates: Sequence[Configuration], metrics: Sequence[str]) -> Matrix:
    """Returns means (candidates, metrics), which all candidates have."""
    return np.array([[candidate.mean(metric) for metric in metrics] for candidate in candidates], dtype=float)


_FIGURES: Mapping[Definitions, tuple[str, str, str, str]] = {
    Definitions.stillhouse: ("total_time_s", "cost_usd", "energy_kwh", "sm_occupancy_pct"),
    Definitions.published: ("train_time_s", "train_cost_usd", "train_energy_kwh", "sm_occupancy_wall_pct"),
}
"""Time, cost, energy and occupancy, which a strategy weighs."""
OCCUPANCY = frozenset(figures[-1] for figures in _FIGURES.values())
"""Only runs on a GPU with `telemetry.profile_steps` have them: a strategy does without them elsewhere."""


def strategies(definitions: Definitions) -> Mapping[str, tuple[Criterion, ...]]:
    of_time, of_cost, of_energy, of_occupancy = _FIGURES[definitions]
    return {
        name: (
            Criterion(of_time, time),
            Criterion(of_cost, cost),
            Criterion(of_energy, energy),
            Criterion(of_occupancy, 0.1, "higher"),
        )
        for name, (time, cost, energy) in _WEIGHTS.items()
    }


STRATEGIES = strategies(Definitions.stillhouse)


def normalised(candidates: Sequence[Configuration], criteria: Sequence[Criterion]) -> Matrix:
    """Returns values divided by each metric's largest (candidates, criteria), 0 if all are 0."""
    values = matrix(candidates, [criterion.metric for criterion in criteria])
    if (values < 0).any():
        row, column = np.argwhere(values < 0)[0]
        raise AnalysisError(
            f"{candidates[row].label} has a negative {criteria[column].metric}; "
            "a max-normalised score needs values of 0 or more"
        )
    largest = values.max(axis=0)
    return values / np.where(largest > 0, largest, 1.0)


def rank(candidates: Sequence[Configuration], criteria: Sequence[Criterion]) -> list[ScoredConfiguration]:
    """Returns the best (lowest) score first; ties keep their order."""
    names = [criterion.metric for criterion in criteria]
    if len(set(names)) < len(names):
        raise AnalysisError("a metric has two weights; give each metric one")
    parts = normalised(candidates, criteria) * _signed(criteria)
    scores = parts.sum(axis=1)
    return [
        ScoredConfiguration(
            candidates[row].label,
            candidates[row].point,
            float(scores[row]),
            dict(zip(names, parts[row].tolist(), strict=True)),
        )
        for row in np.argsort(scores, kind="stable")
    ]


def sensitivity(
    candidates: Sequence[Configuration], criteria: Sequence[Criterion], metric: str
) -> list[WeightRange]:
    """Returns who wins at which share of the total weight, in ranges that cover [0, 1] without gaps.

    `metric` is one of the criteria's, and another of them has weight too.
    """
    at = [criterion.metric for criterion in criteria].index(metric)
    rest = np.array([criterion.weight for criterion in criteria])
    rest[at] = 0.0
    directions = np.sign(_signed([Criterion(c.metric, 1.0, c.better) for c in criteria]))
    values = normalised(candidates, criteria) * directions
    without = values @ (rest / rest.sum())
    return _lower_envelope(without, values[:, at], [candidate.label for candidate in candidates])


def _lower_envelope(at_zero: Matrix, at_one: Matrix, labels: Sequence[str]) -> list[WeightRange]:
    slopes = at_one - at_zero
    share = 0.0
    current = int(np.lexsort((slopes, at_zero))[0])
    ranges: list[WeightRange] = []
    while True:
        steeper = slopes < slopes[current]
        gap = at_zero - at_zero[current]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = np.where(steeper, gap / (slopes[current] - slopes), np.inf)
        crossing = np.where(crossing >= share, crossing, np.inf)
        first = float(crossing.min())
        if first >= 1.0:
            return [*ranges, WeightRange(share, 1.0, labels[current])]
        rivals = np.flatnonzero(crossing == first)
        if first > share:
            ranges.append(WeightRange(share, first, labels[current]))
        share, current = first, int(rivals[np.argmin(slopes[rivals])])


def _signed(criteria: Sequence[Criterion]) -> Matrix:
    return np.array(
        [criterion.weight if criterion.better == "lower" else -criterion.weight for criterion in criteria]
    )


def frontier(
    candidates: Sequence[Configuration], metrics: Mapping[str, Better]
) -> dict[str, tuple[str, ...]]:
    """Returns what is not in the Pareto set, with its dominators there; equal ones do not dominate."""
    values = matrix(candidates, list(metrics))
    costs = values * np.array([1.0 if better == "lower" else -1.0 for better in metrics.values()])
    on_frontier = np.ones(len(costs), dtype=bool)
    # In lexicographic order a point is dominated only by points before it.
    order = np.lexsort(costs.T[::-1])
    undominated: list[int] = []
    for row in order:
        members = costs[undominated]
        beaten = (members <= costs[row]).all(axis=1) & (members < costs[row]).any(axis=1)
        if beaten.any():
            on_frontier[row] = False
        else:
            undominated.append(int(row))
    member_rows = np.flatnonzero(on_frontier)
    members = costs[member_rows]
    dominated: dict[str, tuple[str, ...]] = {}
    for row in np.flatnonzero(~on_frontier).tolist():
        by = (members <= costs[row]).all(axis=1) & (members < costs[row]).any(axis=1)
        dominated[candidates[row].label] = tuple(
            candidates[other].label for other in member_rows[by].tolist()
        )
    return dominated
