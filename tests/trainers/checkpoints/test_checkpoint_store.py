"""Checkpoints on disk: whole or not there, whatever happens to them."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.drawing import scaled
from trainers.checkpoints import manifest
from trainers.checkpoints.store import CheckpointStore, Snapshot, load
from trainers.data import storage
from trainers.errors import CheckpointError
from trainers.reporting import OnlyAttempt


def snapshot(step: int) -> Snapshot:
    return Snapshot({"model": {"w": torch.full((1000,), float(step))}}, {"progress": {"step": step}})


def describe(folder) -> None:
    (folder / "config.json").write_text("{}")


@pytest.fixture
def checkpoints(tmp_path):
    return CheckpointStore(tmp_path / "run", keep=2)


def newest_step(checkpoints) -> int | None:
    found = checkpoints.newest(lambda line: None)
    if found is None:
        return None
    taken = load(found)
    step = taken.state["progress"]["step"]
    assert taken.tensors["model"]["w"].unique().tolist() == [float(step)]
    return step


def test_what_is_saved_is_loaded(checkpoints):
    path = checkpoints.save(123, snapshot(123), describe)
    assert path.name == "step-00000123"
    assert newest_step(checkpoints) == 123


def test_two_are_kept(checkpoints):
    for step in (1, 2, 3, 4):
        checkpoints.save(step, snapshot(step), describe)
    assert sorted(path.name for path in (checkpoints.path(1).parent).iterdir()) == [
        "step-00000003",
        "step-00000004",
    ]


def test_empty_folder_has_none(checkpoints):
    assert newest_step(checkpoints) is None


def test_folder_without_manifest_is_no_checkpoint(checkpoints):
    checkpoints.save(1, snapshot(1), describe)
    checkpoints.save(2, snapshot(2), describe)
    (checkpoints.path(2) / "manifest.json").unlink()
    assert newest_step(checkpoints) == 1


def test_renamed_folder_is_no_checkpoint(checkpoints):
    checkpoints.save(1, snapshot(1), describe)
    shutil.copytree(checkpoints.path(1), checkpoints.path(9))
    assert newest_step(checkpoints) == 1


def test_file_that_the_manifest_does_not_list_is_not_read(checkpoints):
    """Such as the shadow that a file server leaves beside each file."""
    checkpoints.save(1, snapshot(1), describe)
    (checkpoints.path(1) / "._model.safetensors").write_bytes(b"\0\5\26\7Mac OS X")
    assert newest_step(checkpoints) == 1


def test_rejected_checkpoint_is_replaced_and_never_outlives_a_good_one(checkpoints):
    for step in (10, 20):
        checkpoints.save(step, snapshot(step), describe)
    (checkpoints.path(20) / "state.json").write_text("{}")
    checkpoints.save(15, snapshot(15), describe)
    assert newest_step(checkpoints) == 15
    checkpoints.save(20, snapshot(20), describe)
    assert newest_step(checkpoints) == 20
    (checkpoints.path(20) / "manifest.json").unlink()
    assert newest_step(checkpoints) == 15


@settings(max_examples=scaled(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_leaves_the_new_one_or_the_one_before(checkpoints, data):
    shutil.rmtree(checkpoints.path(1).parent, ignore_errors=True)
    for step in (1, 2):
        checkpoints.save(step, snapshot(step), describe)
    files = sorted(checkpoints.path(2).iterdir())
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["truncate", "flip", "remove", "append"]))
    if kind == "remove":
        file.unlink()
    elif kind == "append":
        file.write_bytes(bytes(content) + b" ")
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        if kind == "truncate":
            file.write_bytes(bytes(content[:place]))
        else:
            content[place] ^= 1 << data.draw(st.integers(0, 7))
            file.write_bytes(bytes(content))
    # A change of the manifest's white space alone leaves the checkpoint whole.
    assert newest_step(checkpoints) in ((1, 2) if file.name == "manifest.json" else (1,))


@pytest.mark.parametrize("call", range(1, 12))
def test_full_disk_leaves_the_one_before(checkpoints, monkeypatch, call):
    checkpoints.save(1, snapshot(1), describe)
    real, calls = os.fsync, iter(range(1, 1000))

    def full(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(storage.os, "fsync", full)
    try:
        checkpoints.save(2, snapshot(2), describe)
    except CheckpointError as error:
        assert "No space left on device" in str(error)
    assert newest_step(checkpoints) in (1, 2)
    assert not list(checkpoints.path(1).parent.glob("*.draft"))


def test_file_size_limit_while_writing_tensors_is_a_checkpoint_error(checkpoints):
    checkpoints.save(1, snapshot(1), describe)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(CheckpointError, match="checkpoint of step 2 cannot be written"):
            checkpoints.save(2, snapshot(2), describe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest_step(checkpoints) == 1


def test_dead_drafts_are_removed(checkpoints):
    draft = checkpoints.path(5).with_name("step-00000005.draft")
    draft.mkdir(parents=True)
    (draft / "model.safetensors").write_bytes(random.randbytes(10))
    assert newest_step(checkpoints) is None
    checkpoints.save(6, snapshot(6), describe)
    assert not draft.exists()


def test_manifest_lists_every_file_with_size_and_hash(checkpoints):
    path = checkpoints.save(1, snapshot(1), describe)
    listing = json.loads((path / "manifest.json").read_text())
    assert set(listing["files"]) == {"model.safetensors", "state.json", "config.json"}
    assert all(len(entry["sha256"]) == 64 for entry in listing["files"].values())


class Attempt:
    """A fence that another attempt can take down."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.current = True

    def holds(self) -> bool:
        return self.current


def steps_by_attempt(folder) -> list[tuple[int, int]]:
    return [(saved.attempt, saved.step) for saved in manifest.checkpoints_in(folder)]


def test_a_stale_attempt_touches_nothing_of_the_current_one(tmp_path):
    stale = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))
    stale.save(20, snapshot(20), describe)
    current = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(2))
    for step in (40, 50):
        current.save(step, snapshot(step), describe)
    current.mark_best(current.id(40), "f1", 0.9)
    draft = current.path(60).with_name("step-00000060.draft")
    draft.mkdir()
    stale.save(30, snapshot(30), describe)
    stale.mark_best(stale.id(30), "f1", 0.1)
    assert newest_step(current) == 50
    assert manifest.read_best(tmp_path).step == 40
    assert manifest.verify(current.path(40)) is None
    assert draft.is_dir()


def test_the_newest_is_by_attempt_and_then_by_step(tmp_path):
    first = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))
    second = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(2))
    first.save(10, snapshot(10), describe)
    second.save(20, snapshot(20), describe)
    first.save(90, snapshot(90), describe)
    third = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(3))
    assert newest_step(third) == 20
    shutil.rmtree(second.path(20))
    assert newest_step(third) == 90
    assert newest_step(second) == 90


def test_an_attempt_does_not_read_what_a_later_one_saved(tmp_path):
    CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(2)).save(50, snapshot(50), describe)
    assert newest_step(CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))) is None


def test_the_fence_is_asked_again_before_a_checkpoint_takes_its_name(tmp_path):
    fence = Attempt(1)
    checkpoints = CheckpointStore(tmp_path, keep=2, fence=fence)
    checkpoints.save(10, snapshot(10), describe)
    checkpoints.mark_best(checkpoints.id(10), "f1", 0.5)

    def replaced_meanwhile(folder) -> None:
        describe(folder)
        fence.current = False

    with pytest.raises(CheckpointError, match="a later attempt has replaced attempt 1"):
        checkpoints.save(20, snapshot(20), replaced_meanwhile)
    with pytest.raises(CheckpointError, match="a later attempt has replaced attempt 1"):
        checkpoints.mark_best(checkpoints.id(10), "f1", 0.7)
    assert steps_by_attempt(tmp_path) == [(1, 10)]
    assert manifest.read_best(tmp_path).score == 0.5
    assert not list(tmp_path.rglob("*.draft"))


def test_earlier_attempts_are_pruned_as_if_they_were_one_run(tmp_path):
    first = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))
    for step in (10, 20, 30):
        first.save(step, snapshot(step), describe)
    first.mark_best(first.id(20), "f1", 0.9)
    second = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(2))
    assert newest_step(second) == 30
    second.mark_best(first.id(20), "f1", 0.9)
    second.save(40, snapshot(40), describe)
    assert steps_by_attempt(tmp_path) == [(2, 40), (1, 30), (1, 20)]
    second.save(50, snapshot(50), describe)
    assert steps_by_attempt(tmp_path) == [(2, 50), (2, 40), (1, 20)]


def test_a_damaged_checkpoint_of_an_earlier_attempt_takes_no_good_ones_place(tmp_path):
    first = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))
    for step in (20, 30):
        first.save(step, snapshot(step), describe)
    (first.path(30) / "state.json").write_text("{}")
    second = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(2))
    assert newest_step(second) == 20
    second.save(25, snapshot(25), describe)
    assert steps_by_attempt(tmp_path) == [(2, 25), (1, 20)]


def test_a_forgotten_best_of_an_earlier_attempt_is_none(tmp_path):
    first = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))
    first.save(10, snapshot(10), describe)
    first.mark_best(first.id(10), "f1", 0.5)
    second = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(2))
    second.forget_best()
    assert manifest.read_best(tmp_path) is None


def test_a_checkpoint_under_another_attempts_name_is_none(tmp_path):
    first = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(1))
    first.save(10, snapshot(10), describe)
    later = CheckpointStore(tmp_path, keep=2, fence=OnlyAttempt(7))
    shutil.copytree(first.path(10), later.path(10))
    assert manifest.verify(later.path(10)) == "the manifest is for step 10 of attempt 1"


def test_a_checkpoint_on_record_that_no_file_stands_for_is_an_error(checkpoints, tmp_path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"step 1,190 is on record, but .* sees none in {tmp_path / 'run'}"
    ):
        checkpoints.newest(lambda line: None, on_record=1190)
    assert checkpoints.newest(lambda line: None, on_record=None) is None
