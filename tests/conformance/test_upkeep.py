"""What a service removes by itself."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable

import pytest

from service.config.settings import Settings
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.upkeep import PRUNE_EVERY_S, Upkeep
from service.specs.models import experiment_folder
from service.store import PointBatch, RecordBatch, Store, removal
from tests.conformance.building import count

DAY_S = 86_400.0


@pytest.fixture
def ended(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> Callable[[float], tuple[Experiment, Run]]:
    """An experiment that ended at a time, with 1,000 points."""

    def call(at_s: float) -> tuple[Experiment, Run]:
        store.clocks.simulated = lambda: at_s
        experiment, run, attempt = training()
        steps = list(range(1_000))
        batch = PointBatch(run.id, attempt, "loss", steps, [1.0 / (n + 1) for n in steps], [0.0] * 1_000)
        store.recording.record(RecordBatch(points=[batch]))
        store.attempts.finish_run(run.id, attempt, RunState.succeeded)
        store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
        return experiment, run

    return call


def test_deleted_experiments_are_removed(
    store: Store, settings: Settings, ended: Callable[[float], tuple[Experiment, Run]]
) -> None:
    for experiment in (ended(1.0)[0], ended(2.0)[0]):
        store.removal.delete(experiment.id, at_once=True)
    Upkeep(store, settings, pause_s=0.0).run_once(threading.Event())
    assert count(store, "experiments") == count(store, "points") == 0


def test_an_experiment_stays_until_its_files_can_be_removed(
    store: Store,
    settings: Settings,
    ended: Callable[[float], tuple[Experiment, Run]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stuck, other = ended(1.0)[0], ended(2.0)[0]
    experiment_folder(settings, stuck.id).mkdir(parents=True)

    def refuse(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    for experiment in (stuck, other):
        store.removal.delete(experiment.id, at_once=True)
    upkeep = Upkeep(store, settings, pause_s=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        upkeep.run_once(threading.Event())
    assert store.removal.deleted_experiments() == [stuck.id]
    assert "Permission denied" in caplog.text
    upkeep.run_once(threading.Event())
    assert store.removal.deleted_experiments() == []


def test_old_points_are_thinned_as_the_settings_say(
    store: Store, settings: Settings, ended: Callable[[float], tuple[Experiment, Run]]
) -> None:
    _, old = ended(1_000.0)
    _, young = ended(1_000.0 + 20 * DAY_S)
    store.clocks.simulated = lambda: 1_000.0 + 31 * DAY_S
    assert settings.prune_after_days is None
    Upkeep(store, settings, pause_s=0.0).run_once(threading.Event())
    assert len(store.series.points(old.id)["loss"]) == 1_000, "nothing goes that no one asked for"

    told = settings.model_copy(update={"prune_after_days": 30.0, "prune_keep_every": 50})
    upkeep = Upkeep(store, told, pause_s=0.0)
    upkeep.run_once(threading.Event())
    assert len(store.series.points(old.id)["loss"]) < 50
    assert len(store.series.points(young.id)["loss"]) == 1_000
    store.clocks.simulated = lambda: 1_000.0 + 31 * DAY_S + PRUNE_EVERY_S
    upkeep.run_once(threading.Event())
    assert len(store.series.points(young.id)["loss"]) == 1_000
    store.clocks.simulated = lambda: 1_000.0 + 51 * DAY_S
    upkeep.run_once(threading.Event())
    assert len(store.series.points(young.id)["loss"]) < 50


def test_a_stop_ends_it_after_one_transaction(
    store: Store,
    settings: Settings,
    ended: Callable[[float], tuple[Experiment, Run]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removal, "ROWS_AT_A_TIME", 100)
    experiment, _ = ended(1.0)
    store.removal.delete(experiment.id, at_once=True)
    stop = threading.Event()
    stop.set()
    Upkeep(store, settings).run_once(stop)
    assert count(store, "points") == 900
