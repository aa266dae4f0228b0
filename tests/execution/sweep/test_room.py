"""Runs and the room they need: elastic, absent, busy or held by others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.states import RunState
from service.driving.choosing import LIST_EVERY_S, NODES_RETURN_S, Wait
from service.driving.limits import TO_COME_EVERY_S
from service.driving.sweep import ROOM_S, Sweep
from service.driving.sweep_context import SweepContext
from service.recording.mailbox import Ending
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, NodesToCome
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.store import Store
from tests.execution.conftest import Clock, Submit, placement
from tests.execution.sweep.conftest import (
    CPUS,
    MACHINE_FAILED,
    READY,
    Begin,
    complete,
    given,
    opened,
    turn_of,
)
from trainers.errors import FailureClass

ELASTIC = {"parallel": {"strategy": "ddp", "workers": {"min": 2, "max": 4}}, "batch": {"global_size": 8}}


def test_an_elastic_run_takes_as_many_workers_as_have_room(
    begin: Begin, store: Store, clock: Clock, resources: list[dict[str, float]], notes: list[str]
) -> None:
    resources[:] = [{"CPU": 3.0}, {"CPU": 2.0}]
    sweep, experiment = begin(1, **ELASTIC)
    first = given(sweep)
    assert first.turn.shape.workers == first.turn.config.parallel.workers == 4
    resources.pop()
    sweep.ended(first.turn, MACHINE_FAILED)
    clock.forward(4)
    second = given(sweep)
    assert second.turn.shape.workers == second.turn.config.parallel.workers == 2, "3 does not divide 8"
    resources[:] = [{"CPU": 1.0}]
    store.attempts.run_started(second.run_id, second.attempt, total_steps=9, resumed_from_step=4, facts={})
    sweep.ended(second.turn, MACHINE_FAILED)
    clock.forward(16)
    assert sweep.next_turn() is Wait.later
    assert len(notes) == 1
    assert notes[0].startswith("runs are waiting for capacity: at least 2 workers of 1 CPU are needed")
    resources[:] = [{"CPU": 9.0}]
    clock.forward(4)
    complete(sweep, store, given(sweep))
    (run,) = store.runs.page(experiment_id=experiment.id).items
    assert (run.state, run.workers) == (RunState.succeeded, 4)
    assert [attempt.workers for attempt in store.runs.attempts(run.id)] == [4, 2, 4]


def test_what_an_elastic_run_costs_so_far_counts_the_workers_of_each_attempt(
    begin: Begin, store: Store, clock: Clock, resources: list[dict[str, float]]
) -> None:
    resources[:] = [{"CPU": 4.0}]
    sweep, experiment = begin(1, **ELASTIC)
    first = given(sweep)
    clock.forward(3600)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.bug, "IndexError")))
    resources[:] = [{"CPU": 2.0}]
    clock.forward(3600)
    given(sweep)
    clock.forward(3600)
    totals = store.accounting.totals(experiment.id)
    assert totals.device_hours == pytest.approx(4 + 2)
    assert totals.cost_usd == pytest.approx(6 * CATALOGUE["cpu"].price_usd_per_hour)


def test_a_run_whose_nodes_have_gone_waits_for_others(
    begin: Begin, store: Store, clock: Clock, resources: list[dict[str, float]], notes: list[str]
) -> None:
    sweep, _ = begin(1, parallel={"strategy": "ddp", "workers": 2})
    first = given(sweep)
    store.attempts.run_started(first.run_id, first.attempt, total_steps=9, resumed_from_step=0, facts={})
    sweep.ended(first.turn, MACHINE_FAILED)
    resources[:] = [{"CPU": 1.0}]
    clock.forward(4)
    assert sweep.next_turn() is Wait.later
    assert [note.partition(":")[0] for note in notes] == ["runs are waiting for capacity"]
    resources[:] = [dict(CPUS)]
    clock.forward(4)
    assert given(sweep).attempt == 2


def test_after_a_lost_driver_runs_without_an_attempt_wait_for_nodes_that_come_back(
    begin: Begin,
    store: Store,
    queue: Queue,
    settings: Settings,
    clock: Clock,
    resources: list[dict[str, float]],
    look: Callable[[], ClusterSnapshot],
) -> None:
    """A lost head takes all nodes along, and its drivers: the next one is there before the nodes are."""
    first, experiment = begin(3)
    complete(first, store, given(first))
    resources.clear()
    spec = ExperimentSpec.model_validate_json(store.experiments.spec(experiment.id)[1])

    def lose_driver(attempt: int) -> Sweep:
        store.drivers.release_experiment(experiment.id, attempt, delay_s=0.0)
        queue.claim("s", lease_s=60)
        store.drivers.started(experiment.id, attempt + 1, "node", 1)
        return Sweep(SweepContext(store, settings, experiment.id, attempt + 1, spec, CATALOGUE), look)

    second = lose_driver(1)
    assert second.next_turn() is Wait.later
    resources.append(dict(CPUS))
    clock.forward(4)
    complete(second, store, given(second))
    resources.clear()
    third = lose_driver(2)
    assert third.next_turn() is Wait.later
    clock.forward(NODES_RETURN_S)
    assert third.next_turn() is Wait.over, "then it is not known that they ever come"
    failed = [run.failure_class for run in store.runs.page(experiment_id=experiment.id).items]
    assert failed == [None, None, FailureClass.bad_spec]


def test_what_the_cluster_could_never_run_fails_with_the_reason(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1, search={"axes": {"resources.cpus_per_worker": [8, 1]}})
    assignment = given(sweep)
    impossible, possible = store.runs.page(experiment_id=experiment.id).items
    assert assignment.run_id == possible.id
    assert impossible.state is RunState.failed
    assert impossible.failure_class is FailureClass.bad_spec
    assert "no node has" in (impossible.failure_message or "")


def test_capacity_is_waited_for_when_asked_and_said_once(
    begin: Begin, clock: Clock, notes: list[str], resources: list[dict[str, float]]
) -> None:
    sweep, _ = begin(1, hardware="A100", queue={"wait_for_capacity": True})
    for _ in range(3):
        assert sweep.next_turn() is Wait.later
        clock.forward(3)
    assert len(notes) == 1
    assert "runs are waiting for capacity" in notes[0]
    resources.append({"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0})
    clock.forward(3)
    assert given(sweep).turn.shape.device == "cuda"


def test_cells_of_absent_hardware_wait_while_the_others_go_on(
    begin: Begin,
    store: Store,
    queue: Queue,
    resources: list[dict[str, float]],
    notes: list[str],
    clock: Clock,
) -> None:
    sweep, experiment = begin(1, search={"axes": {"hardware": ["cpu", "A100"]}})
    here = given(sweep)
    assert store.runs.get(here.run_id).hardware == "cpu"
    complete(sweep, store, here)
    assert sweep.next_turn() is Wait.later
    assert notes == [
        "runs are waiting for capacity: no node has hardware A100-PCIE-80GB (Ray resource "
        "accelerator_type:A100); "
        "the cluster has no accelerators"
    ]
    sweep.tell_waiting([])
    queue.heartbeat("s", node="n", pid=1)
    listing = queue.listing()
    assert (listing.items, [each.experiment and each.experiment.id for each in listing.at_work]) == (
        [],
        [experiment.id],
    )
    assert listing.at_work[0].reason == (
        "runs wait for capacity: no node has hardware A100-PCIE-80GB (Ray resource accelerator_type:A100); "
        "the cluster has no accelerators"
    )
    resources.append({"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0})
    clock.forward(10)
    assert store.runs.get(given(sweep).run_id).hardware == "A100-PCIE-80GB"
    sweep.tell_waiting([])
    assert queue.listing().at_work == []


def test_a_run_whose_node_can_come_has_its_turn_and_says_that_it_starts(
    begin: Begin, store: Store, clock: Clock, queue: Queue, resources: list[dict[str, float]]
) -> None:
    a100 = {"CPU": 8.0, "GPU": 2.0, "accelerator_type:A100": 1.0}
    group = NodesToCome("a100", "A100-PCIE-80GB", 2, 1, 360.0, (), a100, {})
    queue.put_cluster(ClusterSnapshot(clock(), True, None, (), (group,)))
    sweep, _ = begin(3, hardware="A100")
    turns = [turn_of(sweep) for _ in range(2)]
    assert sweep.next_turn() is Wait.later, "one node of two devices can come"
    assert all(turn.starts_node for turn in turns)
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    assert store.runs.get(turns[0].run_id).waits_for == (
        "1 CPU + 1 GPU + A100; starts a node of 2 A100-PCIE-80GB, about 6 minutes"
    )
    resources.append(a100)
    queue.put_cluster(ClusterSnapshot(clock(), True, None, ()))
    clock.forward(TO_COME_EVERY_S)
    complete(sweep, store, opened(sweep, turns[0]))
    assert not turn_of(sweep).starts_node


def test_a_node_that_has_just_gone_can_come_again_before_the_scheduler_looks(
    begin: Begin, store: Store, clock: Clock, queue: Queue, resources: list[dict[str, float]]
) -> None:
    a100 = {"CPU": 8.0, "GPU": 1.0, "accelerator_type:A100": 1.0}
    group = NodesToCome("a100", "A100-PCIE-80GB", 1, 0, 360.0, (), a100, {})
    there = ClusterNode("id-a", "node-a", True, a100, a100)
    queue.put_cluster(ClusterSnapshot(clock(), True, None, (there,), (group,)))
    sweep, _ = begin(2, hardware="A100")
    assert turn_of(sweep).starts_node
    assert sweep.next_turn() is Wait.later, "no more than one can come"
    resources.append(a100)
    clock.forward(TO_COME_EVERY_S)
    assert sweep.next_turn() is Wait.later, "it is there, and counts once"


def test_a_run_without_room_has_no_attempt_and_is_charged_nothing(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1)
    turn = turn_of(sweep)
    run = store.runs.get(turn.run_id)
    assert (run.state, run.attempt) == (RunState.queued, 0)
    assert store.runs.attempts(turn.run_id) == []
    assert store.accounting.totals(experiment.id).device_hours == 0.0
    assert sweep.live == ()


def test_a_slow_start_is_explained_once(begin: Begin, notes: list[str]) -> None:
    sweep, _ = begin(1)
    sweep.tell_slow_start()
    sweep.tell_slow_start()
    (said,) = notes
    assert said.startswith("runs have their devices, and their processes are still starting")


def test_a_run_without_room_says_what_for_and_behind_whom(
    begin: Begin, store: Store, clock: Clock, submit: Submit, queue: Queue
) -> None:
    sweep, _ = begin(1)
    turn = turn_of(sweep)
    other = submit(1)
    queue.claim("s", lease_s=60)
    store.drivers.started(other.id, 1, "node", 2)
    store.drivers.record_placements(other.id, 1, [placement("p", placed_s=clock())])
    sweep.tell_waiting([])
    assert store.runs.get(turn.run_id).waits_for is None  # It may be placed at any moment.
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    assert store.runs.get(turn.run_id).waits_for == f"1 CPU; experiment {other.id} holds 2 cpu"
    opened(sweep, turn)
    sweep.tell_waiting([])
    assert store.runs.get(turn.run_id).waits_for is None


def test_what_a_run_waits_for_goes_with_the_driver_that_saw_it(
    begin: Begin, store: Store, clock: Clock, queue: Queue
) -> None:
    sweep, experiment = begin(1)
    turn = turn_of(sweep)
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    assert store.runs.get(turn.run_id).waits_for is not None
    store.drivers.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, 2, "node", 2)
    store.attempts.reset_runs_of_dead_attempt(experiment.id, 2)
    assert store.runs.get(turn.run_id).waits_for is None


def test_a_run_measured_alone_holds_its_node_and_the_next_waits(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2, measure="exclusive")
    first = turn_of(sweep)
    assert dict(first.shape.resources) == {"CPU": 2.0}
    assert first.config.rates.devices_per_worker == 2
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, opened(sweep, first))
    assert turn_of(sweep).run_id != first.run_id


def test_a_run_measured_alone_says_that_it_waits_for_a_whole_node(
    begin: Begin, store: Store, clock: Clock, submit: Submit, queue: Queue, taken: set[int]
) -> None:
    taken.add(0)
    sweep, _ = begin(1, measure="exclusive")
    turn = turn_of(sweep)
    other = submit(1)
    queue.claim("s", lease_s=60)
    store.drivers.started(other.id, 1, "node", 2)
    store.drivers.record_placements(other.id, 1, [placement("p", placed_s=clock())])
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    said = f"2 CPUs, a whole node (measure: exclusive); experiment {other.id} holds 2 cpu"
    assert store.runs.get(turn.run_id).waits_for == said
    assert sweep.wanted(turn)


def test_a_run_that_waits_for_a_busy_node_moves_to_one_that_is_idle(
    begin: Begin, clock: Clock, resources: list[dict[str, float]], taken: set[int]
) -> None:
    taken.add(0)
    sweep, _ = begin(1, measure="exclusive")
    turn = turn_of(sweep)
    resources.append({"CPU": 4.0})
    clock.forward(ROOM_S + 3.0)
    assert not sweep.wanted(turn)
    sweep.drop(turn)
    again = turn_of(sweep)
    assert (again.run_id, dict(again.shape.resources)) == (turn.run_id, {"CPU": 4.0})
    assert sweep.wanted(again)


def test_a_run_that_waits_for_a_node_that_has_gone_is_placed_again(
    begin: Begin, clock: Clock, resources: list[dict[str, float]], taken: set[int]
) -> None:
    resources.append({"CPU": 4.0})
    taken |= {0}
    sweep, _ = begin(1, measure="exclusive")
    turn = turn_of(sweep)
    assert dict(turn.shape.resources) == {"CPU": 4.0}
    resources.pop()
    clock.forward(ROOM_S + 3.0)
    assert not sweep.wanted(turn)


def test_a_run_whose_workers_are_starting_waits_for_no_room(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(2)
    first, second = turn_of(sweep), turn_of(sweep)
    clock.forward(ROOM_S)
    sweep.tell_waiting([first.shape])
    assert store.runs.get(first.run_id).waits_for is None
    assert store.runs.get(second.run_id).waits_for == "1 CPU; no other experiment holds devices"


def test_a_run_cancelled_while_it_waits_for_room_gives_its_turn_back(
    begin: Begin, store: Store, clock: Clock
) -> None:
    sweep, _ = begin(2, queue={"max_concurrent_runs": 1})
    turn = turn_of(sweep)
    store.requests.cancel_run(turn.run_id)
    clock.forward(LIST_EVERY_S)
    sweep.tell_waiting([])
    assert not sweep.wanted(turn)
    assert sweep.open(turn, READY) is None
    assert turn_of(sweep).run_id != turn.run_id
