"""The loss scale of fp16, which keeps small gradients from underflowing.

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
    """The scale, equal on all workers. The base class is for runs that need none: always 1."""

    value: float = 1.0

    @property
    def dynamic(self) -> bool:
        return False

    def back_off(self) -> bool:
        """Lowers the scale after non-finite gradients; returns False if the scale cannot be the reason."""
        return False

    def applied(self) -> None: ...

    def to_state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None: ...


@dataclass(slots=True)
class DynamicLossScale(LossScale):
    """The scale of fp16.

    Attributes:
        growth_steps: Applied steps in a row after which the scale doubles.
        clean_steps: Applied steps since the last change.
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
    """A dynamic loss scale that the device updates after a step without the host.

    The host's scale makes the same changes a step later, when it reads whether the step was finite.
    """

    def __init__(self, scale: DynamicLossScale, device: torch.device) -> None:
        self._scale = scale
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self._clean = torch.zeros((), dtype=torch.float64, device=device)
        self.follow()

    def follow(self) -> None:
        """Copies the host's values, once the host has read all steps."""
        self.value = torch.full_like(self.value, self._scale.value)
        self._clean = torch.full_like(self._clean, self._scale.clean_steps)

    def step(self, loss_finite: torch.Tensor, finite: torch.Tensor) -> None:
        """Changes the scale as `applied` or `back_off` does, without the host.

        Args:
            loss_finite: If False, the scale is not the reason and stays.
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
    if config.precision is not Precision.fp16:
        return LossScale()
    numerics = config.numerics
    return DynamicLossScale(numerics.initial_loss_scale, numerics.loss_scale_growth_steps)
