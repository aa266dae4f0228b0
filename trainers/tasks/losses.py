from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from trainers.model_kinds.heads import IGNORED

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch

CrossEntropy = Callable[["torch.Tensor", "torch.Tensor", int], "torch.Tensor"]
"""(N,) losses of (N, C) logits and (N,) labels, 0 where a label has the given value."""


def _plain(logits: torch.Tensor, labels: torch.Tensor, ignored: int) -> torch.Tensor:
    from torch.nn import functional

    return functional.cross_entropy(logits.float(), labels, ignore_index=ignored, reduction="none")


_operator: Final[ContextVar[CrossEntropy]] = ContextVar("cross_entropy", default=_plain)


@contextmanager
def computed_by(operator: CrossEntropy | None) -> Iterator[None]:
    """Computes the cross-entropies inside it with an encoder's operator; None = with torch's."""
    token = _operator.set(operator or _plain)
    try:
        yield
    finally:
        _operator.reset(token)


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns (N,) cross-entropies in fp32 of (N, C) logits and (N,) classes; the loss of `IGNORED` is 0."""
    return _operator.get()(logits, labels, IGNORED)


def class_loss(logits: torch.Tensor, batch: Batch, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the cross-entropy of (B, C) logits, summed over the batch, with each example's weight.

    Weights are never normalised within a batch, so that the loss of a global batch does not depend on how it
    is divided. `labels` replaces the batch's.
    """
    each = cross_entropies(logits, batch.labels if labels is None else labels)
    return (each if batch.weights is None else each * batch.weights).sum()
