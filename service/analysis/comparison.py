"""Runs side by side by axis, with mean and spread over seeds. Pure.

There is one row per combination of the chosen axes' values. Within a row every cell (one combination of all
axes) weighs the same, however many of its seeds have finished, and the spread is that between the replicates
of a cell (`service.analysis.repeats`), so that it never contains the effect of an axis.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from service.analysis.answers import ComparedRow, ComparisonAnswer
from service.analysis.ranking import label_of
from service.analysis.repeats import counts_repeats, replicate_of
from service.domain.metrics import Metric, Spread, mixes_energy
from service.domain.records import Run
from service.domain.states import RUN_STATES_WITH_RESULT, RunState

Of = TypeVar("Of")
Figures = npt.NDArray[np.float64]
Column = Callable[[str], Figures]  # A figure of all runs (N,) by its name, NaN where missing
Further = Callable[[Sequence[Run]], Mapping[str, Any]]  # Further fields of the row of some runs


def compare(
    runs: Sequence[Run],
    axes: Sequence[str],
    metrics: Sequence[Metric],
    column: Column,
    further: Further = lambda runs: {},
) -> ComparisonAnswer:
    """Sets runs in grid order side by side, a row per point of `axes`, without claims and notes."""
    grouped: dict[tuple[Any, ...], list[int]] = {}
    for position, run in enumerate(runs):
        key = tuple([_hashable(run.point.get(name)) for name in axes])
        grouped.setdefault(key, []).append(position)
    spreads = _spreads(runs, list(grouped.values()), metrics, column)
    members = ([runs[position] for position in positions] for positions in grouped.values())
    rows = tuple(_row(axes, of, figures, further(of)) for of, figures in zip(members, spreads, strict=True))
    best = _best(rows, metrics)
    return ComparisonAnswer(tuple(axes), tuple(metrics), rows, best, claims=(), notes=())


def _hashable(value: Any) -> Any:
    # Equal keys, unlike values: True == 1 == 1.0.
    return (type(value), value) if isinstance(value, str | int | float | bool | None) else json.dumps(value)


def _row(
    axes: Sequence[str], members: Sequence[Run], figures: dict[str, Spread | None], more: Mapping[str, Any]
) -> ComparedRow:
    results = [run for run in members if run.state in RUN_STATES_WITH_RESULT]
    failed = (run for run in members if run.state is RunState.failed)
    provenances = {run.energy_provenance for run in results if run.energy_provenance is not None}
    provenance = "mixed" if len(provenances) > 1 else next(iter(provenances), None)
    for name in figures:
        if mixes_energy(results, name):
            figures[name] = None
    point = {name: members[0].point.get(name) for name in axes}
    return ComparedRow(
        label=label_of(point),
        point=point,
        figures=figures,
        finished=len(results),
        planned=len(members),
        incomplete=sum(run.state is RunState.stopped for run in results),
        failures=dict(Counter(str(run.failure_class or "unknown") for run in failed)),
        energy_provenance=provenance,
        **more,
    )


def _spreads(
    runs: Sequence[Run], groups: Sequence[Sequence[int]], metrics: Sequence[Metric], column: Column
) -> list[dict[str, Spread | None]]:
    # Each cell of a group has a number, and each number its group.
    numbers: dict[tuple[int, str], int] = {}
    cell_of = np.full(len(runs), -1)
    for group, members in enumerate(groups):
        for position in members:
            run = runs[position]
            if run.state in RUN_STATES_WITH_RESULT:
                cell_of[position] = numbers.setdefault((group, run.cell), len(numbers))
    group_of = np.array([group for group, _ in numbers], dtype=int)
    keys = [
        np.unique([replicate_of(run, each) for run in runs], return_inverse=True)[1] for each in (False, True)
    ]
    spreads: list[dict[str, Spread | None]] = [{} for _ in groups]
    for metric in metrics:
        values = column(metric.name)
        counted = (cell_of >= 0) & np.isfinite(values)
        of, figures = cell_of[counted], values[counted]
        units, unit_of = np.unique(
            of * len(runs) + keys[counts_repeats(metric.name)][counted], return_inverse=True
        )
        if len(units) < len(of):
            of = units // len(runs)
            figures = np.bincount(unit_of, figures) / np.bincount(unit_of)
        count = np.bincount(of, minlength=len(numbers))
        mean = np.bincount(of, figures, len(numbers)) / np.maximum(count, 1)
        square = np.bincount(of, (figures - mean[of]) ** 2, len(numbers))
        has = count > 0
        cells = np.bincount(group_of[has], minlength=len(groups))
        means = np.bincount(group_of[has], mean[has], len(groups)) / np.maximum(cells, 1)
        n = np.bincount(group_of, count, len(groups)).astype(int)
        freedom = n - cells
        sd = np.sqrt(np.bincount(group_of, square, len(groups)) / np.maximum(freedom, 1))
        for group, row in enumerate(
            zip(means.tolist(), sd.tolist(), n.tolist(), freedom.tolist(), strict=True)
        ):
            spreads[group][metric.name] = (
                Spread(row[0], row[1] if row[3] else None, row[2]) if row[2] else None
            )
    return spreads


def _best(rows: Sequence[ComparedRow], metrics: Sequence[Metric]) -> dict[str, int]:
    best: dict[str, int] = {}
    for metric in metrics:
        figures = ((position, row.figures[metric.name]) for position, row in enumerate(rows))
        means = {position: figure.mean for position, figure in figures if figure is not None}
        if (winner := only_best(means, metric)) is not None:
            best[metric.name] = winner
    return best


def only_best(means: Mapping[Of, float], metric: Metric) -> Of | None:
    """Whose mean is better than all others; None = there are no others, or several are best."""
    pick = min if metric.better == "lower" else max
    best = pick(means.values()) if means else None
    winners = [of for of, mean in means.items() if mean == best]
    return winners[0] if len(winners) == 1 < len(means) else None
