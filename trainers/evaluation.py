"""Evaluating a model on a part of the data, sharded over the workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from trainers.data.batches import Batch, collate, evaluation_rows
from trainers.data.prefetch import Prefetcher
from trainers.parallel.replica import Replica
from trainers.parallel.workers import Workers
from trainers.precision import Inference
from trainers.tasks.base import Judged, Prepared, Task


@dataclass(frozen=True, slots=True)
class Observed:
    """What all workers observed of a part.

    Attributes:
        rows: (N, K) what scoring needs of each example, in the order of the part.
        loss: mean over examples.
        spent_s: time of forward pass, loss and observation, summed over workers.
    """

    rows: npt.NDArray[np.float32]
    loss: float
    spent_s: float


class Evaluator:
    """Scores a model on one part.

    Args:
        task: loss.
        prepared: the parts and their metrics.
        part: `validation` or `test`.
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
        part: Literal["validation", "test"] = "validation",
    ) -> None:
        self._task, self._workers = task, workers
        self._data, self._scoring = prepared.validation, prepared.scoring
        if part == "test":
            assert prepared.test is not None and prepared.test_scoring is not None
            self._data, self._scoring = prepared.test, prepared.test_scoring
        self._transform = prepared.transform
        self._device, self._inference = device, inference
        self._pad_id, self._multiple = prepared.pad_id, multiple
        self._batches = evaluation_rows(self._data.lengths, batch_size, workers.replica, workers.replicas)

    @property
    def units(self) -> int:
        """What the headline is a mean over."""
        return self._scoring.units

    def evaluate(self, replica: Replica, abandon: Callable[[], bool]) -> dict[str, float] | None:
        """Metrics and `validation_loss`, the same on every worker; None when abandoned. See `observe`."""
        observed = self.observe(replica, abandon)
        return None if observed is None else self.scores(observed)

    def observe(self, replica: Replica, abandon: Callable[[], bool]) -> Observed | None:
        """What scoring needs of the whole part, the same on every worker.

        Args:
            replica: put into evaluation mode meanwhile; draws no random numbers.
            abandon: asked before each batch on every worker, which all get the same answer.

        Returns:
            What was observed, or None when abandoned.
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
        return Observed(
            observed[np.argsort(rows, kind="stable")],
            sum(loss for _, _, loss, _ in every) / len(self._data),
            sum(spent_s for *_, spent_s in every),
        )

    def scores(self, observed: Observed, carried: Mapping[str, float] | None = None) -> dict[str, float]:
        """Metrics and `validation_loss`, which is the loss of the part.

        Args:
            observed: of the whole part.
            carried: see `Scoring.score`.
        """
        scores = {"validation_loss": observed.loss, **self._scoring.score(observed.rows, carried)}
        if self._task.timed:
            scores["sequence_ms"] = 1000.0 * observed.spent_s / len(self._data)
        return scores

    def judge(self, observed: Observed, carried: Mapping[str, float]) -> Judged:
        """See `Scoring.judge`."""
        return self._scoring.judge(observed.rows, carried)

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
