"""Nodes that share a database and a bucket, and no folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service.domain.states import ExperimentState
from service.local.local_ray import LocalRay
from tests.execution.cluster import (
    WITH_NAMESPACES,
    AddNode,
    Running,
    end,
    nodes_of,
    ray_head,
    with_own_folder,
)
from tests.execution.test_two_nodes import write_catalogue
from tests.object_store import in_environment, object_store
from trainers.data.storage import digest, place
from trainers.errors import FailureClass

STEPS = 120
TENSORS = ("model", "optimizer", "random")
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": {"strategy": "ddp", "workers": 2}},
    "pipeline": {
        "parallel": {"strategy": "pipeline", "workers": 2},
        "batch": {"global_size": 4, "micro_size": 2},
    },
    "teacher's logits": {"parallel": {"strategy": "ddp", "workers": 2}, "distillation": {}},
    "teacher's weights": {
        "parallel": {"strategy": "ddp", "workers": 2},
        "distillation": {"hidden_weight": 1.0},
    },
}


@pytest.fixture(scope="module")
def storage_url() -> Iterator[str]:
    with object_store() as served, in_environment(served):
        yield served.make_bucket("nodes-apart")


@pytest.fixture(scope="module")
def local_ray(storage_url: str) -> Iterator[LocalRay]:
    """A head with the store's credentials: drivers, which it runs, look for a teacher's checkpoint there."""
    del storage_url
    with ray_head() as ray:
        yield ray


@pytest.mark.slow
@pytest.mark.ray
@WITH_NAMESPACES
@pytest.mark.parametrize("kind", RUNS)
def test_workers_on_nodes_without_a_common_folder_resume_bitwise_on_another(
    running: Running, add_node: AddNode, kind: str
) -> None:
    write_catalogue(running.settings.data_dir)
    own = with_own_folder(running.settings.data_dir)  # The node's cache is in it.
    add_node("T4", "127.0.0.2", within=own)
    other = add_node("T4", "127.0.0.3", within=own)
    fields = dict(RUNS[kind])
    if "distillation" in fields:
        taught = running.submit(hardware="T4")
        assert running.wait_until_ended(taught) is ExperimentState.succeeded, running.story()
        fields["model"] = {"name": "tiny", "teacher": f"run:{running.runs(taught)[0].id}"}
    experiment = running.submit(
        hardware="T4",
        search={"axes": {"checkpoint.keep": [2, 3]}},  # Twins: what differs does not count.
        length={"steps": STEPS},
        checkpoint={"every_steps": 10},
        deterministic=True,
        **fields,
    )
    runs = running.runs(experiment)
    running.wait_for(lambda: any(running.store.series.latest_points(run.id) for run in runs))
    (killed,) = (run for run in runs if running.store.series.latest_points(run.id))
    running.wait_until_training(killed.id, beyond_step=30)
    logits = kept_logits(running)
    assert bool(logits) is (kind == "teacher's logits")
    end(other)
    running.wait_for(lambda: len(nodes_of(running, "T4")) == 1)
    add_node("T4", "127.0.0.4", within=own)
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    before, *_, last = running.store.runs.attempts(killed.id)
    assert before.failure_class is FailureClass.infrastructure
    assert last.resumed_from_step and last.facts is not None
    assert {place["node"] for place in last.facts["worker_places"]} == nodes_of(running, "T4")
    digests = []
    for run in running.runs(experiment):
        checkpoint = run.checkpoint
        assert checkpoint is not None and checkpoint.startswith("s3://")
        assert run.checkpoint_step == STEPS
        digests.append([digest(place(checkpoint) / f"{name}.safetensors") for name in TENSORS])
        # What the first attempt did after its last checkpoint is known without a file of its node.
        lost_s = running.store.runs.summary(run.id)["lost_since_checkpoint_time_s"]
        assert isinstance(lost_s, float) and (lost_s > 0.0) is (run.id == killed.id)
    assert digests[0] == digests[1]
    assert not list((running.settings.data_dir / "experiments").rglob("*.safetensors"))
    assert kept_logits(running) == logits  # The new node copied them: what it computes, it keeps there too.


def kept_logits(running: Running) -> set[str]:
    """Returns what nodes have kept of teachers' logits for others."""
    kept = running.settings.prepared()
    assert kept is not None
    folder = kept / "teacher-logits"
    return {str(entry) for key in folder.iterdir() for entry in key.iterdir()} if folder.is_dir() else set()
