"""Registries of strategies and of gradient compressions. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainers.registry import Deferred, by_name

if TYPE_CHECKING:
    import torch

SIGN_CHUNK = 256
"""Elements that share a scale in 1-bit Adan; a divisor of the usual hidden sizes, so that the rows of an
embedding table that have no gradient do not share one with those that have."""
SIGN_MESSAGE_BYTES = SIGN_CHUNK // 8 + 4  # Bytes of a chunk: its signs and its scale


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInfo:
    """How a step is spread over workers; `replicate` makes a `Replica` of a `Setup`."""

    name: str  # Value of `parallel.strategy`
    summary: str
    replicate: Callable[[Any], Any]
    several: bool = True  # May have several workers
    exchanges: bool = False  # Workers average gradients by the exchange that `parallel.compression` names
    staged: bool = False  # The layers of a model are divided among workers


STRATEGIES: dict[str, StrategyInfo] = by_name(
    StrategyInfo(
        name="single",
        summary="one worker",
        replicate=Deferred("trainers.parallel:single"),
        several=False,
    ),
    StrategyInfo(
        name="ddp",
        summary="replicas that average gradients",
        replicate=Deferred("trainers.parallel:ddp"),
        exchanges=True,
    ),
    StrategyInfo(
        name="pipeline",
        summary="layers in stages",
        replicate=Deferred("trainers.parallel:pipeline"),
        staged=True,
    ),
)


def unstaged() -> str:
    """Returns the strategies that leave a model whole, as messages offer them."""
    return " or ".join(info.name for info in STRATEGIES.values() if not info.staged)


"""All values of `parallel.strategy`."""


class ExchangeFields(Protocol):
    """Fields of the section `parallel` that the size of a message depends on."""

    @property
    def powersgd_rank(self) -> int: ...


Payload = Callable[[Sequence[int], int, ExchangeFields], float]
"""Bytes of the all-reduce that sends as much as a tensor's exchange: (shape, bytes per element, fields)."""


def _factors(shape: Sequence[int], element_bytes: int, fields: ExchangeFields) -> float:
    """Two thin factors of a matrix if they have less than half its elements, else the tensor."""
    elements = math.prod(shape)
    if len(shape) > 1:
        rows, columns = shape[0], elements // shape[0]
        if 2 * fields.powersgd_rank * (rows + columns) < elements:
            return float(fields.powersgd_rank * (rows + columns) * element_bytes)
    return float(elements * element_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionInfo:
    """How a bucket of gradients is exchanged after the warm-up.

    `exchange` makes a `trainers.parallel.exchange.GradientExchange` of a run, its trained module, its
    optimizer and the steps of its warm-up.
    """

    name: str  # Value of `parallel.compression`
    summary: str
    exchange: Callable[[Any, torch.nn.Module, torch.optim.Optimizer, int], Any]
    payload: Payload  # Payload of one tensor; see `Payload`
    messages: int = 1  # Collectives of one bucket
    waits: bool = False  # The backward pass stands still until a bucket is reduced
    answers_last: bool = False  # The second half of every bucket's exchange begins with the last bucket
    passes: tuple[float, float] = (0.0, 0.0)  # Memory traffic per byte, to compress and to decompress
    after_passes: bool = True  # Can exchange all gradients after the passes, as `model.cuda_graphs` does
    rounds: bool = False  # Does nothing to gradients that are in half precision already
    freezes_second_moment: bool = False  # Needs an optimizer that can do so


NONE = CompressionInfo(
    name="none",
    summary="all of them",
    exchange=Deferred("trainers.parallel.exchange:GradientExchange"),
    payload=lambda shape, element_bytes, fields: float(math.prod(shape) * element_bytes),
)
FP16, BF16 = (
    CompressionInfo(
        name=name,
        summary=f"rounded to {name}",
        exchange=Deferred("trainers.parallel.exchange:HalfExchange"),
        payload=lambda shape, element_bytes, fields: 2.0 * math.prod(shape),
        passes=(1.5, 1.5),  # Reads fp32 and writes half, and back.
        rounds=True,
    )
    for name in ("fp16", "bf16")
)
POWERSGD = CompressionInfo(
    name="powersgd",
    summary="low-rank factors of each matrix",
    exchange=Deferred("trainers.parallel.compression.power_sgd:PowerSgdExchange"),
    payload=_factors,
    messages=3,  # Tensors sent whole, then P, then Q.
    waits=True,
    passes=(5.0, 2.0),  # The error is added and kept; the matrix is read for P and for Q.
    after_passes=False,
)
ONEBIT = CompressionInfo(
    name="onebit",
    summary="1-bit Adan",
    exchange=Deferred("trainers.parallel.compression.one_bit:OneBitExchange"),
    payload=lambda shape, element_bytes, fields: math.prod(shape) / SIGN_CHUNK * SIGN_MESSAGE_BYTES,
    messages=2,  # An all-to-all and an all-gather.
    answers_last=True,
    passes=(5.0, 3.0),  # The error and the denominators are read, the new error is written.
    after_passes=False,
    freezes_second_moment=True,
)

COMPRESSIONS: dict[str, CompressionInfo] = by_name(NONE, FP16, BF16, POWERSGD, ONEBIT)
"""All values of `parallel.compression`."""
