"""Losses that several tasks share."""

from __future__ import annotations

import torch
from torch.nn import functional

from trainers.data.batches import Batch


def class_loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Returns the cross-entropy of (B, C) logits, summed over the batch."""
    return functional.cross_entropy(logits.float(), batch.labels, reduction="sum")
