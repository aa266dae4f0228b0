"""From runs to what is compared: configurations, and sides averaged over other axes."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.analysis.answers import AnalysisError
from service.analysis.ranking import label_of
from service.analysis.recommend import Configuration
from service.analysis.repeats import counts_repeats, replicate_of, seed_of
from service.analysis.run_table import Column
from service.domain.metrics import mixes_energy
from service.domain.records import Run
from service.domain.states import RunState

Columns = Callable[[str], Column]


def cells_of(runs: Sequence[Run]) -> list[list[int]]:
    cells: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        cells.setdefault(json.dumps(run.point, sort_keys=True), []).append(position)
    return list(cells.values())


def configurations(
    runs: Sequence[Run], cells: Sequence[Sequence[int]], metrics: Sequence[str], columns: Columns
) -> list[Configuration]:
    """Returns each cell's figures by metric and replicate; what ran more than once counts with its mean."""
    values = {metric: columns(metric).tolist() for metric in metrics}
    return [_configuration(runs, positions, values) for positions in cells]


def _configuration(
    runs: Sequence[Run], positions: Sequence[int], columns: Mapping[str, Sequence[float]]
) -> Configuration:
    members = [runs[position] for position in positions]
    point = members[0].point
    finished = [position for position in positions if runs[position].state is RunState.succeeded]
    done = [runs[position] for position in finished]
    figures: dict[str, dict[int, float]] = {}
    having: dict[str, dict[int, tuple[int, ...]]] = {}
    seeds = [run.seed for run in done]
    replicates = [replicate_of(run, each=True) for run in done] if any(run.repeat for run in done) else seeds
    for metric, column in columns.items():
        of_replicates: dict[int, list[float]] = {}
        ids: dict[int, list[int]] = {}
        mixed = mixes_energy(done, metric)
        keys = replicates if counts_repeats(metric) else seeds
        for run, position, replicate in zip(done, finished, keys, strict=True):
            value = column[position]
            if not mixed and value == value:
                of_replicates.setdefault(replicate, []).append(value)
                ids.setdefault(replicate, []).append(run.id)
        figures[metric] = {
            replicate: values[0] if len(values) == 1 else statistics.fmean(values)
            for replicate, values in of_replicates.items()
        }
        having[metric] = {replicate: tuple(of) for replicate, of in ids.items()}
    return Configuration(
        label=label_of(point),
        point=point,
        figures=figures,
        runs=having,
        failures={run.seed: _reason(run) for run in members if run.state is not RunState.succeeded},
    )


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
    runs: Mapping[str, Mapping[int, Sequence[Sequence[int]]]] = field(default_factory=dict)
    """Ids of the runs behind each value, of each cell."""

    def unit_scores(
        self, metric: str, read: Callable[[int], Mapping[str, float] | None]
    ) -> dict[int, Mapping[str, float]]:
        """Returns each test unit's mean score by seed, where all its runs have scores on the same units."""
        scores: dict[int, Mapping[str, float]] = {}
        for seed, cells in self.runs.get(metric, {}).items():
            of_cells = [_mean_scores([read(id) for id in ids]) for ids in cells]
            mean = _mean_scores(of_cells)
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
    left out on its side. Returns the sides in order of appearance, and in words what was left out.
    """
    groups: dict[str, list[Configuration]] = {}
    for configuration in configurations:
        groups.setdefault(_part(configuration.point, axes), []).append(configuration)
    others = [
        axis for axis in dict.fromkeys(axis for c in configurations for axis in c.point) if axis not in axes
    ]
    if not others:
        return [
            Side(c.label, c.point, {m: c.figures.get(m, {}) for m in metrics}, _of_one_cell(c))
            for c in configurations
        ], []
    members = list(groups.values())
    averages: dict[str, list[_Average]] = {}
    left_out: dict[str, list[str]] = {}
    for metric in metrics:
        averages[metric], reasons = _averages(members, axes, others, metric)
        for reason in reasons:
            left_out.setdefault(reason, []).append(metric)
    points = [{axis: group[0].point.get(axis) for axis in axes} for group in members]
    every = [
        Side(
            label_of(point),
            point,
            {metric: of_sides[number].values for metric, of_sides in averages.items()},
            {metric: of_sides[number].runs for metric, of_sides in averages.items() if of_sides[number].runs},
        )
        for number, point in enumerate(points)
    ]
    return every, [f"{reason} {', '.join(names)}" for reason, names in left_out.items()]


@dataclass(frozen=True, slots=True)
class _Average:
    values: Mapping[int, float] = field(default_factory=dict)
    runs: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)


def _averages(
    members: Sequence[Sequence[Configuration]], axes: Sequence[str], others: Sequence[str], metric: str
) -> tuple[list[_Average], list[str]]:
    """Averages one metric of each side over the cells that all have; also returns what was left out."""
    sides = [{_part(c.point, others): c for c in group if c.figures.get(metric)} for group in members]
    # A side without any result has no claim; the others are compared without it.
    having = [side for side in sides if side]
    if not having:
        return [_Average() for _ in sides], []
    common = [key for key in having[0] if all(key in side for side in having)]
    if not common:
        raise AnalysisError(
            f"no value of {', '.join(others)} has {metric} for every {', '.join(axes)}; "
            "compare configurations instead"
        )
    uncommon = {key: cell for side in having for key, cell in side.items() if key not in common}
    reasons = [
        f"{_label(cell, others)} is left out, because not every side has its" for cell in uncommon.values()
    ]
    averages = []
    for group, side in zip(members, sides, strict=True):
        if not side:
            averages.append(_Average())
            continue
        cells = [side[key] for key in common]
        seeds = dict.fromkeys(seed for cell in cells for seed in cell.figures[metric])
        whole = [seed for seed in seeds if all(seed in cell.figures[metric] for cell in cells)]
        averages.append(
            _Average(
                {seed: statistics.fmean(cell.figures[metric][seed] for cell in cells) for seed in whole},
                {seed: [cell.runs.get(metric, {}).get(seed, ()) for cell in cells] for seed in whole},
            )
        )
        partial = dict.fromkeys(str(seed_of(seed)) for seed in seeds if seed not in whole)
        if partial:
            reasons.append(
                f"{_label(group[0], axes)}: seed {', '.join(partial)} did not finish on every side and is "
                "left out of"
            )
    return averages, reasons


def _of_one_cell(configuration: Configuration) -> dict[str, dict[int, Sequence[Sequence[int]]]]:
    return {metric: {seed: (ids,) for seed, ids in of.items()} for metric, of in configuration.runs.items()}


def _part(point: Mapping[str, Any], axes: Sequence[str]) -> str:
    return json.dumps([point.get(axis) for axis in axes])


def _label(configuration: Configuration, axes: Sequence[str]) -> str:
    return label_of({axis: configuration.point.get(axis) for axis in axes})
