"""Losses that several tasks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch


def class_loss(logits: torch.Tensor, batch: Batch, ignored: int = -100) -> torch.Tensor:
    """Returns the cross-entropy of (B, C) logits, summed over the batch.

    With weights it is their product with each example's. They are never normalised within a batch: then the
    loss of a global batch does not depend on how it is divided.

    Args:
        logits: (B, C).
        batch: Batch with classes as labels.
        ignored: class that has no logit.
    """
    from torch.nn import functional

    if batch.weights is None:
        return functional.cross_entropy(logits.float(), batch.labels, ignore_index=ignored, reduction="sum")
    each = functional.cross_entropy(logits.float(), batch.labels, ignore_index=ignored, reduction="none")
    return (each * batch.weights).sum()
