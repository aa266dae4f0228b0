"""Evaluating a model on the validation part, sharded over the workers."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from trainers.data.batches import Batch, collate, evaluation_rows
from trainers.data.prefetch import Prefetcher
from trainers.parallel.replica import Replica
from trainers.parallel.workers import Workers
from trainers.precision import Inference
from trainers.tasks.base import Prepared, Task


class Evaluator:
    """Scores a model on one validation part.

    Args:
        task: loss.
        prepared: validation part and its metrics.
        batch_size: examples per forward pass on one worker.
        workers: that share the work.
        device: to compute on.
        inference: number format.
        multiple: batch widths are rounded up to a multiple of this.
    """

    def __init__(
        self,
        task: Task,
        prepared: Prepared,
        *,
        batch_size: int,
        workers: Workers,
        device: torch.device,
        inference: Inference,
        multiple: int,
    ) -> None:
        self._task, self._workers = task, workers
        self._data, self._scoring = prepared.validation, prepared.scoring
        self._transform = prepared.transform
        self._device, self._inference = device, inference
        self._pad_id, self._multiple = prepared.pad_id, multiple
        self._batches = evaluation_rows(self._data.lengths, batch_size, workers.replica, workers.replicas)

    def evaluate(self, replica: Replica, abandon: Callable[[], bool]) -> dict[str, float] | None:
        """Metrics and `validation_loss`, the same on every worker.

        Args:
            replica: put into evaluation mode meanwhile; draws no random numbers.
            abandon: asked before each batch on every worker, which all get the same answer.

        Returns:
            The scores, or None when abandoned.
        """
        replica.student.eval()
        try:
            with self._inference.on(replica.student):
                parts = self._forward_all(replica, abandon)
        finally:
            replica.student.train()
        if parts is None:
            return None
        every = self._workers.collect(parts)
        rows = np.concatenate([rows for rows, _, _, _ in every])
        observed = np.concatenate([observed for _, observed, _, _ in every if len(observed)])
        loss = sum(loss for _, _, loss, _ in every) / len(self._data)
        scores = {"validation_loss": loss, **self._scoring.score(observed[np.argsort(rows, kind="stable")])}
        if self._task.timed:
            scores["sequence_ms"] = 1000.0 * sum(spent_s for *_, spent_s in every) / len(self._data)
        return scores

    @torch.no_grad()
    def _forward_all(
        self, replica: Replica, abandon: Callable[[], bool]
    ) -> tuple[np.ndarray, np.ndarray, float, float] | None:
        """Rows that this worker observed, what it observed of each, the sum of their loss, its seconds."""
        seen: list[np.ndarray] = []
        observed: list[np.ndarray] = []
        loss = spent_s = 0.0
        batches = Prefetcher(self._prepare, 0, len(self._batches))
        try:
            for rows in self._batches:
                if abandon():
                    return None
                batch = batches.next()
                if batch is None:
                    continue
                batch = batch.to(self._device)
                began_s = time.perf_counter()
                said = self._forward(replica, batch)
                spent_s += time.perf_counter() - began_s
                if said is None:
                    continue
                kept, batch_loss = said
                seen.append(rows)
                observed.append(kept)
                loss += batch_loss
        finally:
            batches.close()
        if not seen:
            return np.empty(0, dtype=np.int64), np.empty((0, 0), dtype=np.float32), 0.0, spent_s
        return np.concatenate(seen), np.concatenate(observed), loss, spent_s

    def _prepare(self, number: int) -> Batch | None:
        """A batch on the CPU, None where this worker has none left; runs ahead, in a thread."""
        rows = self._batches[number]
        if not len(rows):
            return None
        batch = collate(self._data, rows, self._pad_id, self._multiple)
        return batch if self._transform is None else self._transform(batch, seed=0, epoch=0)

    def _forward(self, replica: Replica, batch: Batch) -> tuple[np.ndarray, float] | None:
        """What is observed of each example and the sum of their loss, when the device has computed both."""
        with self._inference.context():
            said = replica.infer(batch)
            if said is None:
                return None
            observed = self._scoring.observe(said.logits, batch)
            loss = self._task.loss(said.logits, batch)
        return observed.float().cpu().numpy(), float(loss)
