"""A teacher's logits of a training part, computed once and kept on disk.

The key is a hash of the teacher's bytes and number format, its head, and the tokens of the examples in order.
So all epochs, seeds and runs with that teacher on that data share them, and only the first loads the teacher.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trainers.config import Workspace
from trainers.data.batches import Batch, by_positions, collate
from trainers.data.cache import digest_of
from trainers.data.selection import Indices
from trainers.data.storage import prepared_folder
from trainers.data.tokens import TokenSet
from trainers.distillation.teacher import Teacher, require_finite
from trainers.model_kinds.heads import logits_of
from trainers.tasks.dataset import Pace

_LAYOUT = 1  # Grows when the cache's content changes for the same input
_FILE = "logits.npy"
_BATCH_TOKENS = 16_384


class CachedLogits:
    """Adds a teacher's logits to batches; a `Transform` for tasks that have none of their own.

    They are (N, C) of each example, or with `offsets` (N+1,) those of the tokens of all examples.
    """

    def __init__(self, logits: npt.NDArray[np.float32], offsets: npt.NDArray[np.int64] | None) -> None:
        self._logits, self._offsets = logits, offsets

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        rows = batch.rows.numpy()
        if self._offsets is None:
            return replace(batch, teacher_logits=torch.from_numpy(self._logits[rows]))
        logits = np.zeros((*batch.input_ids.shape, self._logits.shape[1]), dtype=np.float32)
        for i, row in enumerate(rows):
            start, end = self._offsets[row], self._offsets[row + 1]
            logits[i, : end - start] = self._logits[start:end]
        return replace(batch, teacher_logits=torch.from_numpy(logits))


def cached_logits(
    workspace: Workspace, teacher: Teacher, device: torch.device, multiple: int, report: Callable[[str], None]
) -> CachedLogits:
    """Returns the training part's logits, cached or computed; raises `NotFiniteError` and `CacheError`."""
    data = teacher.data
    per_token = data.head.reads != "text"
    count = logits_of(data.head)
    assert count is not None  # Where inputs never change, a vocabulary is not guessed.

    def build(folder: Path) -> None:
        shape = (len(data.train.tokens) if per_token else len(data.train), count)
        logits = np.lib.format.open_memmap(folder / _FILE, mode="w+", dtype=np.float32, shape=shape)
        began_s, done, total = time.monotonic(), 0, len(data.train)
        progress = Pace(report, "teacher's logits:", total, "examples")
        report(f"computing the teacher's logits for {total} examples, once for this teacher and this data")
        model = teacher.load()
        for rows in _by_length(data.train.lengths):
            batch = collate(data.train, rows, data.pad_id, multiple).to(device)
            of_batch = model(batch, with_hidden=False).logits
            require_finite(of_batch, teacher)
            values = of_batch.cpu().numpy()
            if per_token:
                for i, row in enumerate(rows):
                    start, end = data.train.offsets[row], data.train.offsets[row + 1]
                    logits[start:end] = values[i, : end - start]
            else:
                logits[rows] = values
            done += len(rows)
            progress(done)
        report(f"teacher's logits: all {total} examples in {time.monotonic() - began_s:.1f} s")
        logits.flush()

    key = digest_of([_LAYOUT, teacher.sha256, teacher.format.name, repr(data.head), _digest(data.train)])
    folder = prepared_folder(workspace, "teacher-logits", key, build, report)
    logits = np.load(folder / _FILE, mmap_mode="r")
    return CachedLogits(logits, data.train.offsets if per_token else None)


def _by_length(lengths: npt.NDArray[np.int64]) -> list[Indices]:
    """Batches of about `_BATCH_TOKENS`, longest first: what does not fit into memory fails at once."""
    order = np.argsort(-lengths, kind="stable")
    edges = by_positions(lengths[order].tolist(), _BATCH_TOKENS, 1, padded=True)
    return [order[start:end] for start, end in pairwise(edges)]


def _digest(data: TokenSet) -> str:
    total = hashlib.sha256()
    for array in (data.offsets, data.tokens, data.second_at):
        if array is not None:
            total.update(f"{array.dtype.str}{array.shape}".encode())
            total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()
