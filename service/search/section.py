"""The section `search` of a spec, and what every search algorithm has in common. Pure.

`Search` walks the product of the axes, or samples it, and ends no run early. Other algorithms are subclasses,
with fields of their own.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from service.config.document import shortened
from service.config.hardware import ON_MARKET
from service.domain import grid
from service.domain.grid import LINK, MAX_RUNS, AxisValue, Conditions, FieldValue, Point, Range
from service.search.protocol import SEARCHES, Judge, Samples, SearchInfo, Suggestion, names
from trainers.config import Section
from trainers.metrics import SCORES, Better
from trainers.registry import NameIn, described

MAX_CONDITIONED = 16  # Most axes that `when` may name: a grid is counted by walking through them
_TEST = "test_"
_Value = Annotated[FieldValue, Field(json_schema_extra=lambda schema: schema["anyOf"].append(ON_MARKET))]


class Search(Section):
    """Which runs there are, which of them end early, and in which order they are measured."""

    # Fields of one search stand here only where every stored spec has them; new ones belong in its own class.
    first_rung: float = Field(default=1 / 9, gt=0.0, lt=1.0)
    """asha only: share of a run's length at which it is judged first."""
    reduction: int = Field(default=3, ge=2, le=16)
    """asha only: one in this many runs continues from a rung; the next rung is this many times as far."""
    name: Annotated[str, NameIn(SEARCHES), described(SEARCHES)] = "grid"
    """Search over the axes' combinations."""
    axes: dict[str, list[_Value] | Range] = Field(default_factory=dict)
    """Values by dotted field name, such as `batch.global_size: [16, 32]`, the first varying slowest; or
    `{low: 1.0e-5, high: 1.0e-3, log: true}` where `samples` are drawn."""
    together: list[dict[str, list[_Value]]] = Field(default_factory=list)
    """Linked axes: fields whose values move together, such as
    `[{parallel.workers: [1, 2, 4], batch.global_size: [16, 32, 64]}]`; each entry is one axis."""
    when: dict[str, dict[str, list[AxisValue]]] = Field(default_factory=dict)
    """Conditional axes: by axis, the values of other axes with which it varies; else it is left out."""
    otherwise: dict[str, AxisValue | list[FieldValue]] = Field(default_factory=dict)
    """Of conditional axes, the field's value where the condition does not hold, or a list of values that the
    axis has there; unset = what the spec has for it."""
    samples: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """How many combinations are drawn or suggested; unset = every one, where the search walks a grid."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the draw, and of the order in which runs are measured."""
    metric: str = Field(default="validation_loss", max_length=100)
    """The metric that a search judges runs by; never one of the test part."""
    reference_every: int | None = Field(default=None, ge=1, le=MAX_RUNS)
    """Repeat the grid's first cell with its first seed before every so many runs and at the end, in no
    comparison: its times tell whether the machine drifted. Unset = never."""
    stop_diverging: float | None = Field(default=None, gt=1.0, le=1e6)
    """Stop a run early when its training loss is this many times its lowest, over windows; unset = never."""

    @field_validator("axes", mode="before")
    @classmethod
    def _lists_or_ranges(cls, axes: Any) -> Any:
        for name, values in axes.items() if isinstance(axes, Mapping) else ():
            if isinstance(values, Mapping) and values and not values.keys() & Range.model_fields.keys():
                field, value = next(iter(values.items()))
                raise ValueError(
                    f"axis '{name}' is a section; name its fields with dots, such as "
                    f"{name}.{field}: {_shown(value)}"
                )
            if isinstance(values, Mapping | Range):
                continue
            if not isinstance(values, list):
                shown = _shown(values)
                raise ValueError(
                    f"axis '{name}' is {shown}; list its values, such as [{shown}], "
                    "or give a range {low: ..., high: ...}"
                )
            for value in values:
                if isinstance(value, Mapping):
                    raise ValueError(
                        f"axis '{name}' has the value {_shown(value)}, but a section cannot be an axis "
                        "value; make each of its fields an axis, and link them with search.together"
                    )
        return axes

    @field_validator("axes")
    @classmethod
    def _not_empty(cls, axes: dict[str, list[FieldValue] | Range]) -> dict[str, list[FieldValue] | Range]:
        for name, values in axes.items():
            if isinstance(values, Range):
                continue
            if not values:
                raise ValueError(f"axis '{name}' is empty; give at least one value or remove it")
            if len({json.dumps(value) for value in values}) < len(values):
                raise ValueError(f"axis '{name}' lists a value twice; repeat runs with seeds instead")
        return axes

    @field_validator("together")
    @classmethod
    def _equally_long(cls, together: list[dict[str, list[FieldValue]]]) -> list[dict[str, list[FieldValue]]]:
        for columns in together:
            names = list(columns)
            if len(names) < 2:
                raise ValueError(
                    f"an entry links {', '.join(names) or 'no field'}; list two or more fields in it, or "
                    "move it to search.axes"
                )
            lengths = {name: len(values) for name, values in columns.items()}
            if len(set(lengths.values())) > 1:
                counts = " and ".join(f"{count} of {name}" for name, count in lengths.items())
                raise ValueError(f"values move together, but there are {counts}; list equally many of each")
            if not lengths[names[0]]:
                raise ValueError(f"{LINK.join(names)} is empty; give at least one value of each or remove it")
            labels = grid.linked(list(columns.values()))
            if len(set(labels)) < len(labels):
                raise ValueError(
                    f"{LINK.join(names)} lists a combination twice; repeat runs with seeds instead"
                )
        return together

    @field_validator("metric")
    @classmethod
    def _not_of_the_test_part(cls, metric: str) -> str:
        if metric.startswith(_TEST):
            validated = metric.removeprefix(_TEST)
            raise ValueError(
                f"'{metric}' is measured on the test part, which may not guide a search; use a validation "
                f"metric, such as {validated if validated in SCORES else 'validation_loss'}"
            )
        return metric

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.info.samples is Samples.unused and self.samples is not None:
            takers = names(lambda search: search.samples is not Samples.unused)
            raise ValueError(f"samples needs search.name: {takers}; remove it or change name")
        if self.info.samples is Samples.required and self.samples is None:
            raise ValueError(f"search.name: {self.name} needs search.samples; set the number of combinations")
        ranges = [name for name, values in self.axes.items() if isinstance(values, Range)]
        if ranges and self.samples is None:
            raise ValueError(
                f"axis '{ranges[0]}' is a range, which a grid cannot expand; list values, "
                "or use search.name: random with samples"
            )
        for name, value in self.otherwise.items():
            if name not in self.when:
                raise ValueError(f"otherwise has '{name}', which has no condition; add it to search.when")
            if value == []:
                raise ValueError(f"otherwise of '{name}' is empty; list at least one value or remove it")
        varied = [*self.axes, *(name for columns in self.together for name in columns)]
        for name, count in Counter(varied).items():
            if count > 1:
                raise ValueError(
                    f"'{name}' is in two axes; keep it in one of search.axes and search.together"
                )
        return self

    @functools.cached_property
    def fields(self) -> dict[str, list[FieldValue] | Range]:
        """Values by field that varies, those of linked axes included."""
        return {
            **self.axes,
            **{name: values for columns in self.together for name, values in columns.items()},
        }

    @functools.cached_property
    def _written(self) -> dict[str, dict[AxisValue, dict[str, FieldValue]]]:
        """By axis and value in a point, where the two differ from field and value: the fields' values."""
        written: dict[str, dict[AxisValue, dict[str, FieldValue]]] = {}
        for name, values in [*self.axes.items(), *self._varied_otherwise.items()]:
            if not isinstance(values, Range) and any(isinstance(value, list) for value in values):
                of_axis = written.setdefault(name, {})
                of_axis |= {
                    label: {name: value} for label, value in zip(grid.labels(values), values, strict=True)
                }
        for columns in self.together:
            rows = zip(*columns.values(), strict=True)
            written[LINK.join(columns)] = {
                label: dict(zip(columns, row, strict=True))
                for label, row in zip(grid.linked(list(columns.values())), rows, strict=True)
            }
        return written

    @property
    def _varied_otherwise(self) -> dict[str, list[FieldValue]]:
        """Of conditional axes, the values that they have where the condition does not hold."""
        varied: dict[str, list[FieldValue]] = {}
        for name, value in self.otherwise.items():
            values = self.axes.get(name)
            of_lists = isinstance(values, list) and any(isinstance(one, list) for one in values)
            if isinstance(value, list) and (not of_lists or any(isinstance(one, list) for one in value)):
                varied[name] = value
        return varied

    def settings(self, point: Mapping[str, AxisValue]) -> dict[str, FieldValue]:
        """Returns the fields that a point decides: its values, and `otherwise` for axes it leaves out."""
        if not point:
            return {}
        varied = self._varied_otherwise
        fields: dict[str, FieldValue] = {
            name: value  # type: ignore[misc]  # Lists of lists are varied.
            for name, value in self.otherwise.items()
            if name not in varied
        }
        for axis, value in point.items():
            fields |= self._written.get(axis, {}).get(value, {axis: value})
        return fields

    @model_validator(mode="after")
    def _conditions_can_hold(self) -> Self:
        involved = self.when.keys() | {other for needs in self.when.values() for other in needs}
        if len(involved) > MAX_CONDITIONED:
            raise ValueError(
                f"when involves {len(involved)} axes, more than the limit of {MAX_CONDITIONED}; "
                "submit one experiment per case"
            )
        for name, needs in self.when.items():
            if name not in self.axes:
                if name in self.fields:
                    raise ValueError(
                        f"when has '{name}', which is linked to others; move it from search.together "
                        "to search.axes"
                    )
                raise ValueError(
                    f"when has '{name}', which is not an axis; add it to search.axes or remove it"
                )
            for other, values in needs.items():
                known = self.fields.get(other)
                if known is None:
                    raise ValueError(
                        f"when of '{name}' depends on '{other}', which is not an axis; "
                        "add it to search.axes or remove the condition"
                    )
                if isinstance(known, Range):
                    raise ValueError(
                        f"when of '{name}' depends on '{other}', which is a range; use a listed axis"
                    )
                listed = set(grid.labels(known))
                strange = next((_shown(value) for value in values if value not in listed), None)
                if strange is not None or not values:
                    raise ValueError(
                        f"when of '{name}': '{other}' is never {strange or 'anything'}; "
                        f"use values from {shortened(json.dumps(grid.labels(known)), 400)}"
                    )
        self.space()  # A circle is an error.
        return self

    def _labelled(self) -> dict[str, list[AxisValue] | Range]:
        """Returns the axes as points have them, linked ones under their joint names."""
        plain = {
            name: values if isinstance(values, Range) else grid.labels(values)
            for name, values in self.axes.items()
        }
        return plain | {LINK.join(columns): grid.linked(list(columns.values())) for columns in self.together}

    def _conditions(self) -> Conditions:
        """Returns `when` over the axes as points have them: a linked field stands for its axis."""
        conditions: dict[str, dict[str, list[AxisValue]]] = {}
        for name, needs in self.when.items():
            conditions[name] = {other: values for other, values in needs.items() if other in self.axes}
            for columns in self.together:
                named = [other for other in columns if other in needs]
                if named:
                    rows = zip(*(grid.labels(columns[other]) for other in named), strict=True)
                    conditions[name][LINK.join(columns)] = [
                        label
                        for label, row in zip(grid.linked(list(columns.values())), rows, strict=True)
                        if all(value in needs[other] for other, value in zip(named, row, strict=True))
                    ]
        return conditions

    @property
    def info(self) -> SearchInfo:
        return SEARCHES[self.name]

    def space(self) -> grid.Space:
        axes, conditions = self._labelled(), self._conditions()
        otherwise = {name: grid.labels(values) for name, values in self._varied_otherwise.items()}
        ordered = {name: axes[name] for name in grid.ordered(axes, conditions)}
        return grid.Space(ordered, conditions, otherwise)

    @property
    def least_share(self) -> float:
        """Share of its length that every run trains at least."""
        return 1.0

    @functools.cached_property
    def _point_count(self) -> int:
        return self.space().cardinality(1, self.samples)

    def run_count(self, seeds: int) -> int:
        return self._point_count * seeds

    def points(self) -> Iterator[Point]:
        """Returns the grid points, in product order or as drawn; empty ones if they are suggested later."""
        if self.info.suggests:
            return ({} for _ in range(self.run_count(1)))
        return self._product()

    def expected_points(self) -> Iterator[Point]:
        """Returns points to forecast from: `points`, or an even draw in place of suggestions."""
        return self._product() if self.info.suggests else self.points()

    def suggest(self, earlier: Sequence[Suggestion], better: Better) -> Point:
        """Returns a new configuration, if `info.suggests`; `ValueError` = all have been suggested.

        It follows from the section and the arguments alone, so that another driver can take over.
        """
        raise NotImplementedError(f"search.name: {self.name} suggests nothing")

    def judge(self, better: Better) -> Judge | None:
        return None

    def _product(self) -> Iterator[Point]:
        space = self.space()
        return space.points() if self.samples is None else space.sampled(self.samples, self.seed)

    def probes(self) -> Iterator[Point]:
        """Yields points that have each listed value, and both ends of each range, at least once."""
        space, conditions = self.space(), self._conditions()
        for name, values in space.axes.items():
            for value in _ends(values):
                chosen = {other: _ends(options)[0] for other, options in space.axes.items()} | {name: value}
                conditional = [name]
                for axis in conditional:  # What an axis asks for may be conditional itself.
                    needs = conditions.get(axis, {})
                    chosen |= {other: next(iter(options)) for other, options in needs.items()}
                    conditional += [other for other in needs if other not in conditional]
                point: Point = {}
                for other in space.axes:
                    if space.holds(other, point):
                        point[other] = chosen[other]
                    elif alternatives := space.values(other, point):
                        point[other] = _ends(alternatives)[0]
                yield point


def _ends(values: Sequence[AxisValue] | Range) -> Sequence[AxisValue]:
    return [values.low, values.high] if isinstance(values, Range) else values


def _by_name(document: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validates the section as the class that its name selects."""
    if isinstance(document, Search):
        return document
    name = document.get("name") if isinstance(document, Mapping) else None
    if isinstance(name, str) and name in SEARCHES:
        return SEARCHES[name].section.model_validate_json(json.dumps(document), strict=True)
    return handler(document)  # As a grid, or to name what is wrong.


class _Published:
    """Publishes the own fields of all registered searches in one flat section."""

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        reference = handler(core_schema)
        fields = handler.resolve_ref_schema(reference)["properties"]
        for search in SEARCHES.values():
            own = handler.resolve_ref_schema(handler(search.section.__pydantic_core_schema__))["properties"]
            fields.update({name: field for name, field in own.items() if name not in fields})
        return reference


AnySearch = Annotated[SerializeAsAny[Search], WrapValidator(_by_name), _Published()]


def _shown(value: object) -> str:
    return shortened(json.dumps(value, default=str))


GRID = SearchInfo(name="grid", summary="every combination", section=Search, samples=Samples.unused)
RANDOM = SearchInfo(name="random", summary="`samples` of them", section=Search, samples=Samples.required)
