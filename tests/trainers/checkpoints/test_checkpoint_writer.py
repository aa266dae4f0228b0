"""Checkpoints written while training continues: what counts, what waits, what a failure does."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainers.checkpoints import manifest, store
from trainers.checkpoints.store import HostCopy, Snapshot
from trainers.entrypoint import classify, train
from trainers.errors import CheckpointError, FailureClass, NotFiniteError, OutOfMemoryError
from trainers.loop.saving import Saving
from trainers.reporting import NeverStop
from trainers.tasks.classification.task import Imdb

EVERY_TWO = {"every_steps": 2, "every_s": 0.0}
LIMIT_S = 30.0


class SlowDisk:
    """A disk that takes no file until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released, self.begun, self._write = threading.Event(), list[str](), store.save_file
        monkeypatch.setattr(store, "save_file", self.save_file)

    def save_file(self, tensors: dict[str, torch.Tensor], path: Path, **options: object) -> None:
        self.begun.append(f"{path.parent.name}/{path.name}")
        if not self.released.wait(LIMIT_S):
            raise OSError(errno.ETIMEDOUT, "training waits for the disk")
        self._write(tensors, path, **options)


@pytest.fixture
def slow_disk(monkeypatch):
    return SlowDisk(monkeypatch)


@pytest.fixture
def waited(monkeypatch, slow_disk):
    """The steps at which training waited for a write; the disk takes files from the first time on."""
    found: list[object] = []
    wait = Saving._wait

    def counted(self):
        if self._writing is not None:
            found.append("done" if self._writing.done() else "in flight")
            slow_disk.released.set()
        return wait(self)

    monkeypatch.setattr(Saving, "_wait", counted)
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor.clone()
        for name in ("model", "optimizer", "random")
        for key, tensor in load_file(folder / f"{name}.safetensors").items()
    }


def steps_in(config) -> list[int]:
    folder = Path(config.workspace.checkpoints)
    whole = (saved for saved in manifest.checkpoints_in(folder) if not manifest.verify(saved.path(folder)))
    return sorted(saved.step for saved in whole)


class ReleasedAt(NeverStop):
    """A stop that never comes; the disk takes files from a step on."""

    def __init__(self, disk: SlowDisk, step: int) -> None:
        self._disk, self._step, self._asked = disk, step, -1

    def requested(self):
        self._asked += 1
        if self._asked >= self._step:
            self._disk.released.set()


def test_steps_are_trained_while_the_disk_takes_nothing(config_in, tmp_path, recorder, monkeypatch):
    """And the checkpoint holds the step that it was taken at, random states included."""
    changes = {"deterministic": True, "length": {"steps": 6}, "checkpoint": EVERY_TWO}
    first = type(recorder)(stop_after=1)  # It is heard in the step after.
    stopped = train(config_in(tmp_path / "stopped", **changes), first, first)
    disk = SlowDisk(monkeypatch)
    config = config_in(tmp_path / "slow", checkpoint={**EVERY_TWO, "keep": 9}, deterministic=True)
    train(config, recorder, ReleasedAt(disk, step=4))
    assert disk.begun[0].startswith("step-00000002") and recorder.saved == [2, 4, 6]
    one, other = tensors(Path(stopped.checkpoint)), tensors(tmp_path / "slow/attempt-000001/step-00000002")
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_checkpoint_by_time_is_put_off_while_one_is_written(configure, recorder, waited):
    train(configure(length={"steps": 6}, checkpoint={"every_s": 1e-9}), recorder, NeverStop())
    assert recorder.saved == [1, 6]
    assert waited[0] == "in flight"


def test_checkpoint_by_steps_waits_for_the_one_before(configure, recorder, waited):
    config = configure(length={"steps": 4}, checkpoint={**EVERY_TWO, "keep": 9})
    train(config, recorder, NeverStop())
    assert steps_in(config) == recorder.saved == [2, 4]
    assert waited[0] == "in flight"


def test_pause_waits_until_its_checkpoint_is_whole(configure, recorder, waited):
    config = configure(length={"steps": 6})
    recorder.stop_after = 3
    outcome = train(config, recorder, recorder)
    assert (outcome.status, waited) == ("stopped", ["in flight"])
    assert steps_in(config) == recorder.saved == [outcome.step]
    assert manifest.verify(Path(outcome.checkpoint)) is None


def test_best_evaluation_keeps_its_checkpoint(configure, recorder, waited):
    """Its mark, which holds the manifest's digest, waits for the write that the evaluation overlapped."""
    config = configure(length={"steps": 6})
    outcome = train(config, recorder, NeverStop())
    best = manifest.read_best(Path(config.workspace.checkpoints))
    assert best is not None and best.step == outcome.summary["best_step"] == 6
    assert waited == ["in flight"]


def test_write_has_a_figure_of_its_own(configure, recorder, waited):
    config = configure(length={"steps": 4}, checkpoint=EVERY_TWO)
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["checkpoint_write_s"] > 0.0
    resumed = train(config, type(recorder)(), NeverStop())
    assert resumed.summary["checkpoint_write_s"] > 0.0  # that of step 2 is known at step 4


def test_full_disk_ends_the_run_in_one_line(configure, recorder, monkeypatch):
    write = store.save_file

    def full(tensors, path, **options):
        if path.parent.name.startswith("step-00000004"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path, **options)

    monkeypatch.setattr(store, "save_file", full)
    config = configure(length={"steps": 8}, checkpoint=EVERY_TWO)
    with pytest.raises(CheckpointError, match=r"step 4 .*No space left on device") as caught:
        train(config, recorder, NeverStop())
    failure, line = classify(caught.value)
    assert failure is FailureClass.storage and "\n" not in line
    assert steps_in(config) == recorder.saved == [2]


@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (RuntimeError("of the writer"), RuntimeError, "of the writer"),
        (MemoryError(), OutOfMemoryError, "the copy of a checkpoint does not fit"),
    ],
)
def test_error_of_the_thread_keeps_its_type(configure, recorder, monkeypatch, error, raised, words):
    def broken(tensors, path, **options):
        raise error

    monkeypatch.setattr(store, "save_file", broken)
    with pytest.raises(raised, match=words):
        train(configure(length={"steps": 4}, checkpoint=EVERY_TWO), recorder, NeverStop())
    assert recorder.saved == []


def test_checkpoint_in_flight_counts_when_the_run_fails_later(configure, recorder, waited, monkeypatch):
    loss, calls = Imdb.loss, iter(range(100))

    def poisoned(self, logits, batch):
        return loss(self, logits, batch) * (float("nan") if next(calls) >= 3 else 1.0)

    monkeypatch.setattr(
        "trainers.dry_runs.micro_batch.warm_up_once", lambda *_: None
    )  # A call of the loss is a step's.
    monkeypatch.setattr(Imdb, "loss", poisoned)
    config = configure(length={"steps": 8}, checkpoint=EVERY_TWO, batch={"global_size": 8, "micro_size": 8})
    with pytest.raises(NotFiniteError, match="step 4"):
        train(config, recorder, NeverStop())
    assert steps_in(config) == recorder.saved == [2]
    assert waited == ["in flight"]


@pytest.mark.slow
def test_kill_during_a_write_leaves_the_checkpoint_before(launch, config_in, tmp_path):
    changes = {"length": {"steps": 6}, "deterministic": True, "checkpoint": EVERY_TWO}
    victim = config_in(tmp_path / "victim", **changes)
    assert launch([victim], hang_write_at=4, kill_at=5).codes == [-9]
    assert steps_in(victim) == [2]
    left = sorted(path.name for path in (tmp_path / "victim/attempt-000001").glob("step-*"))
    assert left == ["step-00000002", "step-00000004.draft"]
    [result] = launch([config_in(tmp_path / "whole", **changes), victim]).results
    whole, resumed = result["runs"]
    assert resumed["resumed_from"] == 2
    assert resumed["weights"] == whole["weights"]


@pytest.mark.slow
def test_every_worker_learns_of_a_failure_in_the_thread(launch, config_in, tmp_path):
    blocked = tmp_path / "run"
    blocked.write_text("a file in the place of the folder")
    config = config_in(
        blocked,
        length={"steps": 6},
        checkpoint=EVERY_TWO,
        parallel={"strategy": "ddp", "workers": 2},
    )
    for result in launch([config]).results:
        [run] = result["runs"]
        assert run["failure"] == "storage" and "step 2 cannot be written" in run["message"]


def test_host_copy_is_reused_and_no_later_step_changes_it():
    device = torch.device("cpu")
    weights, moments = torch.ones(4), torch.zeros(3, 2).t()
    copy = HostCopy(device)
    first = copy.of(Snapshot({"model": {"w": weights}, "optimizer": {"m": moments}}, {"step": 1}))
    weights.add_(1.0)
    assert first.tensors["model"]["w"].tolist() == [1.0] * 4
    second = copy.of(Snapshot({"model": {"w": weights}, "optimizer": {"m": moments}}, {"step": 2}))
    assert second.tensors["model"]["w"].tolist() == [2.0] * 4
    assert second.tensors["optimizer"]["m"].is_contiguous()
    places = [taken.tensors["model"]["w"].data_ptr() for taken in (first, second)]
    assert places[0] == places[1] != weights.data_ptr()
    larger = copy.of(Snapshot({"model": {"w": torch.arange(5.0)}}, {"step": 3}))
    assert larger.tensors["model"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
