"""What the loss is multiplied by before the backward pass, so that small gradients survive fp16.

Micikevicius et al., arXiv 1710.03740, section 3.2: an overflow halves the scale and its step is
not applied; a stretch of steps without one doubles it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from trainers.config import Precision, RunConfig

MINIMUM = 1.0
"""At this scale an overflow is no longer the scale's doing."""
MAXIMUM = 2.0**24
_FACTOR = 2.0


@dataclass(slots=True)
class LossScale:
    """The scale, which all workers change alike. The base class is a run that needs none: always 1.

    Attributes:
        value: the scale now, dimensionless.
    """

    value: float = 1.0

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes in training."""
        return False

    def back_off(self) -> bool:
        """Lower the scale after gradients that were not finite.

        Returns:
            Whether it could be lowered; else they are not its doing.
        """
        return False

    def applied(self) -> None:
        """A step was applied."""

    def to_state(self) -> dict[str, float]:
        """JSON-able form."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Continues where `to_state` was called."""


@dataclass(slots=True)
class DynamicLossScale(LossScale):
    """The scale of fp16.

    Attributes:
        growth_steps: applied steps in a row after which the scale doubles.
        clean_steps: applied steps since the last change.
    """

    growth_steps: int = 2000
    clean_steps: int = 0

    @property
    @override
    def dynamic(self) -> bool:
        return True

    @override
    def back_off(self) -> bool:
        self.clean_steps = 0
        if self.value <= MINIMUM:
            return False
        self.value = max(MINIMUM, self.value / _FACTOR)
        return True

    @override
    def applied(self) -> None:
        self.clean_steps += 1
        if self.clean_steps >= self.growth_steps:
            self.value, self.clean_steps = min(MAXIMUM, self.value * _FACTOR), 0

    @override
    def to_state(self) -> dict[str, float]:
        return {"value": self.value, "clean_steps": self.clean_steps}

    @override
    def restore(self, state: dict[str, float]) -> None:
        if state:
            self.value, self.clean_steps = float(state["value"]), int(state["clean_steps"])


class DeviceLossScale:
    """A dynamic loss scale on the device, which changes it after a step without the host.

    The host's scale makes the same changes a step later, when it reads whether the step was finite.

    Args:
        scale: Scale of the host.
        device: Device of the gradients.
    """

    def __init__(self, scale: DynamicLossScale, device: torch.device) -> None:
        self._scale = scale
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self._clean = torch.zeros((), dtype=torch.float64, device=device)
        self.follow()

    def follow(self) -> None:
        """Takes the host's values, where the host has read all steps."""
        self.value = torch.full_like(self.value, self._scale.value)
        self._clean = torch.full_like(self._clean, self._scale.clean_steps)

    def step(self, loss_finite: torch.Tensor, finite: torch.Tensor) -> None:
        """Changes the scale after a step as `applied`, or else `back_off`, does.

        Args:
            loss_finite: Whether the loss is; else the scale is not what went wrong.
            finite: Whether loss and gradients are.
        """
        clean = self._clean + 1.0
        grows = clean >= self._scale.growth_steps
        applied = torch.where(grows, (self.value * _FACTOR).clamp(max=MAXIMUM), self.value)
        lowered = (self.value / _FACTOR).clamp(min=MINIMUM)
        otherwise = torch.where(loss_finite, lowered, self.value)
        self.value = torch.where(finite, applied, otherwise)
        kept = torch.where(loss_finite, 0.0, self._clean)
        self._clean = torch.where(finite, torch.where(grows, 0.0, clean), kept)


def loss_scale_for(config: RunConfig) -> LossScale:
    """Returns the loss scale that a run begins with."""
    if config.precision is not Precision.fp16:
        return LossScale()
    numerics = config.numerics
    return DynamicLossScale(numerics.initial_loss_scale, numerics.loss_scale_growth_steps)
