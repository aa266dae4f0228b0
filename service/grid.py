"""From one spec to its runs: cardinality first, then expansion.

Pure. Order of the product: axes in the order in which the spec lists them, the first axis
varying slowest, and seeds varying fastest of all. The size of the grid is known from the
axes' lengths before anything is expanded.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

AxisValue: TypeAlias = str | int | float | bool | None
Point: TypeAlias = dict[str, AxisValue]

MAX_RUNS = 10_000
"""Most runs that one experiment may have."""


def cardinality(axes: Mapping[str, Sequence[AxisValue]], seeds: int, samples: int | None) -> int:
    """Number of runs, without expanding anything.

    Args:
        axes: values by dotted name.
        seeds: number of seeds; each grid point runs once per seed.
        samples: grid points drawn by random search; None = all of them.
    """
    points = math.prod(len(values) for values in axes.values())
    return (points if samples is None else min(points, samples)) * seeds


def grid_points(axes: Mapping[str, Sequence[AxisValue]]) -> Iterator[Point]:
    """All grid points in product order, the first axis varying slowest."""
    names = list(axes)
    for values in itertools.product(*axes.values()):
        yield dict(zip(names, values, strict=True))


def sampled_points(axes: Mapping[str, Sequence[AxisValue]], samples: int, seed: int) -> Iterator[Point]:
    """`samples` distinct grid points drawn uniformly, in the order drawn; never expands the grid."""
    sizes = [len(values) for values in axes.values()]
    total = math.prod(sizes)
    for number in random.Random(seed).sample(range(total), min(samples, total)):
        point: Point = {}
        for name, values in reversed(list(axes.items())):
            number, position = divmod(number, len(values))
            point[name] = values[position]
        yield {name: point[name] for name in axes}


def with_axis_values(document: Mapping[str, object], point: Mapping[str, AxisValue]) -> dict[str, object]:
    """A copy of a spec document with the dotted names of `point` set.

    Raises:
        ValueError: when a name runs through something that is not a section.
    """
    result = dict(document)
    for dotted, value in point.items():
        *sections, leaf = dotted.split(".")
        target = result
        for section in sections:
            inner = target.get(section, {})
            if not isinstance(inner, Mapping):
                raise ValueError(f"axis '{dotted}': '{section}' is a value, not a section")
            target[section] = dict(inner)
            target = target[section]  # type: ignore[assignment]
        target[leaf] = value
    return result
