"""Parallel coordinates: one line per run or configuration across its axes and figures. Pure.

The data are for the page's own renderer: plotly draws this kind with WebGL alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from service.analysis.answers import FrontierMember
from service.analysis.run_table import Column, RunTable
from service.domain.formats import axis_value, point_text, scale_for, short_names, title
from service.domain.metrics import Metric
from service.output.figures.figure import Figure, axis_title, rounded_or_gap

KIND = "parallel"
"""`type` of the trace."""


def of_runs(run_table: RunTable, positions: Sequence[int], metrics: Sequence[Metric]) -> Figure:
    """Returns a line per finished run among `positions`."""
    runs = [run_table.runs[at] for at in positions]
    columns = {metric.name: run_table.column(metric.name)[list(positions)] for metric in metrics}
    return _figure(
        [run.point for run in runs],
        columns,
        metrics,
        [[run.id] for run in runs],
        [f"run:{run.id} {point_text(run.point)} seed={run.seed}" for run in runs],
        "one line per run",
    )


def of_cells(
    members: Sequence[FrontierMember], metrics: Sequence[Metric], runs: Mapping[str, Sequence[int]]
) -> Figure:
    """Returns a line per configuration through the means over its seeds."""
    columns = {metric.name: np.array([m.values[metric.name] for m in members]) for metric in metrics}
    return _figure(
        [member.point for member in members],
        columns,
        metrics,
        [list(runs.get(member.label, ())) for member in members],
        [point_text(member.point) or "the only configuration" for member in members],
        "one line per configuration, means over its seeds",
    )


def _figure(
    points: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Column],
    metrics: Sequence[Metric],
    runs: list[list[int]],
    texts: list[str],
    what: str,
) -> Figure:
    axes = list(dict.fromkeys(axis for point in points for axis in point))
    names = short_names(axes)
    dimensions = [_axis(axis, names[axis], [point.get(axis) for point in points]) for axis in axes]
    for metric in metrics:
        values = columns[metric.name].tolist()
        scale = scale_for(metric.name, values)
        dimensions.append(
            {
                "name": metric.name,
                "label": f"{title(metric.name)} ({scale.unit})" if scale.unit else axis_title(metric.name),
                "values": rounded_or_gap(value * scale.factor for value in values),
                "ticks": None,
                "better": metric.better,
            }
        )
    trace = {"type": KIND, "dimensions": dimensions, "runs": runs, "text": texts}
    better = ", ".join(f"{title(metric.name)} ({metric.better} is better)" for metric in metrics)
    return Figure(KIND, f"Axes and figures side by side, {what}: {better}.", [trace], {"height": 420})


def _axis(name: str, label: str, values: Sequence[Any]) -> dict[str, Any]:
    """Returns an axis' dimension: each value has its own place, in grid order."""
    places: dict[str, int] = {}
    for value in values:
        places.setdefault(json.dumps(value), len(places))
    ticks = [axis_value(json.loads(value)) for value in places]
    numbers = [json.loads(value) for value in places]
    if all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        ranked = sorted(range(len(numbers)), key=lambda at: numbers[at])
        places = {json.dumps(numbers[at]): rank for rank, at in enumerate(ranked)}
        ticks = [axis_value(numbers[at]) for at in ranked]
    return {
        "name": name,
        "label": label,
        "values": [places[json.dumps(value)] for value in values],
        "ticks": ticks,
        "better": None,
    }
