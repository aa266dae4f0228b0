"""Forward and backward passes before a run begins: they compile graphs and show what fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from trainers.config import RunConfig
from trainers.data.batches import Batch, Transform, collate
from trainers.data.tokens import TokenSet
from trainers.device_kinds import kind_of
from trainers.distillation.task_objective import Objective
from trainers.models.precision import Arithmetic
from trainers.updates.optimizer import build

_FP32_BYTES = 4


class DryRun:
    """Passes through a run's model, on the longest of its own examples; no gradient stays.

    Where there are fewer examples than a pass takes, they come again. Passes draw random numbers: a run
    seeds its generators afterwards.
    """

    def __init__(
        self,
        config: RunConfig,
        module: nn.Module,
        objective: Objective,
        arithmetic: Arithmetic,
        data: TokenSet,
        *,
        device: torch.device,
        pad_id: int,
        multiple: int,
        transform: Transform | None,
    ) -> None:
        self._config, self._module, self._objective, self._arithmetic = config, module, objective, arithmetic
        self._data, self._device, self._transform = data, device, transform
        self._pad_id, self._multiple = pad_id, multiple

    @property
    def longest(self) -> int:
        """Tokens of the longest example, which all passes are as wide as."""
        return int(self._data.lengths.max())

    def at_size(self, size: int) -> None:
        """Runs a pass of `size` examples alongside everything that a step of the run needs memory for.

        A recorded pass keeps its memory, next to that of passes that are not recorded, such as an
        evaluation's: both need what a pass of twice the size needs.

        Raises:
            torch.OutOfMemoryError: it does not fit.
        """
        count = sum(p.numel() for p in self._module.parameters() if p.requires_grad)
        each = self._config.state_bytes
        if self._config.parallel.workers > 1:
            each += _FP32_BYTES  # the buckets that gradients are exchanged in
        states = torch.empty(count * each, dtype=torch.uint8, device=self._device)
        try:
            # With a mask, which attention needs the more memory for.
            passes = 2 if self._config.model.cuda_graphs else 1
            self._pass(_with_mask(self._longest(passes * size)))
            kind_of(self._device).backend.synchronize(self._device)
        finally:
            del states
            self._module.zero_grad(set_to_none=True)

    def compile(self, size: int) -> None:
        """Compiles the training graphs now: batches with padding, and those without."""
        for batch in self._variants(self._longest(size)):
            self._pass(batch)
            self._module.zero_grad(set_to_none=True)

    def rehearse(self, size: int) -> None:
        """Runs a training pass and an optimizer step, so that no run's first step pays for a process' first.

        The step is that of an optimizer of the same kind over copies of the vectors and a matrix of the
        model. Weights and state of the run are not touched, and the objective is as before its first step.
        """
        self._pass(self._longest(size))
        trained = [p for p in self._module.parameters() if p.requires_grad]
        torch._foreach_norm([p.grad for p in trained if p.grad is not None], 2, dtype=torch.float32)
        matrix = min((p for p in trained if p.ndim >= 2), key=torch.Tensor.numel)
        copies = nn.ParameterList(p.detach().clone() for p in trained if p.ndim < 2 or p is matrix)
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        build(self._config.optimizer, copies).optimizer.step()
        self._module.zero_grad(set_to_none=True)
        self._objective.begin_step(0, 1)
        kind_of(self._device).backend.synchronize(self._device)

    def _variants(self, batch: Batch) -> Iterator[Batch]:
        yield replace(batch, attention_mask=None)
        yield _with_mask(batch)

    def _longest(self, size: int) -> Batch:
        rows = np.resize(np.argsort(-self._data.lengths, kind="stable")[:size], size)
        batch = collate(self._data, rows, self._pad_id, self._multiple)
        if self._transform is not None:
            batch = self._transform(batch, seed=0, epoch=0)
        return batch.to(self._device)

    def _pass(self, batch: Batch) -> None:
        self._module.train()
        with self._arithmetic.context():
            loss = self._objective.loss(self._module(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]


def _with_mask(batch: Batch) -> Batch:
    return replace(batch, attention_mask=torch.ones_like(batch.input_ids, dtype=torch.bool))
