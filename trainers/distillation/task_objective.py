from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trainers.data.batches import Batch
from trainers.models.student import Output
from trainers.tasks.base import Task
from trainers.telemetry.flops import FlopCount


class Objective:
    """The loss of a task."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, output: Output, batch: Batch) -> torch.Tensor:
        """Returns the sum of the loss over the batch's examples, a scalar in fp32."""
        total = self.task.loss(output.logits, batch)
        # A worker's stand-in takes part, and counts nothing.
        return total if batch.examples else total * 0.0

    def stage(self, step: int, total_steps: int) -> range:
        """Returns the steps of the stage that a step (0-based) belongs to.

        A stage is a training of its own: the optimizer and its learning rate schedule start again.
        """
        return range(total_steps)

    def begin_step(self, step: int, total_steps: int) -> None:
        """Called before each step (0-based): weights may follow a schedule."""

    def asked(self) -> FlopCount | None:
        """Cost of the teacher in the current step; None = it computes nothing."""
        return None

    def local_sums(self) -> list[float | torch.Tensor]:
        """Returns this worker's terms of `parts`; equally many in every step.

        Computed ones stay on the device.
        """
        return []

    def agree(self, sums: Sequence[float]) -> None:
        """Takes `local_sums` summed over all workers."""

    def parts(self) -> Mapping[str, float]:
        """Parts of the loss by point name: means over the examples of the last step's global batch."""
        return {}
