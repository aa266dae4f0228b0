"""The drill: a working installation is backed up and restored elsewhere; nothing acknowledged is missing."""

from __future__ import annotations

import shutil
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch

from service.config.settings import Settings
from service.db import migrate, postgresql, sqlite
from service.db.backup import BackupError, back_up, restore
from service.db.engine import Database
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.specs.models import checkpoint_of, checkpoints_folder, experiment_folder
from service.store import Conflict, NewExperiment, PointBatch, RecordBatch, Store, StoreUnavailable
from tests.conformance.building import Submit, plans_of
from trainers.checkpoints.manifest import CheckpointId, attempt_folder, verify
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.reporting import OnlyAttempt

STEPS = list(range(1, 51))
Training = Callable[..., tuple[Experiment, Run, int]]


def save_checkpoint(settings: Settings, run: Run, attempt: int, step: int) -> None:
    """What a worker leaves behind."""
    folder = checkpoints_folder(settings, run.experiment_id, run.id)
    checkpoints = CheckpointStore(folder, keep=2, fence=OnlyAttempt(attempt))
    checkpoints.save(step, Snapshot({"model": {"w": torch.ones(3)}}, {}), lambda folder: None)
    checkpoints.mark_best(checkpoints.id(step), "accuracy", 0.9)


@dataclass(frozen=True)
class Worked:
    """An experiment whose run has succeeded, with points and a checkpoint."""

    experiment: Experiment
    run: Run


@pytest.fixture
def worked(store: Store, settings: Settings, training: Training) -> Worked:
    experiment, run, attempt = training()
    values = [1.0 / step for step in STEPS]
    points = [PointBatch(run.id, attempt, "loss", STEPS, values, [float(step) for step in STEPS])]
    assert not store.recording.record(RecordBatch(points=points))
    save_checkpoint(settings, run, attempt, 50)
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"accuracy": 0.9, "best_step": 50})
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
    return Worked(store.experiments.get(experiment.id), store.runs.get(run.id))


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> Settings:
    """Another installation, with an empty database of the same kind."""
    folder = tmp_path / "elsewhere"
    if str(settings.database_url).startswith("sqlite"):
        return Settings(data_dir=folder)
    return Settings(data_dir=folder, database_url=request.getfixturevalue("empty_postgresql_url"))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "backup.tar"


def test_every_acknowledged_run_is_there_after_a_restore(
    store: Store, settings: Settings, elsewhere: Settings, archive: Path, worked: Worked
) -> None:
    acknowledged: list[Experiment] = []
    begun, enough = threading.Event(), threading.Event()

    def keep_submitting() -> None:
        while not enough.is_set() and len(acknowledged) < 100:
            spec, plans, written = plans_of(3, 50)
            acknowledged.append(
                store.submissions.submit(NewExperiment(spec, plans, spec_text=written, owner="ada"))[0]
            )
            begun.set()

    thread = threading.Thread(target=keep_submitting)
    thread.start()
    assert begun.wait(10)
    before = list(acknowledged)
    (settings.data_dir / "sites.yaml").write_text("default: {}\n")
    made = back_up(settings, archive, checkpoints=True)
    enough.set()
    thread.join()
    assert restore(elsewhere, archive, replace=False) == made
    assert (elsewhere.data_dir / "sites.yaml").read_text() == "default: {}\n"
    assert migrate.check(elsewhere) == []

    restored = Store.open(elsewhere)
    try:
        for experiment in before:
            assert restored.experiments.get(experiment.id).spec_sha256 == experiment.spec_sha256
        known = {experiment.id for experiment in restored.experiments.page(page_size=200).items}
        assert len(known) == made.contents.experiments
        for id in known - {worked.experiment.id}:
            assert len(restored.runs.page(experiment_id=id).items) == 3  # Whole, or not there.
        assert restored.runs.get(worked.run.id) == worked.run
        assert restored.runs.attempts(worked.run.id) == store.runs.attempts(worked.run.id)
        assert restored.series.points(worked.run.id) == store.series.points(worked.run.id)
        assert restored.experiments.events(worked.experiment.id) == store.experiments.events(
            worked.experiment.id
        )
        path = checkpoint_of(elsewhere, restored.runs.get(worked.run.id), "best")
        assert path.is_relative_to(elsewhere.data_dir)
        assert verify(path) is None
        spec, plans, written = plans_of(1, 50)
        assert restored.submissions.submit(NewExperiment(spec, plans, spec_text=written, owner="eve"))[
            0
        ].id > max(known)
    finally:
        restored.close()


def test_checkpoints_are_in_a_backup_only_when_asked_for(
    settings: Settings, elsewhere: Settings, archive: Path, worked: Worked
) -> None:
    made = back_up(settings, archive, checkpoints=False)
    assert (made.checkpoints, made.files) == (False, 1)
    restore(elsewhere, archive, replace=False)
    assert not experiment_folder(elsewhere, worked.experiment.id).exists()


def test_what_belongs_to_running_processes_is_left_out(
    settings: Settings, archive: Path, worked: Worked
) -> None:
    folder = experiment_folder(settings, worked.experiment.id)
    for name in ("ray/session/log", "spool/attempt-000001.spool"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("x")
    save_path = CheckpointId(1, 60).path(checkpoints_folder(settings, worked.experiment.id, worked.run.id))
    draft = save_path.with_name(save_path.name + ".draft")
    draft.mkdir()
    (draft / "model.safetensors").write_text("half")
    back_up(settings, archive, checkpoints=True)
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    assert not [name for name in names if "/ray/" in name or "/spool/" in name or ".draft" in name]
    assert (names[0], names[-1]) == ("database", "manifest.json")
    assert any(name.endswith("attempt-000001/step-00000050/manifest.json") for name in names)


def test_an_installation_with_experiments_is_not_replaced_unless_told_to(
    store: Store, settings: Settings, archive: Path, worked: Worked, submit: Submit
) -> None:
    back_up(settings, archive, checkpoints=True)
    later = submit(2)
    store.close()
    with pytest.raises(Conflict, match="holds 2 experiments; give --replace"):
        restore(settings, archive, replace=False)
    assert store.experiments.get(later.id) == later
    store.close()
    restore(settings, archive, replace=True)
    assert [found.id for found in store.experiments.page().items] == [worked.experiment.id]


def test_files_that_the_restored_database_does_not_have_are_set_aside(
    store: Store, settings: Settings, archive: Path, worked: Worked, submit: Submit
) -> None:
    """Their numbers are used again: a later run would resume from another run's checkpoint."""
    back_up(settings, archive, checkpoints=False)
    later = submit(1)
    (later_run,) = store.runs.page(experiment_id=later.id).items
    save_checkpoint(settings, later_run, 1, 10)
    save_checkpoint(settings, worked.run, 7, 90)
    store.close()
    restore(settings, archive, replace=True)
    (aside,) = settings.data_dir.glob("set-aside-*")
    assert (aside / "experiments" / str(later.id)).is_dir()
    assert not experiment_folder(settings, later.id).exists()
    kept = checkpoints_folder(settings, worked.experiment.id, worked.run.id)
    assert CheckpointId(1, 50).path(kept).is_dir()
    assert not attempt_folder(kept, 7).exists()


def test_a_live_driver_is_not_replaced(
    store: Store, settings: Settings, archive: Path, training: Training
) -> None:
    training()
    back_up(settings, archive, checkpoints=False)
    store.close()
    with pytest.raises(Conflict, match=r"a driver holds an experiment for another .* stop the service"):
        restore(settings, archive, replace=True)


def test_a_database_that_a_process_has_open_is_not_replaced(
    store: Store, settings: Settings, archive: Path, worked: Worked
) -> None:
    back_up(settings, archive, checkpoints=False)
    store.close()
    idle = Store.open(settings)  # Such as an API without requests.
    try:
        with pytest.raises(Conflict, match=r"^the database is in use; stop the API, the schedulers and"):
            restore(settings, archive, replace=True)
    finally:
        idle.close()
    restore(settings, archive, replace=True)


def test_no_process_opens_a_database_that_is_being_restored(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.0)
    monkeypatch.setattr(postgresql, "LOCK_TIMEOUT_S", 0.02)
    store.close()
    restoring = Database(settings.resolved_database_url(), present=False)
    with restoring.alone() as alone:
        assert alone
        with pytest.raises(StoreUnavailable, match="the database is being restored"):
            Store.open(settings)
    restoring.close()
    Store.open(settings).close()


def test_an_archive_is_never_overwritten(settings: Settings, archive: Path, worked: Worked) -> None:
    archive.write_text("of yesterday")
    with pytest.raises(BackupError, match="exists; give another name"):
        back_up(settings, archive, checkpoints=False)
    assert archive.read_text() == "of yesterday"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def without_manifest(path: Path) -> None:
    copy = path.with_suffix(".copy")
    with tarfile.open(path) as old, tarfile.open(copy, "w") as new:
        for member in old:
            if member.name != "manifest.json":
                new.addfile(member, old.extractfile(member))
    shutil.move(copy, path)


def with_a_stranger(path: Path) -> None:
    with tarfile.open(path, "a") as opened:
        opened.addfile(tarfile.TarInfo("../outside"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda path: flip(path, 512 + 100),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:5000]),
    "cut off between two files": without_manifest,
    "with a file from elsewhere": with_a_stranger,
    "not an archive": lambda path: path.write_bytes(b"not an archive" * 1000),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_backup_changes_nothing(
    store: Store, settings: Settings, archive: Path, worked: Worked, submit: Submit, damage: str
) -> None:
    back_up(settings, archive, checkpoints=True)
    later = submit(1)
    store.close()
    DAMAGES[damage](archive)
    with pytest.raises(BackupError) as refused:
        restore(settings, archive, replace=True)
    assert "\n" not in str(refused.value)
    assert str(archive) in str(refused.value)
    assert store.experiments.get(later.id) == later
    assert checkpoint_of(settings, worked.run, "best").is_dir()
    assert not list(settings.data_dir.glob(".restore-*"))


def test_a_backup_of_a_newer_release_is_refused(
    store: Store, settings: Settings, elsewhere: Settings, archive: Path, worked: Worked
) -> None:
    previous = migrate.newest_revision()
    change = sa.text("UPDATE alembic_version SET version_num = :revision")
    store.database.write(lambda connection: connection.execute(change, {"revision": "9999"}))
    try:
        back_up(settings, archive, checkpoints=False)
    finally:
        store.database.write(lambda connection: connection.execute(change, {"revision": previous}))
    with pytest.raises(BackupError, match="restore it with that release or a newer one"):
        restore(elsewhere, archive, replace=False)


@pytest.mark.postgresql
def test_a_backup_of_the_other_kind_of_database_is_refused(
    tmp_path: Path, sqlite_template: Path, empty_postgresql_url: str, archive: Path
) -> None:
    shutil.copy(sqlite_template, tmp_path / "stillhouse.db")
    back_up(Settings(data_dir=tmp_path), archive, checkpoints=False)
    with pytest.raises(BackupError, match="holds a sqlite database, but this installation uses postgresql"):
        restore(
            Settings(data_dir=tmp_path / "other", database_url=empty_postgresql_url), archive, replace=False
        )


@pytest.mark.postgresql
def test_missing_client_programs_of_postgresql_are_said(
    tmp_path: Path, postgresql_url: str, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    with pytest.raises(BackupError, match="pg_dump was not found; install PostgreSQL's client programs"):
        back_up(Settings(data_dir=tmp_path, database_url=postgresql_url), archive, checkpoints=False)
    assert list(tmp_path.glob("*backup*")) == []
