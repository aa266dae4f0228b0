"""What a task with classes minimises; how it is scored never depends on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainers.model_kinds.heads import IGNORED
from trainers.registry import by_name

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # For signatures alone: the service reads tasks without torch.

Losses = Callable[[Tensor, Tensor, float], Tensor]
"""Losses in fp32 of logits, labels, and the value of the loss's option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInfo:
    name: str
    summary: str
    of_classes: Losses | None  # (N,) of (N, C) logits and (N,) classes, 0 of `IGNORED`; None = the encoder's
    of_labels: Losses  # (B, C) of logits and targets, 1 where a text has the label
    option: str = ""  # The field of the section `task` that only it has; empty = none
    usual: float = 0.0  # Default of the option


def _binary(logits: Tensor, targets: Tensor, option: float = 0.0) -> Tensor:
    from torch.nn import functional

    return functional.binary_cross_entropy_with_logits(logits.float(), targets, reduction="none")


def _smoothed(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    from torch.nn import functional

    return functional.cross_entropy(
        logits.float(), labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    )


def _focused(cross_entropies: Tensor, gamma: float) -> Tensor:
    # 1 - p without cancellation; the derivative of a power below 1 has a pole at 0.
    return (-(-cross_entropies).expm1()).clamp(min=1e-12) ** gamma * cross_entropies


CROSS_ENTROPY = LossInfo(
    name="cross_entropy", summary="the loss that runs are evaluated by", of_classes=None, of_labels=_binary
)
LABEL_SMOOTHING = LossInfo(
    name="label_smoothing",
    summary="cross-entropy with a share of each label spread over all classes",
    of_classes=_smoothed,
    of_labels=lambda logits, targets, share: _binary(logits, targets * (1.0 - share) + share / 2.0),
    option="label_smoothing",
    usual=0.1,
)
FOCAL = LossInfo(
    name="focal",
    summary="cross-entropy with less weight on what is predicted well (arXiv 1708.02002)",
    of_classes=lambda logits, labels, gamma: _focused(_smoothed(logits, labels), gamma),
    of_labels=lambda logits, targets, gamma: _focused(_binary(logits, targets), gamma),
    option="focal_gamma",
    usual=2.0,
)
LOSSES = by_name(CROSS_ENTROPY, LABEL_SMOOTHING, FOCAL)  # All values of `task.loss`
