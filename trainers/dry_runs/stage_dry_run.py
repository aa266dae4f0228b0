from __future__ import annotations

from typing import Any

import torch

from trainers.config import Parallel
from trainers.data.batches import Batch
from trainers.dry_runs.dry_run import DryRun
from trainers.models.student import Output
from trainers.parallel.pipeline.layers import ModelChunk, StagePartition, hidden_dtype


def passes_held(parallel: Parallel, stage: int, micro_batches: int) -> int:
    """Returns the most forward passes over a chunk that a stage has done before their backward passes.

    1F1B: one for each stage that is still to come, and its own; so the first stage holds the most.
    Interleaved 1F1B (arXiv 2104.04473): its warm-up, and one. ZB-V (arXiv 2401.10241): as many as 1F1B's
    first stage, on every stage.
    """
    stages = parallel.stage_count
    chunks = parallel.chunks // stages
    most = chunks * micro_batches
    if parallel.schedule == "gpipe":
        return most
    if parallel.schedule == "interleaved":
        return min(most, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
    if parallel.schedule == "zero_bubble":
        return min(most, chunks * stages)
    return min(most, stages - stage)


class StageDryRun(DryRun):
    """Passes through the layers of one stage, 0-based; `width` is H of the hidden states between stages."""

    def __init__(self, *run: Any, partition: StagePartition, stage: int, width: int, **more: Any) -> None:
        super().__init__(*run, **more)
        self._stage, self._last, self._width = stage, len(partition.layout.chunks) - 1, width
        self._chunks = [
            (number, ModelChunk(partition.own[layer] for layer in partition.layout.chunks[number]))
            for number in partition.layout.chunks_of(stage)
        ]

    def _pass(self, batch: Batch) -> None:
        """Runs as many forward passes as the stage holds at once, then their backward passes."""
        self._module.train()
        micro_batches = self._config.share // batch.input_ids.shape[0]
        held = passes_held(self._config.parallel, self._stage, micro_batches)
        ends = [self._forward(*self._chunks[i % len(self._chunks)], batch) for i in range(held)]
        while ends:
            ends.pop(0).backward()  # type: ignore[no-untyped-call]

    def _forward(self, number: int, chunk: ModelChunk, batch: Batch) -> torch.Tensor:
        hidden = None
        with self._arithmetic.context():
            if number:
                shape = (*batch.computed_shape, self._width)
                dtype = hidden_dtype([own for _, own in self._chunks], self._device)
                hidden = torch.randn(shape, dtype=dtype, device=self._device, requires_grad=True)
            after = chunk(hidden, batch)
            return self._objective.loss(Output(after), batch) if number == self._last else after.float().sum()
