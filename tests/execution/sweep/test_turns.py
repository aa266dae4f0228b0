"""Which run of a sweep is next."""

from __future__ import annotations

from typing import Any

import pytest

from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.driving import limits
from service.driving.choosing import Wait
from service.recording.mailbox import Ending, Turn
from service.scheduling.cluster import FreeRoom
from service.scheduling.queue import Queue
from service.store import StaleAttempt, Store, StoreUnavailable
from tests.execution.conftest import Clock
from tests.execution.sweep.conftest import (
    PAUSED,
    READY,
    Begin,
    complete,
    given,
    in_order,
    turn_of,
)
from trainers.errors import FailureClass
from trainers.reporting import StopReason


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
    assert store.runs.get(first.run_id).state is RunState.succeeded
    assert store.runs.get(first.run_id).accuracy == 0.9


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
    lacks, holds = limits.unsatisfiable, FreeRoom.holds

    def count_lacks(*given: Any) -> str | None:
        looked.append(given)
        return lacks(*given)

    def count_holds(self: FreeRoom, *given: Any) -> bool:
        held.append(given)
        return holds(self, *given)

    monkeypatch.setattr(limits, "unsatisfiable", count_lacks)
    monkeypatch.setattr(FreeRoom, "holds", count_holds)
    for _ in range(3):
        assert sweep.next_turn() is Wait.later
    assert len(looked) <= 2  # One and two CPUs, for the cluster as it was at one time.
    assert len(held) == 3 * 2


def test_a_run_cancelled_after_it_was_listed_gets_no_turn(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, experiment = begin(4)
    runs = in_order(store, experiment)
    first = given(sweep)
    store.requests.cancel_run(runs[1])
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


def test_nothing_is_handed_out_once_all_is_stopping(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first = given(sweep)
    store.requests.pause(experiment.id)
    sweep.stopping = StopReason.pause
    assert sweep.next_turn() is Wait.later  # The pause may be withdrawn.
    sweep.ended(first.turn, PAUSED)
    assert sweep.next_turn() is Wait.over
    assert sweep.conclude() is ExperimentState.paused


def test_wide_runs_wait_for_narrow_ones_to_end(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1, parallel={"strategy": "ddp"}, search={"axes": {"parallel.workers": [1, 2]}})
    narrow = given(sweep)
    assert sweep.next_turn() is Wait.later
    complete(sweep, store, narrow)
    assert given(sweep).turn.shape.workers == 2


def test_a_cancelled_run_is_passed_over(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2)
    first, second = store.runs.page(experiment_id=experiment.id).items
    store.requests.cancel_run(first.id)
    assert given(sweep).run_id == second.id


def test_a_run_that_people_queue_again_is_taken_up(begin: Begin, store: Store, clock: Clock) -> None:
    sweep, _ = begin(2)
    first, _second = given(sweep), given(sweep)
    sweep.ended(first.turn, Ending("failed", failure=(FailureClass.bad_data, "line 3")))
    store.requests.retry_run(first.run_id)
    clock.forward(6)
    assert given(sweep).run_id == first.run_id


def test_a_sweep_of_an_old_attempt_is_fenced(begin: Begin, store: Store, queue: Queue) -> None:
    sweep, experiment = begin(2)
    store.drivers.release_experiment(experiment.id, 1, delay_s=0.0)
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
    assert again.turn.config == first.turn.config
    assert first.turn.config.workspace.checkpoints != second.turn.config.workspace.checkpoints
    assert first.turn.config.workspace.cache == second.turn.config.workspace.cache
    assert str(settings.data_dir) in first.turn.config.workspace.checkpoints
    assert f"/{experiment.id}/runs/{first.run_id}/" in first.turn.config.workspace.checkpoints
    assert first.turn.config.threads == 1


def test_a_turn_that_led_to_no_attempt_is_given_again(begin: Begin, store: Store) -> None:
    sweep, _ = begin(1)
    first = turn_of(sweep)
    sweep.drop(first)
    second = turn_of(sweep)
    assert (second.run_id, second.name != first.name) == (first.run_id, True)
    assert sweep.open(first, READY) is None  # An echo of the turn that was taken back.
    assert sweep.open(second, READY) is not None


def test_a_run_chosen_during_an_outage_is_still_the_next(
    begin: Begin, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, experiment = begin()
    read, calls = store.runs.config, iter(range(10))

    def unavailable_once(run_id: int) -> str:
        if next(calls) == 1:  # The first call is for the run's shapes, the second for its turn.
            raise StoreUnavailable("locked")
        return read(run_id)

    monkeypatch.setattr(store.runs, "config", unavailable_once)
    assert sweep.next_turn() is Wait.later
    assert turn_of(sweep).run_id == in_order(store, experiment)[0]
