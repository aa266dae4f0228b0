"""On a real Ray: a grid makes room for a newcomer at a step boundary, and its results stay the same."""

from __future__ import annotations

import pytest

from service.db import share_statements
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from tests.execution.cluster import Running
from trainers.errors import FailureClass

pytestmark = [pytest.mark.ray, pytest.mark.slow]
LONG = {"length": {"steps": 1_000_000}, "seeds": [0]}


def losses(running: Running, run: Run, upto: int) -> list[tuple[int, float]]:
    return [
        (point.step, point.value)
        for point in running.store.points(run.id, ["loss"])["loss"]
        if point.step <= upto
    ]


def preempted(running: Running, runs: list[Run]) -> list[Run]:
    """The runs with an attempt that was preempted."""
    ended = ((run, attempt) for run in runs for attempt in running.store.attempts(run.id))
    return [run for run, attempt in ended if attempt.failure_class is FailureClass.preempted]


def test_a_newcomer_does_not_wait_for_a_run_of_a_grid_to_end(running: Running) -> None:
    for project in ("nlp", "vision"):
        running.store.create_project(project)
    # All three runs train the same: what is interrupted can be compared with what is not.
    grid = running.submit(project="nlp", search={"axes": {"checkpoint.every_s": [600.0, 601.0]}}, **LONG)
    for run in running.runs(grid):
        running.wait_until_training(run.id)
    newcomer = running.submit(owner="eve", project="vision", **LONG)
    (alone,) = running.runs(newcomer)
    running.wait_until_training(alone.id, beyond_step=20)

    (interrupted,) = preempted(running, running.runs(grid))
    assert (interrupted.own_failures, interrupted.infrastructure_failures) == (0, 0)
    assert interrupted.checkpoint_step is not None  # Long before the next one was due.
    states = sorted(run.state for run in running.runs(grid))
    assert states == [RunState.queued, RunState.running], running.story()

    compared = max(interrupted.checkpoint_step + 20, running.store.run(alone.id).step)
    running.wait_until_training(alone.id, beyond_step=compared)
    running.store.request_cancel(newcomer.id)
    assert running.wait_until_ended(newcomer) is ExperimentState.cancelled
    running.wait_until_training(interrupted.id, beyond_step=compared)
    assert running.store.attempts(interrupted.id)[-1].resumed_from_step == interrupted.checkpoint_step
    expected = losses(running, alone, compared)
    assert expected[-1][0] == compared
    assert losses(running, interrupted, compared) == expected

    running.store.request_cancel(grid.id)
    assert running.wait_until_ended(grid) is ExperimentState.cancelled
    with running.store.database.read() as connection:
        used = {(row.project, row.owner): row.usd for row in connection.execute(share_statements.SHARE_USAGE)}
    assert used["nlp", "ada"] > used["vision", "eve"] > 0.0
    assert all(running.store.experiment_totals(each.id).cost_usd > 0.0 for each in (grid, newcomer))
