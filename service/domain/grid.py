"""From one spec to its runs: cardinality first, then expansion, then the order of measurement. Pure.

In product order the first axis varies slowest, and seeds vary fastest of all, then repeats. The size is known
from the axes' lengths before anything is expanded. Runs are measured in another order: see `blocked_order`.
"""

import heapq
import itertools
import json
import math
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias

from pydantic import model_validator

from trainers.config import Section

AxisValue: TypeAlias = str | int | float | bool | None
FieldValue: TypeAlias = AxisValue | list[AxisValue]
"""What an axis writes into a field; points hold the label of a list."""
Point: TypeAlias = dict[str, AxisValue]
Conditions: TypeAlias = Mapping[str, Mapping[str, Collection[AxisValue]]]
"""By conditional axis: the values that earlier axes must have for it to vary."""

REFERENCE_CELL = "reference"  # Of runs that only tell how the machine drifts; never a hash
MAX_RUNS = 10_000  # Most of one experiment
LINK = "+"
"""Joins the fields of linked axes to a name, `parallel.workers+batch.global_size`, and values to `2+32`."""
Listed: TypeAlias = Mapping[str, Sequence[AxisValue]]


class Range(Section):
    low: float
    """Lower end, in the field's unit."""
    high: float
    """Upper end, in the field's unit."""
    log: bool = False
    """Draw evenly in the logarithm."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
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


class Space:
    """All combinations of the axes' values.

    Args:
        axes: Values by axis, each axis after those that its condition names (`ordered`).
        conditions: By conditional axis, the values of others with which it varies.
        otherwise: By conditional axis, its values where the condition does not hold; without any, the axis is
            absent from the point.
    """

    def __init__(
        self, axes: Axes, conditions: Conditions | None = None, otherwise: Listed | None = None
    ) -> None:
        self.axes = dict(axes)
        self._conditions = {
            name: {other: frozenset(values) for other, values in needs.items()}
            for name, needs in (conditions or {}).items()
        }
        self._otherwise = otherwise or {}

    @property
    def listed(self) -> dict[str, Sequence[AxisValue]]:
        return {name: values for name, values in self.axes.items() if not isinstance(values, Range)}

    @property
    def is_continuous(self) -> bool:
        return len(self.listed) < len(self.axes)

    def holds(self, name: str, chosen: Point) -> bool:
        """Whether an axis' condition holds, given the values of the axes before it."""
        needs = self._conditions.get(name, {})
        return all(other in chosen and chosen[other] in values for other, values in needs.items())

    def values(self, name: str, chosen: Point) -> Sequence[AxisValue] | Range:
        """Returns what an axis varies over, given the values of the axes before it; empty = it is absent."""
        return self.axes[name] if self.holds(name, chosen) else self._otherwise.get(name, ())

    def cardinality(self, seeds: int, samples: int | None) -> int:
        """Returns the number of runs, without expanding anything; beyond `MAX_RUNS` any larger number."""
        if self.is_continuous:
            return (samples or 1) * seeds
        points = self._count(MAX_RUNS + 1 if samples is None else samples)
        return (points if samples is None else min(points, samples)) * seeds

    def points(self) -> Iterator[Point]:
        """Yields all points of listed axes in product order."""
        if self._conditions:
            yield from self._extend(list(self.axes), {})
            return
        for values in itertools.product(*self.listed.values()):
            yield dict(zip(self.axes, values, strict=True))

    def sampled(self, samples: int, seed: int) -> Iterator[Point]:
        """Yields points drawn uniformly; they are distinct unless an axis is continuous."""
        drawn = random.Random(seed)
        if self.is_continuous:
            for _ in range(samples):
                yield self._drawn_point(drawn)
            return
        if self._conditions:
            points = list(itertools.islice(self.points(), MAX_RUNS))
            yield from drawn.sample(points, min(samples, len(points)))
            return
        sizes = [len(values) for values in self.listed.values()]
        total = math.prod(sizes)
        for number in _drawn_numbers(total, min(samples, total), drawn):
            point: Point = {}
            for name, values in reversed(self.listed.items()):
                number, position = divmod(number, len(values))
                point[name] = values[position]
            yield {name: point[name] for name in self.axes}

    def _extend(self, names: list[str], chosen: Point) -> Iterator[Point]:
        if not names:
            yield dict(chosen)
            return
        name, *rest = names
        values = self.values(name, chosen)
        assert not isinstance(values, Range)
        if not values:
            yield from self._extend(rest, chosen)
        for value in values:
            yield from self._extend(rest, {**chosen, name: value})

    def _count(self, enough: int) -> int:
        """Returns the number of points, up to `enough`; walks through those axes that decide about others."""
        axes = self.listed
        deciding = {other for needs in self._conditions.values() for other in needs}
        names = [name for name in axes if name in deciding or name in self._conditions]
        free = math.prod(len(values) for name, values in axes.items() if name not in names)

        def count(first: int, chosen: Point) -> int:
            factor = 1
            for place in range(first, len(names)):
                name = names[place]
                values = self.values(name, chosen)
                assert not isinstance(values, Range)
                if not values:
                    continue
                if name not in deciding:
                    factor *= len(values)
                    continue
                total = 0
                for value in values:
                    total += count(place + 1, {**chosen, name: value})
                    if total * factor * free >= enough:
                        break
                return total * factor
            return factor

        return free * count(0, {})

    def _drawn_point(self, drawn: random.Random) -> Point:
        point: Point = {}
        for name, values in self.axes.items():
            # Drawn even where it does not count, so that one axis' draws do not depend on another's.
            value = values.at(drawn.random()) if isinstance(values, Range) else drawn.choice(values)
            others = self._otherwise.get(name, ())
            other = drawn.choice(others) if others else None
            if self.holds(name, point):
                point[name] = value
            elif others:
                point[name] = other
        return point


def blocked_order(cells: int, replicates: int, seed: int) -> list[int]:
    """Returns the order in which runs are measured: blocks that have every cell once, each reshuffled.

    Whatever drifts over a sweep (clocks, heat, neighbours) then affects every cell alike, and a sweep that is
    cut short has whole blocks to compare. The run indices are in product order, seeds fastest, then repeats.
    """
    shuffled = random.Random(f"blocks/{seed}")
    order: list[int] = []
    for block in range(replicates):
        members = list(range(cells))
        shuffled.shuffle(members)
        order += [cell * replicates + block for cell in members]
    return order


def reference_places(runs: int, every: int | None) -> list[int]:
    """Numbers of grid runs after which each reference run is measured: 0, `every`, ..., all."""
    if every is None:
        return []
    return [*range(0, runs, every), runs]


def with_axis_values(document: Mapping[str, object], point: Mapping[str, FieldValue]) -> dict[str, object]:
    """Returns a copy with dotted names set; `ValueError` where one runs through something not a section."""
    result = dict(document)
    for dotted, value in point.items():
        *sections, leaf = dotted.split(".")
        target = result
        for section in sections:
            inner = target.get(section)
            if not isinstance(inner, Mapping | None):
                raise ValueError(f"axis '{dotted}': '{section}' is a value, not a section")
            target[section] = dict(inner or {})
            target = target[section]  # type: ignore[assignment]
        target[leaf] = value
    return result


def fields_of(axis: str) -> list[str]:
    return axis.split(LINK)


def varied_fields(axes: Iterable[str]) -> set[str]:
    """Returns the fields that these axes vary: points may be given."""
    return {field for axis in axes for field in fields_of(axis)}


def labels(values: Sequence[FieldValue]) -> list[AxisValue]:
    """Returns the values as points hold them: a list as text such as `0.98,0.92,0.99` or `0.1x12`."""
    short = [_label(value) if isinstance(value, list) else value for value in values]
    if len(set(map(str, short))) == len(short):
        return short
    return [json.dumps(value) if isinstance(value, list) else value for value in values]


def _label(values: Sequence[AxisValue]) -> str:
    parts: list[str] = []
    for text, equal in itertools.groupby(map(_text, values)):
        count = len(list(equal))
        parts += [f"{text}x{count}"] if count > 3 else [text] * count
    return ",".join(parts)


def linked(columns: Sequence[Sequence[FieldValue]]) -> list[AxisValue]:
    """Returns the labels of values that move together, one for each place of the columns."""
    return [LINK.join(map(_text, row)) for row in zip(*map(labels, columns), strict=True)]


def _text(value: AxisValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


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


def _drawn_numbers(total: int, samples: int, drawn: random.Random) -> Iterable[int]:
    if total <= sys.maxsize:
        return drawn.sample(range(total), samples)
    # No `range` is that long. Among so many a number hardly ever comes twice.
    numbers: dict[int, None] = {}
    while len(numbers) < samples:
        numbers[drawn.randrange(total)] = None
    return numbers
