"""What a run minimises: its task's loss, or that and what a teacher says."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainers.data.batches import Batch
from trainers.models.student import Output
from trainers.tasks.base import Task


class Objective:
    """The loss of a task.

    Args:
        task: that is learned.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        """Sum of the loss over the batch's examples, a scalar in fp32."""
        return self.task.loss(output.logits, batch)

    def begin_step(self, step: int, total_steps: int) -> None:
        """Told before each step (0-based): weights may follow a schedule."""

    def parts(self) -> Mapping[str, float]:
        """Parts of the loss by point name, per example, of the steps since the last call."""
        return {}
