"""`measure: exclusive`: a run holds its node, or its GPU's share of it, and is told where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.cli.tables import exclusive_lines
from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.planner.preview import planned_runs
from service.scheduling.cluster import NODE_ID, ClusterNode, ClusterSnapshot, at_a_time, unsatisfiable
from service.scheduling.run_plan import Shape, run_config, shapes_of
from service.specs.experiment import ExperimentSpec, validate
from tests.service.placing import fits

GPU_NODE = {"CPU": 32.0, "GPU": 4.0, "accelerator_type:A100": 1.0}


def spec(**fields: Any) -> ExperimentSpec:
    return validate({"name": "alone", "task": {"name": "imdb"}, "measure": "exclusive", **fields})


def group(workers: int, **fields: Any) -> ExperimentSpec:
    return spec(parallel={"strategy": "ddp", "workers": workers}, batch={"global_size": 24}, **fields)


def nodes(*resources: dict[str, float], busy: int | None = None) -> list[ClusterNode]:
    """Nodes `n0`, `n1`, ...; of one all CPUs are taken."""
    return [
        ClusterNode(f"n{n}", f"host{n}", True, of, {**of, "CPU": 0.0} if n == busy else dict(of))
        for n, of in enumerate(resources)
    ]


def wanted(shape: Shape) -> tuple[dict[str, float], dict[str, str], int]:
    return dict(shape.resources), dict(shape.labels), shape.workers


def test_beside_a_run_that_holds_its_node_nothing_has_room() -> None:
    cluster = nodes({"CPU": 8.0})
    (shape,) = shapes_of(spec(), CATALOGUE, cluster)
    assert (shape.exclusive, dict(shape.resources)["CPU"]) == (True, 8.0)
    assert fits([wanted(shape)], cluster)
    least = ({"CPU": 0.25}, {}, 1)
    assert not fits([wanted(shape), least], cluster)
    assert not fits([least, wanted(shape)], cluster)


def test_workers_of_a_group_share_the_node_that_they_hold() -> None:
    cluster = nodes({"CPU": 8.0})
    (shape,) = shapes_of(group(4), CATALOGUE, cluster)
    assert (shape.workers, dict(shape.resources)["CPU"], dict(shape.labels)) == (4, 2.0, {NODE_ID: "n0"})
    assert not fits([wanted(shape), ({"CPU": 0.25}, {}, 1)], cluster)


def test_workers_that_fit_on_no_node_together_hold_one_each() -> None:
    cluster = nodes({"CPU": 4.0}, {"CPU": 4.0}, {"CPU": 2.0})
    (shape,) = shapes_of(group(2, resources={"cpus_per_worker": 3}), CATALOGUE, cluster)
    assert (shape.workers, dict(shape.resources)["CPU"], shape.labels) == (2, 4.0, ())
    assert not fits([wanted(shape), ({"CPU": 3.0}, {}, 1)], cluster)
    assert fits([wanted(shape), ({"CPU": 2.0}, {}, 1)], cluster)  # On the third, which nobody holds.


def test_an_idle_node_comes_first_and_then_a_small_one() -> None:
    cluster = nodes({"CPU": 2.0}, {"CPU": 16.0}, {"CPU": 4.0}, busy=0)
    found = [dict(shape.labels)[NODE_ID] for shape in shapes_of(spec(), CATALOGUE, cluster)]
    assert found == ["n2", "n1", "n0"]


def test_a_gpu_brings_its_share_of_the_nodes_cpus() -> None:
    cluster = nodes(GPU_NODE)
    (shape,) = shapes_of(spec(hardware="A100"), CATALOGUE, cluster)
    assert (dict(shape.resources)["CPU"], dict(shape.resources)["GPU"], shape.labels) == (8.0, 1.0, ())
    assert fits([wanted(shape)] * 4, cluster)
    assert not fits([wanted(shape)] * 4 + [({"CPU": 1.0}, {}, 1)], cluster)


def test_where_gpus_have_unlike_shares_the_node_is_named() -> None:
    cluster = nodes(GPU_NODE, {**GPU_NODE, "CPU": 64.0})
    shapes = shapes_of(spec(hardware="A100"), CATALOGUE, cluster)
    assert [(dict(of.resources)["CPU"], dict(of.labels)[NODE_ID]) for of in shapes] == [
        (8.0, "n0"), (16.0, "n1")
    ]  # fmt: skip


def test_an_elastic_run_takes_the_most_workers_that_divide_a_node() -> None:
    elastic = spec(parallel={"strategy": "ddp", "workers": {"min": 1, "max": 4}}, batch={"global_size": 24})
    assert [shape.workers for shape in shapes_of(elastic, CATALOGUE, nodes({"CPU": 6.0}))] == [3, 2, 1]


def test_what_is_held_is_charged(tmp_path: Path) -> None:
    (shape,) = shapes_of(spec(), CATALOGUE, nodes({"CPU": 8.0}))
    config = run_config(
        spec(),
        experiment_id=5,
        run_id=9,
        seed=11,
        workers=shape.workers,
        cpus_held=shape.cpus,
        settings=Settings(data_dir=tmp_path, data_roots=str(tmp_path)),
        catalogue=CATALOGUE,
    )
    assert (config.rates.devices_per_worker, config.threads) == (8, 1)


@pytest.mark.parametrize(
    ("asked", "cluster", "said"),
    [
        (spec(), nodes({"CPU": 1.0}), None),
        (group(2), nodes({"CPU": 2.0}), None),
        (group(3), nodes({"CPU": 8.0}),
         "needs a whole node for 3 workers of 1 CPU that divide its CPUs evenly"),
        (group(2, resources={"cpus_per_worker": 3}), nodes({"CPU": 5.0}, {"CPU": 4.0}),
         "or 2 equal nodes, but the largest node has 5 CPUs; change parallel.workers"),
        (spec(resources={"cpus_per_worker": 4}), nodes({"CPU": 2.0}),
         "no node has 4 CPUs (the maximum is 2 CPUs)"),
    ],
)  # fmt: skip
def test_where_no_node_is_large_enough_one_line_says_so(
    asked: ExperimentSpec, cluster: list[ClusterNode], said: str | None
) -> None:
    reason = unsatisfiable(asked, ClusterSnapshot(0.0, True, None, tuple(cluster)))
    assert (reason is None) if said is None else (said in (reason or ""))
    assert reason is None or "\n" not in reason


def test_a_shared_device_cannot_be_measured_alone() -> None:
    with pytest.raises(
        SpecError, match=r"measure: exclusive and queue\.share_device: true cannot be combined"
    ):
        spec(queue={"share_device": True})


def test_a_preview_says_what_it_costs() -> None:
    snapshot = ClusterSnapshot(0.0, True, None, tuple(nodes({"CPU": 8.0}, {"CPU": 8.0})))
    asked = spec(search={"axes": {"measure": ["shared", "exclusive"]}})
    shared, alone = planned_runs(asked, CATALOGUE, snapshot)
    assert (shared.cpus, shared.at_a_time, shared.at_a_time_shared) == (1, 16, None)
    assert (alone.cpus, alone.at_a_time, alone.at_a_time_shared) == (8, 2, 16)
    assert alone.price_usd_per_hour == pytest.approx(8 * shared.price_usd_per_hour)
    assert exclusive_lines([shared, alone]) == [
        "measure: exclusive: a run on cpu holds 8 CPUs, 2 at a time instead of 16"
    ]


def test_groups_over_several_nodes_are_counted_whole() -> None:
    asked = group(2, resources={"cpus_per_worker": 3})
    assert at_a_time(asked, nodes(*[{"CPU": 4.0}] * 5)) == 2
    assert at_a_time(asked, nodes({"CPU": 4.0})) == 0
