"""Sweeps that suggest their configurations one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.domain.states import ExperimentState, RunState
from service.driving.choosing import Wait
from service.driving.sweep import Sweep
from service.driving.sweep_context import SweepContext
from service.recording.mailbox import Ending, Turn
from service.recording.outages import wait_out
from service.scheduling.cluster import ClusterSnapshot
from service.specs.experiment import ExperimentSpec
from service.store import Store
from tests.execution.sweep.conftest import (
    COMPLETED,
    Begin,
    complete,
    given,
    losing,
    opened,
    started,
    turn_of,
)
from trainers.errors import FailureClass

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
    assert [run.point for run in store.runs.page(experiment_id=experiment.id).items] == [{}] * 8
    first, second = given(sweep), given(sweep)
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [first.run_id, second.run_id] == [run.id for run in runs[:2]]
    assert runs[0].point == runs[1].point
    assert runs[0].point["optimizer.learning_rate"] == first.turn.config.optimizer.learning_rate
    assert runs[0].precision == runs[0].point["precision"] == first.turn.config.precision
    assert (runs[0].cell, runs[2].point) == (runs[1].cell, {})
    assert sweep.next_turn() is Wait.later  # The next is not asked for before there is room.
    complete(sweep, store, first, Ending("completed", summary={"validation_loss": 0.5}))
    third = given(sweep)
    assert store.runs.get(third.run_id).point not in ({}, runs[0].point)
    told = [
        event.message
        for event in store.experiments.events(experiment.id)
        if event.kind == "experiment.suggested"
    ]
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
                spec = ExperimentSpec.model_validate_json(store.experiments.spec(experiment.id)[1])
                sweep = Sweep(SweepContext(store, settings, experiment.id, 1, spec, CATALOGUE), look)
        assert sweep.next_turn() is Wait.over
        assert sweep.final_state()[0] is ExperimentState.succeeded
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
        points.append([run.point for run in store.runs.page(experiment_id=experiment.id).items])
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
    by_point = {tuple(run.point.values()): run for run in store.runs.page(experiment_id=experiment.id).items}
    refused = by_point.pop(("adamw", True))
    assert (refused.state, refused.failure_class) == (RunState.failed, FailureClass.bad_spec)
    assert "no_prox belongs to adan" in (refused.failure_message or "")
    assert {run.state for run in by_point.values()} == {RunState.succeeded}
    assert len(by_point) == 3
    assert sweep.final_state() == (ExperimentState.succeeded, None)


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
    by_point = {tuple(run.point.values()): run for run in store.runs.page(experiment_id=experiment.id).items}
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
        optimizer = assignment.turn.config.optimizer
        decays.add((str(optimizer.name), optimizer.weight_decay))
        complete(sweep, store, assignment, Ending("completed", summary={"validation_loss": 0.5}))
    assert decays == {("adan", 0.01), ("adan", 0.02), ("adamw", 0.3)}


def test_cells_whose_values_contradict_each_other_fail_at_once(begin: Begin, store: Store) -> None:
    axes = {"batch.global_size": [15, 16], "precision": ["fp32", "tf32"]}
    sweep, experiment = begin(2, search={"axes": axes}, parallel={"strategy": "ddp", "workers": 2})
    only = turn_of(sweep)
    runs = store.runs.page(experiment_id=experiment.id).items
    refused = [run for run in runs if run.state is RunState.failed]
    assert {(run.point["batch.global_size"], run.point["precision"]) for run in refused} == {
        (15, "fp32"), (15, "tf32"), (16, "tf32"),
    }  # fmt: skip
    assert {(run.global_batch_size, run.precision) for run in refused} == {
        (15, "fp32"), (15, "tf32"), (16, "tf32"),
    }  # fmt: skip
    assert {(run.failure_class, run.cost_usd) for run in refused} == {(FailureClass.bad_spec, None)}
    reasons = {run.point["batch.global_size"]: run.failure_message or "" for run in refused}
    assert "batch.global_size 15 is not divisible by parallel.workers 2" in reasons[15]
    assert reasons[16].startswith("precision: cpu does not support tf32")
    assert only.config.batch.global_size == 16
    complete(sweep, store, opened(sweep, only))
    complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    assert sweep.final_state() == (ExperimentState.succeeded, None), "infeasible cells are results"


def test_the_repeats_of_a_suggestion_have_its_values_too(begin: Begin, store: Store) -> None:
    sweep, experiment = begin(2, search=TPE, repeats=3)
    assert experiment.run_count == 24
    given(sweep)
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [bool(run.point) for run in runs] == [True] * 6 + [False] * 18
    assert len({run.cell for run in runs[:6]}) == 1
    assert [(run.seed, run.repeat) for run in runs[:6]] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
