"""Runs without a store: a grid of figures that tests lay out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from service.analysis import recommend as recommending
from service.analysis.answers import ChosenConfiguration, Claim
from service.analysis.claims import Family, UnitScores
from service.analysis.ranking import Configuration
from service.analysis.recommend import Constraint, Rules
from service.analysis.run_table import RunTable
from service.domain.records import Run
from service.domain.states import RunState
from trainers.metrics import Better

GRID: dict[str, list[Any]] = {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32]}
Figures = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


def candidate(label: str, values: Mapping[str, float | None]) -> Configuration:
    """A configuration with one value of each figure; None = it has none."""
    figures = {name: {} if value is None else {0: value} for name, value in values.items()}
    return Configuration(label, {}, figures, {})


def figures(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """fp32 takes twice as long; accuracies differ by seed alone; large batches save a tenth."""
    seconds = (20.0 if point["precision"] == "fp32" else 10.0) * (1 + 0.01 * seed)
    if point["batch.global_size"] == 32:
        seconds *= 0.9 + 0.001 * seed
    return {
        "total_time_s": seconds,
        "cost_usd": seconds / 100,
        "energy_kwh": seconds / 1000,
        "accuracy": 0.9 + 0.002 * seed + (0.0001 * seed if point["precision"] == "bf16" else 0.0),
    }


def compare(
    metric: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    scores: tuple[UnitScores, UnitScores] | None = None,
    **asked: Any,
) -> Claim:
    """The claim about two sides alone."""
    of_units = None if scores is None else {"a": scores[0], "b": scores[1]}
    return Family(metric, {"a": a, "b": b}, scores=of_units, **asked).claim("a", "b")


def recommend(
    configurations: Sequence[Configuration],
    *,
    objective: str,
    better: Better = "lower",
    constraints: Sequence[Constraint] = (),
    family: Callable[[str, Better, float | None], Family] | None = None,
) -> ChosenConfiguration:
    """The choice by claims from the configurations' figures alone, unless others are given."""

    def of_figures(metric: str, wins: Better, margin: float | None) -> Family:
        figures = {each.label: each.figures.get(metric, {}) for each in configurations}
        return Family(metric, figures, better=wins, margin=margin)

    rules = Rules(objective, better, constraints, family or of_figures)
    return recommending.recommend(configurations, rules)


def run(id: int, point: Mapping[str, Any], seed: int, **values: Any) -> Run:
    """A run that succeeded, unless the values say otherwise."""
    known = {
        "id": id, "experiment_id": 1, "index": id - 1, "cell": repr(sorted(point.items())), "seed": seed,
        "repeat": 0, "point": dict(point), "state": RunState.succeeded, "task": "imdb",
        "energy_provenance": "modelled", "own_failures": 0, "infrastructure_failures": 0, "started_s": 100.0,
        "ended_s": 200.0,
    }  # fmt: skip
    return Run(**{**dict.fromkeys(field.name for field in fields(Run)), **known, **values})


def run_table(
    axes: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 3,
    of: Figures = figures,
    change: Callable[[Run], Mapping[str, Any]] = lambda run: {},
    **more: Any,
) -> RunTable:
    """A whole grid.

    Args:
        axes: of the grid; None = `GRID`.
        seeds: per cell.
        of: figures of a point and seed.
        change: values to replace in some runs.
        more: other fields of the table.
    """
    axes = GRID if axes is None else axes
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    runs = []
    for number, (point, seed) in enumerate(itertools.product(points, range(seeds)), 1):
        made = run(number, point, seed, **of(point, seed))
        changed = change(made)
        runs.append(run(number, point, seed, **{**of(point, seed), **changed}) if changed else made)
    judged_on = {made.id: {"validation_examples": 25_000} for made in runs}
    return RunTable(**{"experiments": (), "runs": tuple(runs), "summaries": judged_on, **more})
