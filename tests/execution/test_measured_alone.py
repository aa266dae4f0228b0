"""On a real Ray: experiments on one node see each other, and a run that is measured alone sees nobody."""

from __future__ import annotations

import time

import pytest

from service.domain.neighbours import DISTURBED_PCT
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from service.workers.neighbour_watch import LOOK_S
from tests.execution.cluster import Running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.alone]
BUSY = {"length": {"steps": 1_000_000}, "queue": {"max_concurrent_runs": 1}}
"""Trains, and so uses its CPU, until it is cancelled."""


def looked_at(run: Run) -> bool:
    return run.neighbours_other_experiment_pct is not None


def test_two_experiments_on_one_node_see_each_other_and_one_alone_does_not(running: Running) -> None:
    first, second = running.submit(**BUSY), running.submit(**BUSY)
    (one,), (other,) = running.runs(first), running.runs(second)
    running.wait_until_training(one.id)
    running.wait_until_training(other.id)
    # Wants the whole node, and both its CPUs are in use.
    third = running.submit(measure="exclusive", length={"steps": 400})
    (alone,) = running.runs(third)
    running.wait_for(lambda: "no cpu device is free" in running.queue.position(third.id).reason)
    assert f"experiment {first.id} of ada" in running.queue.position(third.id).reason
    looked_s = time.monotonic() + 3 * LOOK_S
    running.wait_for(lambda: time.monotonic() > looked_s)
    for experiment in (first, second):
        running.store.requests.cancel(experiment.id)
    for experiment in (first, second):
        assert running.wait_until_ended(experiment) is ExperimentState.cancelled

    for id in (one.id, other.id):
        found = running.store.runs.get(id)
        assert looked_at(found), running.story()
        assert (found.neighbours_other_experiment_pct or 0.0) > DISTURBED_PCT
        # Nothing of its own experiment ran next to it but its driver.
        assert (found.neighbours_same_experiment_pct or 0.0) < 50.0

    assert running.wait_until_ended(third) is ExperimentState.succeeded, running.story()
    found = running.store.runs.get(alone.id)
    assert (found.state, found.neighbours_other_experiment_pct) == (RunState.succeeded, 0.0)
    (held,) = running.store.drivers.placements(third.id)
    assert (held.devices, held.workers) == (2, 1)
