"""From runs to configurations, and to sides that are averaged over other axes like with like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from service.analysis.answers import AnalysisError
from service.analysis.cells import add_figures, cells_of, configurations, sides
from service.analysis.ranking import Configuration
from service.analysis.run_table import RunTable
from service.domain.records import Run
from service.domain.states import RunState
from tests.service.analysis.building import run

FP32 = {"precision": "fp32"}


def made(runs: list[Run], *metrics: str) -> list[Configuration]:
    cells = cells_of(runs)
    configured = configurations(runs, cells)
    for metric in metrics:
        add_figures(configured, runs, cells, metric, RunTable((), tuple(runs)).column(metric))
    return configured


def test_a_configuration_has_the_figures_of_its_finished_runs_and_the_reasons_of_the_others() -> None:
    runs = [
        run(1, FP32, 0, cost_usd=1.0, accuracy=0.5),
        run(2, FP32, 1, cost_usd=2.0), run(3, FP32, 1, cost_usd=4.0),
        run(4, FP32, 2, cost_usd=9.0, state=RunState.stopped),
        run(5, FP32, 3, state=RunState.failed, failure_class="bug", failure_message="division by zero"),
        run(6, FP32, 4, state=RunState.failed, failure_class="bad_data"),
        run(7, {"precision": "bf16"}, 0, cost_usd=7.0),
    ]  # fmt: skip
    fp32, bf16 = made(runs, "cost_usd", "accuracy")
    assert (fp32.label, fp32.point, bf16.label) == ("precision=fp32", FP32, "precision=bf16")
    assert fp32.figures == {"cost_usd": {0: 1.0, 1: 3.0}, "accuracy": {0: 0.5}}
    assert fp32.runs == {"cost_usd": {0: [1], 1: [2, 3]}, "accuracy": {0: [1]}}
    assert fp32.failures == {2: "is stopped", 3: "bug: division by zero", 4: "bad_data"}
    assert bf16.figures == {"cost_usd": {0: 7.0}, "accuracy": {}}


def test_measured_and_modelled_energy_make_none() -> None:
    runs = [
        run(1, FP32, 0, energy_kwh=1.0, cost_usd=1.0),
        run(2, FP32, 1, energy_kwh=1.0, energy_provenance=None),
        run(3, FP32, 2, energy_kwh=1.0, energy_provenance="counter"),
    ]  # fmt: skip
    (mixed,) = made(runs, "energy_kwh", "cost_usd")
    assert mixed.figures == {"energy_kwh": {}, "cost_usd": {0: 1.0}}
    (alike,) = made(runs[:2], "energy_kwh")
    assert alike.figures == {"energy_kwh": {0: 1.0, 1: 1.0}}


def test_co2_of_nodes_and_of_devices_alone_make_none() -> None:
    runs = [
        run(1, FP32, 0, co2_kg=1.0, node_energy_source="redfish"),
        run(2, FP32, 1, co2_kg=3.0, node_energy_source="redfish", energy_provenance="counter"),
        run(3, FP32, 2, co2_kg=9.0),
    ]  # fmt: skip
    (alike,) = made(runs[:2], "co2_kg")
    assert alike.figures == {"co2_kg": {0: 1.0, 1: 3.0}}
    (mixed,) = made(runs, "co2_kg")
    assert mixed.figures == {"co2_kg": {}}


def cell(
    precision: str, size: int, figures: Mapping[str, Mapping[int, float]], runs: Any = None
) -> Configuration:
    point = {"precision": precision, "batch.global_size": size}
    label = f"precision={precision}, batch.global_size={size}"
    return Configuration(label, point, figures, {}, runs=runs or {})


def costs(*values: float) -> dict[str, dict[int, float]]:
    return {"cost_usd": dict(enumerate(values))}


def test_all_axes_make_sides_of_single_cells() -> None:
    cells = [
        cell("fp32", 16, costs(1.0), {"cost_usd": {0: (1, 2)}}),
        cell("bf16", 16, {**costs(2.0), "accuracy": {0: 0.5}}),
    ]
    every, notes = sides(cells, ["precision", "batch.global_size"], ["cost_usd", "f1"])
    assert notes == []
    assert [side.label for side in every] == [each.label for each in cells]
    assert [side.values for side in every] == [
        {"cost_usd": {0: 1.0}, "f1": {}},
        {"cost_usd": {0: 2.0}, "f1": {}},
    ]
    assert every[0].cells == {"cost_usd": [cells[0]], "f1": [cells[0]]}


def test_a_side_is_the_mean_over_the_cells_that_all_sides_have() -> None:
    cells = [
        cell("fp32", 16, costs(1.0, 2.0), {"cost_usd": {0: (1,), 1: (2,)}}),
        cell("fp32", 32, costs(3.0, 6.0), {"cost_usd": {0: (3,), 1: (4,)}}),
        cell("fp32", 64, costs(100.0, 100.0)),
        cell("bf16", 16, costs(0.5, 1.0)), cell("bf16", 32, costs(1.5)), cell("bf16", 64, {"cost_usd": {}}),
        cell("tf32", 16, {}), cell("tf32", 8, {"cost_usd": {}}),
    ]  # fmt: skip
    every, notes = sides(cells, ["precision"], ["f1", "cost_usd"])
    assert [side.label for side in every] == ["precision=fp32", "precision=bf16", "precision=tf32"]
    assert [side.point for side in every] == [{"precision": of} for of in ("fp32", "bf16", "tf32")]
    assert [side.values for side in every] == [
        {"f1": {}, "cost_usd": {0: 2.0, 1: 4.0}}, {"f1": {}, "cost_usd": {0: 1.0}},
        {"f1": {}, "cost_usd": {}},
    ]  # fmt: skip
    assert every[0].cells == {"f1": [], "cost_usd": cells[:2]}
    assert notes == [
        "batch.global_size=64 is left out, because not every side has its cost_usd",
        "precision=bf16: seed 1 did not finish on every side and is left out of cost_usd",
    ]


def test_what_is_left_out_of_several_metrics_is_named_once() -> None:
    both = {"cost_usd": {0: 1.0, 1: 1.0, 2: 1.0}, "accuracy": {0: 0.5, 1: 0.5, 2: 0.5}}
    one = {"cost_usd": {2: 1.0}, "accuracy": {2: 0.5}}
    cells = [
        cell("fp32", 16, both), cell("fp32", 32, one), cell("fp32", 64, both),
        cell("bf16", 16, both), cell("bf16", 32, both),
    ]  # fmt: skip
    _, notes = sides(cells, ["precision"], ["cost_usd", "accuracy"])
    assert notes == [
        "batch.global_size=64 is left out, because not every side has its cost_usd, accuracy",
        "precision=fp32: seed 0, 1 did not finish on every side and is left out of cost_usd, accuracy",
    ]


def test_sides_without_a_common_cell_are_refused() -> None:
    cells = [cell("fp32", 16, costs(1.0)), cell("bf16", 32, costs(1.0))]
    with pytest.raises(
        AnalysisError,
        match=r"^no combination of batch\.global_size has cost_usd with every value of precision; "
        "compare configurations instead$",
    ):
        sides(cells, ["precision"], ["cost_usd"])


def test_an_axis_that_only_some_configurations_have_is_compared_among_these() -> None:
    """Hardware `b` has one optimizer, and only adan has implementations: neither is a value to compare."""
    points: list[dict[str, Any]] = [
        *({"hardware": "a", "optimizer": "adamw", "size": size} for size in (8, 16)),
        *(
            {"hardware": "a", "optimizer": "adan", "implementation": "fused", "size": size}
            for size in (8, 16)
        ),
        *({"hardware": "b", "size": size} for size in (8, 16)),
    ]
    cells = [Configuration(str(point), point, costs(float(at)), {}) for at, point in enumerate(points)]
    every, notes = sides(cells, ["optimizer"], ["cost_usd"])
    assert [side.point for side in every] == [{"optimizer": "adamw"}, {"optimizer": "adan"}]
    assert [side.values["cost_usd"] for side in every] == [{0: 0.5}, {0: 2.5}]
    assert notes == ["configurations without optimizer are left out: 2"]

    assert [side.label for side in sides(cells[1:4:2], ["optimizer"], ["cost_usd"])[0]] == [
        "optimizer=adamw",
        "optimizer=adan",
    ]
    two = [*cells[:4], Configuration("", {**points[2], "implementation": "single"}, costs(9.0), {})]
    with pytest.raises(AnalysisError, match="no combination of hardware, size, implementation has cost_usd"):
        sides(two, ["optimizer"], ["cost_usd"])


def test_scores_of_a_side_are_means_over_its_cells_runs_on_the_same_units() -> None:
    cells = [
        cell("fp32", 16, costs(1.0, 1.0, 1.0), {"cost_usd": {0: (1, 2), 1: (4,), 2: (6,)}}),
        cell("fp32", 32, costs(1.0, 1.0, 1.0), {"cost_usd": {0: (3,), 1: (5,), 2: (7,)}}),
        cell("bf16", 16, costs(1.0)), cell("bf16", 32, costs(1.0)),
    ]  # fmt: skip
    (fp32, bf16), _ = sides(cells, ["precision"], ["cost_usd"])
    known = {
        1: {"x": 0.0, "y": 1.0}, 2: {"x": 1.0, "y": 1.0}, 3: {"x": 1.0, "y": 0.0},
        4: {"x": 1.0, "y": 1.0}, 6: {"x": 1.0, "y": 1.0}, 7: {"x": 1.0, "z": 1.0},
    }  # fmt: skip
    assert fp32.unit_scores("cost_usd", known.get) == {0: {"x": 0.75, "y": 0.5}}
    assert fp32.unit_scores("accuracy", known.get) == {}
    assert bf16.unit_scores("cost_usd", known.get) == {}
    assert np.isclose(np.mean(list(fp32.unit_scores("cost_usd", known.get)[0].values())), 0.625)
