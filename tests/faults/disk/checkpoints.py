"""Damaged checkpoints: the newest whole one is found, and each newer one is named in one line."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from tests.faults.disk.damage import Damage
from tests.faults.disk.outcome import Outcome
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore, Snapshot, load
from trainers.reporting import OnlyAttempt

SAVED = (CheckpointId(1, 10), CheckpointId(1, 20), CheckpointId(2, 15))
"""The third was saved last."""


def snapshot(id: CheckpointId) -> Snapshot:
    """What the checkpoint of a step holds."""
    weights = torch.arange(64, dtype=torch.float32) + 1000 * id.attempt + id.step
    return Snapshot({"model": {"weight": weights}, "optimizer": {"m": -weights}}, {"step": id.step})


def save(folder: Path, id: CheckpointId) -> None:
    """Saves the checkpoint of a step."""
    CheckpointStore(folder, keep=3, fence=OnlyAttempt(id.attempt)).save(
        id.step, snapshot(id), lambda path: None
    )


def difference(path: Path) -> str:
    """What a checkpoint holds that was not saved; empty = nothing."""
    expected, found = snapshot(CheckpointId.of(path)), load(path)
    same = expected.state == found.state and expected.tensors.keys() == found.tensors.keys()
    for file, tensors in expected.tensors.items():
        same = same and all(torch.equal(found.tensors[file][name], tensors[name]) for name in tensors)
    return "" if same else f"{path} holds other values"


class Checkpoints:
    """Cases of damaged checkpoints.

    Args:
        folder: for files.
    """

    def __init__(self, folder: Path) -> None:
        self._template, self._folder = folder / "template", folder / "run"
        for id in SAVED:
            save(self._template, id)

    def case(self, chance: random.Random) -> Outcome:
        """Damages a file of the newest checkpoint, often also of the one before, and looks for the newest."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._template, self._folder)
        newest_first = sorted(SAVED, reverse=True)
        damaged = newest_first[: chance.choice((1, 1, 2))]
        what = []
        for id in damaged:
            file = chance.choice(sorted(id.path(self._folder).iterdir()))
            if chance.random() < 0.1:
                file.unlink()
                what.append(f"{file.name} of {id} removed")
            else:
                damage = Damage.choose(chance, file.stat().st_size)
                damage.do(file)
                what.append(f"{file.name} of {id}: {damage}")
        lines: list[str] = []
        store = CheckpointStore(self._folder, keep=3, fence=OnlyAttempt(2))
        path = store.newest(lines.append)
        found = None if path is None else CheckpointId.of(path)
        wrong = "none is found" if path is None else difference(path)
        if found is not None and found < newest_first[len(damaged)]:
            wrong = f"{found} is found, which is older than {newest_first[len(damaged)]}"
        passed_over = newest_first[: newest_first.index(found)] if found else newest_first
        if not all(str(id.path(self._folder)) in line for id, line in zip(passed_over, lines, strict=False)):
            wrong = "a line names another checkpoint"
        return Outcome("; ".join(what), wrong, bool(passed_over), tuple(lines), len(passed_over))
