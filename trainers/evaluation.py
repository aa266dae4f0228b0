"""Evaluating a model on the validation part, sharded over the workers."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from trainers.data.batches import Batch, collate, evaluation_rows
from trainers.models.student import Student
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
        self._batches = evaluation_rows(self._data.lengths, batch_size, workers.rank, workers.world)

    def evaluate(self, model: Student, abandon: Callable[[], bool]) -> dict[str, float] | None:
        """Metrics and `validation_loss`, the same on every worker.

        Args:
            model: put into evaluation mode meanwhile; draws no random numbers.
            abandon: asked before each batch on every worker, which all get the same answer.

        Returns:
            The scores, or None when abandoned.
        """
        began_s = time.perf_counter()
        model.eval()
        try:
            with self._inference.on(model):
                parts = self._forward_all(model, abandon)
        finally:
            model.train()
        if parts is None:
            return None
        every = self._workers.collect((*parts, time.perf_counter() - began_s))
        rows = np.concatenate([rows for rows, _, _, _ in every])
        observed = np.concatenate([observed for _, observed, _, _ in every if len(observed)])
        loss = sum(loss for _, _, loss, _ in every) / len(self._data)
        scores = {"validation_loss": loss, **self._scoring.score(observed[np.argsort(rows, kind="stable")])}
        if self._task.timed:
            scores["sequence_ms"] = 1000.0 * sum(spent_s for *_, spent_s in every) / len(self._data)
        return scores

    @torch.no_grad()
    def _forward_all(
        self, model: Student, abandon: Callable[[], bool]
    ) -> tuple[np.ndarray, np.ndarray, float] | None:
        observed: list[np.ndarray] = []
        loss = 0.0
        for rows in self._batches:
            if abandon():
                return None
            if not len(rows):
                continue
            batch = collate(self._data, rows, self._pad_id, self._multiple)
            if self._transform is not None:
                batch = self._transform(batch, seed=0, epoch=0)
            kept, batch_loss = self._forward(model, batch.to(self._device))
            observed.append(kept.float().cpu().numpy())
            loss += float(batch_loss)
        whole = np.concatenate(observed) if observed else np.empty((0, 0), dtype=np.float32)
        return np.concatenate(self._batches), whole, loss

    def _forward(self, model: Student, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self._inference.context():
            logits = model(batch).logits
            return self._scoring.observe(logits, batch), self._task.loss(logits, batch)
