"""Claims: priority, then fair share, then age; nothing is claimed twice."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.db import statements
from service.domain.records import Experiment
from service.domain.states import ExperimentState, RunState
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.store import NotFound, Store
from tests.conformance.building import Submit
from trainers.errors import FailureClass


def test_claim_gives_attempt_lease_and_submission_id(store: Store, queue: Queue, submit: Submit) -> None:
    wanted = submit()
    (claimed,) = queue.claim("s1", lease_s=30)
    assert claimed == store.experiments.get(wanted.id)
    assert (claimed.state, claimed.attempt, claimed.lease_owner) == (ExperimentState.starting, 1, "s1")
    assert claimed.submission_id == f"stillhouse-{wanted.id}-1"
    assert claimed.lease_until_s == pytest.approx(store.clock() + 30, abs=5)
    assert queue.claim("s1", lease_s=30) == []


def test_priority_then_fair_share_then_age(queue: Queue, submit: Submit) -> None:
    ada = [submit(owner="ada").id for _ in range(3)]
    bob = [submit(owner="bob").id for _ in range(2)]
    urgent = submit(owner="ada", priority=90).id
    late = submit(owner="eve", priority=10).id
    expected = [urgent, bob[0], ada[0], bob[1], ada[1], ada[2], late]
    assert [entry.experiment.id for entry in queue.listing().items] == expected
    claimed = [queue.claim("s", lease_s=30)[0].id for _ in expected]
    assert claimed == expected


def test_several_claims_at_once_keep_the_order(queue: Queue, submit: Submit) -> None:
    for owner in ("ada", "ada", "bob"):
        submit(owner=owner)
    expected = [entry.experiment.id for entry in queue.listing().items]
    assert [claimed.id for claimed in queue.claim("s", lease_s=30, limit=10)] == expected


@pytest.mark.parametrize("seed", range(3))
def test_the_queue_shown_is_the_queue_claimed(store: Store, queue: Queue, submit: Submit, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        submit(owner=chance.choice("abcd"), priority=chance.choice([10, 50]))
    shown = [entry.experiment.id for entry in queue.listing().items]
    assert [queue.position(id).position for id in shown] == list(range(1, 26))
    assert [queue.claim("s", lease_s=30)[0].id for _ in range(25)] == shown


def test_concurrent_claimers_claim_each_once(store: Store, queue: Queue, submit: Submit) -> None:
    ids = {submit(owner=f"owner{number % 5}").id for number in range(80)}

    def claimer(name: int) -> list[int]:
        mine: list[int] = []
        while found := queue.claim(f"s{name}", lease_s=30):
            mine += [experiment.id for experiment in found]
        return mine

    with ThreadPoolExecutor(8) as pool:
        claimed = [id for mine in pool.map(claimer, range(8)) for id in mine]
    assert sorted(claimed) == sorted(ids)
    assert all(store.experiments.get(id).attempt == 1 for id in ids)


def test_the_limit_holds_over_concurrent_claimers(queue: Queue, submit: Submit) -> None:
    for _ in range(20):
        submit()
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda _: queue.claim("s", lease_s=30, limit=2, max_active=5), range(8)))
    assert sum(map(len, claims)) == 5
    assert len(queue.active()) == 5


def test_claims_of_several_schedulers_in_one_group_each_get_their_lease(
    store: Store, queue: Queue, submit: Submit
) -> None:
    ids = [submit(owner=owner, priority=priority).id for owner in ("ada", "bob") for priority in (10, 50)]
    expected = [entry.experiment.id for entry in queue.listing().items]
    barrier = threading.Barrier(4)

    def claim(number: int) -> list[Experiment]:
        barrier.wait()
        return queue.claim(f"s{number}", lease_s=30 + number)

    with ThreadPoolExecutor(4) as pool:
        found = [experiment for got in pool.map(claim, range(4)) for experiment in got]
    assert sorted(experiment.id for experiment in found) == sorted(ids) == sorted(expected)
    assert {experiment.lease_owner for experiment in found} == {"s0", "s1", "s2", "s3"}
    for experiment in found:
        assert experiment == store.experiments.get(experiment.id)
        submitted, claimed = store.experiments.events(experiment.id)
        assert submitted.kind == "experiment.submitted"
        assert (claimed.number, claimed.kind, claimed.attempt) == (2, "experiment.claimed", 1)
        assert claimed.message == f"claimed by {experiment.lease_owner}, attempt 1"
        assert claimed.data == {"submission_id": f"stillhouse-{experiment.id}-1"}


def test_a_claim_goes_on_where_a_priority_ends(queue: Queue, submit: Submit) -> None:
    ids = [submit(owner=owner, priority=priority).id for priority in (50, 20) for owner in ("ada", "bob")]
    assert [claimed.id for claimed in queue.claim("s", lease_s=30, limit=3)] == ids[:3]


def test_what_somebody_is_changing_is_passed_over(store: Store, queue: Queue, submit: Submit) -> None:
    if store.database.is_sqlite:
        pytest.skip("writers of SQLite take turns")
    first, second = submit(), submit()
    with store.database.writers.connect() as connection, connection.begin():
        connection.execute(statements.ADVANCE_EVENTS, {"experiment": first.id, "count": 0})
        assert [claimed.id for claimed in queue.claim("s", lease_s=30, limit=2)] == [second.id]
    assert [claimed.id for claimed in queue.claim("s", lease_s=30)] == [first.id]


def test_what_waits_for_its_delay_is_passed_over(store: Store, queue: Queue, submit: Submit) -> None:
    now = [1000.0]
    store.clocks.simulated = lambda: now[0]
    queue = Queue(store)
    first, second = submit(priority=90), submit(priority=10)
    queue.claim("s", lease_s=30)
    failure = (FailureClass.infrastructure, "no node")
    store.drivers.release_experiment(first.id, 1, delay_s=60, failure=failure)
    queue.heartbeat("s", node="n", pid=1)
    assert "retrying in 60 s after: no node" in queue.position(first.id).reason
    assert [claimed.id for claimed in queue.claim("s", lease_s=30)] == [second.id]
    assert queue.claim("s", lease_s=30) == []
    now[0] += 61
    (again,) = queue.claim("s", lease_s=30)
    assert (again.id, again.attempt) == (first.id, 2)
    with pytest.raises(NotFound):
        queue.position(first.id)


def test_a_lease_that_ran_out_is_adopted_once(store: Store, queue: Queue, submit: Submit) -> None:
    now = [1000.0]
    store.clocks.simulated = lambda: now[0]
    queue = Queue(store)
    id = submit().id
    queue.claim("dead", lease_s=30)
    assert not queue.adopt(id, 1, "s2", 30)
    now[0] += 31
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda n: queue.adopt(id, 1, f"s{n}", 30), range(8))) == 1
    store.drivers.started(id, 1, "n", 1)  # The driver is still of the current attempt.
    now[0] += 100
    assert not queue.adopt(id, 2, "s3", 30)
    store.drivers.renew_lease(id, 1, 30)
    assert not queue.adopt(id, 1, "s3", 30)


def test_cancelled_and_paused_are_not_claimed(store: Store, queue: Queue, submit: Submit) -> None:
    store.requests.cancel(submit().id)
    store.requests.pause(submit().id)
    assert queue.claim("s", lease_s=30) == []
    assert queue.listing().items == []


def test_set_priority_moves_in_the_queue(store: Store, queue: Queue, submit: Submit) -> None:
    submit()
    second = submit()
    store.requests.set_priority(second.id, 80)
    assert queue.position(second.id).position == 1


def test_reasons(store: Store, queue: Queue, submit: Submit) -> None:
    first, second = submit(), submit()
    assert "no scheduler is running" in queue.position(first.id).reason
    queue.heartbeat("s", node="n", pid=1)
    assert "next" in queue.position(first.id).reason
    assert "1 ahead" in queue.position(second.id).reason
    big = submit(priority=99, resources={"cpus_per_worker": 64})
    node = ClusterNode("a", "a", True, {"CPU": 2.0}, {"CPU": 2.0})
    snapshot = ClusterSnapshot(1.0, True, None, (node,))
    queue.put_cluster(snapshot)
    assert queue.cluster() == snapshot
    assert "64 CPUs (the maximum is 2 CPUs)" in queue.position(big.id).reason


def test_schedulers_are_alive_by_heartbeat(store: Store) -> None:
    now = [1000.0]
    store.clocks.simulated = lambda: now[0]
    queue = Queue(store)
    queue.heartbeat("s", node="n", pid=1)
    now[0] += 20
    queue.heartbeat("s", node="n", pid=1)
    now[0] += 20
    (alive,) = queue.schedulers_alive()
    assert (alive.name, alive.started_s, alive.heartbeat_s) == ("s", 1000.0, 1020.0)
    now[0] += 20
    assert queue.schedulers_alive() == []
    queue.heartbeat("s", node="n", pid=1)
    queue.leave("s")
    assert queue.schedulers_alive() == []


def test_the_order_counts_what_runs_already(queue: Queue, submit: Submit) -> None:
    submit(owner="ada", priority=90)
    queue.claim("s", lease_s=30)
    ids = [submit(owner=owner).id for owner in ("ada", "ada", "bob")]
    assert [entry.experiment.id for entry in queue.listing().items] == [ids[2], ids[0], ids[1]]


def test_pages_of_the_queue_are_the_order_of_claims(queue: Queue, submit: Submit) -> None:
    chance = random.Random(5)
    for _ in range(31):
        submit(owner=chance.choice("abcd"), priority=chance.choice([20, 50, 80]))
    queue.claim("s", lease_s=30, limit=4)
    shown: list[int] = []
    token = None
    while not shown or token is not None:
        page = queue.listing(page_size=4, page_token=token)
        assert page.total == 27
        assert [entry.position for entry in page.items] == list(range(len(shown) + 1, len(shown) + 5))[
            : len(page.items)
        ]
        shown += [entry.experiment.id for entry in page.items]
        token = page.next_page_token
    assert shown == [claimed.id for claimed in queue.claim("s", lease_s=30, limit=40)]


def test_claims_between_two_pages_move_nothing(queue: Queue, submit: Submit) -> None:
    chance = random.Random(6)
    for _ in range(20):
        submit(owner=chance.choice("abc"))
    expected = [entry.experiment.id for entry in queue.listing().items]
    first = queue.listing(page_size=8)
    queue.claim("s", lease_s=30, limit=5)
    second = queue.listing(page_size=8, page_token=first.next_page_token)
    assert [entry.experiment.id for entry in second.items] == expected[8:16]
    assert (second.items[0].position, second.total) == (4, 15)


def test_a_page_of_an_empty_queue_is_empty(queue: Queue) -> None:
    page = queue.listing()
    assert (page.items, page.total, page.next_page_token) == ([], 0, None)


def test_positions_are_those_of_the_order_of_claims(store: Store, submit: Submit) -> None:
    now = [1000.0]
    store.clocks.simulated = lambda: now[0]
    queue = Queue(store)
    chance = random.Random(7)
    for _ in range(40):
        submit(owner=chance.choice(["ada", "bob", "eve", "zoe"]), priority=chance.choice([20, 50, 50, 80]))
        now[0] += chance.choice([0.0, 1.0])  # Some join the queue at the same time.
    queue.claim("s", lease_s=30, limit=9)
    entries = queue.listing().items
    assert len(entries) == 31
    assert [queue.position(entry.experiment.id).position for entry in entries] == list(range(1, 32))


def test_a_claimed_experiment_keeps_its_runs_queued(store: Store, queue: Queue, submit: Submit) -> None:
    id = submit(3).id
    queue.claim("s", lease_s=30)
    assert store.experiments.run_counts(id)[RunState.queued] == 3
