"""Devices are divided among what runs and what waits, and who may hold some is claimed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from service.db import schema
from service.domain.events import EventKind
from service.domain.records import Experiment, Placement
from service.domain.shares import DeviceAllowance
from service.domain.states import ExperimentState
from service.fairness.state import USEFUL_S
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, NodesToCome
from service.scheduling.fair_pass import FairPass
from service.scheduling.queue import Queue
from service.scheduling.scheduler import lost_attempts
from service.store import Store
from tests.conformance.building import Submit

CLUSTER = ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 2.0}, {}),))


@pytest.fixture
def fair_pass(store: Store) -> FairPass:
    return FairPass(store)


def started(store: Store, queue: Queue) -> Experiment:
    """The next experiment, with a driver."""
    (claimed,) = queue.claim("s", lease_s=30)
    store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    return claimed


def allowances(store: Store, experiment_id: int) -> dict[str, DeviceAllowance]:
    return dict(store.drivers.requests(experiment_id, 1).allowances)


def hold(
    store: Store, experiment_id: int, devices: int, *, since_s: float, ready_s: float | None = None
) -> None:
    """Devices at 0.9 USD an hour each."""
    placed = Placement(
        id="placement", hardware="cpu", workers=1, devices=devices, price_usd_per_hour=devices * 0.9,
        power_w=15.0, placed_s=since_s, ready_s=ready_s, released_s=None, seen_s=since_s,
    )  # fmt: skip
    store.drivers.record_placements(experiment_id, 1, [placed])


def used(store: Store) -> dict[tuple[str, str, str, str], float]:
    with store.database.read() as connection:
        rows = connection.execute(sa.select(schema.share_usage)).all()
    return {(row.project, row.owner, row.pool, row.hardware): row.usd for row in rows}


def test_a_grid_makes_room_for_a_newcomer_that_is_claimed(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    grid = submit(20)
    started(store, queue)
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == []
    assert allowances(store, grid.id)["cpu"].devices == 2
    hold(store, grid.id, 2, since_s=store.clock())
    newcomer = submit(owner="bob")
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == [newcomer.id]
    shared = allowances(store, grid.id)["cpu"]
    assert (shared.devices, shared.preemptible) == (1, True)
    assert shared.reason is not None
    assert f"experiment {newcomer.id} of bob" in shared.reason
    (claimed,) = queue.claim("s", lease_s=30, max_active=4, among=[newcomer.id])
    assert (claimed.id, claimed.state, claimed.attempt) == (newcomer.id, ExperimentState.starting, 1)
    assert allowances(store, newcomer.id) == {"cpu": DeviceAllowance(1)}


def test_devices_that_can_come_are_divided_like_those_that_are_there(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    head = ClusterNode("1", "1", True, {"CPU": 0.0}, {})
    group = NodesToCome("c1", "cpu", 1, 4, 360.0, (), {"CPU": 1.0}, {})
    cluster = ClusterSnapshot(0.0, True, None, (head,), (group,))
    grid = submit(20)
    assert fair_pass.divide(cluster, queue.active(), 3) == [grid.id]
    started(store, queue)
    other = submit(20, owner="bob")
    assert fair_pass.divide(cluster, queue.active(), 3) == [other.id]
    started(store, queue)
    fair_pass.divide(cluster, queue.active(), 3)
    assert [allowances(store, each.id)["cpu"].devices for each in (grid, other)] == [2, 2]
    assert fair_pass.lacking == {"cpu"}
    there = replace(cluster, nodes=(ClusterNode("2", "2", True, {"CPU": 4.0}, {}),), to_come=())
    fair_pass.divide(there, queue.active(), 3)
    assert fair_pass.lacking == set()


@pytest.mark.parametrize(("restart_s", "useful_s"), [(0.0, USEFUL_S), (120.0, 50 * 120.0)])
def test_devices_change_hands_after_a_useful_time_unless_for_a_newcomer(
    store: Store, queue: Queue, submit: Submit, restart_s: float, useful_s: float
) -> None:
    now = [store.clock()]
    store.clocks.simulated = lambda: now[0]
    grid = submit(20)
    started(store, queue)
    hold(store, grid.id, 3, since_s=now[0], ready_s=now[0] + restart_s)
    other = submit(20, owner="bob")
    started(store, queue)
    hold(store, other.id, 1, since_s=now[0])
    four = ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 4.0}, {}),))
    fair_pass = FairPass(store)

    def divided() -> tuple[float, float]:
        fair_pass.divide(four, queue.active(), 0)
        return allowances(store, grid.id)["cpu"].devices, allowances(store, other.id)["cpu"].devices

    assert divided() == (3, 1)
    now[0] += useful_s - 1.0
    assert divided() == (3, 1)
    now[0] += 1.0
    assert divided() == (2, 2)


def test_a_grid_does_not_hold_up_a_later_experiment_of_its_user(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    grid = submit(20)
    started(store, queue)
    small = submit(1)
    hold(store, grid.id, 1, since_s=store.clock())
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == [small.id]
    assert allowances(store, grid.id)["cpu"].devices == 1


def test_who_has_no_driver_gets_the_place_of_whoever_has_most(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    four = ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 4.0}, {}),))
    old, new = submit(2), submit(2)
    for _ in (old, new):
        started(store, queue)

    def divided() -> list[float]:
        assert fair_pass.divide(four, queue.active(), 0) == [], "there is no place"
        return [allowances(store, each.id)["cpu"].devices for each in (old, new)]

    submit(owner="ada")
    assert divided() == [2, 2], "nobody is without a driver"
    newcomer = submit(owner="bob")
    assert divided() == divided() == [2, 0]
    reason = allowances(store, new.id)["cpu"].reason
    assert reason is not None
    store.drivers.release_experiment(new.id, 1, delay_s=0.0, yielded=reason)
    assert fair_pass.divide(four, queue.active(), 1) == [newcomer.id]


def test_a_driver_stays_where_everybody_has_one(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    grid = submit(20)
    started(store, queue)
    submit(owner="bob")
    fair_pass.divide(CLUSTER, queue.active(), 0)
    assert allowances(store, grid.id)["cpu"].devices == 2


def test_others_projects_are_not_named(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    store.projects.create("secret")
    grid = submit(20)
    started(store, queue)
    submit(owner="bob", project="secret")
    fair_pass.divide(CLUSTER, queue.active(), 3)
    reason = allowances(store, grid.id)["cpu"].reason
    assert reason is not None
    assert reason.endswith("devices go to 1 experiment of other projects")


def test_share_errors_are_of_those_who_have_work(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    store.projects.create("nlp")
    now = 1_000_000.0
    store.clocks.simulated = lambda: now
    assert fair_pass.share_errors() == {}, "there was no pass yet"
    grid = submit(20)
    started(store, queue)
    fair_pass.divide(CLUSTER, queue.active(), 3)
    assert fair_pass.share_errors() == {"default": 0.0}, "nothing has been used"
    rows = [
        {"project": project, "owner": "ada", "pool": "default", "hardware": "cpu", "usd": usd, "at_s": now}
        for project, usd in (("default", 3.0), ("nlp", 1.0), ("away", 90.0))
    ]
    store.database.write(lambda connection: connection.execute(schema.share_usage.insert(), rows))
    other = submit(owner="bob", project="nlp")
    fair_pass.divide(CLUSTER, queue.active(), 3)
    assert fair_pass.share_errors() == pytest.approx({"default": 0.25, "nlp": -0.25})
    store.requests.cancel(other.id)
    fair_pass.divide(CLUSTER, queue.active(), 3)
    assert fair_pass.share_errors() == {"default": 0.0, "nlp": 0.0}, f"{grid.id} is alone"


def test_what_may_hold_nothing_is_not_claimed(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    grid = submit(20, priority=90)
    started(store, queue)
    hold(store, grid.id, 2, since_s=store.clock())
    waiting = submit(owner="bob")
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == []
    assert allowances(store, grid.id)["cpu"].devices == 2
    queue.heartbeat("s", node="n", pid=1)
    reason = "no cpu device is free; devices go to experiment 1 of ada; next in line"
    assert queue.position(waiting.id).reason == reason.replace("experiment 1", f"experiment {grid.id}")


def test_what_waits_for_a_free_kind_is_not_held_up_by_what_is_first(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    grid = submit(20, priority=90)
    started(store, queue)
    hold(store, grid.id, 3, since_s=store.clock())
    submit(owner="bob")
    gpu = submit(owner="eve", hardware="T4")
    nodes = (*CLUSTER.nodes, _gpu_node("2"))
    assert fair_pass.divide(ClusterSnapshot(0.0, True, None, nodes), queue.active(), 1) == [gpu.id]


def test_hardware_that_the_cluster_lacks_is_not_limited(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    wanted = submit(hardware="T4")
    large = submit(resources={"cpus_per_worker": 8}, owner="bob")
    assert fair_pass.divide(CLUSTER, [], 3) == [wanted.id, large.id]
    started(store, queue)
    assert allowances(store, wanted.id) == {}


def test_only_named_experiments_are_claimed_and_only_if_they_wait(
    store: Store, queue: Queue, submit: Submit
) -> None:
    first, second, third = submit(), submit(), submit()
    store.requests.pause(third.id)
    (claimed,) = queue.claim("s", lease_s=30, among=[third.id, second.id, 10_000])
    assert claimed.id == second.id
    assert queue.claim("s", lease_s=30, among=[third.id, second.id]) == []
    assert queue.claim("s", lease_s=30, max_active=1, among=[first.id]) == []


def test_two_schedulers_charge_the_use_of_devices_once(
    store: Store, queue: Queue, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [store.clock()]
    store.clocks.simulated = lambda: now[0]
    grid = submit(20)
    started(store, queue)
    hold(store, grid.id, 2, since_s=now[0])
    both = FairPass(store), FairPass(store)
    for _ in range(10):
        now[0] += 20.0
        for each in both:
            each.divide(CLUSTER, queue.active(), 0)
    assert used(store) == {("default", "ada", "default", "cpu"): pytest.approx(1.8 * 200 / 3600, rel=1e-3)}


def test_use_halves_within_a_half_life(store: Store, queue: Queue, submit: Submit) -> None:
    now = [store.clock()]
    store.clocks.simulated = lambda: now[0]
    grid = submit(20)
    started(store, queue)
    hold(store, grid.id, 2, since_s=now[0] - 50)
    fair_pass = FairPass(store)
    fair_pass.divide(CLUSTER, queue.active(), 0)
    (before,) = used(store).values()
    now[0] += 7 * 86_400.0
    fair_pass.divide(CLUSTER, queue.active(), 0)
    (after,) = used(store).values()
    a_minute = 1.8 * 60 / 3600  # The most that is charged for the time without a scheduler.
    assert after == pytest.approx(before / 2 + a_minute, rel=1e-3)


def _gpu_node(id: str) -> ClusterNode:
    has = {"CPU": 1.0, "GPU": 1.0, "accelerator_type:T4": 1.0}
    return ClusterNode(id, id, True, has, {})


def test_an_experiment_that_yields_is_queued_and_no_attempt_is_lost(
    store: Store, queue: Queue, submit: Submit
) -> None:
    experiment = submit()
    started(store, queue)
    yielded = "no cpu device is free"
    assert (
        store.drivers.release_experiment(experiment.id, 1, delay_s=0.0, yielded=yielded)
        is ExperimentState.queued
    )
    event = store.experiments.events(experiment.id)[-1]
    assert (event.kind, event.message) == (
        EventKind.experiment_yielded,
        "queued until it may hold devices: no cpu device is free",
    )
    assert lost_attempts(store, experiment.id) == 0
    assert started(store, queue).attempt == 2


def test_a_persons_urgent_experiment_comes_first_as_runs_of_their_sweep_end(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    sweep = submit(20, priority=25)
    started(store, queue)
    hold(store, sweep.id, 2, since_s=store.clock())
    urgent = submit(1, priority=100)
    queue.heartbeat("s", node="n", pid=1)
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == []
    allowed = allowances(store, sweep.id)["cpu"]
    assert (allowed.devices, allowed.preemptible) == (1, False), "no run is stopped, and none follows"
    reason = f"as its runs end, their devices go to experiment {urgent.id} of ada, of higher priority"
    assert allowed.reason == reason
    waits = queue.position(urgent.id).reason
    assert waits == f"no cpu device is free; devices go to experiment {sweep.id} of ada; next in line"

    hold(store, sweep.id, 1, since_s=store.clock())
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == [urgent.id]
    assert allowances(store, sweep.id)["cpu"].devices == 1
    started(store, queue)
    assert fair_pass.divide(CLUSTER, queue.active(), 3) == []
    assert (allowances(store, sweep.id)["cpu"].devices, allowances(store, urgent.id)["cpu"].devices) == (1, 1)


def test_nothing_is_kept_for_an_experiment_that_there_is_no_place_for(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    sweep = submit(20, priority=25)
    started(store, queue)
    hold(store, sweep.id, 2, since_s=store.clock())
    submit(1, priority=100)
    assert fair_pass.divide(CLUSTER, queue.active(), 0) == []
    assert allowances(store, sweep.id)["cpu"].devices == 2


def test_priorities_of_other_projects_are_not_named(
    store: Store, queue: Queue, submit: Submit, fair_pass: FairPass
) -> None:
    store.projects.create("secret")
    sweep, other = submit(20, priority=25), submit(20, priority=50, owner="bob", project="secret")
    for each in (other, sweep):
        started(store, queue)
        hold(store, each.id, 1, since_s=store.clock())
    submit(2, priority=100, owner="bob", project="secret")
    fair_pass.divide(CLUSTER, queue.active(), 3)
    allowed = allowances(store, sweep.id)["cpu"]
    assert allowed.devices == 0
    assert allowed.reason == (
        "as its runs end, their devices go to 2 experiments of other projects, of higher priority"
    )


def test_an_urgent_experiment_gets_the_place_of_one_of_lower_priority_after_a_useful_time(
    store: Store, queue: Queue, submit: Submit
) -> None:
    now = [store.clock()]
    store.clocks.simulated = lambda: now[0]
    fair_pass = FairPass(store)
    old, new = submit(20, priority=25), submit(20, priority=25)
    for each in (old, new):
        started(store, queue)
        hold(store, each.id, 1, since_s=now[0])
    urgent = submit(1, priority=100)

    def divided() -> list[float]:
        assert fair_pass.divide(CLUSTER, queue.active(), 0) == [], "there is no place"
        return [allowances(store, each.id)["cpu"].devices for each in (old, new)]

    assert divided() == [1, 1]
    now[0] += USEFUL_S
    assert divided() == divided() == [2, 0]
    store.drivers.release_experiment(new.id, 1, delay_s=0.0, yielded="urgent")
    assert fair_pass.divide(CLUSTER, queue.active(), 1) == [urgent.id]
