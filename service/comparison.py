"""Runs beside each other by axis: mean and spread over seeds of what each configuration took.

Pure. One row per combination of the chosen axes' values. Within a row every *cell* (one
combination of all axes) weighs the same, however many of its seeds have finished, and the
spread is the one between seeds of a cell, so that it never contains the effect of an axis.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from service.headlines import Judged, headline
from service.states import RunState

AxisValues = tuple[tuple[str, Any], ...]
Figure = Callable[[Any, str], float | None]


class ComparedRun(Protocol):
    """What a comparison needs of a run; `service.records.Run` and the client's runs have it."""

    @property
    def cell(self) -> str:
        """Short hash of the axis values."""
        ...

    @property
    def point(self) -> dict[str, Any]:
        """Axis values by dotted name."""
        ...

    @property
    def state(self) -> RunState:
        """Where the run is in its life."""
        ...

    @property
    def failure_class(self) -> Any:
        """Why it failed; None when it did not."""
        ...

    @property
    def energy_provenance(self) -> str | None:
        """`counter`, `sampled` or `modelled`; None until known."""
        ...


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure that runs are compared by.

    Attributes:
        name: column of the run, with its unit.
        better: which direction wins.
    """

    name: str
    better: Literal["lower", "higher"]


METRICS: tuple[Metric, ...] = (
    Metric("total_time_s", "lower"),
    Metric("train_time_s", "lower"),
    Metric("cost_usd", "lower"),
    Metric("energy_kwh", "lower"),
    Metric("accuracy", "higher"),
    Metric("f1", "higher"),
    Metric("exact_match", "higher"),
    Metric("map", "higher"),
    Metric("mrr", "higher"),
    Metric("top5_accuracy", "higher"),
    Metric("train_loss", "lower"),
    Metric("validation_loss", "lower"),
    Metric("samples_per_s", "higher"),
    Metric("tokens_per_s", "higher"),
    Metric("peak_memory_mib", "lower"),
    Metric("mfu_pct", "higher"),
)
"""Everything that runs can be compared by."""

DEFAULT_METRICS = ("total_time_s", "cost_usd", "energy_kwh", "accuracy")
"""The project's question: time, cost, energy, and what happened to accuracy."""


def default_metrics(runs: Iterable[Judged]) -> tuple[str, ...]:
    """The project's question in the words of the runs' tasks: their headline metrics for accuracy."""
    headlines = dict.fromkeys(headline(run) for run in runs) or {"accuracy": None}
    return (*(name for name in DEFAULT_METRICS if name != "accuracy"), *headlines)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over seeds.

    Attributes:
        mean: mean of the cells' means, in the metric's unit.
        sd: sample standard deviation between seeds of one cell, pooled over the row's cells
            by their degrees of freedom; None when no cell has two values.
        n: values that went in.
    """

    mean: float
    sd: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Row:
    """One combination of axis values.

    Attributes:
        point: values of the chosen axes, in their order.
        figures: spread by metric name; None when no run has the figure.
        finished: runs with a result (succeeded, or stopped early).
        planned: runs in all.
        incomplete: runs with a result that ended early.
        failures: how many runs failed, by failure class.
        energy_provenance: how the row's energy came to be; `mixed` leaves the energy out,
            because measured and modelled energy never share a number.
    """

    point: dict[str, Any]
    figures: dict[str, Spread | None]
    finished: int
    planned: int
    incomplete: int
    failures: dict[str, int]
    energy_provenance: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, in the order in which the grid first reaches them.

    Attributes:
        axes: dotted names of the chosen axes.
        metrics: the compared figures.
        rows: one per combination of the axes' values.
        best: position of the row with the best mean, by metric name; absent when fewer than
            two rows have the figure. A better mean is not yet a proven difference.
    """

    axes: tuple[str, ...]
    metrics: tuple[Metric, ...]
    rows: tuple[Row, ...]
    best: dict[str, int]


def compare(
    runs: Iterable[ComparedRun],
    *,
    by: Sequence[str] | None = None,
    metrics: Sequence[str | Metric] = DEFAULT_METRICS,
    figure: Figure = getattr,
) -> Comparison:
    """Set runs beside each other.

    Args:
        runs: of one experiment or of several, in grid order.
        by: axes that make the rows; None = all axes that any run has.
        metrics: names out of `METRICS`, or metrics that `figure` knows.
        figure: gives a run's figure by name; None when it has none.

    Raises:
        ValueError: naming an axis that no run has, or an unknown metric.
    """
    runs = list(runs)
    known = list(dict.fromkeys(name for run in runs for name in run.point))
    axes = tuple(known if by is None else by)
    for name in axes:
        if name not in known:
            raise ValueError(f"no run has the axis '{name}'; axes: {', '.join(known) or 'none'}")
    chosen = tuple(_metric(name) if isinstance(name, str) else name for name in metrics)
    grouped: dict[AxisValues, list[ComparedRun]] = {}
    for run in runs:
        grouped.setdefault(tuple((name, _hashable(run.point.get(name))) for name in axes), []).append(run)
    rows = tuple(_row(axes, chosen, members, figure) for members in grouped.values())
    return Comparison(axes, chosen, rows, _best(rows, chosen))


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else json.dumps(value, sort_keys=True)


def _metric(name: str) -> Metric:
    for metric in METRICS:
        if metric.name == name:
            return metric
    raise ValueError(f"no metric is called '{name}'; metrics: {', '.join(m.name for m in METRICS)}")


def _row(
    axes: Sequence[str], metrics: Sequence[Metric], members: Sequence[ComparedRun], figure: Figure
) -> Row:
    results = [run for run in members if run.state in (RunState.succeeded, RunState.stopped)]
    failures: dict[str, int] = {}
    for run in members:
        if run.state is RunState.failed:
            name = str(run.failure_class or "unknown")
            failures[name] = failures.get(name, 0) + 1
    provenances = {run.energy_provenance for run in results if run.energy_provenance is not None}
    provenance = "mixed" if len(provenances) > 1 else next(iter(provenances), None)
    figures = {metric.name: _spread(results, metric.name, figure) for metric in metrics}
    if provenance == "mixed" and "energy_kwh" in figures:
        figures["energy_kwh"] = None
    return Row(
        point={name: members[0].point.get(name) for name in axes},
        figures=figures,
        finished=len(results),
        planned=len(members),
        incomplete=sum(run.state is RunState.stopped for run in results),
        failures=failures,
        energy_provenance=provenance,
    )


def _spread(results: Sequence[ComparedRun], name: str, figure: Figure) -> Spread | None:
    cells: dict[str, list[float]] = {}
    for run in results:
        value = figure(run, name)
        if value is not None and math.isfinite(value):
            cells.setdefault(run.cell, []).append(float(value))
    if not cells:
        return None
    means = [statistics.fmean(values) for values in cells.values()]
    freedom = sum(len(values) - 1 for values in cells.values())
    squares = sum(
        math.fsum((value - mean) ** 2 for value in values)
        for values, mean in zip(cells.values(), means, strict=True)
    )
    return Spread(
        mean=statistics.fmean(means),
        sd=math.sqrt(squares / freedom) if freedom else None,
        n=sum(len(values) for values in cells.values()),
    )


def _best(rows: Sequence[Row], metrics: Sequence[Metric]) -> dict[str, int]:
    best: dict[str, int] = {}
    for metric in metrics:
        means = [
            (figure.mean, position)
            for position, row in enumerate(rows)
            if (figure := row.figures[metric.name]) is not None
        ]
        if len(means) > 1:
            pick = min if metric.better == "lower" else max
            winner = pick(means, key=lambda entry: entry[0])
            if sum(mean == winner[0] for mean, _ in means) == 1:
                best[metric.name] = winner[1]
    return best
