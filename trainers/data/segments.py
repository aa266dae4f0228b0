"""Changes of a batch's shape: examples packed end to end, and batches of one shape or of a few.

Few shapes are for devices that compile each operation for every new one, and for passes that are recorded.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch.nn import functional

from trainers.data.batches import Batch, Segments, Transform
from trainers.model_kinds.heads import IGNORED

_LENGTHS = 8  # Lengths of rows between a power of two and the next


def pack(batch: Batch, *, pad_id: int, multiple: int = 1, length: int = 0) -> Batch:
    """Returns a batch, on the CPU, with its examples also as one row of at least `length` tokens."""
    count, width = batch.input_ids.shape
    if batch.attention_mask is None:
        places = torch.arange(count * width)
        lengths = [width] * count
    else:
        places = batch.attention_mask.flatten().nonzero()[:, 0]
        lengths = batch.attention_mask.sum(1).tolist()
    tokens = len(places)
    rest = length - tokens if length > tokens else -tokens % multiple
    segments = [*lengths, rest] if rest else lengths
    edges = np.array([0, *accumulate(segments)])
    positions = np.arange(edges[-1]) - np.repeat(edges[:-1], segments)

    def laid(values: torch.Tensor, filling: int) -> torch.Tensor:
        row = torch.full((1, tokens + rest), filling, dtype=values.dtype)
        row[0, :tokens] = values.flatten()[places]
        return row

    types, guessed = batch.token_type_ids, batch.guessed
    return replace(
        batch,
        padded_tokens=tokens + rest,
        segments=Segments(
            input_ids=laid(batch.input_ids, pad_id),
            position_ids=torch.from_numpy(positions)[None],
            token_type_ids=None if types is None else laid(types, 0),
            cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
            first=torch.from_numpy(edges[:count]),
            places=places,
            guessed=None if guessed is None else torch.searchsorted(places, guessed),
            lengths=tuple(segments),
        ),
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """A `Transform`: packs each batch, after its task's own. Row lengths are multiples of `multiple`."""

    before: Transform | None
    pad_id: int
    multiple: int

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        if self.before is not None:
            batch = self.before(batch, seed=seed, epoch=epoch)
        return pack(batch, pad_id=self.pad_id, multiple=self.multiple)


@dataclass(frozen=True, slots=True)
class StaticShape:
    """A `Transform`: pads each batch to (rows, width), after its task's own. The mask is always there.

    Rows beyond the examples are one token that attends to itself, with labels that are `IGNORED` and weights
    of 0, so that neither loss nor gradients count them.
    """

    before: Transform | None
    pad_id: int
    rows: int
    width: int
    labels_tokens: bool = False  # Labels are of tokens, (B, S)

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
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
        count, width = values.shape
        return functional.pad(values, (0, self.width - width, 0, self.rows - count), value=filling)

    def _rows(self, values: torch.Tensor, filling: float) -> torch.Tensor:
        return functional.pad(
            values, (0, 0) * (values.dim() - 1) + (0, self.rows - len(values)), value=filling
        )


@dataclass(frozen=True, slots=True)
class StaticRow:
    """A `Transform`: packs each batch into a row of one of a few lengths, with as many segments as others."""

    shape: StaticShape  # More rows than examples: the row's padding is the last position of the last one
    multiple: int  # Rows are as long as a multiple of this, in tokens
    longest: int  # Length of the longest row, in tokens

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        static = self.shape(batch, seed=seed, epoch=epoch)
        assert static.attention_mask is not None
        tokens = int(static.attention_mask.sum())
        length = self.length_of(tokens)
        row = pack(static, pad_id=self.shape.pad_id, length=length).segments
        assert row is not None
        # A position of the padding may be one that the model has no embedding for.
        positions = row.position_ids.clone()
        positions[:, tokens:] = 0
        static_row = replace(
            row,
            position_ids=positions,
            places=functional.pad(row.places, (0, length - tokens), value=static.input_ids.numel() - 1),
            at_most=min(length, max(self.shape.width, self._step(tokens))),
        )
        return replace(static, padded_tokens=length, segments=static_row)

    def length_of(self, tokens: int) -> int:
        step = self._step(tokens)
        return min(self.longest, (tokens // step + 1) * step)

    def _step(self, tokens: int) -> int:
        power = 1 << (tokens.bit_length() - 1)
        return up_to_multiple(max(1, power // _LENGTHS), self.multiple)


def up_to_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
