"""kill -9 of workers and drivers on a real Ray: every run still ends, and no point is there twice."""

from __future__ import annotations

import collections
import hashlib
import os
import re
import signal
from pathlib import Path

import pytest

from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.specs.experiment import ExperimentSpec
from tests.execution.cluster import Running

pytestmark = pytest.mark.ray
TOTAL = 250
STEPS = {"length": {"steps": TOTAL}, "checkpoint": {"every_steps": 10}}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def assert_complete(running: Running, experiment: Experiment) -> None:
    """Every run succeeded, with each step's loss exactly once."""
    assert running.store.experiments.get(experiment.id).state is ExperimentState.succeeded, running.story()
    for run in running.runs(experiment):
        assert run.state is RunState.succeeded, running.story()
        steps = collections.Counter(
            point.step for point in running.store.series.points(run.id, ["loss"])["loss"]
        )
        assert set(steps) == set(range(1, TOTAL + 1))
        assert max(steps.values()) == 1


def test_a_killed_worker_resumes_from_its_checkpoint(running: Running) -> None:
    experiment = running.submit(**STEPS)
    run_id = running.runs(experiment)[0].id
    kill(running.wait_until_training(run_id, beyond_step=30))
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    first, second = running.store.runs.attempts(run_id)
    assert first.failure_class == "infrastructure"
    assert second.resumed_from_step is not None
    assert second.resumed_from_step >= 10
    run = running.store.runs.get(run_id)
    assert (run.infrastructure_failures, run.own_failures) == (1, 0)


def final_files(run: Run) -> dict[str, str]:
    """Hashes of the weights and the optimizer's state where the run ended."""
    assert run.checkpoint is not None
    assert run.checkpoint_step == TOTAL
    return {
        name: hashlib.sha256((Path(run.checkpoint) / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.safetensors")
    }


@pytest.mark.slow
def test_a_killed_worker_of_a_group_costs_its_run_an_attempt_and_the_others_nothing(
    running: Running,
) -> None:
    """Runs of 2 workers on 2 CPUs by each strategy, and runs of one worker, which need the group's CPUs.

    The two runs of a strategy differ in what does not count, so that the killed one has a twin.
    """
    axes = {"parallel.strategy": ["single", "ddp", "pipeline"], "parallel.workers": [2]}
    experiment = running.submit(
        search={
            "axes": {**axes, "checkpoint.keep": [2, 3]},
            "when": {"parallel.workers": {"parallel.strategy": ["ddp", "pipeline"]}},
            "seed": 352,  # measures the two that are killed first, and those of one worker last
        },
        batch={"global_size": 4, "micro_size": 2},
        deterministic=True,
        **STEPS,
    )
    spec = ExperimentSpec.model_validate_json(running.store.experiments.spec(experiment.id)[1])
    twins = {run.point["parallel.strategy"]: run for run in running.runs(experiment)}
    victims = [
        run
        for run in running.runs(experiment)
        if run.point["parallel.strategy"] != "single" and run.point["checkpoint.keep"] == 2
    ]
    for victim in sorted(victims, key=lambda run: spec.places()[run.index]):
        running.wait_until_training(victim.id, beyond_step=30)
        facts = running.store.runs.attempts(victim.id)[-1].facts
        assert facts is not None
        kill(facts["worker_places"][1]["pid"])
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    for run in running.runs(experiment):
        strategy = run.point["parallel.strategy"]
        assert run.infrastructure_failures == (run.id in {victim.id for victim in victims})
        assert final_files(run) == final_files(running.store.runs.get(twins[strategy].id)), strategy
    for victim in victims:
        first = running.store.runs.attempts(victim.id)[0]
        assert first.failure_class == "infrastructure"
        stage = r" \(stage [01]\)" if victim.point["parallel.strategy"] == "pipeline" else ""
        # Its peer may be heard of first.
        assert re.match(rf"worker [01] of 2{stage}( lost another)?: ", first.failure_message or "")


@pytest.mark.slow
def test_a_killed_driver_is_followed_by_another(running: Running) -> None:
    experiment = running.submit(seeds=[0, 1], **STEPS)
    run_id = running.runs(experiment)[0].id
    running.wait_until_training(run_id, beyond_step=30)
    started = [
        event
        for event in running.store.experiments.events(experiment.id)
        if event.kind == "experiment.started"
    ]
    assert started[0].data is not None
    kill(started[0].data["pid"])
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    assert running.store.experiments.get(experiment.id).attempt == 2
    assert running.store.runs.attempts(run_id)[0].failure_class == "lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", ["service.driving.host", "service.driving.preloaded"], ids=["host", "forks"]
)
def test_a_killed_host_takes_its_drivers_along_and_others_follow(running: Running, killed: str) -> None:
    """The host itself, or the process that forks its drivers, by what it has imported."""
    import psutil

    experiment = running.submit(**STEPS)
    run_id = running.runs(experiment)[0].id
    running.wait_until_training(run_id, beyond_step=30)
    started = running.store.experiments.events(experiment.id)
    (driver,) = [event.data["pid"] for event in started if event.kind == "experiment.started" and event.data]
    assert running.local_ray._head is not None
    of_cluster = psutil.Process(running.local_ray._head.pid).children(recursive=True)
    hosts = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process in of_cluster and killed in str(process.info["cmdline"])
    ]
    assert hosts
    for process in hosts:
        process.kill()

    def over() -> bool:
        return not psutil.pid_exists(driver) or psutil.Process(driver).status() == psutil.STATUS_ZOMBIE

    running.wait_for(over)
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    assert running.store.experiments.get(experiment.id).attempt == 2


@pytest.mark.slow
def test_a_killed_relay_loses_no_point(running: Running) -> None:
    import psutil

    experiment = running.submit(**STEPS)
    run_id = running.runs(experiment)[0].id
    running.wait_until_training(run_id, beyond_step=30)
    # Another process of tests has a cluster of its own.
    assert running.local_ray._head is not None
    of_cluster = psutil.Process(running.local_ray._head.pid).children(recursive=True)
    relays = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process in of_cluster and "ray::Relay" in str(process.info["cmdline"])
    ]
    assert relays
    for process in relays:
        process.kill()
    running.wait_until_ended(experiment)
    assert_complete(running, experiment)
    assert running.store.runs.get(run_id).attempt == 1
