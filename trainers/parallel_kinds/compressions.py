"""What each compression of gradients sends, as figures for estimates. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainers.config import Compression, Parallel

SIGN_CHUNK = 256
"""Elements that share a scale in 1-bit Adan; a divisor of the usual hidden sizes, so that the rows of an
embedding table that have no gradient do not share one with those that have."""
SIGN_MESSAGE_BYTES = SIGN_CHUNK // 8 + 4
"""Bytes of a chunk: its signs and its scale."""

Payload = Callable[[Sequence[int], int, Parallel], float]
"""Bytes of the all-reduce that sends as much as a tensor's exchange: (shape, bytes per element, section)."""


@dataclass(frozen=True, slots=True)
class Traits:
    """How a compression exchanges a bucket of gradients after its warm-up.

    Attributes:
        messages: Collectives of one bucket.
        waits: The backward pass stands still until a bucket is reduced.
        answers_last: The second half of every bucket's exchange begins with the last bucket.
        passes: Bytes of memory traffic per byte of gradients, to compress and to decompress.
    """

    payload: Payload
    messages: int = 1
    waits: bool = False
    answers_last: bool = False
    passes: tuple[float, float] = (0.0, 0.0)


def _whole(shape: Sequence[int], element_bytes: int, parallel: Parallel) -> float:
    return float(math.prod(shape) * element_bytes)


def _half(shape: Sequence[int], element_bytes: int, parallel: Parallel) -> float:
    return 2.0 * math.prod(shape)


def _factors(shape: Sequence[int], element_bytes: int, parallel: Parallel) -> float:
    """Two thin factors of a matrix if they have less than half its elements, else the tensor."""
    elements = math.prod(shape)
    if len(shape) > 1:
        rows, columns = shape[0], elements // shape[0]
        if 2 * parallel.powersgd_rank * (rows + columns) < elements:
            return float(parallel.powersgd_rank * (rows + columns) * element_bytes)
    return float(elements * element_bytes)


def _signs(shape: Sequence[int], element_bytes: int, parallel: Parallel) -> float:
    return math.prod(shape) / SIGN_CHUNK * SIGN_MESSAGE_BYTES


TRAITS: Mapping[Compression, Traits] = {
    Compression.none: Traits(_whole),
    # Reads fp32 and writes half, and back.
    Compression.fp16: Traits(_half, passes=(1.5, 1.5)),
    Compression.bf16: Traits(_half, passes=(1.5, 1.5)),
    # Tensors sent whole, then P, then Q. The error is added and kept; the matrix is read for P and for Q.
    Compression.powersgd: Traits(_factors, messages=3, waits=True, passes=(5.0, 2.0)),
    # An all-to-all and an all-gather. The error and the denominators are read, the new error is written.
    Compression.onebit: Traits(_signs, messages=2, answers_last=True, passes=(5.0, 3.0)),
}
