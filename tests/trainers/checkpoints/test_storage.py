"""Files appear whole or not at all, in a folder and in a store; errors of a store are reported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.object_store import KEY, SECRET, give_up_soon
from trainers.checkpoints import manifest
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.data import storage
from trainers.entrypoint import classify, train
from trainers.errors import CheckpointError, FailureClass
from trainers.reporting import NeverStop, OnlyAttempt

LARGE = 40 << 20  # More than two parts


def snapshot(step: int) -> Snapshot:
    return Snapshot({"model": {"w": torch.full((1000,), float(step))}}, {"progress": {"step": step}})


def describe(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def filled(**files: bytes):
    def fill(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    return fill


def yes() -> None: ...


def no() -> None:
    raise CheckpointError("a later attempt")


def names(folder: storage.Place) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def test_a_file_is_read_as_written_and_replaced(root):
    for content in (b"one", b"another"):
        storage.put(root / "a" / "file", content)
        assert (root / "a" / "file").read_bytes() == content
    assert (root / "a" / "file").stat().st_size == 7
    assert abs((root / "a" / "file").stat().st_mtime - time.time()) < 600
    assert names(root / "a") == {"file"}
    assert (root / "a").is_dir() and not (root / "a").is_file()
    assert (root / "a" / "file").is_file()


def test_a_file_that_is_not_confirmed_is_not_written(root):
    storage.put(root / "file", b"before")
    with pytest.raises(CheckpointError):
        storage.put(root / "file", b"after", no)
    assert (root / "file").read_bytes() == b"before"
    assert names(root) == {"file"}


def test_what_is_missing_is_a_file_that_is_not_found(root):
    x = root / "x"
    for read in (x.read_bytes, x.stat, lambda: x.open("rb")):
        with pytest.raises(FileNotFoundError) as missing:
            read()
        assert str(root / "x") in str(missing.value)
    assert names(root / "x") == set()
    assert not (root / "x").is_file()


def test_a_group_has_a_manifest_of_what_was_sent(root, tmp_path):
    large = os.urandom(LARGE)
    storage.put_sealed(root / "group", {"format": 2}, filled(a=large, b=b""), yes, tmp_path / "scratch")
    assert names(root / "group") == {"a", "b", "manifest.json"}
    for name, sealed in manifest.sealed_files(root / "group").items():
        assert storage.digest(root / "group" / name) == sealed["sha256"]
        assert (root / "group" / name).stat().st_size == sealed["size"]
    copy = storage.on_this_node(root / "group", tmp_path / "copies")
    assert (copy / "a").read_bytes() == large
    assert not list((tmp_path / "scratch").glob("*"))


def test_a_group_without_confirmation_is_none(root, tmp_path):
    with pytest.raises(CheckpointError):
        storage.put_sealed(root / "group", {}, filled(a=b"a"), no, tmp_path / "scratch")
    assert not (root / "group" / "manifest.json").is_file()


def test_a_group_is_removed_and_moved_whole(root, tmp_path):
    storage.put_sealed(root / "top" / "group", {}, filled(a=b"a"), yes, tmp_path / "scratch")
    storage.move(root / "top", root / "aside" / "top")
    assert names(root / "aside" / "top" / "group") == {"a", "manifest.json"}
    assert not (root / "top" / "group").is_dir()
    storage.delete(root / "aside")
    storage.delete(root / "never was")
    assert not (root / "aside" / "top" / "group" / "a").is_file()
    assert not (root / "aside").is_dir()


def steps_of(store: CheckpointStore) -> list[tuple[int, int]]:
    return [(saved.attempt, saved.step) for saved in manifest.checkpoints_in(store.folder)]


def test_checkpoints_are_kept_pruned_and_read_back(root, tmp_path):
    first = CheckpointStore(root, 2, OnlyAttempt(1), tmp_path / "node")
    for step in (10, 20, 30):
        first.save(step, snapshot(step), describe)
    assert first.mark_best(first.id(20), "f1", 0.9)
    second = CheckpointStore(root, 2, OnlyAttempt(2), tmp_path / "another node")
    newest = second.newest(pytest.fail)
    assert second.load(newest).state == {"progress": {"step": 30}}
    assert second.load(newest, only=("model",)).tensors["model"]["w"].unique().tolist() == [30.0]
    assert second.mark_best(first.id(20), "f1", 0.9)
    for step in (40, 50):
        second.save(step, snapshot(step), describe)
    assert steps_of(second) == [(2, 50), (2, 40), (1, 20)]
    best = manifest.read_best(root)
    assert (best.step, best.score, manifest.verify(best.path)) == (20, 0.9, None)
    assert not list((tmp_path / "another node" / "copies").glob("*"))


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_is_taken(root, tmp_path):
    store = CheckpointStore(root, 2, scratch=tmp_path / "node")
    for step in (10, 20):
        store.save(step, snapshot(step), describe)
    weights = store.path(20) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    storage.put(weights, bytes(content))
    lines: list[str] = []
    assert store.newest(lines.append) == store.path(10)
    assert "model.safetensors does not match the manifest" in lines[0]


def test_a_write_that_was_killed_leaves_nothing_that_counts(root, tmp_path):
    store = CheckpointStore(root, 2, scratch=tmp_path / "node")
    store.save(10, snapshot(10), describe)
    left = store.path(20)
    if isinstance(left, Path):
        left = left.with_name("step-00000020.draft")
    storage.put(left / "model.safetensors", b"half")
    assert store.newest(pytest.fail) == store.path(10)
    store.save(30, snapshot(30), describe)
    assert not left.is_dir()


def test_a_stale_attempt_writes_no_checkpoint(root, tmp_path):
    class Replaced(OnlyAttempt):
        def holds(self) -> bool:
            return False

    store = CheckpointStore(root, 2, Replaced(1), tmp_path / "node")
    with pytest.raises(CheckpointError, match="a later attempt has replaced attempt 1"):
        store.save(10, snapshot(10), describe)
    assert steps_of(store) == []


def test_a_store_that_refuses_for_a_while_is_asked_again(bucket, served, tmp_path):
    store = CheckpointStore(bucket, 2, scratch=tmp_path / "node")
    served.failing += [503, 500, 503]
    store.save(10, snapshot(10), describe)
    served.failing += [503, 500]
    assert store.newest(pytest.fail) == store.path(10)
    assert not served.failing


@pytest.mark.slow
def test_a_store_that_keeps_refusing_fails_the_attempt_and_names_the_object(
    bucket, served, tmp_path, monkeypatch
):
    give_up_soon(monkeypatch)
    store = CheckpointStore(bucket, 2, scratch=tmp_path / "node")
    store.save(10, snapshot(10), describe)
    served.failing += [503] * 1000
    served.methods = frozenset({"PUT", "POST"})
    with pytest.raises(CheckpointError, match="checkpoint of step 20 cannot be written to s3://b") as failed:
        store.save(20, snapshot(20), describe)
    assert classify(failed.value)[0] is FailureClass.storage
    assert KEY not in str(failed.value) and SECRET not in str(failed.value)
    served.failing.clear()
    assert store.newest(pytest.fail) == store.path(10)


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(bucket, served, tmp_path, monkeypatch):
    give_up_soon(monkeypatch)
    CheckpointStore(bucket, 2, scratch=tmp_path / "node").save(10, snapshot(10), describe)
    served.failing += [500] * 1000
    store = CheckpointStore(bucket, 2, scratch=tmp_path / "another node")
    with pytest.raises(CheckpointError, match="cannot be read"):
        store.newest(pytest.fail)


def test_messages_of_the_library_are_told_without_secrets(bucket, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-that-is-long")
    with pytest.raises(OSError) as failed, storage._reported(bucket):
        raise OSError(f"key {KEY}, secret {SECRET}, token a-token-that-is-long: refused\nmore")
    assert str(failed.value) == f"[Errno 5] key ***, secret ***, token ***: refused: '{bucket}'"
    assert failed.value.__cause__ is None and failed.value.__suppress_context__


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://key:secret@bucket/p", "credentials, region and endpoint come from the environment"),
        ("s3://bucket?endpoint_override=x", "come from the environment"),
        ("http://bucket/p", "http:// is not known"),
        ("abfs://container/p", "give abfs://container@account"),
    ],
)
def test_a_url_that_is_not_a_place_is_refused(url, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        storage.place(url)
    assert "secret" not in str(refused.value)


KILLED = """
import os, signal, sys
from pathlib import Path
from trainers.config import RunConfig
from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink

class Killed(NullSink):
    def checkpoint(self, *, step, path, verified):
        assert path.startswith("s3://")
        if step >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

train(RunConfig.model_validate_json(sys.stdin.read()), Killed(), NeverStop())
"""


@pytest.mark.slow
def test_a_run_killed_on_one_node_ends_bitwise_on_another(config_in, bucket, tmp_path, recorder, shared):
    changes = {
        "deterministic": True,
        "checkpoint": {"every_steps": 1, "every_s": 0.0},
        "task": {"name": "imdb", "path": "reviews", "max_length": 48, "test": "auto"},
    }
    whole = train(config_in(tmp_path / "whole", **changes), type(recorder)(), NeverStop())

    def on(node: str, folder: str, **others):
        where = {
            "checkpoints": str(bucket / folder),
            "cache": str(tmp_path / node),
            "data_roots": (str(shared / "data"),),
        }
        return config_in(Path(), **{**changes, "workspace": {**where, **others.pop("roots", {})}, **others})

    command = [sys.executable, "-c", KILLED]
    killed = subprocess.run(
        command, input=on("one", "run").model_dump_json(), text=True, capture_output=True, check=False
    )
    assert killed.returncode == -9, killed.stderr
    resumed = train(on("other", "run"), recorder, NeverStop())
    assert recorder.resumed_from >= 2
    assert resumed.checkpoint.startswith(str(bucket))
    for name in ("model", "optimizer", "random"):
        file = f"{name}.safetensors"
        there = (storage.place(resumed.checkpoint) / file).read_bytes()
        assert there == (Path(whole.checkpoint) / file).read_bytes()
    for name in ("accuracy", "best_score", "test_score"):
        assert resumed.summary[name] == whole.summary[name]
    teacher = str(resumed.summary["best_checkpoint"])
    taught = on(
        "third",
        "taught",
        roots={"model_roots": (teacher,)},
        model={"name": teacher, "teacher": teacher},
        distillation={"soft_weight": 0.5},
    )
    assert train(taught, type(recorder)(), NeverStop()).status == "completed"
