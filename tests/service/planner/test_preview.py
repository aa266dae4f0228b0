"""What a preview says of single cells: elastic runs, pipelines, runs with and without a teacher."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from service.cli.tables import preview_table, strategy_text
from service.config.hardware import CATALOGUE
from service.domain.records import Attempt
from service.domain.states import RunState
from service.planner.preview import PlannedRun, notes_of, planned_runs
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.specs.experiment import ExperimentSpec, validate


def planned(cpus: float | None = None, **fields: Any) -> list[PlannedRun]:
    snapshot = None
    if cpus is not None:
        node = ClusterNode("n", "n", True, {"CPU": cpus}, {})
        snapshot = ClusterSnapshot(0.0, True, None, (node,))
    return list(
        planned_runs(validate({"name": "x", "task": {"name": "imdb"}, **fields}), CATALOGUE, snapshot)
    )


def test_an_elastic_run_shows_its_range_of_workers_and_prices() -> None:
    (run,) = planned(parallel={"strategy": "ddp", "workers": {"min": 1, "max": 4}})
    assert (run.workers, run.min_workers, run.cpus) == (4, 1, 4)
    assert run.price_usd_per_hour == pytest.approx(4 * run.min_price_usd_per_hour)
    console = Console(width=120, no_color=True)
    with console.capture() as shown:
        console.print(preview_table([run]))
    assert "1-4 x cpu" in shown.get()


@pytest.mark.parametrize(("cpus", "feasible"), [(1.0, False), (2.0, True), (3.0, True)])
def test_an_elastic_run_is_feasible_where_the_fewest_workers_have_room(cpus: float, feasible: bool) -> None:
    (run,) = planned(cpus, parallel={"strategy": "ddp", "workers": {"min": 2, "max": 4}})
    assert run.feasible is feasible


def test_a_pipelines_workers_are_its_stages_times_its_replicas() -> None:
    (run,) = planned(
        model={"name": "mini"},
        parallel={"strategy": "pipeline", "stages": 2, "workers": {"min": 2, "max": 6}},
    )
    assert (run.workers, run.min_workers) == (4, 2)  # 3 replicas do not divide a batch of 16


def test_a_run_shows_the_shape_of_its_pipeline() -> None:
    told = Attempt(
        1, 1, 1, RunState.running, 0.0, None, None, 0, None, None, 4, None, None, None,
        facts={"config": {"parallel": {"workers": 4, "stages": 2, "engine": None, "schedule": "gpipe"}}},
        summary=None,
    )  # fmt: skip
    assert strategy_text("pipeline", [told]) == "pipeline of 2 stages on torch, gpipe"
    assert strategy_text("pipeline", []) == "pipeline"
    assert strategy_text("ddp", [told]) == "ddp"


def test_a_page_in_the_middle_of_a_cell_continues_with_its_repeats() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    spec = validate(
        {"name": "a", "task": {"name": "imdb"}, "seeds": [3, 5], "repeats": 2, "search": {"axes": axes}}
    )
    plans = list(spec.runs())
    assert [run.repeat for run in planned_runs(spec, CATALOGUE, None)] == [plan.repeat for plan in plans]
    page = list(planned_runs(spec, CATALOGUE, None, start=3, limit=3))
    assert [(run.index, run.cell, run.seed, run.repeat) for run in page] == [
        (plan.index, plan.cell, plan.seed, plan.repeat) for plan in plans[3:6]
    ]


def test_cells_without_a_teacher_run_beside_those_that_have_one() -> None:
    runs = planned(
        distillation={"soft_weight": 0.9},
        search={"axes": {"model.teacher": [None, "run:1"]}},
        model={"name": "mini"},
    )
    assert [(run.point["model.teacher"], run.reason) for run in runs] == [(None, None), ("run:1", None)]


@pytest.mark.parametrize(
    ("hardware", "precision", "note"),
    [
        ("H200", "fp32", "precision fp32 on hardware H200 computes 67 TFLOP/s at most, bf16 989.5"),
        ("H200", "bf16", None),
        ("V100", "fp32", None),
        ("cpu", "fp32", None),
    ],
)
def test_fp32_where_bf16_is_faster_is_noted(hardware: str, precision: str, note: str | None) -> None:
    document = {"name": "x", "task": {"name": "imdb"}, "hardware": hardware, "precision": precision}
    notes = of_precisions(validate(document))
    assert len(notes) == (note is not None)
    assert note is None or notes[0].startswith(note)


def of_precisions(spec: ExperimentSpec) -> list[str]:
    return [line for line in notes_of(spec, CATALOGUE) if line.startswith("precision ")]


@pytest.mark.parametrize(("hardware", "noted"), [("V100", True), ("V100-SXM2-32GB", True), ("T4", False)])
def test_the_build_that_a_v100_needs_is_noted(hardware: str, noted: bool) -> None:
    spec = validate({"name": "x", "task": {"name": "imdb"}, "hardware": hardware, "precision": "fp16"})
    notes = [line for line in notes_of(spec, CATALOGUE) if "needs torch built for CUDA 12.6" in line]
    assert len(notes) == noted
    assert all("--build-arg DEVICE=cuda12" in line for line in notes)


@pytest.mark.parametrize(("hardware", "noted"), [("H200", False), ("T4", True), ("cpu", False)])
def test_hardware_that_no_run_has_trained_on_is_noted(hardware: str, noted: bool) -> None:
    spec = validate({"name": "x", "task": {"name": "imdb"}, "hardware": hardware, "precision": "fp32"})
    line = f"hardware {hardware}: this version has never been run on such a GPU"
    assert (line in notes_of(spec, CATALOGUE)) is noted


def test_a_grids_notes_are_of_each_hardware_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.device_kinds.has_fast_bf16", lambda: False)
    axes = {"hardware": ["cpu", "L4"], "precision": ["fp32", "bf16"]}
    document = {"name": "x", "task": {"name": "imdb"}, "search": {"name": "grid", "axes": axes}}
    notes = of_precisions(validate(document))
    assert [line.partition(" on hardware ")[2].split()[0] for line in notes] == ["cpu", "L4"]
    assert "precision bf16 on hardware cpu is slower than fp32 on processors without units for it" in notes[0]


@pytest.mark.parametrize(("hardware", "chosen"), [("H200", "bf16"), ("V100", "fp32"), ("cpu", "fp32")])
def test_auto_precision_is_resolved_by_the_hardware(hardware: str, chosen: str) -> None:
    document = {"name": "x", "task": {"name": "imdb"}, "hardware": hardware, "precision": "auto"}
    spec = validate(document)
    (plan,) = spec.runs(CATALOGUE)
    assert plan.spec.precision == chosen
    assert f"is {chosen}" in of_precisions(spec)[0]


def test_auto_precision_is_resolved_at_each_point_of_a_grid() -> None:
    axes = {"hardware": ["V100", "H200"], "precision": ["auto", "fp16"]}
    document = {"name": "x", "task": {"name": "imdb"}, "search": {"name": "grid", "axes": axes}}
    runs = list(validate(document).runs(CATALOGUE))
    assert [str(run.spec.precision) for run in runs] == ["fp32", "fp16", "bf16", "fp16"]
