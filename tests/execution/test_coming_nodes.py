"""A pool without nodes, to which Ray's own autoscaler brings one: version 2, with Ray's fake provider."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.drains import Head
from service.domain.states import ExperimentState, RunState
from service.local.local_ray import LocalRay
from service.scheduling.cluster import NodesToCome
from tests.execution.cluster import WAIT_S, Running, served_by

GROUP = "box"
HEAD_ID, HEAD_TYPE = "f" * 51 + "00000", "ray.head.default"
"""What the provider calls the head; Ray itself is imported when its authentication is set."""
IDLE_S = 3.0
"""Time after which the autoscaler ends an idle node."""
VARIABLES = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_FAKE_CLUSTER": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}


@pytest.fixture
def local_ray() -> Iterator[LocalRay]:
    """A head without CPUs, whose autoscaler may start one node; not the session's."""
    with tempfile.TemporaryDirectory(prefix="sh-", dir="/tmp") as short:
        config = Path(short, "cluster.yaml")
        head = Head(Path(short, "ray"), f"--autoscaling-config={config}")
        config.write_text(yaml.safe_dump(cluster(head.address)))
        with served_by(head, VARIABLES) as ray:
            yield ray


def cluster(head: str) -> dict[str, Any]:
    """The autoscaler's configuration; without `ray up`, all that it would fill in must be given."""
    commands = ("", "head_", "worker_")
    return {
        "cluster_name": "coming",
        "max_workers": 1,
        "idle_timeout_minutes": IDLE_S / 60.0,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": head,
            "head_node_id": HEAD_ID,
            "launch_multiple": True,
        },
        "head_node_type": HEAD_TYPE,
        "available_node_types": {
            HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            GROUP: {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1},
        },
        "head_node": {},
        "worker_nodes": {},
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{of}setup_commands": [] for of in commands},
        **{f"{of}start_ray_commands": [] for of in commands[1:]},
        "initialization_commands": [],
    }


@pytest.fixture(autouse=True)
def pool(tmp_path: Path) -> None:
    """What the scheduler knows of the autoscaler."""
    group = {"hardware": "cpu", "cpus": 1, "max": 1, "start_minutes": 3.0}
    (tmp_path / "pools.yaml").write_text(yaml.safe_dump({"default": {GROUP: group}}))


@pytest.mark.slow
@pytest.mark.ray
def test_a_waiting_run_brings_a_node_and_the_last_run_lets_it_go(running: Running) -> None:
    running.wait_for(lambda: (seen := running.queue.cluster()) is not None and seen.to_come)
    # The first driver's host may take longer to start than the node does, and its run then waits for nothing.
    first = running.submit()
    assert running.wait_until_ended(first) is ExperimentState.succeeded, running.story()
    running.wait_for(lambda: not running.jobs.cluster(0.0).totals.get("CPU"))
    experiment = running.submit(length={"steps": 400})
    (run,) = running.runs(experiment)
    reasons: list[str] = []

    def waits_or_runs() -> bool:
        reasons.extend(each.reason for each in running.queue.listing().at_work)
        return bool(reasons) or running.store.runs.get(run.id).state is not RunState.queued

    running.wait_for(waits_or_runs)
    # What the first node took is known by now, and counts in place of the declared time.
    assert re.search(r"starts a node of 1 cpu, about \d+ minutes?", reasons[0]), running.story()
    running.wait_until_training(run.id)
    (node,) = (each for each in running.jobs.cluster(0.0).nodes if each.alive and each.resources.get("CPU"))
    facts = running.store.runs.attempts(run.id)[-1].facts
    assert facts is not None and facts["ray_node_id"] == node.id
    assert node.devices == {"CPU": (1.0, 0.0)}, "also under version 2 what is reserved is not free"
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    running.wait_for(lambda: not running.jobs.cluster(0.0).totals.get("CPU"))
    running.wait_for(lambda: seen_by_scheduler(running).count == 1)
    took_s = seen_by_scheduler(running).started_s
    assert len(took_s) == 2 and all(0.0 < each < WAIT_S for each in took_s)


def seen_by_scheduler(running: Running) -> NodesToCome:
    snapshot = running.queue.cluster()
    assert snapshot is not None
    (group,) = snapshot.to_come
    return group
