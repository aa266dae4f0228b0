"""From runs to what is compared: configurations, and sides averaged over other axes."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.analysis.answers import AnalysisError
from service.analysis.ranking import Configuration, label_of
from service.analysis.repeats import counts_repeats, replicate_of, seed_of
from service.analysis.run_table import Column
from service.domain.metrics import mixes_energy
from service.domain.records import Run
from service.domain.states import RunState

_ABSENT = object()


def cells_of(runs: Sequence[Run]) -> list[list[int]]:
    cells: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        cells.setdefault(json.dumps(run.point, sort_keys=True), []).append(position)
    return list(cells.values())


def configurations(runs: Sequence[Run], cells: Sequence[Sequence[int]]) -> list[Configuration]:
    """Returns each cell, to which `add_figures` gives its figures."""
    return [
        Configuration(
            label=label_of(runs[positions[0]].point),
            point=runs[positions[0]].point,
            figures={},
            runs={},
            failures={
                runs[at].seed: _reason(runs[at])
                for at in positions
                if runs[at].state is not RunState.succeeded
            },
        )
        for positions in cells
    ]


def add_figures(
    configurations: Sequence[Configuration],
    runs: Sequence[Run],
    cells: Sequence[Sequence[int]],
    metric: str,
    column: Column,
) -> None:
    """Adds one metric by replicate; what ran more than once counts with its mean."""
    each, figures = counts_repeats(metric), column.tolist()
    for configuration, positions in zip(configurations, cells, strict=True):
        finished = [at for at in positions if runs[at].state is RunState.succeeded]
        of_replicates: dict[int, list[float]] = {}
        ids: dict[int, list[int]] = {}
        if not mixes_energy((runs[at] for at in finished), metric):
            for at in finished:
                if (value := figures[at]) == value:
                    replicate = replicate_of(runs[at], each)
                    of_replicates.setdefault(replicate, []).append(value)
                    ids.setdefault(replicate, []).append(runs[at].id)
        configuration.figures[metric] = {
            replicate: values[0] if len(values) == 1 else statistics.fmean(values)
            for replicate, values in of_replicates.items()
        }
        configuration.runs[metric] = ids


def _reason(run: Run) -> str:
    if run.failure_class is not None:
        return (
            f"{run.failure_class}: {run.failure_message}" if run.failure_message else str(run.failure_class)
        )
    return f"is {run.state}"


@dataclass(frozen=True, slots=True)
class Side:
    """What a claim is about: a configuration, or one axis value averaged over all other axes."""

    label: str
    point: Mapping[str, Any]
    values: Mapping[str, Mapping[int, float]]
    """By metric and replicate; means over the same cells on every side."""
    cells: Mapping[str, Sequence[Configuration]] = field(default_factory=dict)
    """What the values are means over, by metric."""

    def unit_scores(
        self, metric: str, read: Callable[[int], Mapping[str, float] | None]
    ) -> dict[int, Mapping[str, float]]:
        """Returns each test unit's mean score by seed, where all its runs have scores on the same units."""
        scores: dict[int, Mapping[str, float]] = {}
        cells = [cell.runs.get(metric, {}) for cell in self.cells.get(metric, ())]
        for seed in self.values.get(metric, {}):
            mean = _mean_scores([_mean_scores([read(id) for id in cell.get(seed, ())]) for cell in cells])
            if mean is not None:
                scores[seed] = mean
        return scores


def _mean_scores(scores: Sequence[Mapping[str, float] | None]) -> Mapping[str, float] | None:
    first = scores[0] if scores else None
    if first is None or len(scores) == 1:
        return first
    known = [of for of in scores if of is not None and of.keys() == first.keys()]
    if len(known) < len(scores):
        return None
    return {unit: statistics.fmean(of[unit] for of in known) for unit in first}


def sides(
    configurations: Sequence[Configuration], axes: Sequence[str], metrics: Sequence[str]
) -> tuple[list[Side], list[str]]:
    """Groups configurations by some axes and averages over the others, like with like.

    A cell that a side lacks is left out on every side, and a seed that lacks one of the remaining cells is
    left out on its side; so are configurations without the axes, where others have them (`search.when`).
    Returns the sides in order of appearance, and in words what was left out.
    """
    having = [c for c in configurations if any(axis in c.point for axis in axes)]
    without = len(configurations) - len(having) if having else 0
    groups: dict[str, list[Configuration]] = {}
    for configuration in having or configurations:
        groups.setdefault(_part(configuration.point, axes), []).append(configuration)
    further = dict.fromkeys(axis for c in having or configurations for axis in c.point if axis not in axes)
    others = [axis for axis in further if not _implied(axis, groups.values())]
    if not further:
        return [
            Side(c.label, c.point, {m: c.figures.get(m, {}) for m in metrics}, {m: [c] for m in metrics})
            for c in configurations
        ], []
    members = [[(_part(c.point, others), c) for c in group] for group in groups.values()]
    points = [{axis: group[0].point.get(axis) for axis in axes} for group in groups.values()]
    labels = [label_of(point) for point in points]
    values: list[dict[str, Mapping[int, float]]] = [{} for _ in points]
    behind: list[dict[str, Sequence[Configuration]]] = [{} for _ in points]
    left_out: dict[str, list[str]] = {}
    for metric in metrics:
        cells, uncommon = _common_cells(members, axes, others, metric)
        reasons = [f"{_label(cell, others)} is left out, because not every side has its" for cell in uncommon]
        for number, of in enumerate(cells):
            columns = [cell.figures[metric] for cell in of]
            seeds = dict.fromkeys(seed for column in columns for seed in column)
            whole = [seed for seed in seeds if all(seed in column for column in columns)]
            values[number][metric] = {
                seed: math.fsum([column[seed] for column in columns]) / len(columns) for seed in whole
            }
            behind[number][metric] = of
            partial = dict.fromkeys(
                str(seed_of(seed)) for seed in seeds if seed not in values[number][metric]
            )
            if partial:
                reasons.append(
                    f"{labels[number]}: seed {', '.join(partial)} did not finish on every side and is "
                    "left out of"
                )
        for reason in reasons:
            left_out.setdefault(reason, []).append(metric)
    every = [Side(*side) for side in zip(labels, points, values, behind, strict=True)]
    reasons = [f"{reason} {', '.join(names)}" for reason, names in left_out.items()]
    if without:
        reasons.append(f"configurations without {', '.join(axes)} are left out: {without}")
    return every, reasons


def _implied(axis: str, groups: Iterable[Sequence[Configuration]]) -> bool:
    """Whether some sides lack the axis and the others have one value of it, as an option of theirs."""
    lacking = False
    for group in groups:
        values = [c.point.get(axis, _ABSENT) for c in group]
        if any(value != values[0] for value in values):
            return False
        lacking |= values[0] is _ABSENT
    return lacking


def _common_cells(
    members: Sequence[Sequence[tuple[str, Configuration]]],
    axes: Sequence[str],
    others: Sequence[str],
    metric: str,
) -> tuple[list[list[Configuration]], list[Configuration]]:
    """Returns each side's cells that all sides have, in one order, and the cells that some side lacks."""
    sides = [{key: c for key, c in group if c.figures.get(metric)} for group in members]
    # A side without any result has no claim; the others are compared without it.
    having = [side for side in sides if side]
    if not having:
        return [[] for _ in sides], []
    common = [key for key in having[0] if all(key in side for side in having)]
    if not common:
        raise AnalysisError(
            f"no combination of {', '.join(others)} has {metric} with every value of {', '.join(axes)}; "
            "compare configurations instead"
        )
    uncommon = {key: cell for side in having for key, cell in side.items() if key not in common}
    return [[side[key] for key in common if side] for side in sides], list(uncommon.values())


def _part(point: Mapping[str, Any], axes: Sequence[str]) -> str:
    return json.dumps([point.get(axis) for axis in axes])


def _label(configuration: Configuration, axes: Sequence[str]) -> str:
    return label_of({axis: configuration.point.get(axis) for axis in axes})
