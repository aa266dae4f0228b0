from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from service.analysis.candidates import Candidate, matrix
from trainers.metrics import Better


@dataclass(frozen=True, slots=True)
class Frontier:
    """The undominated configurations and, for each other one, the members that dominate it.

    A dominator is at least as good on every metric and better on one; naming members is enough, because
    domination is transitive.
    """

    members: tuple[str, ...]
    dominated: Mapping[str, tuple[str, ...]]


def frontier(candidates: Sequence[Candidate], metrics: Mapping[str, Better]) -> Frontier:
    """Returns the Pareto set over `metrics`; equal configurations are all members."""
    values = matrix(candidates, list(metrics))
    costs = values * np.array([1.0 if better == "lower" else -1.0 for better in metrics.values()])
    on_frontier = np.ones(len(costs), dtype=bool)
    # In lexicographic order a point is dominated only by points before it.
    order = np.lexsort(costs.T[::-1])
    kept: list[int] = []
    for row in order:
        members = costs[kept]
        beaten = (members <= costs[row]).all(axis=1) & (members < costs[row]).any(axis=1)
        if beaten.any():
            on_frontier[row] = False
        else:
            kept.append(int(row))
    member_rows = np.flatnonzero(on_frontier)
    members = costs[member_rows]
    dominated: dict[str, tuple[str, ...]] = {}
    for row in np.flatnonzero(~on_frontier).tolist():
        by = (members <= costs[row]).all(axis=1) & (members < costs[row]).any(axis=1)
        dominated[candidates[row].label] = tuple(
            candidates[other].label for other in member_rows[by].tolist()
        )
    return Frontier(tuple(candidates[row].label for row in member_rows.tolist()), dominated)
