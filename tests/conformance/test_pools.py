"""Pools: each has its schedulers, its cluster and its queue, in one database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import queue_statements, schema
from service.domain.records import Placement
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.fair_pass import FairPass
from service.scheduling.queue import FORGOTTEN_AFTER_S, Queue, pools_of
from service.scheduling.scheduler import Scheduler
from service.store import Store
from tests.conformance.building import Submit
from tests.fake_ray_jobs import FakeRayJobs


class Pool:
    """A pool with a cluster in memory."""

    def __init__(self, store: Store, settings: Settings, name: str) -> None:
        self.store, self.settings, self.name = store, settings, name
        self.queue = Queue(store, name)
        self.jobs = FakeRayJobs()
        self.scheduler = self.another("one")

    def another(self, name: str) -> Scheduler:
        """Returns another scheduler of it, which knows nothing of the others."""
        return Scheduler(
            self.store, self.queue, self.jobs, self.settings, name=f"{self.name}-{name}", python="python"
        )


@pytest.fixture
def now(store: Store) -> list[float]:
    """The time, which tests move."""
    now = [store.clock()]
    store.clocks.simulated = lambda: now[0]
    return now


@pytest.fixture
def pools(store: Store, now: list[float], settings: Settings) -> Iterator[tuple[Pool, Pool]]:
    """The pool `default`, and another."""
    yield Pool(store, settings, "default"), Pool(store, settings, "gpu")


def cpus(count: float) -> ClusterSnapshot:
    return ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": count}, {}),))


def test_each_scheduler_claims_for_its_own_cluster(
    store: Store, pools: tuple[Pool, Pool], submit: Submit
) -> None:
    here, there = pools
    mine, others = submit(), submit(pool="gpu")
    assert here.scheduler.run_once().claimed == (mine.id,)
    assert here.jobs.submitted == [store.experiments.get(mine.id).submission_id]
    assert there.jobs.submitted == []
    assert there.scheduler.run_once().claimed == (others.id,)
    assert there.jobs.submitted == [store.experiments.get(others.id).submission_id]
    assert here.scheduler.run_once().claimed == ()
    assert [each.id for each in there.queue.active()] == [others.id]


def test_no_claim_takes_what_another_pool_has_waiting(store: Store, submit: Submit) -> None:
    wanted = submit(pool="gpu", priority=90)
    here, there = Queue(store), Queue(store, "gpu")
    assert here.claim("s", lease_s=30, limit=10) == []
    assert here.claim("s", lease_s=30, among=[wanted.id]) == []
    assert [each.id for each in there.claim("s", lease_s=30, among=[wanted.id])] == [wanted.id]


def test_each_pool_has_places_for_drivers_of_its_own(store: Store, submit: Submit) -> None:
    for pool in ("default", "gpu") * 3:
        submit(pool=pool)
    for queue in (Queue(store), Queue(store, "gpu")):
        assert len(queue.claim("s", lease_s=30, limit=9, max_active=2)) == 2


def test_a_pool_without_schedulers_leaves_the_others_serving(
    store: Store, pools: tuple[Pool, Pool], submit: Submit, now: list[float]
) -> None:
    here, there = pools
    orphan = submit(pool="gpu")
    there.scheduler.run_once()  # Here its process is killed.
    waiting = submit(pool="gpu")
    now[0] += 600.0
    did = here.scheduler.run_once()
    assert (did.adopted, did.stopped, did.ended) == ((), (), ())
    mine = submit()
    assert here.scheduler.run_once().claimed == (mine.id,)
    assert not here.queue.adopt(orphan.id, 1, "default-one", 30)
    assert not here.queue.withdraw(orphan.id, 1)
    assert store.experiments.get(orphan.id).lease_owner == "gpu-one"
    assert here.queue.position(waiting.id).reason == (
        "no scheduler of pool 'gpu' is running; "
        "start one with: stillhouse scheduler --pool gpu --ray-address URL"
    )
    did = there.another("two").run_once()
    assert (did.adopted, did.claimed) == ((orphan.id,), (waiting.id,))


def test_the_queue_shows_all_pools_and_counts_in_each(store: Store, submit: Submit) -> None:
    ids = {pool: [submit(pool=pool).id for _ in range(3)] for pool in ("tpu", "default", "gpu")}
    queue = Queue(store)
    shown: list[tuple[int, int]] = []
    token = None
    while not shown or token is not None:
        page = queue.listing(page_size=2, page_token=token)
        assert page.total == 9
        shown += [(entry.experiment.id, entry.position) for entry in page.items if entry.experiment]
        token = page.next_page_token
    expected = [(id, place) for pool in ("default", "gpu", "tpu") for place, id in enumerate(ids[pool], 1)]
    assert shown == expected
    assert [(id, queue.position(id).position) for id, _ in expected] == expected


def test_the_reason_names_what_the_experiments_own_cluster_lacks(store: Store, submit: Submit) -> None:
    large = submit(pool="gpu", resources={"cpus_per_worker": 8})
    here, there = Queue(store), Queue(store, "gpu")
    for queue, count in ((here, 16.0), (there, 2.0)):
        queue.heartbeat(f"s-{queue.pool}", node="n", pid=1)
        queue.put_cluster(cpus(count))
    assert "8 CPUs (the maximum is 2 CPUs)" in here.position(large.id).reason
    there.put_cluster(cpus(8.0))
    assert "next in line" in here.position(large.id).reason


def test_every_pool_is_known_with_its_schedulers(
    store: Store, pools: tuple[Pool, Pool], now: list[float]
) -> None:
    here, there = pools
    there.scheduler.run_once()
    found = pools_of(here.queue.clusters(), here.queue.schedulers_alive(), now[0])
    assert [(each.pool, each.schedulers, each.reachable) for each in found] == [
        ("default", (), False),
        ("gpu", ("gpu-one",), True),
    ]
    here.scheduler.run_once()
    assert here.queue.clusters().keys() == {"default", "gpu"}
    now[0] += FORGOTTEN_AFTER_S + 60.0
    here.scheduler.run_once()
    assert here.queue.clusters().keys() == {"default"}


def test_a_pass_divides_its_pools_devices_alone(store: Store, submit: Submit) -> None:
    grid, other = submit(20), submit(20, pool="gpu")
    here, there = FairPass(store), FairPass(store, "gpu")
    for queue in (Queue(store), Queue(store, "gpu")):
        assert queue.claim("s", lease_s=30)
    for _ in range(2):
        here.divide(cpus(2.0), Queue(store).active(), 0)
        there.divide(cpus(3.0), Queue(store, "gpu").active(), 0)
        assert store.drivers.requests(grid.id, 1).allowances["cpu"].devices == 2
        assert store.drivers.requests(other.id, 1).allowances["cpu"].devices == 3


@pytest.mark.parametrize(("ceiling", "left"), [(4, 1), (3, 0), (9, 5)])
def test_a_ceiling_is_over_all_pools(store: Store, submit: Submit, ceiling: int, left: int) -> None:
    _set_terms(store, {"ceiling": {"cpu": ceiling}})
    grid, other = submit(20), submit(20, pool="gpu")
    for queue in (Queue(store), Queue(store, "gpu")):
        queue.claim("s", lease_s=30)
    FairPass(store, "gpu").divide(cpus(3.0), Queue(store, "gpu").active(), 0)
    assert store.drivers.requests(other.id, 1).allowances["cpu"].devices == 3
    FairPass(store).divide(cpus(5.0), Queue(store).active(), 0)
    assert store.drivers.requests(grid.id, 1).allowances["cpu"].devices == left


def test_use_is_charged_once_over_all_pools(store: Store, submit: Submit, now: list[float]) -> None:
    used_by = [submit(20), submit(20, pool="gpu")]
    passes = {pool: (FairPass(store, pool), Queue(store, pool)) for pool in ("default", "gpu")}
    for _, queue in passes.values():
        queue.claim("s", lease_s=30)
    for experiment in used_by:
        placed = Placement(
            id="placement", hardware="cpu", workers=1, devices=2, price_usd_per_hour=1.8, power_w=15.0,
            placed_s=now[0], ready_s=None, released_s=None, seen_s=now[0],
        )  # fmt: skip
        store.drivers.record_placements(experiment.id, 1, [placed])
    for _ in range(10):
        now[0] += 20.0
        for fair_pass, queue in passes.values():
            fair_pass.divide(cpus(2.0), queue.active(), 0)
    with store.database.read() as connection:
        used = {row.pool: row.usd for row in connection.execute(sa.select(schema.share_usage))}
    assert used == pytest.approx({"default": 1.8 * 200 / 3600, "gpu": 1.8 * 200 / 3600}, rel=1e-3)


def test_a_claim_reads_its_own_pool_along_the_index(store: Store, submit: Submit) -> None:
    wanted = submit(pool="gpu")
    elsewhere = submit()
    _repeat(store, elsewhere.id, 5_000)
    asked = {"pool": "gpu", "below": 1 << 30, "now": store.clock(), "count": 1, "passed_over": []}

    def claimed(connection: sa.Connection) -> tuple[list[int | None], list[str], int]:
        """What is found, how the rows of experiments are looked up, and the pages that it takes."""
        statement = queue_statements.next_to_claim(connection)
        if store.database.is_sqlite:
            plan = connection.execute(sa.text(f"EXPLAIN QUERY PLAN {statement}"), asked)
            looks, pages = [row.detail for row in plan], 0
        else:
            connection.execute(queue_statements.CLAIMS_IN_TURN)
            explain = sa.text(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")
            plan = connection.execute(explain, asked).scalar_one()[0]["Plan"]
            looks = [
                f"{node['Node Type']} {node.get('Index Name')} {node.get('Index Cond')}"
                for node in _nodes(plan)
                if node.get("Relation Name") == "experiments"
            ]
            pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        return [row.id for row in connection.execute(statement, asked)], looks, pages

    found, looks, pages = store.database.write(claimed)
    assert found == [wanted.id]
    pool = "pool=?" if store.database.is_sqlite else "pool = "
    assert sum("ix_experiments_claim" in look and pool in look for look in looks) == 4, looks
    assert not [look for look in looks if look.startswith(("Seq Scan", "SCAN experiments"))]
    assert pages < 100


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from _nodes(inner)


def _set_terms(store: Store, settings: Mapping[str, Any]) -> None:
    projects = schema.projects
    statement = sa.update(projects).where(projects.c.name == "default").values(settings=dict(settings))
    store.database.write(lambda connection: connection.execute(statement))


def _repeat(store: Store, experiment_id: int, count: int) -> None:
    """Queues copies of an experiment, without runs."""
    table = schema.experiments

    def body(connection: sa.Connection) -> None:
        found = connection.execute(sa.select(table).where(table.c.id == experiment_id)).mappings().one()
        row = {name: value for name, value in found.items() if name != "id"}
        connection.execute(sa.insert(table), [row] * count)

    store.database.write(body)
    if not store.database.is_sqlite:
        store.database.write(lambda connection: connection.execute(sa.text("ANALYZE experiments")))
