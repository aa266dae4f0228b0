"""Nodes that an autoscaler can start count as those that are there, and how long they take is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.config.hardware import CATALOGUE, NodeGroup
from service.config.settings import Settings
from service.domain.serialization import adapter
from service.planner.preview import planned_runs
from service.scheduling.cluster import (
    NODE_ID,
    ClusterNode,
    ClusterSnapshot,
    at_a_time,
    devices_of,
    exclusive_holds,
    unsatisfiable,
    worker_resources,
)
from service.scheduling.node_groups import NodeStarts
from service.specs.experiment import ExperimentSpec, validate

HEAD = ClusterNode("head", "head", True, {"CPU": 0.0}, {})
A100 = {"CPU": 32.0, "GPU": 4.0, "accelerator_type:A100": 1.0}
GROUP = NodeGroup(hardware="A100-SXM4-80GB", devices=4, cpus=32, memory_gib=128, max=2, start_minutes=6)
ONE = "a node of 4 A100-SXM4-80GB, about 6 minutes"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def spec(**fields: Any) -> ExperimentSpec:
    fields = {"hardware": "A100-SXM4-80GB", **fields}
    return validate({"name": "x", "task": {"name": "imdb"}, **fields}).at({})


def seen(*nodes: ClusterNode) -> ClusterSnapshot:
    return ClusterSnapshot(0.0, True, None, (HEAD, *nodes))


def starts(before: ClusterSnapshot | None = None) -> tuple[NodeStarts, Clock]:
    clock = Clock()
    return NodeStarts({"a100": GROUP}, CATALOGUE, before, clock), clock


def node(id: str, *, free: float = 4.0, **labels: str) -> ClusterNode:
    return ClusterNode(id, id, True, A100, {**A100, "GPU": free}, labels)


def test_hardware_that_can_come_is_not_missing() -> None:
    empty = seen()
    assert "no node has" in str(unsatisfiable(spec(), empty))
    snapshot = starts()[0].look(empty)
    assert unsatisfiable(spec(), snapshot) is None
    assert devices_of(CATALOGUE["A100-SXM4-80GB"], snapshot.possible) == 8.0
    assert at_a_time(spec(), snapshot.possible) == 8
    eight = {"strategy": "ddp", "workers": 8}
    assert unsatisfiable(spec(parallel=eight), snapshot) is None
    nine = unsatisfiable(
        spec(parallel={"strategy": "ddp", "workers": 9}, batch={"global_size": 18}), snapshot
    )
    assert "the cluster has room for 8 at a time" in str(nine)
    assert "accelerator_type:T4" in str(unsatisfiable(spec(hardware="T4"), snapshot))


def test_nodes_that_are_there_leave_fewer_to_come() -> None:
    labelled = {"ray.io/node-group": "a100"}
    for nodes, left in (
        ((node("1"),), 1),
        ((node("1"), node("2")), 0),
        ((node("1", **labelled), node("2", **{"ray.io/node-group": "other"})), 1),
        ((replace(node("1"), alive=False),), 2),
    ):
        (group,) = starts()[0].look(seen(*nodes)).to_come
        assert group.count == left


def test_a_run_that_fits_into_what_is_free_starts_no_node() -> None:
    look = starts()[0].look
    wanted = worker_resources(spec())
    assert look(seen(node("1"))).to_start(wanted, {}, 4) is None
    for snapshot, workers in ((look(seen(node("1"))), 5), (look(seen(node("1", free=0.0))), 1)):
        group = snapshot.to_start(wanted, {}, workers)
        assert group is not None
        assert group.words == f"starts {ONE}"
    assert look(seen(node("1", free=0.0), node("2", free=0.0))).to_start(wanted, {}, 1) is None
    assert look(seen()).to_start(worker_resources(spec(hardware="T4")), {}, 1) is None


def test_a_run_measured_alone_waits_for_a_node_that_is_there_and_starts_one_where_none_could_hold_it() -> (
    None
):
    alone = spec(measure="exclusive")
    look = starts()[0].look
    (hold,) = exclusive_holds(alone, look(seen()).possible)
    assert (dict(hold.resources)["CPU"], dict(hold.labels)) == (8.0, {})
    assert at_a_time(alone, look(seen()).possible) == 8
    there = exclusive_holds(alone, look(seen(node("1"))).possible)
    assert there == exclusive_holds(alone, [node("1")])
    small = replace(node("s"), resources={"CPU": 2.0}, available={})
    (hold,) = exclusive_holds(spec(measure="exclusive"), look(seen(small)).possible)
    assert NODE_ID not in hold.labels


def test_how_long_nodes_take_is_learned_and_kept() -> None:
    follows, clock = starts()
    follows.look(seen())
    clock.now = 1000.0
    follows.want({"A100-SXM4-80GB"})
    clock.now = 1200.0
    follows.want({"A100-SXM4-80GB"})
    snapshot = follows.look(seen(node("1")))
    assert snapshot.to_come[0].start_s == 200.0
    follows.want(set())
    clock.now = 9000.0
    assert follows.look(seen(node("1"), node("2"))).to_come[0].started_s == (200.0,), "no one waited for it"
    stored = adapter(ClusterSnapshot).validate_json(adapter(ClusterSnapshot).dump_json(snapshot))
    assert stored == snapshot
    (group,) = starts(stored)[0].look(seen()).to_come
    assert group.node_in_words == "a node of 4 A100-SXM4-80GB, about 3 minutes"


def test_a_preview_counts_what_can_come() -> None:
    snapshot = starts()[0].look(seen())
    (run,) = planned_runs(spec(), CATALOGUE, snapshot)
    assert (run.feasible, run.at_a_time) == (True, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: {a: {hardware: A1000, cpus: 4, max: 2}}",
         "default.a.hardware: 'A1000' is not in the catalogue; did you mean 'A100'?"),
        ("default: {a: {hardware: A100, cpus: 4, max: 2, device_count: 2}}",
         "default.a.device_count: unknown key; "),
        ("default: {a: {hardware: A100, cpus: 4, max: 0}}", "default.a.max: "),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_names_the_field(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"pools\.yaml: ") as refused:
        Settings(data_dir=tmp_path).node_groups()
    assert message in str(refused.value)
