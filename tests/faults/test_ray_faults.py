"""kill -9 of workers and drivers on a real Ray: every run still ends, and no point is there twice."""

from __future__ import annotations

import collections
import os
import signal
from pathlib import Path

import pytest

from service.records import Experiment, Run
from service.states import ExperimentState, RunState
from tests.execution.cluster import Running

pytestmark = pytest.mark.ray
TOTAL = 250
STEPS = {"length": {"steps": TOTAL}, "checkpoint": {"every_steps": 10}}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def assert_complete(running: Running, experiment: Experiment) -> None:
    """Every run succeeded, with each step's loss exactly once."""
    assert running.store.experiment(experiment.id).state is ExperimentState.succeeded, running.story()
    for run in running.runs(experiment):
        assert run.state is RunState.succeeded, running.story()
        steps = collections.Counter(point.step for point in running.store.points(run.id, ["loss"])["loss"])
        assert set(steps) == set(range(1, TOTAL + 1))
        assert max(steps.values()) == 1


def test_a_killed_worker_resumes_from_its_checkpoint(running: Running) -> None:
    experiment = running.submit(**STEPS)
    run_id = running.runs(experiment)[0].id
    kill(running.wait_until_training(run_id, beyond_step=30))
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    first, second = running.store.attempts(run_id)
    assert first.failure_class == "infrastructure"
    assert second.resumed_from_step is not None
    assert second.resumed_from_step >= 10
    run = running.store.run(run_id)
    assert (run.infrastructure_failures, run.own_failures) == (1, 0)


def final_files(run: Run) -> dict[str, bytes]:
    """Weights and optimizer state where the run ended."""
    assert run.checkpoint is not None
    assert run.checkpoint_step == TOTAL
    return {
        name: (Path(run.checkpoint) / name).read_bytes()
        for name in ("model.safetensors", "optimizer.safetensors")
    }


def test_a_killed_worker_of_a_group_costs_its_run_an_attempt_and_the_others_nothing(
    running: Running,
) -> None:
    """2 workers on 2 CPUs, two such runs, then runs of one worker, which need the group's CPUs.

    The two runs of a kind differ in what does not count, so that the killed one has a twin.
    """
    experiment = running.submit(
        parallel={"strategy": "ddp"},
        search={"axes": {"parallel.workers": [2, 1], "checkpoint.keep": [2, 3]}},
        deterministic=True,
        **STEPS,
    )
    wide = running.runs(experiment)[0].id
    running.wait_until_training(wide, beyond_step=30)
    facts = running.store.attempts(wide)[-1].facts
    assert facts is not None
    kill(facts["worker_places"][1]["pid"])
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    runs = running.runs(experiment)
    assert [run.infrastructure_failures for run in runs] == [1, 0, 0, 0]
    assert running.store.attempts(wide)[0].failure_class == "infrastructure"
    assert running.store.attempts(wide)[0].failure_message == "worker 1 of 2: a worker process died"
    assert final_files(runs[0]) == final_files(runs[1])


def test_a_killed_driver_is_followed_by_another(running: Running) -> None:
    experiment = running.submit(seeds=[0, 1], **STEPS)
    run_id = running.runs(experiment)[0].id
    running.wait_until_training(run_id, beyond_step=30)
    started = [event for event in running.store.events(experiment.id) if event.kind == "experiment.started"]
    assert started[0].data is not None
    kill(started[0].data["pid"])
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    assert running.store.experiment(experiment.id).attempt == 2
    assert running.store.attempts(run_id)[0].failure_class == "lost"


def test_a_killed_recorder_loses_no_point(running: Running) -> None:
    import psutil

    experiment = running.submit(**STEPS)
    run_id = running.runs(experiment)[0].id
    running.wait_until_training(run_id, beyond_step=30)
    recorders = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "ray::Exchange" in str(process.info["cmdline"])
    ]
    assert recorders
    for process in recorders:
        process.kill()
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    assert running.store.run(run_id).attempt == 1
