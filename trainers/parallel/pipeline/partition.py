"""Which layers each stage has. Pure.

A model is a row of layers: its embeddings, its encoder layers, its head. A stage has consecutive
ones, at least one, and a step is as slow as its slowest stage: so the largest stage is made as small
as it can be, and among such partitions the most even one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Returns the layers of each stage, such that the most costly stage costs as little as possible.

    Exact: of the partitions with the smallest largest stage, the one with the smallest sum of
    squares; if that is equal too, stages are filled from the front.

    Args:
        costs: Cost of each layer in one unit (parameters, seconds); all 1 = equal numbers of layers.

    Returns:
        One range of layer numbers for each stage, in order; together all layers.

    Raises:
        ValueError: There are fewer layers than stages, or a cost is not a number from 0 up.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages; use 1 to {len(costs)} stages")
    if not all(0.0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"layer costs must be finite and not negative: {list(costs)}")
    before = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return before[stop] - before[start]

    smallest = _bottleneck(before, stages)
    # least[n]: sum of squares of the best partition of the first n layers into the stages so far.
    least: list[float] = [0.0] + [float("inf")] * len(costs)
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        following, came_from = [float("inf")] * len(least), [0] * len(least)
        for stop in range(stage, len(least)):
            # From the shortest last stage to the longest: where squares are equal the front has more.
            for start in range(stop - 1, stage - 2, -1):
                if cost(start, stop) > smallest:
                    break
                squares = least[start] + cost(start, stop) ** 2
                if squares < following[stop]:
                    following[stop], came_from[stop] = squares, start
        least = following
        starts.append(came_from)
    found, stop = [], len(costs)
    for came_from in reversed(starts):
        found.append(range(came_from[stop], stop))
        stop = came_from[stop]
    return tuple(reversed(found))


def _bottleneck(before: Sequence[float], stages: int) -> float:
    """Returns the smallest cost that the most costly of `stages` stages can have."""
    layers = len(before) - 1
    largest = list(before)  # with one stage: the first n layers together
    for stage in range(2, stages + 1):
        largest = [
            min(
                (max(largest[start], before[stop] - before[start]) for start in range(stage - 1, stop)),
                default=float("inf"),
            )
            for stop in range(layers + 1)
        ]
    return largest[layers]
