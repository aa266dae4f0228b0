"""Batches of one shape, for devices that compile each operation again for every new one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from trainers.data.batches import Batch, Transform
from trainers.models.heads import IGNORED


@dataclass(frozen=True, slots=True)
class StaticShape:
    """Pads each batch to (rows, width), after what its task does to it; a `Transform`.

    Rows beyond the examples stand in: one token that attends to itself, labels that are `IGNORED` and
    weights of 0, so that neither loss nor gradients count them. The mask is always there.

    Attributes:
        before: what the task does to a batch; None = nothing.
        pad_id: token id of padding.
        rows: examples of a batch, stand-ins included.
        width: positions of an example.
        labels_tokens: labels are of tokens, (B, S).
    """

    before: Transform | None
    pad_id: int
    rows: int
    width: int
    labels_tokens: bool = False

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        """Returns the batch in the shape of all others."""
        if self.before is not None:
            batch = self.before(batch, seed=seed, epoch=epoch)
        count = len(batch.input_ids)
        mask = batch.attention_mask
        if mask is None:
            mask = torch.ones_like(batch.input_ids, dtype=torch.bool)
        mask = self._positions(mask, False)
        # Of a row without any, softmax would be 0 / 0.
        mask[count:, 0] = True
        padded = self._positions if self.labels_tokens else self._rows
        types, weights = batch.token_type_ids, batch.weights
        return replace(
            batch,
            input_ids=self._positions(batch.input_ids, self.pad_id),
            attention_mask=mask,
            token_type_ids=None if types is None else self._positions(types, 0),
            labels=padded(batch.labels, IGNORED),
            rows=self._rows(batch.rows, -1),
            weights=None if weights is None else self._rows(weights, 0.0),
            padded_tokens=self.rows * self.width,
        )

    def _positions(self, values: torch.Tensor, filling: float) -> torch.Tensor:
        """Returns (B, S) as (rows, width)."""
        count, width = values.shape
        return functional.pad(values, (0, self.width - width, 0, self.rows - count), value=filling)

    def _rows(self, values: torch.Tensor, filling: float) -> torch.Tensor:
        """Returns (B, ...) as (rows, ...)."""
        return functional.pad(
            values, (0, 0) * (values.dim() - 1) + (0, self.rows - len(values)), value=filling
        )
