"""The checkpoint of the best evaluation is kept beside the newest ones, and known after any interruption."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from trainers.checkpoints import manifest
from trainers.checkpoints.manifest import BEST, CheckpointId, attempt_folder, read_best
from trainers.checkpoints.store import CheckpointStore, Snapshot, load
from trainers.entrypoint import train
from trainers.errors import CheckpointError
from trainers.loop.progress import Progress
from trainers.reporting import NeverStop, OnlyAttempt

TWO_EPOCHS = {"length": {"epochs": 2.0}, "evaluation": {"every_epochs": 0.5}}


def snapshot(step: int) -> Snapshot:
    return Snapshot({"model": {"w": torch.full((10,), float(step))}}, {"progress": {"step": step}})


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def checkpoints(folder):
    return CheckpointStore(folder, keep=2)


def save(checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, snapshot(step), lambda path: None)


def steps_in(folder) -> list[int]:
    return sorted(saved.step for saved in manifest.checkpoints_in(folder))


def checkpoint_path(folder, step: int):
    return CheckpointId(1, step).path(folder)


def test_the_best_outlives_newer_ones_until_another_is_better(checkpoints, folder):
    save(checkpoints, 1, 2)
    assert checkpoints.mark_best(checkpoints.id(2), "f1", 0.7)
    save(checkpoints, 3, 4, 5)
    assert steps_in(folder) == [2, 4, 5]
    best = read_best(folder)
    assert (best.path, best.step, best.metric, best.score) == (checkpoint_path(folder, 2), 2, "f1", 0.7)
    checkpoints.mark_best(checkpoints.id(5), "f1", 0.8)
    save(checkpoints, 6)
    assert steps_in(folder) == [5, 6]


def test_a_mark_without_its_checkpoint_is_none(checkpoints, folder):
    save(checkpoints, 1)
    assert not checkpoints.mark_best(checkpoints.id(9), "f1", 0.7)
    assert read_best(folder) is None
    checkpoints.mark_best(checkpoints.id(1), "f1", 0.7)
    (checkpoint_path(folder, 1) / "manifest.json").unlink()
    assert read_best(folder) is None


def test_a_mark_is_of_one_checkpoint_and_not_of_its_step(checkpoints, folder):
    save(checkpoints, 1)
    checkpoints.mark_best(checkpoints.id(1), "f1", 0.7)
    checkpoints.save(1, snapshot(2), lambda path: None)
    assert read_best(folder) is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"step": 1}', '{"step": "x", "metric": "f1", "score": 1}', "\0"]
)
def test_a_damaged_mark_is_none(checkpoints, folder, content):
    save(checkpoints, 1)
    (attempt_folder(folder, 1) / BEST).write_text(content)
    assert read_best(folder) is None
    save(checkpoints, 2, 3)
    assert steps_in(folder) == [2, 3]


@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_leaves_the_mark_before(checkpoints, folder, monkeypatch, call):
    save(checkpoints, 1, 2)
    checkpoints.mark_best(checkpoints.id(1), "f1", 0.7)
    real, calls = os.fsync, iter(range(1, 100))

    def full(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoints.mark_best(checkpoints.id(2), "f1", 0.8)
    monkeypatch.undo()
    assert read_best(folder).step in (1, 2)
    assert not list(folder.rglob("*.draft"))


def test_a_glance_sees_a_missing_and_a_short_file_and_verify_every_byte(checkpoints, folder):
    save(checkpoints, 1)
    path = checkpoint_path(folder, 1)
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert manifest.verify(path, every_byte=False) is None
    assert "does not match the manifest" in manifest.verify(path)
    weights.write_bytes(content[:-1])
    assert "bytes" in manifest.verify(path, every_byte=False)
    weights.unlink()
    assert manifest.verify(path, every_byte=False) == "model.safetensors is missing"


@pytest.mark.parametrize(("higher", "best"), [(True, (0.9, 1)), (False, (0.2, 3))])
def test_progress_keeps_the_better_score_in_the_tasks_direction(higher, best):
    progress = Progress()
    for score in (0.9, 0.5, 0.2, float("nan")):
        progress.step += 1
        progress.judge({"m": score}, "m", higher_is_better=higher)
    assert (progress.best, progress.best_step) == best


def test_a_score_that_is_no_number_is_never_the_best_for_long():
    progress = Progress(step=1)
    progress.judge({"m": float("nan")}, "m", higher_is_better=True)
    progress.step = 2
    progress.judge({"m": 0.1}, "m", higher_is_better=True)
    assert (progress.best, progress.best_step) == (0.1, 2)


def test_each_evaluation_has_a_checkpoint_and_the_best_is_in_the_summary(configure, recorder, tmp_path):
    outcome = train(configure(**TWO_EPOCHS, checkpoint={"every_s": 0.0, "keep": 1}), recorder, NeverStop())
    scores = recorder.series("accuracy")
    assert len(scores) == 4
    assert recorder.saved == sorted(scores)
    summary = outcome.summary
    assert (summary["headline"], summary["score"]) == ("accuracy", scores[outcome.step])
    first_best = max(scores, key=lambda step: (scores[step], -step))
    assert (summary["best_score"], summary["best_step"]) == (scores[first_best], first_best)
    best = read_best(tmp_path / "checkpoints")
    assert str(best.path) == summary["best_checkpoint"]
    assert (best.step, best.metric, best.score) == (first_best, "accuracy", scores[first_best])
    assert manifest.verify(best.path) is None
    assert steps_in(tmp_path / "checkpoints") == sorted({first_best, outcome.step})


@pytest.mark.slow
def test_a_resumed_run_marks_what_the_whole_run_marks(config_in, tmp_path, recorder):
    whole = train(config_in(tmp_path / "whole", **TWO_EPOCHS), recorder, NeverStop())
    config = config_in(tmp_path / "parts", **TWO_EPOCHS)
    for stop_after in (7, 13, 20, None):
        part = type(recorder)(stop_after=stop_after)
        outcome = train(config, part, part)
    for name in ("best_score", "best_step", "score", "headline"):
        assert outcome.summary[name] == whole.summary[name]
    marks = [read_best(tmp_path / name) for name in ("whole", "parts")]
    assert [mark.step for mark in marks] == [whole.summary["best_step"]] * 2


def test_a_best_checkpoint_that_is_gone_is_forgotten_on_resume(config_in, tmp_path, recorder):
    config = config_in(tmp_path / "run", **TWO_EPOCHS)
    part = type(recorder)(stop_after=20)
    train(config, part, part)
    newest = max(steps_in(tmp_path / "run"))
    state = load(checkpoint_path(tmp_path / "run", newest)).state["progress"]
    best = read_best(tmp_path / "run")
    assert state["best_step"] == best.step < newest
    (best.path / "manifest.json").unlink()
    outcome = train(config, recorder, NeverStop())
    later = {step: score for step, score in recorder.series("accuracy").items() if step >= newest}
    assert outcome.summary["best_score"] == max(later.values())
    assert read_best(tmp_path / "run").step == outcome.summary["best_step"]


def test_a_later_attempt_resumes_from_and_judges_against_an_earlier_one(config_in, tmp_path, recorder):
    config = config_in(tmp_path / "run", **TWO_EPOCHS)
    part = type(recorder)(stop_after=20)
    train(config, part, part, fence=OnlyAttempt(1))
    first_best = read_best(tmp_path / "run")
    outcome = train(config, recorder, NeverStop(), fence=OnlyAttempt(2))
    assert recorder.resumed_from == max(step for step in part.saved)
    scores = {**part.series("accuracy"), **recorder.series("accuracy")}
    best_step = max(scores, key=lambda step: (scores[step], -step))
    best = read_best(tmp_path / "run")
    assert (best.step, str(best.path)) == (best_step, outcome.summary["best_checkpoint"])
    own = CheckpointId.of(best.path)
    assert own.attempt == (1 if best_step <= recorder.resumed_from else 2)
    assert first_best.step in part.saved
    assert CheckpointId.of(Path(outcome.checkpoint)) == CheckpointId(2, outcome.step)
