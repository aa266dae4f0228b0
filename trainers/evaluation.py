"""Evaluating a model on the validation part, sharded over the workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from trainers.data.batches import Batch, collate, evaluation_rows
from trainers.data.tokens import TokenSet
from trainers.models.student import Student
from trainers.parallel.workers import Workers
from trainers.precision import Arithmetic
from trainers.tasks.base import Task


class Evaluator:
    """Scores a model on one validation part.

    Args:
        task: loss and metrics.
        data: validation part.
        batch_size: examples per forward pass on one worker.
        workers: that share the work.
        device: to compute on.
        arithmetic: of the forward pass.
        pad_id: token id of padding.
        multiple: batch widths are rounded up to a multiple of this.
    """

    def __init__(
        self,
        task: Task,
        data: TokenSet,
        *,
        batch_size: int,
        workers: Workers,
        device: torch.device,
        arithmetic: Arithmetic,
        pad_id: int,
        multiple: int,
    ) -> None:
        self._task, self._data, self._workers = task, data, workers
        self._device, self._arithmetic = device, arithmetic
        self._pad_id, self._multiple = pad_id, multiple
        self._batches = evaluation_rows(data.lengths, batch_size, workers.rank, workers.world)

    def evaluate(self, model: Student, abandon: Callable[[], bool]) -> dict[str, float] | None:
        """Metrics and `validation_loss`, the same on every worker.

        Args:
            model: put into evaluation mode meanwhile; draws no random numbers.
            abandon: asked before each batch on every worker, which all get the same answer.

        Returns:
            The scores, or None when abandoned.
        """
        model.eval()
        try:
            parts = self._forward_all(model, abandon)
        finally:
            model.train()
        if parts is None:
            return None
        every = self._workers.collect(parts)
        rows = np.concatenate([rows for rows, _, _ in every])
        logits = np.concatenate([logits for _, logits, _ in every])
        loss = sum(loss for _, _, loss in every) / len(self._data)
        scores = self._task.score(logits, self._data.labels[rows])
        return {"validation_loss": loss, **scores}

    @torch.no_grad()
    def _forward_all(
        self, model: Student, abandon: Callable[[], bool]
    ) -> tuple[np.ndarray, np.ndarray, float] | None:
        logits = np.empty((sum(map(len, self._batches)), len(self._task.classes)), dtype=np.float32)
        done, loss = 0, 0.0
        for rows in self._batches:
            if abandon():
                return None
            if not len(rows):
                continue
            batch = collate(self._data, rows, self._pad_id, self._multiple).to(self._device)
            output, batch_loss = self._forward(model, batch)
            logits[done : done + len(rows)] = output.float().cpu().numpy()
            done += len(rows)
            loss += float(batch_loss)
        return np.concatenate(self._batches), logits, loss

    def _forward(self, model: Student, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        with self._arithmetic.context():
            logits = model(batch)
            return logits, self._task.loss(logits, batch)
