"""The spec of an experiment: the immutable, validated, hashed text of a submission. Pure.

`service.config.document.parse` turns bytes into a document under limits, `validate` turns a document into an
`ExperimentSpec`, and `ExperimentSpec.runs()` expands it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, create_model

from service.config.document import Problem, SpecError, shortened
from service.config.hardware import CATALOGUE, Hardware, find, lookup, written
from service.domain import grid
from service.domain.grid import REFERENCE_CELL, AxisValue, FieldValue
from service.search import AnySearch, Search
from service.specs.fields import SpecFields, WantedPrecision, axis_names, canonical_json, section_of
from service.specs.rules import of_combination, problems_of
from service.specs.wording import naming_problems
from trainers.config import DevicePricing, Section

_SEARCH: TypeAdapter[Search] = TypeAdapter(AnySearch)
_OF_ONE_RUN = {"search": Search(), "seeds": [0], "repeats": 1}
_MOST_STARTS = 100  # Grid points of which one has to be valid as a whole for a spec to be


def nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a cell cannot be trained: its values contradict each other, though each is valid by itself."""

    reason: str
    fields: Mapping[str, FieldValue]  # Values of the cell by dotted field


class InfeasibleCell(SpecError):
    """`spec` has the cell's values, where they are at odds only with hardware or between sections."""

    def __init__(
        self,
        problems: Sequence[Problem],
        fields: Mapping[str, FieldValue],
        spec: ExperimentSpec | None,
    ) -> None:
        super().__init__(problems)
        self.refusal, self.spec = Refusal(str(self), fields), spec


class ExperimentSpec(SpecFields):
    def at(
        self, point: Mapping[str, AxisValue], catalogue: Mapping[str, Hardware] = CATALOGUE
    ) -> ExperimentSpec:
        """Returns the validated spec of one grid point's runs: no axes, and the point's values written in.

        An empty point is not suggested yet: the axes' first values count.

        Raises:
            InfeasibleCell: only the combination of the point's values is wrong.
            SpecError: a value is wrong by itself; the problems name the point.
        """
        if not self.search.fields:
            # Validated as it stands.
            return self._with_entry(catalogue).model_copy(update=_OF_ONE_RUN)
        fields = self.search.settings(point)
        try:
            written = self._with_values(fields)
        except SpecError as error:
            if not of_combination(error, fields):
                raise _of_point(error, point) from None
            raise InfeasibleCell(error.problems, fields, None) from None
        problems = problems_of(written, catalogue, point)
        resolved = written._with_entry(catalogue)
        if problems and of_combination(SpecError(problems)):
            raise InfeasibleCell(problems, fields, resolved)
        if problems:
            raise _of_point(SpecError(problems), point)
        return resolved

    def _with_values(self, values: Mapping[str, FieldValue]) -> ExperimentSpec:
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
                if section[within] is None:
                    section[within] = {}
                section = section[within]
            section[fields[-1]] = value
        unchanged = {
            name: getattr(self, name) for name in ExperimentSpec.model_fields if name not in document
        }
        with naming_problems(document):
            changed = _part_of_spec(tuple(document)).model_validate_json(json.dumps(document), strict=True)
            validated = {name: getattr(changed, name) for name in document}
            return ExperimentSpec.model_validate({**unchanged, **validated, **_OF_ONE_RUN}, strict=True)

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

    def pricing(self, catalogue: Mapping[str, Hardware] = CATALOGUE) -> DevicePricing:
        """Returns the rates of one worker of a resolved spec."""
        shared = self.queue.share_device
        return lookup(self.hardware, catalogue).pricing(self.resources.cpus_per_worker, shared=shared)

    def runs(
        self, catalogue: Mapping[str, Hardware] = CATALOGUE, *, before_each: Callable[[], None] = nothing
    ) -> Iterator[RunPlan]:
        """Yields the runs in product order, each validated as if it had been written out by hand.

        Cells whose values contradict each other are runs too, which end at once with the reason, unless there
        are no others. A `SpecError` names the first grid point with a value that is wrong by itself.
        """
        replicates, places = self.replicates, self.places()
        suggested = self._before_suggestions(catalogue, before_each) if self.search.info.suggests else None
        index = 0
        refused: list[RunPlan] = []
        first: RunPlan | None = None  # Of those that can be trained
        # Points still to be suggested are all empty: one of them is resolved for all.
        for cell, alike in itertools.groupby(self.search.points(), key=cell_of):
            points = list(alike)
            before_each()
            resolved, refusal = (suggested, None) if suggested else self._resolved(points[0], catalogue)
            plans = []
            for point, (seed, repeat) in itertools.product(points, replicates):
                spec = resolved or self
                plans.append(RunPlan(index, places[index], cell, seed, repeat, point, spec, refusal))
                index += 1
            if first is None and refusal is None:
                first = plans[0]
            if first is None:
                refused += plans
                continue
            # A spec that is not valid could not be read again: the first valid one stands for it.
            for plan in [*refused, *plans]:
                yield dataclasses.replace(plan, spec=first.spec) if plan.spec is self else plan
            refused.clear()
        if first is None:
            point = refused[0].point
            try:
                self.at(point, catalogue)
            except SpecError as error:
                raise _of_point(error, point) from None
            return
        for following in range(index, len(places)):
            yield dataclasses.replace(
                first, index=following, place=places[following], cell=REFERENCE_CELL, seed=self.seeds[0]
            )

    def _resolved(
        self, point: Mapping[str, AxisValue], catalogue: Mapping[str, Hardware]
    ) -> tuple[ExperimentSpec | None, Refusal | None]:
        try:
            return self.at(point, catalogue), None
        except InfeasibleCell as error:
            return error.spec, error.refusal

    def _before_suggestions(
        self, catalogue: Mapping[str, Hardware], before_each: Callable[[], None]
    ) -> ExperimentSpec:
        """Returns the spec of runs whose values are not suggested yet; checks each value that may be."""
        feasible = None
        for point in self.search.probes():
            before_each()
            resolved, refusal = self._resolved(point, catalogue)
            if refusal is None and feasible is None:
                feasible = resolved
        try:
            return self.at({}, catalogue)
        except InfeasibleCell:
            if feasible is None:
                raise
            return feasible


def _of_point(error: SpecError, point: Mapping[str, AxisValue]) -> SpecError:
    if not point:
        return error
    prefix = f"grid point {shortened(canonical_json(dict(point)), 400)}: "
    return SpecError(dataclasses.replace(one, message=prefix + one.message) for one in error.problems)


def cell_of(point: Mapping[str, AxisValue]) -> str:
    return hashlib.sha256(canonical_json(point).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run of the grid before it is stored."""

    index: int  # In product order, from 0
    place: int  # In the order of measurement (`grid.blocked_order`), from 0
    cell: str  # Short hash of the axis values, or `REFERENCE_CELL`
    seed: int
    repeat: int  # Which run of this cell and seed, from 0
    point: dict[str, AxisValue]
    spec: ExperimentSpec
    """With the point's values; of a refused cell whose values make no valid spec, that of another cell."""
    refusal: Refusal | None = None


@functools.lru_cache(maxsize=1024)
def read_stored(canonical: str) -> ExperimentSpec:
    """Returns the same object for the same canonical text, as seeds of a cell have."""
    return ExperimentSpec.model_validate_json(canonical)


def validate(document: Mapping[str, object], catalogue: Mapping[str, Hardware] = CATALOGUE) -> ExperimentSpec:
    """Checks every field, the hardware and the axes' names; `SpecError` has every problem, in order."""
    try:
        document = _with_markets(document)
    except ValueError as error:
        raise SpecError([Problem("invalid-value", "hardware", str(error))]) from None
    replaced = _replaced_problems(document, catalogue)
    document = _with_first_point(document)
    try:
        spec = _read(document)
    except SpecError as error:
        other = _with_other_point(document, error)
        if other is None:
            raise (SpecError([*replaced, *error.problems]) if replaced else error) from None
        spec = other
    if problems := [*replaced, *problems_of(spec, catalogue)]:
        raise SpecError(problems)
    return spec


def _with_markets(section: Any) -> Any:
    """Writes hardware on a market as one text, in the field and wherever it is an axis."""
    if isinstance(section, list):
        return [_with_markets(each) for each in section]
    if not isinstance(section, dict):
        return section
    return {
        name: written(value) if name == "hardware" else _with_markets(value)
        for name, value in section.items()
    }


def _replaced_problems(document: Mapping[str, object], catalogue: Mapping[str, Hardware]) -> list[Problem]:
    """Judges each value that an axis replaces by itself, not with others: no run has them together."""
    search = document.get("search")
    axes = _written_axes(search).keys() & axis_names() if isinstance(search, Mapping) else ()
    replaced = {name for name in axes if _written(document, name)}
    if not replaced:
        return []
    problems: list[Problem] = []
    try:
        _read({**document, "search": {}})
    except SpecError as error:
        paths = tuple(f"{name}." for name in replaced)
        problems = [problem for problem in error.problems if f"{problem.path}.".startswith(paths)]
    if "hardware" in replaced and isinstance(name := document["hardware"], str):
        try:
            lookup(name, catalogue)
        except ValueError as error:
            problems.append(Problem("unknown-hardware", "hardware", str(error)))
    return problems


def _written(document: Mapping[str, object], name: str) -> bool:
    value: object = document
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _read(document: Mapping[str, object]) -> ExperimentSpec:
    with naming_problems(document):
        return ExperimentSpec.model_validate_json(json.dumps(document), strict=True)


def _with_other_point(document: Mapping[str, object], error: SpecError) -> ExperimentSpec | None:
    """Returns the spec with the first values that can be combined, where those of the first point cannot."""
    written = document.get("search")
    if not isinstance(written, Mapping) or not of_combination(error, _written_axes(written)):
        return None
    try:
        search = _SEARCH.validate_json(json.dumps(written), strict=True)
        known = search.fields.keys() <= set(axis_names())
    except ValueError:
        return None
    points = itertools.chain(search.probes(), search.expected_points()) if known else ()
    for point in itertools.islice(points, _MOST_STARTS):
        with contextlib.suppress(SpecError):
            return _read(grid.with_axis_values(document, search.settings(point)))
    return None


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
        section = section_of(field.annotation)
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
