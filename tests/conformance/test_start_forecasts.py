"""When what waits will start: forecast, stored, shown to those who may see it, and learned from."""

from __future__ import annotations

import pytest

from service.domain.access import EVERYTHING, Visibility
from service.domain.records import Experiment, Placement
from service.domain.shares import StartForecast
from service.planner.start_forecasts import ERRORS, FORECASTS_IN, StartForecasts, planned_start
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, NodesToCome
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.store import Store
from tests.conformance.building import Submit, plans_of

CLUSTER = ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 2.0}, {}),))


@pytest.fixture
def now(store: Store) -> list[float]:
    """The installation's clock."""
    at = [store.clock()]
    store.clocks.simulated = lambda: at[0]
    return at


@pytest.fixture
def busy(store: Store, queue: Queue, submit: Submit, now: list[float]) -> Experiment:
    """Ada's grid, which holds both devices of the cluster."""
    queue.put_cluster(CLUSTER)
    grid = submit(20)
    (claimed,) = queue.claim("s", lease_s=30)
    store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    held = [
        Placement(
            id=f"placement-{number}", hardware="cpu", workers=1, devices=1, price_usd_per_hour=0.9,
            power_w=15.0, placed_s=now[0], ready_s=None, released_s=None, seen_s=now[0],
        )
        for number in range(2)
    ]  # fmt: skip
    store.drivers.record_placements(grid.id, 1, held)
    return grid


def foreseen(queue: Queue, experiment: Experiment, visible: Visibility = EVERYTHING) -> StartForecast:
    start = queue.position(experiment.id, visible).start
    assert start is not None
    return start


def test_a_waiting_experiment_learns_when_behind_whom_and_why(
    store: Store, queue: Queue, submit: Submit, busy: Experiment, now: list[float]
) -> None:
    first, second = submit(owner="bob", priority=70), submit(owner="cem")
    assert queue.position(first.id).start is None, "nothing was forecast yet"
    StartForecasts(store).run_once()
    start, later = foreseen(queue, first), foreseen(queue, second)
    assert (start.hardware, start.devices, start.at_s) == ("cpu", 1.0, now[0])
    assert "waits for 1 cpu" in start.reason
    assert start.earliest_s is not None
    assert start.median_s is not None
    assert start.latest_s is not None
    assert now[0] <= start.earliest_s <= start.median_s <= start.latest_s
    assert start.place < later.place
    assert first.id in later.ahead
    assert later.user.held_usd_per_hour == 0.0
    assert later.project.held_usd_per_hour == pytest.approx(2 * 0.05)
    listed = {entry.experiment.id: entry.start for entry in queue.listing().items if entry.experiment}
    assert listed == {first.id: start, second.id: later}


def test_experiments_ahead_of_other_projects_are_not_named(
    store: Store, queue: Queue, submit: Submit, busy: Experiment
) -> None:
    store.projects.create("secret")
    hidden = submit(owner="bob", priority=70, project="secret")
    mine = submit(owner="cem")
    StartForecasts(store).run_once()
    assert hidden.id in foreseen(queue, mine).ahead
    assert hidden.id not in foreseen(queue, mine, Visibility(frozenset({"default"}))).ahead
    shown = queue.listing(visible=Visibility(frozenset({"default"}))).items
    assert [entry.start is None for entry in shown if entry.experiment is None] == [True]


def test_forecasts_that_nobody_renews_are_not_shown(
    store: Store, queue: Queue, submit: Submit, busy: Experiment, now: list[float]
) -> None:
    waiting = submit(owner="bob")
    StartForecasts(store).run_once()
    assert queue.position(waiting.id).start is not None
    now[0] += 61.0
    assert queue.position(waiting.id).start is None


def test_an_empty_queue_writes_nothing(store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put_cluster(CLUSTER)

    def write(body: object) -> None:
        raise AssertionError("a transaction was begun")

    monkeypatch.setattr(store.database, "write", write)
    StartForecasts(store).run_once()


def test_a_start_teaches_how_far_its_forecast_was_off(
    store: Store, queue: Queue, submit: Submit, busy: Experiment, now: list[float]
) -> None:
    started, cancelled = submit(owner="bob", priority=70), submit(owner="cem")
    foresight = StartForecasts(store)
    foresight.run_once()
    now[0] += 30.0
    (claimed,) = queue.claim("s", lease_s=30)
    assert claimed.id == started.id
    store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    store.requests.cancel(cancelled.id)
    foresight.run_once()
    with store.database.read() as connection:
        errors = connection.execute(ERRORS).all()
        left = connection.execute(FORECASTS_IN, {"in_pool": "default"}).all()
    assert len(errors) == 1, "what was cancelled teaches nothing"
    assert errors[0].early >= errors[0].late
    assert left == [], "nothing waits any more"


def test_what_finds_no_place_waits_for_an_experiment_to_end(
    store: Store, queue: Queue, submit: Submit, busy: Experiment
) -> None:
    most = store.settings.max_concurrent_experiments
    queue.put_cluster(ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 64.0}, {}),)))
    for number in range(most - 1):
        submit(owner=f"driver-{number}")
        (claimed,) = queue.claim("s", lease_s=30)
        store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    waiting = [submit(owner=f"user-{number}") for number in range(most + 1)]
    StartForecasts(store).run_once()
    start, last = foreseen(queue, waiting[0]), foreseen(queue, waiting[-1])
    assert f"max_concurrent_experiments is {most}" in start.reason
    assert start.latest_s is not None
    assert start.median_s is not None
    assert start.median_s > start.at_s
    assert last.latest_s is None, "those that start before it are not known yet"


def test_a_longer_queue_than_places_is_forecast_where_nothing_runs(
    store: Store, queue: Queue, submit: Submit
) -> None:
    queue.put_cluster(ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 64.0}, {}),)))
    waiting = [submit() for _ in range(store.settings.max_concurrent_experiments + 2)]
    StartForecasts(store).run_once()
    last = foreseen(queue, waiting[-1])
    assert "as many experiments run as may at a time" in last.reason
    assert last.latest_s is None


def test_who_has_no_driver_is_forecast_the_place_of_whoever_has_most(
    store: Store, queue: Queue, submit: Submit, now: list[float]
) -> None:
    queue.put_cluster(ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 64.0}, {}),)))
    for _ in range(store.settings.max_concurrent_experiments):
        submit()
        (claimed,) = queue.claim("s", lease_s=30)
        store.drivers.started(claimed.id, claimed.attempt, "node", 1)
    newcomer, more = submit(owner="bob"), submit(owner="ada")
    StartForecasts(store).run_once()
    soon, later = foreseen(queue, newcomer).median_s, foreseen(queue, more).median_s
    assert soon is not None
    assert later is not None
    assert soon - now[0] <= 60.0 < later - now[0]


def test_a_spec_that_finds_devices_starts_at_once(store: Store, queue: Queue) -> None:
    spec = plans_of(1, 50)[0]
    found = planned_start(spec, store, CLUSTER, owner="bob", visible=EVERYTHING)
    assert found is not None
    assert (found.earliest_s, found.latest_s, found.reason, found.yields) == (0.0, 0.0, None, [])
    assert found.words == "starts at once"


def test_a_spec_whose_devices_can_come_starts_with_their_node(store: Store) -> None:
    group = NodesToCome("g", "cpu", 4, 1, 360.0, (), {"CPU": 4.0}, {})
    empty = ClusterSnapshot(0.0, True, None, (ClusterNode("1", "1", True, {"CPU": 0.0}, {}),), (group,))
    found = planned_start(plans_of(1, 50)[0], store, empty, owner="bob", visible=EVERYTHING)
    assert found is not None
    assert (found.median_s, found.words) == (360.0, "starts a node of 4 cpu, about 6 minutes")


def planned(store: Store, spec: ExperimentSpec, visible: Visibility = EVERYTHING) -> str:
    found = planned_start(spec, store, CLUSTER, owner="bob", visible=visible)
    assert found is not None
    return found.words


def test_a_spec_is_told_at_whose_expense_it_would_run(
    store: Store, queue: Queue, submit: Submit, busy: Experiment, now: list[float]
) -> None:
    now[0] += 3600.0
    spec = plans_of(1, 50)[0]
    words = planned(store, spec)
    assert f"1 run of experiment {busy.id} of ada would stop for it at the next checkpoint" in words
    hidden = planned(store, spec, Visibility(frozenset({"other"})))
    assert "1 run of others would stop for it at the next checkpoint" in hidden


def test_a_spec_that_the_cluster_cannot_run_has_no_start(store: Store) -> None:
    spec = plans_of(1, 50, hardware="H100")[0]
    assert planned_start(spec, store, CLUSTER, owner="bob", visible=EVERYTHING) is None
