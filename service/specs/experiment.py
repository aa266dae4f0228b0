"""The spec of an experiment: the immutable, validated, hashed text of a submission. Pure.

`service.config.document.parse` turns bytes into a document under limits, `validate` turns a document into an
`ExperimentSpec`, and `ExperimentSpec.runs()` expands it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import create_model

from service.config.document import SpecError, shortened
from service.config.hardware import CATALOGUE, Hardware, find, lookup
from service.domain import grid
from service.domain.grid import REFERENCE_CELL, AxisValue, FieldValue, Point
from service.search import Search
from service.specs.fields import SpecFields, WantedPrecision, axis_names, canonical_json
from service.specs.rules import INFEASIBLE, problems_of
from service.specs.wording import naming_problems
from trainers.config import Precision, Section


def nothing() -> None: ...


class ExperimentSpec(SpecFields):
    def at(
        self,
        point: Mapping[str, AxisValue],
        catalogue: Mapping[str, Hardware] = CATALOGUE,
        *,
        named: bool = True,
        infeasible: bool = False,
    ) -> ExperimentSpec:
        """Returns the validated spec of one grid point's runs: no axes, and the point's values written in.

        An empty point is not suggested yet: the axes' first values count. `named` names the point in
        problems, `infeasible` allows a precision that the hardware does not support.
        """
        if not self.search.fields:
            # Validated as it stands.
            return self._with_entry(catalogue).model_copy(update={"search": Search(), "seeds": [0]})
        prefix = f"grid point {shortened(canonical_json(dict(point)), 400)}: " if point and named else ""
        resolved = self._with_values(self.search.settings(point), prefix)
        problems = problems_of(resolved, catalogue, point, prefix)
        if infeasible:
            problems = [problem for problem in problems if problem.type != INFEASIBLE]
        if problems:
            raise SpecError(problems)
        return resolved._with_entry(catalogue)

    def _with_values(self, values: Mapping[str, FieldValue], prefix: str) -> ExperimentSpec:
        """Returns the spec with dotted fields set, the changed sections validated again, and no search."""
        document: dict[str, Any] = {}
        if self.batch.per_worker_size is not None or "batch.per_worker_size" in values:
            document["batch"] = self.batch.model_dump(mode="json", exclude={"global_size"})  # It follows.
        for dotted, value in values.items():
            name, *fields = dotted.split(".")
            if not fields:
                document[name] = value
                continue
            section = document.setdefault(name, getattr(self, name).model_dump(mode="json"))
            for within in fields[:-1]:
                section = section[within]
            section[fields[-1]] = value
        unchanged = {
            name: getattr(self, name) for name in ExperimentSpec.model_fields if name not in document
        }
        with naming_problems(document, prefix):
            changed = _part_of_spec(tuple(document)).model_validate_json(json.dumps(document), strict=True)
            validated = {name: getattr(changed, name) for name in document}
            return ExperimentSpec.model_validate(
                {**unchanged, **validated, "search": Search(), "seeds": [0]}, strict=True
            )

    def _with_entry(self, catalogue: Mapping[str, Hardware]) -> ExperimentSpec:
        """Writes in the catalogue entry's own name, by which runs compare, and its precision."""
        entry = find(self.hardware, catalogue)
        if entry is None:
            return self
        update: dict[str, object] = {"hardware": entry.name}
        if self.precision == WantedPrecision.auto:
            update["precision"] = WantedPrecision(entry.auto_precision)
        elif entry.name == self.hardware:
            return self
        return self.model_copy(update=update)

    def runs(
        self, catalogue: Mapping[str, Hardware] = CATALOGUE, *, before_each: Callable[[], None] = nothing
    ) -> Iterator[RunPlan]:
        """Yields the runs in product order, each validated as if it had been written out by hand.

        A grid over hardware and precision has cells that a device cannot compute: they are runs too, which
        end at once with the reason, unless there are no others. A `SpecError` names the first invalid grid
        point.
        """
        if self.search.info.suggests:
            for point in self.search.probes():
                before_each()
                self.at(point, catalogue, infeasible=True)
        plans = self._plans(catalogue, before_each)
        # Only the whole grid shows that no hardware computes any of its cells.
        yield from list(plans) if "hardware" in self.search.fields else plans

    def _plans(self, catalogue: Mapping[str, Hardware], before_each: Callable[[], None]) -> Iterator[RunPlan]:
        seeds, places = self.seeds, self.places()
        mixed = "hardware" in self.search.fields
        index = 0
        refused: Point | None = None
        measured: RunPlan | None = None
        # Points still to be suggested are all empty: one of them is resolved for all.
        for cell, alike in itertools.groupby(self.search.points(), key=cell_of):
            points = list(alike)
            before_each()
            resolved = self.at(points[0], catalogue, infeasible=mixed)
            if lookup(resolved.hardware, catalogue).lacks(Precision(resolved.precision)) is not None:
                refused = points[0] if refused is None else refused
            elif measured is None:
                measured = RunPlan(0, 0, REFERENCE_CELL, seeds[0], points[0], resolved)
            for point, seed in itertools.product(points, seeds):
                yield RunPlan(index, places[index], cell, seed, point, resolved)
                index += 1
        if measured is None and refused is not None:
            self.at(refused, catalogue)  # Raises.
        for following in range(index, len(places)):
            assert measured is not None  # Reference runs belong to searches whose points are known.
            yield dataclasses.replace(measured, index=following, place=places[following])


def cell_of(point: Mapping[str, AxisValue]) -> str:
    return hashlib.sha256(canonical_json(point).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run of the grid before it is stored."""

    index: int  # In product order, from 0
    place: int  # In the order of measurement (`grid.blocked_order`), from 0
    cell: str  # Short hash of the axis values, or `REFERENCE_CELL`
    seed: int
    point: dict[str, AxisValue]
    spec: ExperimentSpec


@functools.lru_cache(maxsize=1024)
def read_stored(canonical: str) -> ExperimentSpec:
    """Returns the same object for the same canonical text, as seeds of a cell have."""
    return ExperimentSpec.model_validate_json(canonical)


def validate(document: Mapping[str, object], catalogue: Mapping[str, Hardware] = CATALOGUE) -> ExperimentSpec:
    """Checks every field, the hardware and the axes' names; `SpecError` has every problem, in order."""
    document = _with_first_point(document)
    with naming_problems(document):
        spec = ExperimentSpec.model_validate_json(json.dumps(document), strict=True)
    if problems := problems_of(spec, catalogue):
        raise SpecError(problems)
    return spec


@functools.cache
def _part_of_spec(names: tuple[str, ...]) -> type[Section]:
    fields: dict[str, Any] = {
        name: (field.annotation, field)
        for name, field in ExperimentSpec.model_fields.items()
        if name in names
    }
    return create_model("PartOfSpec", __base__=Section, **fields)


def _with_first_point(document: Mapping[str, object]) -> Mapping[str, object]:
    """Gives each field that is an axis the axis' first value, so that no default is judged unused.

    A conditional axis gives its value only where it varies with the first values of the axes in its
    condition; elsewhere the document's own value stays.
    """
    search = document.get("search")
    if not isinstance(search, Mapping):
        return document
    axes = _written_axes(search)
    known, written = set(axis_names()), search.get("when")
    conditions = {
        name: needs
        for name, needs in (written.items() if isinstance(written, Mapping) else ())
        if name in axes and name in known and isinstance(needs, Mapping)
    }
    starts = {name: values for name, values in axes.items() if name in known}
    first: dict[str, Any] = {}
    try:
        for name in grid.ordered(starts, conditions):
            values = starts[name]
            if not _varies(conditions.get(name), first):
                continue
            if isinstance(values, list) and values:
                first[name] = values[0]
            elif isinstance(values, Mapping) and "low" in values:
                first[name] = values["low"]
        defaults = {name: _field_value(document, name) for name in conditions}
        document = grid.with_axis_values(document, first)
    except ValueError:
        return document  # Validation names the circle, or the value that should be a section.
    otherwise = search.get("otherwise", {})
    if defaults and isinstance(otherwise, Mapping):
        defaults = {name: value for name, value in defaults.items() if isinstance(value, AxisValue | list)}
        return {**document, "search": {**search, "otherwise": {**defaults, **otherwise}}}
    return document


def _written_axes(search: Mapping[str, object]) -> dict[str, object]:
    """Returns the values of each field that varies, linked or not, as far as they can be read."""
    together = search.get("together")
    sections = [search.get("axes"), *(together if isinstance(together, list) else ())]
    return {
        name: values
        for section in sections
        if isinstance(section, Mapping)
        for name, values in section.items()
    }


def _varies(needs: object, chosen: Mapping[str, Any]) -> bool:
    return not isinstance(needs, Mapping) or all(
        other in chosen and isinstance(values, list) and chosen[other] in values
        for other, values in needs.items()
    )


def _field_value(document: Mapping[str, object], name: str) -> object:
    value: Any = document
    section: Any = ExperimentSpec
    for part in name.split("."):
        fields = value if isinstance(value, Mapping) else {}
        value = fields.get(part)
        field = section.model_fields[part]
        section = field.annotation
    if value is None:
        return field.get_default(call_default_factory=True, validated_data=dict(fields))
    return value


def json_schema() -> dict[str, Any]:
    schema = ExperimentSpec.model_json_schema(mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:stillhouse:spec:v1",
        **schema,
        "title": "Stillhouse experiment spec",
    }
