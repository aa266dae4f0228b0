"""Printed figures of a study next to own ones, with what differs in the conditions."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from scipy import special

from service.analysis.answers import BadQuestion, Condition, PublishedComparison, PublishedFigure
from service.analysis.question import Question
from service.analysis.ranking import Configuration, label_of
from service.analysis.repeats import means_by_seed, units_of
from service.analysis.run_table import flat_spec
from service.config.document import RefusedDocument, load_yaml
from service.config.suggestions import nearest
from service.db import schema
from service.domain.formats import axis_value, short_name
from service.domain.grid import LINK, AxisValue, fields_of
from service.domain.metrics import METRICS
from service.store import Store
from trainers.metrics import DECLARED

_PARAMETER = "published"
_MOST_VALUES = 20_000
_MOST_SHOWN = 5  # Own values of one condition

Facts = Mapping[str, Any]


class PrintedRow(BaseModel):
    """One configuration of a study, by dotted names of axes, with its figures in our units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: dict[str, AxisValue] = Field(default_factory=dict)
    figures: dict[str, FiniteFloat] = Field(min_length=1)


class PrintedTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: dict[str, AxisValue] = Field(min_length=1)
    conditions: dict[str, AxisValue | dict[str, AxisValue]] = Field(default_factory=dict)
    rows: list[PrintedRow] = Field(min_length=1)


def read_printed(text: str) -> PrintedTable:
    """Reads YAML or JSON; `BadQuestion` says in one line what is wrong with it."""
    try:
        return PrintedTable.model_validate(load_yaml(text, max_depth=8, max_values=_MOST_VALUES))
    except RefusedDocument as error:
        raise BadQuestion(_PARAMETER, f"the published figures cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise BadQuestion(
            _PARAMETER,
            f"the published figures: {where}: {first['msg']}; write source, conditions, and rows of at and "
            "figures",
        ) from None


def read_specs(store: Store, experiment_ids: Sequence[int]) -> list[Facts]:
    """Returns the resolved specs of all cells, by dotted names of fields."""
    c = schema.cell_specs.c
    statement = sa.select(c.canonical).where(c.experiment_id.in_(list(experiment_ids)))
    with store.database.read() as connection:
        return [flat_spec(json.loads(canonical)) for (canonical,) in connection.execute(statement)]


def compare_published(
    question: Question, table: PrintedTable, specs: Sequence[Facts] = ()
) -> PublishedComparison:
    """Sets printed figures next to own means; what own runs lack is listed with a reason."""
    own = _Own(question, specs)
    wanted = _flat(table.conditions)
    fixed = {
        axis: value for name, value in wanted.items() if (axis := own.axis(name)) and own.has(axis, value)
    }
    names = dict.fromkeys(name for row in table.rows for name in row.figures)
    for name in names:
        _check(name, question)
    cells = question.cells([question.named_metric(name) for name in names])
    figures: list[PublishedFigure] = []
    missing: dict[str, str] = {}
    for row in table.rows:
        label = label_of(row.at)
        found = own.cell(cells, row.at, fixed)
        if isinstance(found, str):
            missing[label] = found
            continue
        lacking = []
        for name, printed in row.figures.items():
            if found.figures[name]:
                figures.append(own.figure(label, found, name, printed))
            else:
                lacking.append(name)
        if lacking:
            reasons = "; ".join(sorted(set(found.failures.values())))
            missing[label] = reasons or f"own runs have no {', '.join(lacking)}"
    conditions = tuple(own.condition(name, value) for name, value in wanted.items())
    source = {name: axis_value(value) for name, value in table.source.items()}
    return PublishedComparison(source, tuple(figures), missing, conditions)


def _check(name: str, question: Question) -> None:
    known = dict.fromkeys([*(metric.name for metric in METRICS), *DECLARED, *question.figure_names])
    if name not in known:
        raise BadQuestion(_PARAMETER, f"unknown figure '{name[:100]}'; {nearest(name[:100], known)}")


def _interval(
    values: Mapping[int, float], question: Question, name: str
) -> tuple[float, float] | tuple[None, None]:
    """Student's t over seeds, or runs of theirs, with the least spread that claims have."""
    array = np.array(list(values.values()))
    units = units_of(list(values), array[:, None])
    array = np.array([array[of].mean() for of in units])
    count = len(array)
    if count < 2:
        return None, None
    least = float(question.resolution(name).run_variance(array))
    reach = special.stdtrit(count - 1, 0.975) * math.sqrt(max(float(array.var(ddof=1)), least) / count)
    return float(array.mean() - reach), float(array.mean() + reach)


@dataclass(frozen=True, slots=True)
class _Own:
    """What own runs were run with, by the names that a study may use."""

    question: Question
    specs: Sequence[Facts]

    def axis(self, name: str) -> str | None:
        """The axis of a name, or the field of linked axes."""
        axes = self.question.axes
        fields = dict.fromkeys(field for axis in axes for field in fields_of(axis))
        if name in (*axes, *fields):
            return name
        named = [field for field in fields if name in (field.rpartition(".")[2], short_name(field))]
        return named[0] if len(named) == 1 else None

    def has(self, axis: str, value: AxisValue) -> bool:
        points = (_by_field(run.point) for run in self.question.run_table.runs)
        return any(_same(point[axis], value) for point in points if axis in point)

    def cell(
        self, cells: Sequence[Configuration], at: Mapping[str, AxisValue], fixed: Mapping[str, AxisValue]
    ) -> Configuration | str:
        """The one configuration of a row, or why there is none."""
        point = dict(fixed)
        for name, value in at.items():
            axis = self.axis(name)
            if axis is None:
                known = self.values(name)
                if not any(_same(of, value) for of in known):
                    has = f"own runs have {', '.join(known)}" if known else "own runs do not report it"
                    return f"{name} is {axis_value(value)} in print; {has}"
                continue
            if not self.has(axis, value):
                return f"no run has {axis}={axis_value(value)}"
            point[axis] = value
        matching = [
            cell
            for cell in cells
            if all(
                axis in (of := _by_field(cell.point)) and _same(of[axis], value)
                for axis, value in point.items()
            )
        ]
        if len(matching) == 1:
            return matching[0]
        if not matching:
            return f"no run has {label_of(point)} together"
        more = ", ".join(axis for axis in self.question.axes if not {axis, *fields_of(axis)} & point.keys())
        return f"it fits {len(matching)} own configurations; give {more} in at"

    def figure(self, label: str, cell: Configuration, name: str, printed: float) -> PublishedFigure:
        values = cell.figures[name]
        mean = math.fsum(values.values()) / len(values)
        low, high = _interval(values, self.question, name)

        def over(value: float | None) -> float | None:
            return None if value is None or printed == 0.0 else value / printed

        ends = sorted(end for end in (over(low), over(high)) if end is not None)
        return PublishedFigure(
            label=label,
            point=cell.point,
            metric=name,
            printed=printed,
            mean=mean,
            low=low,
            high=high,
            seeds=len(means_by_seed(values)),
            ratio=over(mean),
            ratio_low=ends[0] if ends else None,
            ratio_high=ends[1] if ends else None,
        )

    def condition(self, name: str, printed: AxisValue) -> Condition:
        known = self.values(name)
        differs = None if not known else not all(_same(of, printed) for of in known)
        return Condition(name, axis_value(printed), tuple(known[:_MOST_SHOWN]), differs)

    def values(self, name: str) -> list[str]:
        """Own values, each once: of an axis, a field of the spec, the data or the environment."""
        table = self.question.run_table
        if axis := self.axis(name):
            found: Iterable[Any] = (_by_field(run.point).get(axis) for run in table.runs)
        else:
            found = _looked_up(name, self.specs) or _looked_up(
                name, [*table.data.values(), *(_flat(facts) for facts, _ in table.environments)]
            )
        return list(dict.fromkeys(axis_value(value) for value in found if value is not None))


def _by_field(point: Mapping[str, AxisValue]) -> dict[str, AxisValue]:
    """Values by axis, and of linked axes by field too."""
    values = dict(point)
    for axis, value in point.items():
        fields = fields_of(axis)
        parts = value.split(LINK) if isinstance(value, str) else []
        if len(fields) == len(parts) > 1:
            values |= dict(zip(fields, parts, strict=True))
    return values


def _looked_up(name: str, facts: Sequence[Facts]) -> list[Any]:
    """By the whole name, the last part of one, or `name` of a section."""
    names = dict.fromkeys(known for of in facts for known in of)
    last = name.removeprefix("versions.").rpartition(".")[2] if name.startswith("versions.") else name
    for wanted in (name, f"{name}.name", f"packages.{last}"):
        if wanted in names:
            return [of.get(wanted) for of in facts]
    ending = [known for known in names if last in (known.rpartition(".")[2], short_name(known))]
    return [of.get(ending[0]) for of in facts] if len(ending) == 1 else []


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        section = isinstance(value, Mapping)
        flat |= {f"{name}.{inner}": of for inner, of in value.items()} if section else {name: value}
    return flat


def _same(own: Any, printed: Any) -> bool:
    one, other = axis_value(own), axis_value(printed)
    try:
        return math.isclose(float(one), float(other), rel_tol=1e-9)
    except ValueError:
        return one.casefold() == other.casefold()
