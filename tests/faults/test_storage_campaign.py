"""Kills with checkpoints in an object store: the checker finds what is planted, and a slice runs clean."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.faults.campaign import storage_lives
from tests.faults.campaign.storage_kills import BUCKET, FAULTS, Lane, Outcome, Reader, Run, look
from tests.object_store import ObjectStore, in_environment, object_store
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.data import storage

FOLDERS = ("attempt-000001/step-00000002", "attempt-000001/step-00000003")


@pytest.fixture(scope="module")
def served() -> Iterator[ObjectStore]:
    with object_store() as store, in_environment(store):
        store.make_bucket(BUCKET)
        yield store


@pytest.fixture
def run(served: ObjectStore, tmp_path: Path) -> Run:
    """A run of three steps whose first is the best, and what each holds by right."""
    name = f"runs/{random.SystemRandom().getrandbits(64):x}"
    store = CheckpointStore(storage.place(f"s3://{BUCKET}/{name}"), 2, scratch=tmp_path)
    expected, acknowledged = {}, []
    for step in (1, 2, 3):
        weights = torch.full((4,), float(step))
        tensors = {file: {"w": weights.clone()} for file in ("model", "optimizer", "random")}
        saved = store.save(step, Snapshot(tensors, {"step": step}), lambda draft: None)
        expected[step] = {
            file: hashlib.sha256((saved / file).read_bytes()).hexdigest() for file in storage_lives.TENSORS
        }
        acknowledged.append((1, step))
        if step == 1:
            store.mark_best(store.id(1), "f1", 0.5)
    return Run(name, "writer", expected, acknowledged)


def counts(served: ObjectStore, run: Run) -> dict[str, int]:
    outcome = Outcome()
    look(Reader(served.target), run, outcome)
    return {fault: sum(found == fault for found, _ in outcome.found) for fault in FAULTS}


@pytest.mark.parametrize(("step", "wrong"), [(1, 1), (2, 0), (3, 0), (4, 1)])
def test_a_run_resumes_where_the_store_was_or_with_what_was_on_its_way(
    served: ObjectStore, tmp_path: Path, step: int, wrong: int
) -> None:
    outcome = Outcome()
    lane = Lane(0, 0, tmp_path, (served.target, {}))
    lane._hear({"resumed": step}, Run("runs/x", "writer", {}), outcome, 2)
    assert [fault for fault, _ in outcome.found] == ["wrong_resume"] * wrong


def place(run: Run, name: str) -> storage.ObjectPath:
    found = storage.place(f"s3://{BUCKET}/{run.name}/{name}")
    assert isinstance(found, storage.ObjectPath)
    return found


def test_nothing_is_found_where_nothing_is_planted(served: ObjectStore, run: Run) -> None:
    run.ended = {}
    assert counts(served, run) == dict.fromkeys(FAULTS, 0)
    assert run.whole == [(1, 1), (1, 2), (1, 3)]


def test_a_manifest_of_a_file_that_is_gone_or_changed_is_not_whole(served: ObjectStore, run: Run) -> None:
    place(run, f"{FOLDERS[0]}/state.json").unlink()
    place(run, f"{FOLDERS[1]}/state.json").upload(b"{}")
    assert counts(served, run)["not_whole"] == 2


def test_an_acknowledged_checkpoint_without_a_manifest_is_lost(served: ObjectStore, run: Run) -> None:
    place(run, f"{FOLDERS[1]}/manifest.json").unlink()
    assert counts(served, run)["lost"] == 1


def test_a_best_checkpoint_that_is_gone_is_lost(served: ObjectStore, run: Run) -> None:
    storage.delete(place(run, "attempt-000001/step-00000001"))
    assert counts(served, run)["lost"] == 1


def test_tensors_of_another_step_are_a_wrong_resume(served: ObjectStore, run: Run) -> None:
    run.expected = {**run.expected, 3: run.expected[2]}
    assert counts(served, run)["wrong_resume"] == 1


def test_what_a_run_leaves_besides_its_checkpoints_is_left(served: ObjectStore, run: Run) -> None:
    run.ended = {}
    place(run, "attempt-000002/step-00000009/model.safetensors").upload(b"half")
    assert counts(served, run)["left"] == 1


@pytest.mark.slow
def test_a_slice_of_the_campaign_finds_nothing() -> None:
    seed = random.SystemRandom().randrange(10**6)
    command = [sys.executable, "-m", "tests.faults.campaign", "--storage", "s3", "--kills", "8",
               "--seed", str(seed)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    answer = json.loads(done.stdout.splitlines()[-1])
    assert {fault: answer["kills"][fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert answer["kills"]["count"] == 8 and sum(answer["store_faults"].values())
