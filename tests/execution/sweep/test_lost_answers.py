"""Transactions of the sweep whose answers are lost after their commit."""

from __future__ import annotations

from functools import partial

import pytest

from service.domain.states import ExperimentState, RunState
from service.driving.choosing import Wait
from service.recording import outages
from service.recording.mailbox import Turn
from service.recording.outages import wait_out
from service.store import Store
from tests.execution.conftest import Clock
from tests.execution.sweep.conftest import (
    COMPLETED,
    MACHINE_FAILED,
    READY,
    Begin,
    given,
    losing,
    opened,
    started,
    turn_of,
)
from trainers.reporting import StopReason


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
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [(run.state, run.attempt) for run in runs] == [(RunState.succeeded, 1)] * 2


def test_a_failure_whose_answer_is_lost_is_tried_again(
    begin: Begin, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, _ = begin(1)
    first = given(sweep)
    losing(store, monkeypatch, 0)
    sweep.ended(first.turn, MACHINE_FAILED)
    assert store.runs.get(first.run_id).infrastructure_failures == 1
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
    assert store.runs.get(turn.run_id).state is RunState.starting
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
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [(run.state, run.attempt) for run in runs] == [(RunState.failed, 1)] * 2
    assert sweep.conclude() is ExperimentState.failed
