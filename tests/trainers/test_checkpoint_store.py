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

from trainers.checkpoints import store
from trainers.checkpoints.store import CheckpointStore, Snapshot, load
from trainers.errors import CheckpointError


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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

    monkeypatch.setattr(store.os, "fsync", full)
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
    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"model.safetensors", "state.json", "config.json"}
    assert all(len(entry["sha256"]) == 64 for entry in manifest["files"].values())
