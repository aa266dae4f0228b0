"""A grid over hardware on a cluster of unlike nodes: each run where it belongs, whatever joins or leaves."""

from __future__ import annotations

import pytest
import yaml

from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from tests.execution.cluster import AddNode, Running, end, kinds
from trainers.errors import FailureClass

pytestmark = pytest.mark.ray

KINDS = {"A100": ["fp32", "bf16"], "T4": ["fp32", "fp16"], "cpu": ["fp32", "bf16"]}
STEPS = 200
"""What each kind of node computes. All are CPUs of this machine under these names and labels."""


def by_cell(runs: list[Run]) -> dict[tuple[object, object], Run]:
    return {(run.point["hardware"], run.point["precision"]): run for run in runs}


@pytest.mark.slow
def test_runs_land_on_their_hardware_and_nothing_is_lost_when_a_node_goes_and_comes(
    running: Running, add_node: AddNode
) -> None:
    catalogue = {
        name: {
            "device": "cpu", "labels": {"kind": name}, "precisions": precisions, "tdp_w": 100.0,
            "price_usd_per_hour": 1.0, "price_date": "2026-01-01", "price_source": "a test",
        }
        for name, precisions in KINDS.items()
    }  # fmt: skip
    (running.settings.data_dir / "hardware.yaml").write_text(yaml.safe_dump(catalogue))
    a100 = add_node("A100")
    add_node("cpu")
    experiment = running.submit(
        search={"axes": {"hardware": list(KINDS), "precision": ["fp32", "bf16"]}}, length={"steps": STEPS}
    )
    running.wait_until_training(by_cell(running.runs(experiment))["A100", "fp32"].id, beyond_step=2)
    end(a100)
    running.wait_for(lambda: "A100" not in kinds(running))
    add_node("A100")
    add_node("T4")  # was not there when the sweep began
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()

    nodes = {node.id: node.labels.get("kind") for node in running.jobs.cluster(0.0).nodes}
    cells = by_cell(running.runs(experiment))
    for (hardware, precision), run in cells.items():
        if precision not in KINDS[str(hardware)]:
            assert (run.state, run.failure_class) == (RunState.failed, FailureClass.bad_spec)
            assert f"{hardware} does not support bf16" in (run.failure_message or "")
            continue
        assert run.state is RunState.succeeded, running.story()
        facts = running.store.runs.attempts(run.id)[-1].facts
        assert facts is not None
        assert nodes[str(facts["ray_node_id"])] == hardware
        losses = running.store.series.points(run.id, ["loss"])["loss"]
        assert [point.step for point in losses] == list(range(1, STEPS + 1))
