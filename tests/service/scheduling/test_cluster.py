"""What a cluster could never run is said in words, before anything waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config.hardware import CATALOGUE
from service.domain.serialization import adapter
from service.scheduling.cluster import (
    NODE_ID,
    ClusterNode,
    ClusterSnapshot,
    FreeRoom,
    devices_of,
    unsatisfiable,
)
from service.specs.experiment import ExperimentSpec, validate
from tests.service.placing import fits


def cluster(*nodes: dict[str, float], reachable: bool = True) -> ClusterSnapshot:
    """A cluster of idle nodes."""
    return ClusterSnapshot(
        1.0,
        reachable,
        None,
        tuple(ClusterNode(str(n), f"n{n}", True, resources, resources) for n, resources in enumerate(nodes)),
    )


def spec(**fields: Any) -> ExperimentSpec:
    """A spec without axes."""
    return validate({"name": "x", "task": {"name": "imdb"}, **fields})


GPU = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0, "memory": 64.0 * 2**30}


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ({}, [{"CPU": 1.0}]),
        (
            {"resources": {"cpus_per_worker": 2}, "parallel": {"strategy": "ddp", "workers": 2}},
            [{"CPU": 4.0}],
        ),
        ({"parallel": {"strategy": "ddp", "workers": 2}}, [{"CPU": 1.0}, {"CPU": 1.0}]),
        ({"parallel": {"strategy": "ddp", "workers": {"min": 2, "max": 8}}}, [{"CPU": 2.0}]),
        ({"hardware": "A100"}, [{"CPU": 1.0}, GPU]),
        ({"resources": {"memory_gib_per_worker": 64}}, [GPU]),
    ],
)
def test_what_fits(wanted: dict[str, Any], nodes: list[dict[str, float]]) -> None:
    assert unsatisfiable(spec(**wanted), cluster(*nodes)) is None


@pytest.mark.parametrize(
    ("wanted", "nodes", "said"),
    [
        (
            {"resources": {"cpus_per_worker": 4}}, [{"CPU": 2.0}],
            "no node has 4 CPUs (the maximum is 2 CPUs); lower",
        ),
        (
            {"hardware": "V100"}, [GPU],
            "no node has hardware V100 (Ray resource accelerator_type:V100); the cluster has A100",
        ),
        ({"hardware": "V100"}, [{"CPU": 2.0}], "the cluster has no accelerators"),
        (
            {"parallel": {"strategy": "ddp", "workers": 4}}, [{"CPU": 2.0}, {"CPU": 1.0}],
            "4 workers of 1 CPU are needed, but the cluster has room for 3 at a time; lower parallel.workers",
        ),
        (
            {"parallel": {"strategy": "ddp", "workers": {"min": 3, "max": 8}}}, [{"CPU": 2.0}],
            "at least 4 workers of 1 CPU are needed, but the cluster has room for 2 at a time",
        ),
        (
            {"resources": {"memory_gib_per_worker": 65}}, [GPU],
            "no node has 65 GiB memory (the maximum is 64 GiB memory)",
        ),
        (
            {"resources": {"cpus_per_worker": 4, "memory_gib_per_worker": 8}},
            [{"CPU": 4.0}, {"CPU": 1.0, "memory": 9.0 * 2**30}],
            "no node has 4 CPUs + 8 GiB memory at once",
        ),
        ({}, [], "the cluster has no live node"),
    ],
)  # fmt: skip
def test_what_never_fits(wanted: dict[str, Any], nodes: list[dict[str, float]], said: str) -> None:
    answer = unsatisfiable(spec(**wanted), cluster(*nodes))
    assert answer is not None
    assert said in answer


def test_what_is_not_known_is_not_held_against_a_spec() -> None:
    big = spec(resources={"cpus_per_worker": 999})
    assert unsatisfiable(big, None) is None
    assert unsatisfiable(big, cluster(reachable=False)) is None


def test_dead_nodes_do_not_count() -> None:
    dead = ClusterNode("a", "a", False, {"CPU": 9.0}, {"CPU": 9.0})
    snapshot = ClusterSnapshot(1.0, True, None, (dead,))
    assert snapshot.totals == {}
    assert unsatisfiable(spec(), snapshot) == "the cluster has no live node"


def test_a_draining_node_takes_nothing_and_is_named_to_those_that_need_it() -> None:
    labels = {"kind": "new"}
    there = ClusterNode("a", "10.0.0.2", True, {"CPU": 9.0}, {"CPU": 9.0}, labels)
    going = replace(there, draining=True, drain_deadline_s=45_296.0)
    assert devices_of(CATALOGUE["cpu"], [there, going]) == 9.0
    assert not FreeRoom([going]).holds({"CPU": 1.0}, labels, 1)
    snapshot = ClusterSnapshot(1.0, True, None, (going,))
    assert snapshot.totals == {}
    said = "the cluster has no live node (node 10.0.0.2 is draining, and goes at 12:34:56 UTC)"
    assert unsatisfiable(spec(), snapshot) == said
    assert replace(going, drain_deadline_s=None).departure == "node 10.0.0.2 is draining"


def test_totals_and_document() -> None:
    snapshot = cluster({"CPU": 2.0}, {"CPU": 3.0, "GPU": 1.0})
    assert snapshot.totals == {"CPU": 5.0, "GPU": 1.0}
    kind = adapter(ClusterSnapshot)
    assert kind.validate_python(kind.dump_python(snapshot, mode="json")) == snapshot


Wanted = tuple[Mapping[str, float], Mapping[str, str], int]

_amounts = st.fixed_dictionaries(
    {"CPU": st.sampled_from([0.25, 0.5, 1.0, 2.0])}, optional={"GPU": st.sampled_from([0.25, 1.0])}
)
_labels = st.sampled_from([{}, {"kind": "new"}, {"kind": "old"}, {NODE_ID: "1"}])
_nodes = st.lists(
    st.builds(
        lambda cpus, gpus, kind, alive: (alive, {"CPU": cpus, **gpus}, kind),
        st.sampled_from([1.0, 2.0, 3.0]),
        st.sampled_from([{}, {"GPU": 1.0}, {"GPU": 2.0}]),
        st.sampled_from([{}, {"kind": "new"}, {"kind": "old"}]),
        st.sampled_from([True, True, True, False]),
    ),
    max_size=4,
)


def one_by_one(wanted: Sequence[Wanted], nodes: Sequence[ClusterNode]) -> bool:
    """Each worker alone on the first node that has room for it."""
    free = [(node, dict(node.resources)) for node in nodes]
    for amounts, labels, workers in wanted:
        for _ in range(workers):
            for node, left in free:
                if node.has(labels) and all(
                    left.get(name, 0.0) >= amount for name, amount in amounts.items()
                ):
                    for name, amount in amounts.items():
                        left[name] -= amount
                    break
            else:
                return False
    return True


@given(wanted=st.lists(st.tuples(_amounts, _labels, st.integers(1, 4)), max_size=6), nodes=_nodes)
def test_groups_are_placed_as_their_workers_one_by_one(wanted: list[Wanted], nodes: list[Any]) -> None:
    cluster = [
        ClusterNode(str(number), str(number), alive, resources, {}, labels)
        for number, (alive, resources, labels) in enumerate(nodes)
    ]
    assert fits(wanted, cluster) == one_by_one(wanted, cluster)
    room = FreeRoom(cluster)
    for count, one in enumerate(wanted):
        assert room.holds(*one) == one_by_one(wanted[: count + 1], cluster)
        if not room.take(*one):
            break
