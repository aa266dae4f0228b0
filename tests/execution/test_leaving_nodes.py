"""Nodes of a real Ray that drain or die under a run: what it loses, and where it continues."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import yaml

from service.domain.events import EventKind
from service.domain.records import Event, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.cluster import NODE_ID
from service.workers.ray_cluster import drain
from tests.execution.cluster import AddNode, Running, end, nodes_of
from trainers.errors import FailureClass

pytestmark = [pytest.mark.slow, pytest.mark.ray]

STEPS = 600
FIELDS = {"hardware": "T4", "length": {"steps": STEPS}, "checkpoint": {"every_steps": 200}}
"""So many steps between checkpoints that one without notice loses some."""


@pytest.fixture(autouse=True)
def catalogue(running: Running) -> None:
    entry = {
        "device": "cpu", "labels": {"kind": "T4"}, "precisions": ["fp32"], "tdp_w": 100.0,
        "price_usd_per_hour": 1.0, "price_date": "2026-01-01", "price_source": "a test",
    }  # fmt: skip
    (running.settings.data_dir / "hardware.yaml").write_text(yaml.safe_dump({"T4": entry}))


def node_of(running: Running, run: Run) -> str:
    facts = running.store.runs.attempts(run.id)[-1].facts
    assert facts is not None
    return str(facts["ray_node_id"])


def events_of(running: Running, run: Run, kind: EventKind) -> list[Event]:
    events = running.store.experiments.events(run.experiment_id)
    return [event for event in events if event.run_id == run.id and event.kind == kind]


def assert_complete(running: Running, run: Run) -> None:
    losses = running.store.series.points(run.id, ["loss"])["loss"]
    assert [point.step for point in losses] == list(range(1, STEPS + 1))


def test_a_run_on_a_draining_node_loses_no_step_and_continues_on_another(
    running: Running, add_node: AddNode
) -> None:
    add_node("T4", "127.0.0.2")
    experiment = running.submit(max_restarts=0, **FIELDS)
    (run,) = running.runs(experiment)
    running.wait_until_training(run.id, beyond_step=30)
    first = node_of(running, run)
    add_node("T4", "127.0.0.3")

    assert drain(running.local_ray.address, {NODE_ID: first}, 120.0, "a test takes it back") == ["127.0.0.2"]
    (draining,) = [node for node in running.jobs.cluster(0.0).nodes if node.draining]
    assert (draining.id, draining.name) == (first, "127.0.0.2")
    assert draining.drain_deadline_s == pytest.approx(time.time() + 120.0, abs=60.0)
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()

    assert node_of(running, run) != first
    before, after = running.store.runs.attempts(run.id)
    assert before.failure_class is FailureClass.preempted, running.story()
    assert after.resumed_from_step == before.last_step
    run = running.store.runs.get(run.id)
    assert (run.own_failures, run.infrastructure_failures) == (0, 0)
    (event,) = events_of(running, run, EventKind.run_preempted)
    assert event.data == {"lost_steps": 0}
    # Left empty, it may be gone by the time the run's end is written.
    assert re.search(r"node 127.0.0.2 (is draining, and goes at |was drained)", event.message)
    assert_complete(running, run)
    # With nothing left on it, the node goes before its deadline.
    running.wait_for(lambda: first not in nodes_of(running, "T4"), timeout_s=60.0)


def test_a_group_saves_and_shrinks_when_one_of_its_nodes_is_told_to_end(
    running: Running, add_node: AddNode
) -> None:
    add_node("T4", "127.0.0.2")
    ending = add_node("T4", "127.0.0.3")
    experiment = running.submit(
        max_restarts=0, parallel={"strategy": "ddp", "workers": {"min": 1, "max": 2}}, **FIELDS
    )
    (run,) = running.runs(experiment)
    running.wait_until_training(run.id, beyond_step=30)

    os.kill(ending.pid, signal.SIGTERM)
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    before, *_, after = running.store.runs.attempts(run.id)
    assert (before.workers, after.workers) == (2, 1)
    assert before.failure_class is FailureClass.preempted, running.story()
    assert after.resumed_from_step == before.last_step
    event, *_ = events_of(running, run, EventKind.run_preempted)
    assert event.data == {"lost_steps": 0}
    assert re.search(r"node 127.0.0.3 (is draining|was drained)", event.message)
    assert_complete(running, run)


def test_a_run_whose_node_is_lost_says_so_and_the_run_on_another_node_goes_on(
    running: Running, add_node: AddNode
) -> None:
    nodes = {address: add_node("T4", address) for address in ("127.0.0.2", "127.0.0.3")}
    experiment = running.submit(seeds=[0, 1], max_restarts=0, **FIELDS)
    runs = running.runs(experiment)
    for run in runs:
        running.wait_until_training(run.id, beyond_step=30)
    older, newer = sorted(runs, key=lambda run: running.store.runs.attempts(run.id)[0].started_s)
    named = {node.id: node.name for node in running.jobs.cluster(0.0).nodes}
    lost = named[node_of(running, older)]

    end(nodes[lost])
    running.wait_for(lambda: running.store.runs.attempts(older.id)[0].ended_s is not None)
    (event,) = events_of(running, older, EventKind.run_retrying)
    assert f"infrastructure: node {lost} was lost" in event.message, running.story()
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    assert len(running.store.runs.attempts(newer.id)) == 1, running.story()
    assert running.store.runs.get(older.id).state is RunState.succeeded
    for run in runs:
        assert_complete(running, run)
