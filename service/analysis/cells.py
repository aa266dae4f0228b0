"""From runs to what the analysis compares: one configuration per cell, its figures by seed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from service.analysis.recommend import Configuration
from service.records import Run
from service.states import RunState


def configurations(runs: Iterable[Run], metrics: Sequence[str]) -> list[Configuration]:
    """The cells of runs, in the order in which they first appear.

    Only runs that trained their whole length count: a stopped run's time and cost are not those
    of the configuration. What failed is kept as a reason.

    Args:
        runs: of one experiment, or of several with the same axes.
        metrics: columns of `Run`, for instance `cost_usd`.
    """
    cells: dict[str, list[Run]] = {}
    for run in runs:
        cells.setdefault(json.dumps(run.point, sort_keys=True), []).append(run)
    return [_configuration(members, metrics) for members in cells.values()]


def _configuration(members: Sequence[Run], metrics: Sequence[str]) -> Configuration:
    point = members[0].point
    done = [run for run in members if run.state is RunState.succeeded]
    return Configuration(
        label=", ".join(f"{axis}={value}" for axis, value in point.items()) or "the only configuration",
        point=point,
        figures={
            metric: {run.seed: float(value) for run in done if (value := getattr(run, metric)) is not None}
            for metric in metrics
        },
        failures={run.seed: _reason(run) for run in members if run.state is not RunState.succeeded},
    )


def _reason(run: Run) -> str:
    if run.failure_class is not None:
        return (
            f"{run.failure_class}: {run.failure_message}" if run.failure_message else str(run.failure_class)
        )
    return f"is {run.state}"
