"""From one spec to its runs: cardinality first, then expansion, then the order of measurement. Pure.

In product order the first axis varies slowest, and seeds vary fastest of all. The size of the grid is known
from the axes' lengths before anything is expanded. Runs are measured in another order: see `blocked_order`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from pydantic import model_validator

from trainers.config import Section

AxisValue: TypeAlias = str | int | float | bool | None
Point: TypeAlias = dict[str, AxisValue]
Conditions: TypeAlias = Mapping[str, Mapping[str, Collection[AxisValue]]]
"""By conditional axis: the values that earlier axes must have for it to vary."""

REFERENCE_CELL = "reference"  # Of runs that only tell how the machine drifts; never a hash
MAX_RUNS = 10_000  # Most of one experiment
Listed: TypeAlias = Mapping[str, Sequence[AxisValue]]


class Range(Section):
    low: float
    """Lower end, in the field's unit."""
    high: float
    """Upper end, in the field's unit."""
    log: bool = False
    """Draw evenly in the logarithm."""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not self.low < self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}; swap them")
        if self.log and self.low <= 0:
            raise ValueError(f"log needs low above 0, not {self.low:g}; raise low or remove log")
        return self

    def at(self, share: float) -> float:
        """The value at a share in [0, 1] of the way, rounded for readability."""
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return self.rounded(value)

    def rounded(self, value: float) -> float:
        return min(max(float(f"{value:.6g}"), self.low), self.high)


Axes: TypeAlias = Mapping[str, Sequence[AxisValue] | Range]


def cardinality(axes: Axes, seeds: int, samples: int | None, conditions: Conditions | None = None) -> int:
    """Returns the number of runs, without expanding anything; beyond `MAX_RUNS` any larger number."""
    listed = {name: values for name, values in axes.items() if not isinstance(values, Range)}
    if len(listed) < len(axes):
        return (samples or 1) * seeds
    points = _count(listed, _as_sets(conditions or {}), MAX_RUNS + 1 if samples is None else samples)
    return (points if samples is None else min(points, samples)) * seeds


def grid_points(axes: Listed, conditions: Conditions | None = None) -> Iterator[Point]:
    """Yields all points in product order; an axis whose condition does not hold is absent from the point."""
    if not conditions:
        names = list(axes)
        for values in itertools.product(*axes.values()):
            yield dict(zip(names, values, strict=True))
        return
    yield from _extend(list(axes), axes, _as_sets(conditions), {})


def sampled_points(
    axes: Axes, samples: int, seed: int, conditions: Conditions | None = None
) -> Iterator[Point]:
    """Yields points drawn uniformly; they are distinct unless an axis is continuous."""
    drawn = random.Random(seed)
    if any(isinstance(values, Range) for values in axes.values()):
        looked_up = _as_sets(conditions or {})
        for _ in range(samples):
            yield _drawn_point(axes, looked_up, drawn)
        return
    listed = {name: values for name, values in axes.items() if not isinstance(values, Range)}
    if conditions:
        points = list(itertools.islice(grid_points(listed, conditions), MAX_RUNS))
        yield from drawn.sample(points, min(samples, len(points)))
        return
    sizes = [len(values) for values in listed.values()]
    total = math.prod(sizes)
    for number in _drawn_numbers(total, min(samples, total), drawn):
        point: Point = {}
        for name, values in reversed(list(listed.items())):
            number, position = divmod(number, len(values))
            point[name] = values[position]
        yield {name: point[name] for name in listed}


def blocked_order(cells: int, seeds: int, seed: int) -> list[int]:
    """Returns the order in which runs are measured: one block per seed, every cell once in it, reshuffled.

    Whatever drifts over a sweep (clocks, heat, neighbours) then affects every cell alike, and a sweep that is
    cut short has whole blocks to compare. The run indices are in product order, seeds fastest.
    """
    shuffled = random.Random(f"blocks/{seed}")
    order: list[int] = []
    for block in range(seeds):
        members = list(range(cells))
        shuffled.shuffle(members)
        order += [cell * seeds + block for cell in members]
    return order


def reference_places(runs: int, every: int | None) -> list[int]:
    """Numbers of grid runs after which each reference run is measured: 0, `every`, ..., all."""
    if every is None:
        return []
    return [*range(0, runs, every), runs]


def with_axis_values(document: Mapping[str, object], point: Mapping[str, AxisValue]) -> dict[str, object]:
    """Returns a copy with dotted names set; `ValueError` where one runs through something not a section."""
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


def ordered(names: Iterable[str], conditions: Conditions) -> list[str]:
    """Returns the axes as listed, but each after those in its condition; `ValueError` for a circle."""
    listed = list(names)
    if not conditions:
        return listed
    places = {name: place for place, name in enumerate(listed)}
    missing = {name: {other for other in conditions.get(name, ()) if other in places} for name in listed}
    dependents: dict[str, list[str]] = {}
    for name, others in missing.items():
        for other in others:
            dependents.setdefault(other, []).append(name)
    ready = [places[name] for name, others in missing.items() if not others]
    order: list[str] = []
    while ready:
        name = listed[heapq.heappop(ready)]
        order.append(name)
        for dependent in dependents.get(name, ()):
            missing[dependent].discard(name)
            if not missing[dependent]:
                heapq.heappush(ready, places[dependent])
    if len(order) < len(listed):
        left = [repr(name) for name in listed if missing[name]]
        raise ValueError(
            f"the conditions of {' and '.join(left)} depend on each other in a cycle; "
            "remove one from search.when"
        )
    return order


def holds(name: str, conditions: Conditions, chosen: Point) -> bool:
    """Whether an axis varies, given the values of the axes before it."""
    return all(
        other in chosen and chosen[other] in values for other, values in conditions.get(name, {}).items()
    )


def _extend(names: list[str], axes: Listed, conditions: Conditions, chosen: Point) -> Iterator[Point]:
    if not names:
        yield dict(chosen)
        return
    name, *rest = names
    if not holds(name, conditions, chosen):
        yield from _extend(rest, axes, conditions, chosen)
        return
    for value in axes[name]:
        yield from _extend(rest, axes, conditions, {**chosen, name: value})


def _as_sets(conditions: Conditions) -> Conditions:
    return {
        name: {other: frozenset(values) for other, values in needs.items()}
        for name, needs in conditions.items()
    }


def _count(axes: Listed, conditions: Conditions, enough: int) -> int:
    """Returns the number of points, up to `enough`; walks through those axes that decide about others."""
    deciding = {other for needs in conditions.values() for other in needs}
    names = [name for name in axes if name in deciding or name in conditions]
    free = math.prod(len(values) for name, values in axes.items() if name not in names)

    def count(first: int, chosen: Point) -> int:
        factor = 1
        for place in range(first, len(names)):
            name = names[place]
            if not holds(name, conditions, chosen):
                continue
            if name not in deciding:
                factor *= len(axes[name])
                continue
            total = 0
            for value in axes[name]:
                total += count(place + 1, {**chosen, name: value})
                if total * factor * free >= enough:
                    break
            return total * factor
        return factor

    return free * count(0, {})


def _drawn_numbers(total: int, samples: int, drawn: random.Random) -> Iterable[int]:
    if total <= sys.maxsize:
        return drawn.sample(range(total), samples)
    # No `range` is that long. Among so many a number hardly ever comes twice.
    numbers: dict[int, None] = {}
    while len(numbers) < samples:
        numbers[drawn.randrange(total)] = None
    return numbers


def _drawn_point(axes: Axes, conditions: Conditions, drawn: random.Random) -> Point:
    point: Point = {}
    for name, values in axes.items():
        # Drawn even where it does not count, so that one axis' draws do not depend on another's.
        value = values.at(drawn.random()) if isinstance(values, Range) else drawn.choice(values)
        if holds(name, conditions, point):
            point[name] = value
    return point
