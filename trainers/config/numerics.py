from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from trainers.config.section import Section


class Precision(StrEnum):
    """The number format of the forward and backward pass."""

    fp32 = "fp32"
    tf32 = "tf32"
    fp16 = "fp16"
    bf16 = "bf16"


class Numerics(Section):
    """Half precision in detail, and what to do when numbers are not finite."""

    parameters: Literal["fp32", "half"] = "fp32"
    """half = parameters and gradients in the format of `precision`, with the optimizer's fp32 masters."""
    evaluation: Literal["same", "fp32", "half", "fp16", "bf16", "packed"] = "same"
    """Number format of evaluation; same = as in training, half (the training's), fp16, bf16 = weights and
    arithmetic in it, packed = binary layers from one bit a weight."""
    initial_loss_scale: float = Field(default=65536.0, ge=1.0, le=2.0**24)
    """fp16 only: loss scale at the first step, dimensionless."""
    loss_scale_growth_steps: int = Field(default=2000, ge=1, le=1_000_000)
    """fp16 only: steps without overflow after which the scale doubles; an overflow halves it."""
    not_finite: Literal["stop", "skip", "roll_back"] = "stop"
    """When loss or gradients are not finite: end the run, skip the step, or resume from a checkpoint."""
    not_finite_limit: int = Field(default=20, ge=1, le=10_000)
    """Steps in a row (skip) or times in all (roll_back) after which the run ends all the same."""
