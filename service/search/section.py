"""The section `search` of a spec: axes, conditions and the search over them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from service import grid
from service.grid import MAX_RUNS, AxisValue, Point
from trainers.config import Section
from trainers.figures import SCORES

_TEST = "test_"
"""How the names of all figures of the test part begin."""


class Range(Section):
    """A continuous axis."""

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

    def span(self) -> grid.Span:
        """As the grid takes it."""
        return grid.Span(self.low, self.high, self.log)


class Search(Section):
    """Which runs there are, which of them end early, and in which order they are measured."""

    name: Literal["grid", "random", "asha", "tpe"] = "grid"
    """grid = every combination; random = `samples` of them; asha = either, the worse ones ended at rungs;
    tpe = `samples` of them, each suggested by how those before it ended."""
    axes: dict[str, list[AxisValue] | Range] = Field(default_factory=dict)
    """Values by dotted field name, such as `batch.global_size: [16, 32]`, the first varying slowest; or
    `{low: 1.0e-5, high: 1.0e-3, log: true}` where `samples` are drawn."""
    when: dict[str, dict[str, list[AxisValue]]] = Field(default_factory=dict)
    """Conditional axes: by axis, the values of other axes with which it varies; else it is left out."""
    otherwise: dict[str, AxisValue] = Field(default_factory=dict)
    """Of conditional axes, the field's value where the axis is left out; unset = what the spec has for it."""
    samples: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """random, tpe, and asha unless it walks the whole grid: how many combinations."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the draw, and of the order in which runs are measured."""
    metric: str = Field(default="validation_loss", max_length=100)
    """asha and tpe: the metric that runs are judged by; never one of the test part."""
    first_rung: float = Field(default=1 / 9, gt=0.0, lt=1.0)
    """asha only: share of a run's length at which it is judged first."""
    reduction: int = Field(default=3, ge=2, le=16)
    """asha only: one of so many runs goes on from a rung; the next rung is so many times as far."""
    reference_every: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """Repeat the grid's first cell with its first seed before every so many runs and at the end, in no
    comparison: its times tell whether the machine drifted. Unset = never."""
    stop_diverging: float | None = Field(default=None, gt=1.0, le=1e6)
    """Stop a run early when its training loss is this many times its lowest, over windows; unset = never."""

    @field_validator("axes", mode="before")
    @classmethod
    def _lists_or_ranges(cls, axes: Any) -> Any:
        """One line for what pydantic would tell of each form that an axis may have."""
        for name, values in axes.items() if isinstance(axes, Mapping) else ():
            if isinstance(values, Mapping | Range):
                continue
            if not isinstance(values, list):
                shown = _shown(values)
                raise ValueError(
                    f"axis '{name}' is {shown}; list its values, such as [{shown}], "
                    "or give a range {low: ..., high: ...}"
                )
            for value in values:
                if not isinstance(value, AxisValue):
                    raise ValueError(
                        f"axis '{name}' has the value {_shown(value)}, but a list or section cannot be an "
                        "axis value; submit one experiment per value, and compare them"
                    )
        return axes

    @field_validator("axes")
    @classmethod
    def _not_empty(cls, axes: dict[str, list[AxisValue] | Range]) -> dict[str, list[AxisValue] | Range]:
        for name, values in axes.items():
            if isinstance(values, Range):
                continue
            if not values:
                raise ValueError(f"axis '{name}' is empty; give at least one value or remove it")
            if len({json.dumps(value) for value in values}) < len(values):
                raise ValueError(f"axis '{name}' lists a value twice; repeat runs with seeds instead")
        return axes

    @field_validator("metric")
    @classmethod
    def _not_of_the_test_part(cls, metric: str) -> str:
        if metric.startswith(_TEST):
            raise ValueError(
                f"'{metric}' is measured on the test part, which may not guide a search; use a "
                f"validation metric, such as {metric.removeprefix(_TEST)}"
                if metric.removeprefix(_TEST) in SCORES
                else f"'{metric}' is measured on the test part, which may not guide a search; use a "
                "validation metric, such as validation_loss"
            )
        return metric

    @model_validator(mode="after")
    def _consistent(self) -> Search:
        if self.name == "grid" and self.samples is not None:
            raise ValueError("samples needs search.name: random, asha or tpe; remove it or change name")
        if self.name in ("random", "tpe") and self.samples is None:
            raise ValueError(f"search.name: {self.name} needs search.samples; set the number of combinations")
        if self.name == "tpe" and not self.axes:
            raise ValueError("search.name: tpe has nothing to search; add values or ranges to search.axes")
        spans = [name for name, values in self.axes.items() if isinstance(values, Range)]
        if spans and self.samples is None:
            raise ValueError(
                f"axis '{spans[0]}' is a range, which a grid cannot expand; list values, "
                "or use search.name: random with samples"
            )
        return self

    @model_validator(mode="after")
    def _otherwise_is_conditional(self) -> Search:
        for name in self.otherwise:
            if name not in self.when:
                raise ValueError(f"otherwise has '{name}', which has no condition; add it to search.when")
        return self

    def settings(self, point: Mapping[str, AxisValue]) -> Point:
        """All fields that a grid point decides: its values, and those of the axes that it leaves out.

        An empty point, which nothing is suggested for yet, leaves no axis out.
        """
        return {**self.otherwise, **point} if point else {}

    @model_validator(mode="after")
    def _conditions_can_hold(self) -> Search:
        for name, needs in self.when.items():
            if name not in self.axes:
                raise ValueError(
                    f"when has '{name}', which is not an axis; add it to search.axes or remove it"
                )
            for other, values in needs.items():
                known = self.axes.get(other)
                if known is None:
                    raise ValueError(
                        f"when of '{name}' depends on '{other}', which is not an axis; "
                        "add it to search.axes or remove the condition"
                    )
                if isinstance(known, Range):
                    raise ValueError(
                        f"when of '{name}' depends on '{other}', which is a range; use a listed axis"
                    )
                strange = [value for value in values if value not in known]
                if strange or not values:
                    shown = json.dumps(strange[0]) if strange else "anything"
                    raise ValueError(
                        f"when of '{name}': '{other}' is never {shown}; use values from {json.dumps(known)}"
                    )
        self._ordered()
        return self

    def _ordered(self) -> dict[str, list[AxisValue] | Range]:
        return {name: self.axes[name] for name in grid.ordered(self.axes, self.when)}

    def points(self) -> Iterator[Point]:
        """The grid points, in product order or in the order drawn; empty ones where they come later."""
        if self.name == "tpe":
            yield from ({} for _ in range(self.run_count(1)))
            return
        if self.samples is not None:
            yield from grid.sampled_points(self.ranges(), self.samples, self.seed, self.when)
            return
        listed = {name: values for name, values in self._ordered().items() if not isinstance(values, Range)}
        yield from grid.grid_points(listed, self.when)

    def run_count(self, seeds: int) -> int:
        """Number of runs; computed from lengths, without expanding."""
        return grid.cardinality(self.ranges(), seeds, self.samples, self.when)

    def probes(self) -> Iterator[Point]:
        """Points that have each listed value, and both ends of each range, at least once."""
        ends = {
            name: [values.low, values.high] if isinstance(values, Range) else values
            for name, values in self._ordered().items()
        }
        for name, values in ends.items():
            for value in values:
                chosen = {other: options[0] for other, options in ends.items()} | {name: value}
                conditional = [name]
                for axis in conditional:  # What an axis asks for may be conditional itself.
                    needs = self.when.get(axis, {})
                    chosen |= {other: options[0] for other, options in needs.items()}
                    conditional += needs
                point: Point = {}
                for other in ends:
                    if grid.holds(other, self.when, point):
                        point[other] = chosen[other]
                yield point

    def ranges(self) -> grid.Axes:
        """The axes as the grid takes them."""
        return {
            name: values.span() if isinstance(values, Range) else values
            for name, values in self._ordered().items()
        }


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
