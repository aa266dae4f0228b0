"""Runs that start from the best checkpoint of another run: resolved when they are handed out."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from service.config.settings import Settings
from service.domain.records import Run
from service.domain.states import ExperimentState, RunState
from service.driving.choosing import LIST_EVERY_S, Wait
from service.scheduling.queue import Queue
from service.specs.models import checkpoints_folder
from service.store import Store
from tests.execution.conftest import Clock, Submit
from tests.execution.sweep.conftest import Begin, complete, given
from trainers.checkpoints.manifest import attempt_folder
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.errors import FailureClass


@pytest.fixture
def source(store: Store, queue: Queue, settings: Settings, submit: Submit) -> Run:
    """A run that has succeeded, with a best checkpoint on the disk."""
    experiment = submit(1)
    queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, 1, "node", 1)
    (run,) = store.runs.page(experiment_id=experiment.id).items
    attempt = store.attempts.open(run.id, 1)
    store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
    checkpoints = CheckpointStore(folder_of(settings, run).parent, keep=2)
    for step in (5, 9):
        checkpoints.save(step, Snapshot({"model": {"w": torch.ones(3)}}, {}), lambda folder: None)
    checkpoints.mark_best(checkpoints.id(5), "accuracy", 0.9)
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"best_step": 5})
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.succeeded)
    return store.runs.get(run.id)


def folder_of(settings: Settings, run: Run) -> Path:
    return attempt_folder(checkpoints_folder(settings, run.experiment_id, run.id), 1)


def test_the_best_checkpoint_becomes_the_model_and_the_one_further_root(
    begin: Begin, source: Run, settings: Settings
) -> None:
    sweep, _ = begin(1, model={"name": f"run:{source.id}", "teacher": f"run:{source.id}"})
    config = given(sweep).turn.config
    best = str(folder_of(settings, source) / "step-00000005")
    assert (config.model.name, config.model.teacher) == (best, best)
    roots = [str(root) for root in settings.roots("model")]
    assert list(dict.fromkeys(config.workspace.model_roots)) == [*roots, best]


def test_runs_without_a_source_see_no_further_root(begin: Begin, source: Run, settings: Settings) -> None:
    sweep, _ = begin(1)
    assert given(sweep).turn.config.workspace.model_roots == tuple(
        str(root) for root in settings.roots("model")
    )


def test_an_axis_over_teachers_gives_each_run_its_own(begin: Begin, source: Run, settings: Settings) -> None:
    sweep, _ = begin(1, search={"axes": {"model.teacher": [None, f"run:{source.id}"]}})
    without, taught = given(sweep), given(sweep)
    assert without.turn.config.model.teacher is None
    assert taught.turn.config.model.teacher == str(folder_of(settings, source) / "step-00000005")


def test_each_seed_starts_from_the_run_that_is_named_for_it(
    begin: Begin, store: Store, source: Run, settings: Settings
) -> None:
    sweep, experiment = begin(2, model={"name": "tiny", "teacher": f"run:0={source.id},1=999"})
    taught = given(sweep)
    assert taught.turn.config.model.teacher == str(folder_of(settings, source) / "step-00000005")
    complete(sweep, store, taught)
    assert sweep.next_turn() is Wait.over
    first, second = store.runs.page(experiment_id=experiment.id).items
    assert (first.seed, first.state, first.id) == (0, RunState.succeeded, taught.run_id)
    assert (second.state, second.failure_message) == (RunState.failed, "run 999 no longer exists")


def test_a_damaged_checkpoint_fails_what_starts_from_it_and_nothing_else(
    begin: Begin, store: Store, source: Run, settings: Settings
) -> None:
    weights = folder_of(settings, source) / "step-00000005" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    sweep, experiment = begin(1, search={"axes": {"model.name": [f"run:{source.id}", "tiny"]}})
    complete(sweep, store, given(sweep))
    assert sweep.next_turn() is Wait.over
    lost, trained = store.runs.page(experiment_id=experiment.id).items
    assert (lost.state, lost.failure_class) == (RunState.failed, FailureClass.bad_spec)
    assert "model.safetensors does not match the manifest" in str(lost.failure_message)
    assert trained.state is RunState.succeeded
    assert sweep.final_state() == (ExperimentState.incomplete, None)


def test_a_source_that_failed_fails_the_experiment_with_its_reason(
    begin: Begin, store: Store, queue: Queue, submit: Submit
) -> None:
    first = submit(1)
    queue.claim("s", lease_s=60)
    store.drivers.started(first.id, 1, "node", 1)
    (run,) = store.runs.page(experiment_id=first.id).items
    attempt = store.attempts.open(run.id, 1)
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=(FailureClass.bad_data, "no labels"))
    sweep, _ = begin(2, model={"name": f"run:{run.id}"})
    assert sweep.next_turn() is Wait.over
    state, failure = sweep.final_state()
    assert state is ExperimentState.failed
    assert failure == (FailureClass.bad_spec, f"run {run.id} failed: bad_data: no labels")


def test_a_source_that_was_retried_is_looked_at_again(
    begin: Begin, store: Store, source: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, experiment = begin(2, model={"name": f"run:{source.id}"})
    real = store.runs.get
    failed = {
        "state": RunState.failed,
        "failure_class": FailureClass.bad_data,
        "failure_message": "no labels",
    }
    monkeypatch.setattr(
        store.runs,
        "get",
        lambda id: dataclasses.replace(real(id), **failed) if id == source.id and failed else real(id),
    )
    assert sweep.next_turn() is Wait.over
    failed.clear()
    again = store.requests.retry_run(store.runs.page(experiment_id=experiment.id).items[0].id)
    clock.forward(LIST_EVERY_S)
    assert given(sweep).run_id == again.id


def test_a_source_that_is_tried_again_is_waited_for(begin: Begin, store: Store, source: Run) -> None:
    sweep, _ = begin(1, model={"name": f"run:{source.id}"})
    real = store.runs.get
    pending = {"state": RunState.running}

    def run(id: int) -> Run:
        found = real(id)
        return dataclasses.replace(found, **pending) if id == source.id else found

    store.runs.get = run  # type: ignore[method-assign]
    assert sweep.next_turn() is Wait.later
    pending.clear()
    assert given(sweep).turn.config.model.name.endswith("step-00000005")


def test_a_source_without_a_checkpoint_is_said(
    begin: Begin, store: Store, source: Run, settings: Settings
) -> None:
    (folder_of(settings, source) / "best.json").unlink()
    sweep, experiment = begin(1, model={"name": f"run:{source.id}"})
    assert sweep.next_turn() is Wait.over
    (run,) = store.runs.page(experiment_id=experiment.id).items
    assert "no evaluated checkpoint" in str(run.failure_message)
