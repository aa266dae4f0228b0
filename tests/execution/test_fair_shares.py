"""On a real Ray: people of two projects share two CPUs, and their results are those of undisturbed runs."""

from __future__ import annotations

from typing import Any

import pytest

from service.db import share_statements
from service.domain.records import Experiment
from service.domain.states import ExperimentState, RunState
from tests.execution.cluster import Running
from trainers.errors import FailureClass

pytestmark = [pytest.mark.ray, pytest.mark.slow]

GRID: dict[str, Any] = {"seeds": [0, 1, 2, 3], "length": {"steps": 4000}, "checkpoint": {"every_s": 1.0}}
ONE: dict[str, Any] = {"seeds": [7], "length": {"steps": 400}}


def losses(running: Running, experiment: Experiment) -> list[dict[int, float]]:
    """Loss by step of each run, in grid order."""
    return [
        {point.step: point.value for point in running.store.points(run.id)["loss"]}
        for run in running.runs(experiment)
    ]


def undisturbed(running: Running, **fields: Any) -> list[dict[int, float]]:
    """The same experiment with the cluster to itself."""
    experiment = running.submit(**fields)
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    return losses(running, experiment)


def test_a_newcomer_starts_at_a_step_boundary_of_a_grid_and_both_results_stay_the_same(
    running: Running,
) -> None:
    grid_alone, one_alone = undisturbed(running, **GRID), undisturbed(running, **ONE)

    for project in ("nlp", "vision"):
        running.store.create_project(project)
    grid = running.submit(owner="ada", project="nlp", **GRID)
    first, second, *_ = running.runs(grid)
    for run in (first, second):
        running.wait_until_training(run.id)
    newcomers = [
        running.submit(owner="bob", project="nlp", **ONE),
        running.submit(owner="eve", project="vision", **ONE),
    ]
    runs = [running.runs(newcomer)[0] for newcomer in newcomers]
    running.wait_for(lambda: any(running.store.run(run.id).attempt for run in runs))
    ended = {run.state for run in running.runs(grid)} & {RunState.succeeded}
    assert not ended, running.story()  # It did not wait for a run of the grid to end.

    for experiment in (*newcomers, grid):
        assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    assert losses(running, grid) == grid_alone
    assert [losses(running, newcomer) for newcomer in newcomers] == [one_alone, one_alone]

    attempts = [attempt for run in running.runs(grid) for attempt in running.store.attempts(run.id)]
    preempted = [each for each in attempts if each.failure_class is FailureClass.preempted]
    assert preempted
    assert all((run.own_failures, run.infrastructure_failures) == (0, 0) for run in running.runs(grid))
    with running.store.database.read() as connection:
        used = {(row.project, row.owner): row.usd for row in connection.execute(share_statements.SHARE_USAGE)}
    assert used["nlp", "ada"] > used["vision", "eve"] > 0.0
    for experiment in (*newcomers, grid):
        assert running.store.experiment_totals(experiment.id).cost_usd > 0.0
