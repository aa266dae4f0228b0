"""What a preview says of single cells: elastic runs, pipelines, runs with and without a teacher."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from service.cli.rendering import preview_table, strategy_text
from service.config.hardware import CATALOGUE
from service.domain.records import Attempt
from service.domain.states import RunState
from service.planner.preview import PlannedRun, planned_runs
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.spec.experiment import validate


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
        model={"student": "mini"},
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


def test_cells_without_a_teacher_run_beside_those_that_have_one() -> None:
    runs = planned(
        distillation={"soft_weight": 0.9},
        search={"axes": {"model.teacher": [None, "run:1"]}},
        model={"student": "mini"},
    )
    assert [(run.point["model.teacher"], run.reason) for run in runs] == [(None, None), ("run:1", None)]
