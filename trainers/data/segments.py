"""Examples laid end to end in one row, so that an encoder computes no padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from trainers.data.batches import Batch, Transform


@dataclass(frozen=True, slots=True)
class Segments:
    """The row of a micro-batch: T tokens, one segment per example.

    The row is padded to a multiple by a last segment of its own, which no example reads.

    Attributes:
        input_ids: (1, T) token ids.
        position_ids: (1, T) position of each token in its segment.
        token_type_ids: (1, T) 1 in the second text of a pair; None when all is one text.
        cu_seqlens: (K + 1,) int32, segment k is `[cu_seqlens[k], cu_seqlens[k + 1])`.
        first: (B,) place of each example's first token in the row.
        places: (N,) place in the flattened (B, S) batch of each example's token, in the order of the row.
        guessed: (M,) places in the row of `Batch.guessed`, in the same order; None without them.
        lengths: Tokens of each segment, on the host: no layer has to wait for them.
        at_most: Bound of every segment of every row of this shape; None = the longest of this row.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    token_type_ids: torch.Tensor | None
    cu_seqlens: torch.Tensor
    first: torch.Tensor
    places: torch.Tensor
    guessed: torch.Tensor | None
    lengths: tuple[int, ...]
    at_most: int | None = None

    @property
    def longest(self) -> int:
        return max(self.lengths) if self.at_most is None else self.at_most

    def counted(self, pad_id: int) -> torch.Tensor:
        """(1, T) number of each token in its segment, from 1; padding, also within texts, is 0."""
        counts = (self.input_ids != pad_id).long()
        before = counts.cumsum(1) - counts
        places = torch.arange(counts.shape[1], device=counts.device)
        return (before - before.gather(1, places - self.position_ids) + 1) * counts

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Segments:
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors()}
        return replace(self, **changed)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), torch.Tensor):
                yield field.name, value

    def unpack(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns values (1, T, ...) of the row's tokens as (B, S, ...), 0 on padding."""
        flat = values.new_zeros((shape.numel(), *values.shape[2:]))
        placed = flat.index_copy(0, self.places, values[0, : self.places.shape[0]])
        return torch.unflatten(placed, 0, tuple(shape))


def pack(batch: Batch, *, pad_id: int, multiple: int = 1, length: int = 0) -> Batch:
    """Returns a batch, on the CPU, with its examples also as one row, in their order.

    T is rounded up to a multiple of `multiple`, or is `length` where there are fewer tokens.
    """
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
    """Packs each batch, after what its task does to it; a `Transform`. Rows are a multiple of tokens long."""

    before: Transform | None
    pad_id: int
    multiple: int

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        if self.before is not None:
            batch = self.before(batch, seed=seed, epoch=epoch)
        return pack(batch, pad_id=self.pad_id, multiple=self.multiple)
