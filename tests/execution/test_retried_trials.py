"""A run that is tried again and has no place yet, when its experiment is asked to give way or to stop."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable

import pytest

from service.domain.events import EventKind
from service.domain.states import ExperimentState, RunState
from tests.execution.cluster import Running

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ENDLESS = {"length": {"steps": 1_000_000}, "checkpoint": {"every_steps": 10}}
HOLD_A_CPU = """
import ray, time
ray.init()
@ray.remote(num_cpus=1)
class Holder:
    def ready(self): pass
holder = Holder.remote()
ray.get(holder.ready.remote())
time.sleep(3600)
"""
"""A job of someone else's on the same cluster."""


def let_urgent_in(running: Running, experiment_id: int) -> None:
    running.submit(owner="eve", queue={"priority": 100}, **ENDLESS)


def cancel_the_run(running: Running, experiment_id: int) -> None:
    running.store.requests.cancel_run(running.store.runs.page(experiment_id=experiment_id).items[0].id)


@pytest.mark.parametrize(
    ("ask", "healthy"),
    [
        pytest.param(let_urgent_in, RunState.running, id="preempt"),
        pytest.param(lambda running, id: running.store.requests.cancel(id), RunState.cancelled, id="cancel"),
        pytest.param(cancel_the_run, RunState.running, id="cancel-the-run"),
    ],
)
def test_a_retried_run_without_a_place_is_taken_back_and_the_other_keeps_its_attempt(
    running: Running, ask: Callable[[Running, int], object], healthy: RunState
) -> None:
    foreign = f"foreign-{time.time_ns()}"
    running.jobs.submit(foreign, shlex.join([sys.executable, "-c", HOLD_A_CPU]), metadata={})
    try:
        running.wait_for(lambda: running.jobs.cluster(0.0).nodes[0].available.get("CPU", 2.0) < 2.0)
        experiment = running.submit(seeds=[0, 1], **ENDLESS)
        retried, other = (run.id for run in running.runs(experiment))
        pid = running.wait_until_training(retried)
        running.wait_for(lambda: running.store.runs.get(other).waits_for)
        os.kill(pid, signal.SIGKILL)
        running.wait_until_training(other)
        running.wait_for(lambda: running.store.runs.get(retried).waits_for)
        ask(running, experiment.id)

        def settled() -> bool:
            taken_back = not running.store.runs.get(retried).waits_for
            return taken_back and running.store.runs.get(other).state is healthy

        running.wait_for(lambda: settled() or running.store.experiments.get(experiment.id).attempt > 1)
        if healthy is RunState.running:
            running.wait_until_training(other, beyond_step=running.store.runs.get(other).step)
        kinds = {event.kind for event in running.store.experiments.events(experiment.id)}
        assert EventKind.experiment_released not in kinds, running.story()
        found = running.store.experiments.get(experiment.id)
        assert (found.attempt, found.failure_message) == (1, None), running.story()
        assert len(running.store.runs.attempts(other)) == 1
        assert len(running.store.runs.attempts(retried)) == 1
        for each in running.store.experiments.page().items:
            running.store.requests.cancel(each.id)
        for each in running.store.experiments.page().items:
            assert running.wait_until_ended(each) is ExperimentState.cancelled
    finally:
        running.jobs.stop(foreign)
