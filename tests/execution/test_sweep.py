"""The sweep against a real SQLite store and no Ray: which run is next, and what an ending leads to."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.records import Experiment
from service.domain.states import ExperimentState, RunState
from service.driving import room
from service.driving.choosing import LIST_EVERY_S, Wait
from service.driving.sweep import ROOM_S, Sweep
from service.recording import outages
from service.recording.assignment import Assignment, Ending, Ready, Turn
from service.recording.outages import wait_out
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, FreeRoom
from service.scheduling.queue import Queue
from service.spec.experiment import ExperimentSpec
from service.store import CheckpointRow, Conflict, RecordBatch, StaleAttempt, Store, StoreUnavailable
from tests.execution.conftest import Clock, Submit, placement
from trainers.errors import FailureClass
from trainers.reporting import StopReason

CPUS = {"CPU": 2.0}
READY = Ready("placement", 0.0)
COMPLETED = Ending("completed", summary={"accuracy": 0.9})
PAUSED = Ending("stopped", stop_reason=StopReason.pause)

Begin = Callable[..., tuple[Sweep, Experiment]]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def resources() -> list[dict[str, float]]:
    """The cluster's nodes; tests change it."""
    return [dict(CPUS)]


@pytest.fixture
def taken() -> set[int]:
    """Nodes, by place, whose CPUs are reserved; tests change it."""
    return set()


@pytest.fixture
def look(resources: list[dict[str, float]], taken: set[int]) -> Callable[[], ClusterSnapshot]:
    """The cluster as it is."""

    def look() -> ClusterSnapshot:
        nodes = tuple(
            ClusterNode(str(n), str(n), True, each, {"CPU": 0.0} if n in taken else {})
            for n, each in enumerate(resources)
        )
        return ClusterSnapshot(0.0, True, None, nodes)

    return look


@pytest.fixture
def begin(
    store: Store,
    queue: Queue,
    settings: Settings,
    submit: Submit,
    notes: list[str],
    look: Callable[[], ClusterSnapshot],
) -> Begin:
    """Submit, claim and begin the sweep of an experiment."""

    def begin(runs: int = 2, **fields: Any) -> tuple[Sweep, Experiment]:
        experiment = submit(runs, **fields)
        queue.claim("s", lease_s=60)
        store.driver_started(experiment.id, 1, "node", 1)
        spec = ExperimentSpec.model_validate_json(store.experiment_spec(experiment.id)[1])

        def note(message: str, kind: EventKind) -> None:
            notes.append(message)
            store.note(experiment.id, 1, message, kind=kind)

        sweep = Sweep(store, settings, experiment.id, 1, spec, CATALOGUE, capacity=look, note=note)
        return sweep, experiment

    return begin


def turn_of(sweep: Sweep) -> Turn:
    following = sweep.next_turn()
    assert isinstance(following, Turn)
    return following


def given(sweep: Sweep) -> Assignment:
    """A run whose workers are ready at once."""
    return opened(sweep, turn_of(sweep))


def opened(sweep: Sweep, turn: Turn) -> Assignment:
    assignment = sweep.open(turn, READY)
    assert assignment is not None
    return assignment


def complete(sweep: Sweep, store: Store, assignment: Assignment, ending: Ending = COMPLETED) -> None:
    """The worker begins and ends as it would."""
    store.run_started(assignment.run_id, assignment.attempt, total_steps=9, resumed_from_step=0, facts={})
    sweep.ended(assignment.turn, ending)


def in_order(store: Store, experiment: Experiment) -> list[int]:
    """Ids of an experiment's runs in the order of measurement."""
    spec = ExperimentSpec.model_validate_json(store.experiment_spec(experiment.id)[1])
    runs = store.runs(experiment_id=experiment.id, page_size=1000).items
    return [run.id for run in sorted(runs, key=lambda run: spec.places()[run.index])]


def test_hands_out_runs_in_the_order_of_measurement_until_the_cluster_is_full(
    begin: Begin, store: Store
) -> None:
    sweep, experiment = begin(3)
    runs = in_order(store, experiment)
    first, second = given(sweep), given(sweep)
    assert [first.run_id, second.run_id] == runs[:2]
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, first)
    assert given(sweep).run_id == runs[2]
    assert store.run(first.run_id).state is RunState.succeeded
    assert store.run(first.run_id).accuracy == 0.9


def test_a_full_cluster_is_looked_at_once_for_each_kind_of_run(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, _ = begin(
        30, search={"axes": {"precision": ["fp32", "bf16"], "resources.cpus_per_worker": [1, 2]}}
    )
    while isinstance(sweep.next_turn(), Turn):
        pass
    looked: list[object] = []
    held: list[object] = []
    lacks, holds = room.unsatisfiable, FreeRoom.holds

    def count_lacks(*given: Any) -> str | None:
        looked.append(given)
        return lacks(*given)

    def count_holds(self: FreeRoom, *given: Any) -> bool:
        held.append(given)
        return holds(self, *given)

    monkeypatch.setattr(room, "unsatisfiable", count_lacks)
    monkeypatch.setattr(FreeRoom, "holds", count_holds)
    for _ in range(3):
        assert sweep.next_turn() is Wait.later
    assert len(looked) <= 2  # One and two CPUs, for the cluster as it was at one time.
    assert len(held) == 3 * 2


def test_a_run_cancelled_after_it_was_listed_gets_no_turn(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, experiment = begin(4)
    runs = in_order(store, experiment)
    first = given(sweep)
    store.request_cancel_run(runs[1])
    assert sweep.next_turn() is Wait.later
    assert turn_of(sweep).run_id == runs[2]
    complete(sweep, store, first)
    assert turn_of(sweep).run_id == runs[3]


def test_no_more_at_a_time_than_the_spec_allows(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2, queue={"max_concurrent_runs": 1})
    first = given(sweep)
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, first)
    given(sweep)


def test_is_over_when_every_run_has_ended(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    only = given(sweep)
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, only)
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)


def test_a_machine_failure_is_tried_again_after_its_delay(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(1)
    first = given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.infrastructure, "a worker process died")))
    assert store.run(first.run_id).state is RunState.queued
    assert sweep.next_turn() is Wait.later
    clock.forward(2)
    again = given(sweep)
    assert (again.run_id, again.attempt) == (first.run_id, 2)


ELASTIC = {"parallel": {"strategy": "ddp", "workers": {"min": 2, "max": 4}}, "batch": {"global_size": 8}}
MACHINE_FAILED = Ending("failed", failure=(FailureClass.infrastructure, "a worker's node is gone"))


def test_an_elastic_run_takes_as_many_workers_as_have_room(
    begin: Begin, store: Store, clock: Clock, resources: list[dict[str, float]], notes: list[str]
) -> None:
    resources[:] = [{"CPU": 3.0}, {"CPU": 2.0}]
    sweep, experiment = begin(1, **ELASTIC)
    first = given(sweep)
    assert first.shape.workers == first.config.parallel.workers == 4
    resources.pop()
    sweep.ended(first.turn, MACHINE_FAILED)
    clock.forward(4)
    second = given(sweep)
    assert second.shape.workers == second.config.parallel.workers == 2  # 3 does not divide the batch of 8
    resources[:] = [{"CPU": 1.0}]
    store.run_started(second.run_id, second.attempt, total_steps=9, resumed_from_step=4, facts={})
    sweep.ended(second.turn, MACHINE_FAILED)
    clock.forward(16)
    assert sweep.next_turn() is Wait.later
    assert len(notes) == 1
    assert notes[0].startswith("runs are waiting for capacity: at least 2 workers of 1 CPU are needed")
    resources[:] = [{"CPU": 9.0}]
    clock.forward(4)
    complete(sweep, store, given(sweep))
    (run,) = store.runs(experiment_id=experiment.id).items
    assert (run.state, run.workers) == (RunState.succeeded, 4)
    assert [attempt.workers for attempt in store.attempts(run.id)] == [4, 2, 4]


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
    totals = store.experiment_totals(experiment.id)
    assert totals.device_hours == pytest.approx(4 + 2)
    assert totals.cost_usd == pytest.approx(6 * CATALOGUE["cpu"].price_usd_per_hour)


def test_a_run_whose_nodes_have_gone_waits_for_others(
    begin: Begin, store: Store, clock: Clock, resources: list[dict[str, float]], notes: list[str]
) -> None:
    sweep, _ = begin(1, parallel={"strategy": "ddp", "workers": 2})
    first = given(sweep)
    store.run_started(first.run_id, first.attempt, total_steps=9, resumed_from_step=0, facts={})
    sweep.ended(first.turn, MACHINE_FAILED)
    resources[:] = [{"CPU": 1.0}]
    clock.forward(4)
    assert sweep.next_turn() is Wait.later
    assert [note.partition(":")[0] for note in notes] == ["runs are waiting for capacity"]
    resources[:] = [dict(CPUS)]
    clock.forward(4)
    assert given(sweep).attempt == 2


def test_a_bug_is_tried_max_restarts_times(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(1, max_restarts=2)
    for attempt in (1, 2, 3):
        assignment = given(sweep)
        assert assignment.attempt == attempt
        sweep.ended(assignment.turn, Ending("failed", failure=(FailureClass.bug, "IndexError")))
        clock.forward(301)
    assert store.run(assignment.run_id).state is RunState.failed
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.failed, (FailureClass.bug, "IndexError"))


def test_out_of_memory_is_a_result_and_not_tried_again(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2)
    first, second = given(sweep), given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.out_of_memory, "batch 32 does not fit")))
    complete(sweep, store, second)
    assert store.run(first.run_id).state is RunState.failed
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state()[0] is ExperimentState.succeeded


def test_progress_between_machine_failures_keeps_the_delay_short(
    begin: Begin, store: Store, clock: Clock
) -> None:
    sweep, _ = begin(1)
    for attempt in range(1, 8):
        assignment = given(sweep)
        assert assignment.attempt == attempt
        store.record(RecordBatch(checkpoints=[CheckpointRow(assignment.run_id, attempt, attempt * 10, "/x")]))
        sweep.ended(assignment.turn, Ending("failed", failure=(FailureClass.infrastructure, "died")))
        clock.forward(1.1)


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (StopReason.cancel, RunState.cancelled),
        (StopReason.pause, RunState.paused),
        (StopReason.early_stop, RunState.stopped),
        (StopReason.preempted, RunState.queued),
    ],
)
def test_a_stopped_run_goes_where_its_reason_says(
    begin: Begin, store: Store, reason: StopReason, state: RunState
) -> None:
    sweep, experiment = begin(1)
    assignment = given(sweep)
    if reason is StopReason.cancel:
        store.request_cancel_run(assignment.run_id)
    if reason is StopReason.pause:
        store.request_pause(experiment.id)
    sweep.ended(assignment.turn, Ending("stopped", stop_reason=reason, summary={"steps": 3}))
    assert store.run(assignment.run_id).state is state


def test_nothing_is_handed_out_once_all_is_stopping(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first = given(sweep)
    store.request_pause(experiment.id)
    sweep.stopping = StopReason.pause
    assert sweep.next_turn() is Wait.later  # The pause may be withdrawn.
    sweep.ended(first.turn, PAUSED)
    assert sweep.next_turn() is Wait.over
    assert sweep.conclude() is ExperimentState.paused


def test_a_pause_withdrawn_while_runs_stop_for_it_is_forgotten(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first, second = given(sweep), given(sweep)
    store.request_pause(experiment.id)
    sweep.stopping = StopReason.pause
    sweep.ended(first.turn, PAUSED)
    store.resume(experiment.id)
    sweep.ended(second.turn, PAUSED)  # It had stopped before it could hear of that.
    sweep.stopping = None
    complete(sweep, store, given(sweep))
    complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.conclude() is ExperimentState.succeeded
    runs = store.runs(experiment_id=experiment.id).items
    assert [(run.state, run.attempt) for run in runs] == [(RunState.succeeded, 2)] * 2


def test_a_pause_withdrawn_as_the_experiment_pauses_is_not_carried_out(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1)
    store.request_pause(experiment.id)
    sweep.stopping = StopReason.pause
    assert sweep.next_turn() is Wait.over
    store.resume(experiment.id)
    assert sweep.conclude() is None
    sweep.stopping = None
    sweep.recover()
    complete(sweep, store, given(sweep))
    assert sweep.conclude() is ExperimentState.succeeded


def test_a_run_that_is_retried_as_the_experiment_ends_is_run(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    first = given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.bad_data, "line 3")))
    assert sweep.next_turn() is Wait.over
    store.retry_run(first.run_id)
    assert sweep.conclude() is None
    assert store.run(first.run_id).state is RunState.queued
    sweep.recover()
    complete(sweep, store, given(sweep))
    assert sweep.conclude() is ExperimentState.succeeded


def test_runs_whose_trials_were_ended_start_again_when_people_ask_for_more(
    begin: Begin, store: Store
) -> None:
    """A pause took too long, so that all trials were ended at once, and was withdrawn just then."""
    sweep, experiment = begin(1)
    first = given(sweep)
    store.run_started(first.run_id, 1, total_steps=9, resumed_from_step=0, facts={})
    store.request_pause(experiment.id)
    store.resume(experiment.id)
    assert sweep.conclude() is None
    sweep.recover()
    assert given(sweep).attempt == 2


def losing(store: Store, monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """The answers of these transactions, counted from now, are lost after their commit."""
    write, numbers = store.database.write, itertools.count()

    def committed_and_lost(body: Callable[[Any], Any]) -> Any:
        answer = write(body)
        if next(numbers) in calls:
            raise StoreUnavailable("the connection was lost")
        return answer

    monkeypatch.setattr(store.database, "write", committed_and_lost)
    monkeypatch.setattr(outages, "RETRY_S", 0.0)


@pytest.mark.parametrize("lost", range(12))
def test_an_answer_that_is_lost_costs_no_attempt(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    sweep, experiment = begin(2)
    losing(store, monkeypatch, lost, lost + 3)
    sweep.recover()
    while isinstance(following := sweep.next_turn(), Turn):
        assignment = opened(sweep, following)
        wait_out(partial(started, store, assignment.run_id), "the recorder")
        sweep.ended(assignment.turn, COMPLETED)
    assert following is Wait.over
    assert wait_out(sweep.conclude, "the end") is ExperimentState.succeeded
    runs = store.runs(experiment_id=experiment.id).items
    assert [(run.state, run.attempt) for run in runs] == [(RunState.succeeded, 1)] * 2


def started(store: Store, run_id: int) -> None:
    with contextlib.suppress(Conflict):  # Reported before; the answer was lost.
        store.run_started(run_id, 1, total_steps=9, resumed_from_step=0, facts={})


def test_a_failure_whose_answer_is_lost_is_tried_again(
    begin: Begin, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, _ = begin(1)
    first = given(sweep)
    losing(store, monkeypatch, 0)
    sweep.ended(first.turn, MACHINE_FAILED)
    assert store.run(first.run_id).infrastructure_failures == 1
    clock.forward(2)
    assert given(sweep).attempt == 2


def test_an_attempt_that_was_opened_unheard_is_given_up_when_its_turn_is(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause was heard between the two tries to open the attempt, and withdrawn later."""
    sweep, _ = begin(1)
    turn = turn_of(sweep)
    losing(store, monkeypatch, 0)
    with monkeypatch.context() as patch:
        patch.setattr(outages.time, "sleep", lambda seconds: setattr(sweep, "stopping", StopReason.pause))
        assert sweep.open(turn, READY) is None
    assert store.run(turn.run_id).state is RunState.starting
    sweep.stopping = None
    again = given(sweep)
    assert (again.run_id, again.attempt) == (turn.run_id, 2)


@pytest.mark.parametrize("lost", range(2))
def test_a_run_that_cannot_be_trained_fails_when_an_answer_is_lost(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    sweep, experiment = begin(1, search={"axes": {"resources.cpus_per_worker": [8, 9]}})
    losing(store, monkeypatch, lost)
    assert sweep.next_turn() is Wait.later
    assert sweep.next_turn() is Wait.over
    runs = store.runs(experiment_id=experiment.id).items
    assert [(run.state, run.attempt) for run in runs] == [(RunState.failed, 1)] * 2
    assert sweep.conclude() is ExperimentState.failed


def test_a_reached_budget_stops_the_rest(begin: Begin, store: Store, clock: Clock, notes: list[str]) -> None:
    sweep, experiment = begin(3, budget={"hours": 1.0}, queue={"max_concurrent_runs": 1})
    first = given(sweep)
    clock.forward(2 * 3600)
    complete(sweep, store, first)
    assert sweep.next_turn() is Wait.over
    assert "budget.hours reached" in notes[0]
    state, _ = sweep.final_state()
    assert state is ExperimentState.succeeded
    store.finish_experiment(experiment.id, 1, state)
    states = [run.state for run in store.runs(experiment_id=experiment.id).items]
    assert states == [RunState.succeeded, RunState.stopped, RunState.stopped]


def test_what_the_cluster_could_never_run_fails_with_the_reason(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1, search={"axes": {"resources.cpus_per_worker": [8, 1]}})
    assignment = given(sweep)
    impossible, possible = store.runs(experiment_id=experiment.id).items
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
    assert given(sweep).shape.device == "cuda"


def test_wide_runs_wait_for_narrow_ones_to_end(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1, parallel={"strategy": "ddp"}, search={"axes": {"parallel.workers": [1, 2]}})
    narrow = given(sweep)
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, narrow)
    assert given(sweep).shape.workers == 2


def test_a_cancelled_run_is_passed_over(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first, second = store.runs(experiment_id=experiment.id).items
    store.request_cancel_run(first.id)
    assert given(sweep).run_id == second.id


def test_a_run_that_people_queue_again_is_taken_up(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(2)
    first, _second = given(sweep), given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.bad_data, "line 3")))
    store.retry_run(first.run_id)
    clock.forward(6)
    assert given(sweep).run_id == first.run_id


def test_an_ending_waits_for_the_report_of_its_start(begin: Begin, store: Store) -> None:
    """The database was away: the driver comes back to it before the recorder does."""
    sweep, _ = begin(1)
    assignment = given(sweep)
    late = threading.Timer(
        0.5,
        lambda: store.run_started(assignment.run_id, 1, total_steps=9, resumed_from_step=0, facts={}),
    )
    late.start()
    sweep.ended(assignment.turn, COMPLETED)
    late.join()
    assert store.run(assignment.run_id).state is RunState.succeeded


def test_an_echo_of_an_ending_changes_nothing(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    assignment = given(sweep)
    complete(sweep, store, assignment)
    sweep.ended(assignment.turn, Ending("failed", failure=(FailureClass.bug, "late")))
    assert store.run(assignment.run_id).state is RunState.succeeded


def test_a_sweep_of_an_old_attempt_is_fenced(begin: Begin, store: Store, queue: Queue) -> None:
    sweep, experiment = begin(2)
    store.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s", lease_s=60)
    with pytest.raises(StaleAttempt):
        sweep.open(turn_of(sweep), READY)


def test_a_run_keeps_its_folder_over_attempts_and_shares_the_cache(
    begin: Begin, clock: Clock, settings: Settings
) -> None:
    sweep, experiment = begin(2)
    first, second = given(sweep), given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.infrastructure, "died")))
    clock.forward(2)
    again = given(sweep)
    assert again.config == first.config
    assert first.config.workspace.checkpoints != second.config.workspace.checkpoints
    assert first.config.workspace.cache == second.config.workspace.cache
    assert str(settings.data_dir) in first.config.workspace.checkpoints
    assert f"/{experiment.id}/runs/{first.run_id}/" in first.config.workspace.checkpoints
    assert first.config.threads == 1


AXIS = {"search": {"axes": {"batch.global_size": [8, 16, 32, 64]}}, "batch": {"micro_size": "auto"}}


def test_out_of_memory_prunes_what_needs_more(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1, **AXIS)
    sizes = {run.id: run.point["batch.global_size"] for run in store.runs(experiment_id=experiment.id).items}
    while (assignment := given(sweep)) and sizes[assignment.run_id] != 32:
        complete(sweep, store, assignment)
    sweep.ended(
        assignment.turn, Ending("failed", failure=(FailureClass.out_of_memory, "micro-batch 32 is too large"))
    )
    while isinstance(following := sweep.next_turn(), Turn):
        complete(sweep, store, opened(sweep, following))
    ended = {sizes[run.id]: run for run in store.runs(experiment_id=experiment.id).items}
    # 64 may have been measured before 32 was: then it stands.
    assert {size for size, run in ended.items() if run.state is RunState.succeeded} >= {8, 16}
    if ended[64].state is not RunState.succeeded:
        assert ended[64].failure_class is FailureClass.out_of_memory
        assert (ended[64].failure_message or "").startswith("does not fit (by 32)")
    assert sweep.final_state()[0] is ExperimentState.succeeded


def test_a_budget_of_runs_ends_the_sweep(begin: Begin, store: Store, notes: list[str]) -> None:
    sweep, _ = begin(3, budget={"runs": 2})
    for _ in range(2):
        complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)
    assert notes == ["budget.runs reached: 2 of 2 runs; no further runs are started"]


def test_a_held_budget_pauses_and_is_granted_again_by_a_resume(
    begin: Begin, store: Store, queue: Queue, settings: Settings
) -> None:
    sweep, experiment = begin(3, budget={"runs": 1, "when_reached": "hold"})
    complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.paused, None)
    dead = Sweep(
        store,
        settings,
        experiment.id,
        1,
        ExperimentSpec.model_validate_json(store.experiment_spec(experiment.id)[1]),
        CATALOGUE,
        capacity=lambda: ClusterSnapshot(0.0, True, None, ()),
    )
    assert dead.next_turn() is Wait.over  # A driver that died before the pause grants nothing.
    store.finish_experiment(experiment.id, 1, ExperimentState.paused)
    store.resume(experiment.id)
    queue.claim("s", lease_s=60)
    store.driver_started(experiment.id, 2, "node", 1)
    spec = ExperimentSpec.model_validate_json(store.experiment_spec(experiment.id)[1])
    nodes = (ClusterNode("0", "0", True, dict(CPUS), {}),)
    again = Sweep(
        store,
        settings,
        experiment.id,
        2,
        spec,
        CATALOGUE,
        capacity=lambda: ClusterSnapshot(0.0, True, None, nodes),
    )
    complete(again, store, given(again))
    assert again.next_turn() is Wait.over
    assert again.final_state() == (ExperimentState.paused, None)


def test_cells_of_absent_hardware_wait_while_the_others_go_on(
    begin: Begin, store: Store, resources: list[dict[str, float]], notes: list[str], clock: Clock
) -> None:
    sweep, _experiment = begin(1, search={"axes": {"hardware": ["cpu", "A100"]}})
    here = given(sweep)
    assert store.run(here.run_id).hardware == "cpu"
    complete(sweep, store, here)
    assert sweep.next_turn() is Wait.later
    assert notes == [
        "runs are waiting for capacity: no node has hardware A100-PCIE-80GB (Ray resource "
        "accelerator_type:A100); "
        "the cluster has no accelerators"
    ]
    resources.append({"CPU": 2.0, "GPU": 1.0, "accelerator_type:A100": 1.0})
    clock.forward(10)
    assert store.run(given(sweep).run_id).hardware == "A100-PCIE-80GB"


TPE = {
    "name": "tpe",
    "samples": 4,
    "axes": {
        "precision": ["fp32", "bf16"],
        "optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True},
    },
}


def test_configurations_are_suggested_one_after_the_other_for_all_seeds(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2, search=TPE)
    assert experiment.run_count == 8
    assert [run.point for run in store.runs(experiment_id=experiment.id).items] == [{}] * 8
    first, second = given(sweep), given(sweep)
    runs = store.runs(experiment_id=experiment.id).items
    assert [first.run_id, second.run_id] == [run.id for run in runs[:2]]
    assert runs[0].point == runs[1].point
    assert runs[0].point["optimizer.learning_rate"] == first.config.optimizer.learning_rate
    assert runs[0].precision == runs[0].point["precision"] == first.config.precision
    assert (runs[0].cell, runs[2].point) == (runs[1].cell, {})
    assert sweep.next_turn() is Wait.later  # The next is not asked for before there is room.
    complete(sweep, store, first, Ending("completed", summary={"validation_loss": 0.5}))
    third = given(sweep)
    assert store.run(third.run_id).point not in ({}, runs[0].point)
    told = [event.message for event in store.events(experiment.id) if event.kind == "experiment.suggested"]
    assert [text.partition(":")[0] for text in told] == ["suggestion 1", "suggestion 2"]


def test_a_driver_that_starts_anew_suggests_what_the_first_would_have(
    begin: Begin, store: Store, settings: Settings, look: Callable[[], ClusterSnapshot]
) -> None:
    points: list[list[dict[str, Any]]] = []
    for dies in (False, True):
        sweep, experiment = begin(1, search=TPE)
        for number in range(4):
            only = given(sweep)
            complete(sweep, store, only, Ending("completed", summary={"validation_loss": 1.0 / (number + 1)}))
            if dies:
                spec = ExperimentSpec.model_validate_json(store.experiment_spec(experiment.id)[1])
                sweep = Sweep(store, settings, experiment.id, 1, spec, CATALOGUE, capacity=look)
        assert sweep.next_turn() is Wait.over
        assert sweep.final_state()[0] is ExperimentState.succeeded
        store.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
        points.append([run.point for run in store.runs(experiment_id=experiment.id).items])
    assert points[0] == points[1]
    assert len({str(point) for point in points[0]}) == 4


def test_a_suggestion_that_cannot_be_trained_fails_and_the_next_is_asked_for(
    begin: Begin, store: Store
) -> None:
    search = {
        "name": "tpe",
        "samples": 4,
        "axes": {"optimizer.name": ["adan", "adamw"], "optimizer.no_prox": [False, True]},
    }
    sweep, experiment = begin(1, search=search, optimizer={"name": "adan"})
    while True:
        following = sweep.next_turn()
        if following is Wait.over:
            break
        if isinstance(following, Turn):
            complete(sweep, store, opened(sweep, following))
    by_point = {tuple(run.point.values()): run for run in store.runs(experiment_id=experiment.id).items}
    refused = by_point.pop(("adamw", True))
    assert (refused.state, refused.failure_class) == (RunState.failed, FailureClass.bad_spec)
    assert "no_prox belongs to adan" in (refused.failure_message or "")
    assert {run.state for run in by_point.values()} == {RunState.succeeded}
    assert len(by_point) == 3


@pytest.mark.parametrize("every", [2, 3])
def test_a_suggestion_that_cannot_be_trained_fails_when_answers_are_lost(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """A driver that ended between storing a suggestion and refusing it leaves the same behind."""
    search = {
        "name": "tpe",
        "samples": 4,
        "axes": {"optimizer.name": ["adan", "adamw"], "optimizer.no_prox": [False, True]},
    }
    sweep, experiment = begin(1, search=search, optimizer={"name": "adan"})
    losing(store, monkeypatch, *range(0, 100, every))
    while (following := sweep.next_turn()) is not Wait.over:
        if isinstance(following, Turn):
            assignment = opened(sweep, following)
            wait_out(partial(started, store, assignment.run_id), "the recorder")
            sweep.ended(assignment.turn, COMPLETED)
    by_point = {tuple(run.point.values()): run for run in store.runs(experiment_id=experiment.id).items}
    assert len(by_point) == 4
    refused = by_point.pop(("adamw", True))
    assert (refused.state, refused.attempt) == (RunState.failed, 1)
    assert "no_prox belongs to adan" in (refused.failure_message or "")
    assert {run.state for run in by_point.values()} == {RunState.succeeded}


def test_a_suggestion_that_leaves_an_axis_out_keeps_the_specs_value(begin: Begin, store: Store) -> None:
    search = {
        "name": "tpe",
        "samples": 3,
        "axes": {"optimizer.name": ["adan", "adamw"], "optimizer.weight_decay": [0.01, 0.02]},
        "when": {"optimizer.weight_decay": {"optimizer.name": ["adan"]}},
    }
    sweep, _ = begin(1, search=search, optimizer={"weight_decay": 0.3})
    decays: set[tuple[str, float]] = set()
    for _ in range(3):
        assignment = given(sweep)
        optimizer = assignment.config.optimizer
        decays.add((str(optimizer.name), optimizer.weight_decay))
        complete(sweep, store, assignment, Ending("completed", summary={"validation_loss": 0.5}))
    assert decays == {("adan", 0.01), ("adan", 0.02), ("adamw", 0.3)}


def test_a_run_without_room_has_no_attempt_and_is_charged_nothing(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(1)
    turn = turn_of(sweep)
    run = store.run(turn.run_id)
    assert (run.state, run.attempt) == (RunState.queued, 0)
    assert store.attempts(turn.run_id) == []
    assert store.experiment_totals(experiment.id).device_hours == 0.0
    assert sweep.live == ()


def test_a_run_without_room_says_what_for_and_behind_whom(
    begin: Begin, store: Store, clock: Clock, submit: Submit, queue: Queue
) -> None:
    sweep, _ = begin(1)
    turn = turn_of(sweep)
    other = submit(1)
    queue.claim("s", lease_s=60)
    store.driver_started(other.id, 1, "node", 2)
    store.record_placements(other.id, 1, [placement("p", placed_s=clock())])
    sweep.tell_waiting([])
    assert store.run(turn.run_id).waits_for is None  # It may be placed at any moment.
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    assert store.run(turn.run_id).waits_for == f"1 CPU; experiment {other.id} holds 2 cpu"
    opened(sweep, turn)
    sweep.tell_waiting([])
    assert store.run(turn.run_id).waits_for is None


def test_what_a_run_waits_for_goes_with_the_driver_that_saw_it(
    begin: Begin, store: Store, clock: Clock, queue: Queue
) -> None:
    sweep, experiment = begin(1)
    turn = turn_of(sweep)
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    assert store.run(turn.run_id).waits_for is not None
    store.release_experiment(experiment.id, 1, delay_s=0.0)
    queue.claim("s", lease_s=60)
    store.driver_started(experiment.id, 2, "node", 2)
    store.reset_runs_of_dead_attempt(experiment.id, 2)
    assert store.run(turn.run_id).waits_for is None


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
    store.driver_started(other.id, 1, "node", 2)
    store.record_placements(other.id, 1, [placement("p", placed_s=clock())])
    clock.forward(ROOM_S)
    sweep.tell_waiting([])
    said = f"2 CPUs, a whole node (measure: exclusive); experiment {other.id} holds 2 cpu"
    assert store.run(turn.run_id).waits_for == said
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
    assert store.run(first.run_id).waits_for is None
    assert store.run(second.run_id).waits_for == "1 CPU; no other experiment holds devices"


def test_a_budget_used_up_while_a_run_waits_for_room_charges_it_nothing(begin: Begin, store: Store) -> None:
    sweep, _ = begin(2, budget={"runs": 1})
    first, second = turn_of(sweep), turn_of(sweep)
    complete(sweep, store, opened(sweep, first))
    assert sweep.open(second, READY) is None
    assert not sweep.wanted(second)
    assert store.attempts(second.run_id) == []
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None)


def test_a_run_cancelled_while_it_waits_for_room_gives_its_turn_back(
    begin: Begin, store: Store, clock: Clock
) -> None:
    sweep, _ = begin(2, queue={"max_concurrent_runs": 1})
    turn = turn_of(sweep)
    store.request_cancel_run(turn.run_id)
    clock.forward(LIST_EVERY_S)
    sweep.tell_waiting([])
    assert not sweep.wanted(turn)
    assert sweep.open(turn, READY) is None
    assert turn_of(sweep).run_id != turn.run_id


def test_a_turn_that_led_to_no_attempt_is_given_again(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    first = turn_of(sweep)
    sweep.drop(first)
    second = turn_of(sweep)
    assert (second.run_id, second.name != first.name) == (first.run_id, True)
    assert sweep.open(first, READY) is None  # An echo of the turn that was taken back.
    assert sweep.open(second, READY) is not None


def test_workers_that_fail_before_they_are_ready_count_as_a_failure_of_the_run(
    begin: Begin, store: Store
) -> None:
    sweep, _ = begin(1)
    turn = turn_of(sweep)
    sweep.ended(turn, Ending("failed", failure=(FailureClass.infrastructure, "a worker process died")))
    run = store.run(turn.run_id)
    assert (run.state, run.infrastructure_failures) == (RunState.queued, 1)
    assert [attempt.failure_class for attempt in store.attempts(turn.run_id)] == [FailureClass.infrastructure]


def test_a_run_chosen_during_an_outage_is_still_the_next(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, experiment = begin()
    read, calls = store.run_config, iter(range(10))

    def unavailable_once(run_id: int) -> str:
        if next(calls) == 1:  # The first call is for the run's shapes, the second for its turn.
            raise StoreUnavailable("locked")
        return read(run_id)

    monkeypatch.setattr(store, "run_config", unavailable_once)
    assert sweep.next_turn() is Wait.later
    assert turn_of(sweep).run_id == in_order(store, experiment)[0]
