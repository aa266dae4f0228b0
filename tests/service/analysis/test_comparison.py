"""Comparison of runs: numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from service.analysis import comparison
from service.analysis.answers import ComparisonAnswer
from service.domain.metrics import DEFAULT_METRICS, METRICS, Metric, better_of
from service.domain.records import Run
from service.domain.states import RunState


@dataclass
class Row:
    point: dict[str, Any]
    accuracy: float | None = None
    total_time_s: float | None = None
    cost_usd: float | None = None
    energy_kwh: float | None = None
    energy_provenance: str | None = "modelled"
    state: RunState = RunState.succeeded
    failure_class: str | None = None
    seed: int = field(default_factory=itertools.count().__next__)
    repeat: int = 0

    @property
    def cell(self) -> str:
        return repr(self.point)


def figures(precision: str, size: int, *accuracies: float) -> list[Row]:
    return [Row({"precision": precision, "batch.global_size": size}, value) for value in accuracies]


def compare(
    runs: Sequence[Row], *, by: Sequence[str] | None = None, metrics: Sequence[str] = DEFAULT_METRICS
) -> ComparisonAnswer:
    """By all axes where `by` is None."""
    axes = list(dict.fromkeys(axis for run in runs for axis in run.point))
    chosen = [Metric(name, better_of(name) or "higher") for name in metrics]

    def column(name: str) -> comparison.Figures:
        return np.array([getattr(run, name) for run in runs], dtype=float)

    return comparison.compare(cast("Sequence[Run]", runs), axes if by is None else by, chosen, column)


def test_a_cell_has_the_mean_and_sample_deviation_of_its_seeds() -> None:
    (row,) = compare(figures("fp32", 16, 0.8, 0.9), metrics=["accuracy"]).rows
    spread = row.figures["accuracy"]
    assert spread is not None
    assert spread.mean == pytest.approx(0.85)
    assert spread.sd == pytest.approx(math.sqrt(0.005))
    assert spread.n == 2


def test_one_seed_has_no_deviation() -> None:
    (row,) = compare(figures("fp32", 16, 0.8), metrics=["accuracy"]).rows
    assert row.figures["accuracy"] is not None
    assert row.figures["accuracy"].sd is None


def test_rows_follow_the_grid_and_all_axes_make_them() -> None:
    runs = figures("fp32", 32, 0.8) + figures("fp32", 16, 0.7) + figures("bf16", 32, 0.9)
    table = compare(runs)
    assert table.axes == ("precision", "batch.global_size")
    assert [tuple(row.point.values()) for row in table.rows] == [("fp32", 32), ("fp32", 16), ("bf16", 32)]


def test_a_single_axis_weighs_cells_alike_and_its_spread_leaves_out_the_other_axis() -> None:
    # fp32: cells 0.5 (three seeds, no spread) and 0.9 (one seed). The plain mean would be 0.6.
    runs = figures("fp32", 16, 0.5, 0.5, 0.5) + figures("fp32", 32, 0.9)
    (row,) = compare(runs, by=["precision"], metrics=["accuracy"]).rows
    spread = row.figures["accuracy"]
    assert spread is not None
    assert spread.mean == pytest.approx(0.7)
    assert spread.sd == pytest.approx(0.0)
    assert spread.n == 4


def test_the_pooled_deviation_weighs_cells_by_degrees_of_freedom() -> None:
    # Squares: 2.0 over 2 degrees (1, 2, 3) and 0.5 over 1 degree (10, 11).
    runs = figures("fp32", 16, 1.0, 2.0, 3.0) + figures("fp32", 32, 10.0, 11.0)
    (row,) = compare(runs, by=["precision"], metrics=["accuracy"]).rows
    assert row.figures["accuracy"] is not None
    assert row.figures["accuracy"].sd == pytest.approx(math.sqrt(2.5 / 3))


def test_best_is_lowest_for_time_and_highest_for_accuracy() -> None:
    runs = [Row({"p": 1}, accuracy=0.9, total_time_s=10.0), Row({"p": 2}, accuracy=0.8, total_time_s=5.0)]
    assert compare(runs).best == {"accuracy": 0, "total_time_s": 1}


def test_a_tie_or_a_single_row_has_no_best() -> None:
    tie = [Row({"p": 1}, accuracy=0.9), Row({"p": 2}, accuracy=0.9)]
    assert compare(tie).best == {}
    assert compare(tie[:1]).best == {}


def test_failed_runs_are_counted_by_class_and_give_no_figures() -> None:
    runs = [
        Row({"p": 1}, accuracy=0.9),
        Row({"p": 1}, accuracy=0.1, state=RunState.failed, failure_class="out_of_memory"),
        Row({"p": 1}, state=RunState.queued),
        Row({"p": 1}, accuracy=0.7, state=RunState.stopped),
    ]
    (row,) = compare(runs).rows
    assert (row.finished, row.planned, row.incomplete) == (2, 4, 1)
    assert row.failures == {"out_of_memory": 1}
    assert row.figures["accuracy"] is not None
    assert row.figures["accuracy"].mean == pytest.approx(0.8)


def test_measured_and_modelled_energy_never_mix() -> None:
    runs = [
        Row({"p": 1}, energy_kwh=1.0),
        Row({"p": 1}, energy_kwh=2.0, energy_provenance="counter"),
        Row({"p": 2}, energy_kwh=3.0),
    ]
    mixed, modelled = compare(runs).rows
    assert mixed.energy_provenance == "mixed"
    assert mixed.figures["energy_kwh"] is None
    assert modelled.energy_provenance == "modelled"
    assert modelled.figures["energy_kwh"] is not None


def test_values_that_are_not_finite_are_left_out() -> None:
    (row,) = compare([Row({}, accuracy=math.nan), Row({}, accuracy=0.5)]).rows
    assert row.figures["accuracy"] is not None
    assert row.figures["accuracy"].n == 1


def test_every_metric_is_a_column_of_a_run() -> None:
    columns = {field.name for field in dataclasses.fields(Run)}
    assert {metric.name for metric in METRICS} <= columns
    assert set(DEFAULT_METRICS) <= {metric.name for metric in METRICS}


def test_no_runs_give_no_rows() -> None:
    assert compare([]).rows == ()


def test_an_axis_may_have_lists_as_values() -> None:
    table = compare([Row({"layers": layers}, accuracy=0.5) for layers in ([1, 2], [1, 3], [1, 2])])
    assert [(row.point["layers"], row.planned) for row in table.rows] == [([1, 2], 2), ([1, 3], 1)]
