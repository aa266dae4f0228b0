"""What the driver knows of the devices that its job holds, against a cluster that the test plays."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence

import pytest

from service.domain.records import Placement
from service.recording.mailbox import Ready
from service.scheduling.ray_jobs import JobState, wait_until_ended
from service.scheduling.run_plan import Shape
from service.store import StoreUnavailable
from service.workers.ray_cluster import SEEN_S, PlacementGroup, PlacementWatch
from tests.execution.cluster import Running
from tests.execution.conftest import Clock
from trainers.config import DevicePricing

SHAPE = Shape(2, (("CPU", 1.0),), "cpu")
RATES = DevicePricing(
    hardware="cpu", device="cpu", price_usd_per_hour=0.05, price_date="2026-11-21", tdp_w=7.5
)
GROUP = PlacementGroup("g", 999_990.0, ({"CPU": 1.0}, {"CPU": 1.0}), {})


class Cluster:
    """The groups that Ray holds, and the rows that were stored."""

    def __init__(self, clock: Clock) -> None:
        self.groups: list[PlacementGroup] = []
        self.stored: dict[str, Placement] = {}
        self.unavailable = False
        self.refusals = 0
        self.watch = PlacementWatch(lambda: self.groups, lambda: [(SHAPE, RATES)], self.store, clock)

    def store(self, changed: Sequence[Placement]) -> None:
        if self.unavailable or self.refusals:
            self.refusals = max(0, self.refusals - 1)
            raise StoreUnavailable("locked")
        self.stored |= {placement.id: placement for placement in changed}


@pytest.fixture
def cluster(clock: Clock) -> Cluster:
    return Cluster(clock)


def test_devices_are_held_from_their_creation_to_their_release(cluster: Cluster, clock: Clock) -> None:
    cluster.groups = [GROUP]
    cluster.watch.look()
    held = cluster.stored["g"]
    assert (held.placed_s, held.ready_s, held.released_s) == (999_990.0, None, None)
    assert cluster.watch.starting() == cluster.watch.starting(999_990.0) == [SHAPE]
    assert cluster.watch.starting(999_989.0) == []
    assert (held.workers, held.devices, held.price_usd_per_hour, held.power_w) == (2, 2, 0.1, 15.0)
    cluster.watch.ready(Ready("g", 999_999.0))
    cluster.watch.ready(Ready("g", 1_000_500.0))  # A later run in the same processes.
    assert cluster.watch.starting() == []
    clock.forward(600.0)
    cluster.groups = []
    cluster.watch.look()
    released = cluster.stored["g"]
    assert (released.ready_s, released.released_s) == (999_999.0, clock())


def test_what_holds_no_devices_is_no_placement(cluster: Cluster) -> None:
    cluster.groups = [PlacementGroup("slot", 999_990.0, ({"node:10.0.0.1": 0.0001},), {})]
    cluster.watch.look()
    assert cluster.stored == {}


def test_a_release_keeps_its_time_while_the_database_is_unavailable(cluster: Cluster, clock: Clock) -> None:
    cluster.groups = [GROUP]
    cluster.watch.look()
    cluster.unavailable, cluster.groups = True, []
    clock.forward(10.0)
    cluster.watch.look()
    released_s = clock()
    clock.forward(100.0)
    cluster.watch.look()
    cluster.unavailable = False
    cluster.watch.look()
    assert cluster.stored["g"].released_s == released_s


def test_what_is_held_is_stored_as_seen_from_time_to_time(cluster: Cluster, clock: Clock) -> None:
    cluster.groups = [GROUP]
    for _ in range(2):
        clock.forward(SEEN_S)
        cluster.watch.look()
    assert cluster.stored["g"].seen_s == clock()


def test_what_is_held_at_the_end_counts_as_released(cluster: Cluster, clock: Clock) -> None:
    cluster.groups = [GROUP]
    with cluster.watch as watch:
        watch.look()
    assert cluster.stored["g"].released_s == clock()


def test_the_end_waits_for_an_unavailable_database(cluster: Cluster, clock: Clock) -> None:
    cluster.groups = [GROUP]
    with cluster.watch as watch:
        watch.look()
        ended_s = clock()
        cluster.refusals = 3
    assert cluster.refusals == 0
    assert cluster.stored["g"].released_s == ended_s


def test_hardware_that_differs_by_label_alone_is_detected(cluster: Cluster) -> None:
    shape = Shape(2, (("CPU", 1.0),), "cpu", (("zone", "b"),))
    assert GROUP.holds(SHAPE)
    assert not GROUP.holds(shape)


WAITS_FOR_ROOM = """
import ray, time
from ray.util.placement_group import placement_group, placement_group_table
from service.workers.ray_cluster import look_at_placements
ray.init()
@ray.remote(num_cpus=0)
class Controller:
    def reserve(self):
        return placement_group([{"CPU": 64}]).id.hex()
def state():
    look_at_placements()
    return placement_group_table()[id]["state"]
controller = Controller.remote()
id = ray.get(controller.reserve.remote())
assert state() == "PENDING"
ray.kill(controller)
while state() != "REMOVED":
    time.sleep(0.1)
"""
"""A controller of a worker group that is killed while no node has room for its workers."""


@pytest.mark.slow
@pytest.mark.ray
def test_what_a_killed_controller_waits_for_takes_no_node_that_comes(running: Running) -> None:
    job = f"waits-{time.time_ns()}"
    running.jobs.submit(job, shlex.join([sys.executable, "-c", WAITS_FOR_ROOM]), metadata={})
    try:
        ended = wait_until_ended(running.jobs, job, timeout_s=60.0)
        assert ended is not None and ended.state is JobState.succeeded, running.jobs.logs(job)
    finally:
        running.jobs.stop(job)
