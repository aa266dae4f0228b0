"""The update rule and its schedule."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from trainers.availability import AVAILABLE
from trainers.config.section import Section, require_available


class OptimizerName(StrEnum):
    """The update rule."""

    adamw = "adamw"
    adan = "adan"


class Implementation(StrEnum):
    """How the update rule is executed; the result is the same to rounding."""

    auto = "auto"
    single_unfused = "single_unfused"
    multi_unfused = "multi_unfused"
    single_fused = "single_fused"
    multi_fused = "multi_fused"


DEFAULT_WARMUP = 0.1
"""Share of the steps that are warm-up where nothing is set."""


class Optimizer(Section):
    """The update rule, its hyperparameters and its schedule."""

    name: OptimizerName = OptimizerName.adamw
    """Update rule. Adan: arXiv 2208.06677, in the official code's convention of betas."""
    implementation: Implementation = Implementation.auto
    """How the step is executed; auto = the fastest that is available here."""
    learning_rate: float = Field(default=1e-4, gt=0.0, le=10.0)
    """Peak learning rate, dimensionless."""
    betas: tuple[float, ...] | None = None
    """Decay rates: two for adamw, three for adan; unset = (0.9, 0.999) or (0.98, 0.92, 0.99)."""
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    """Added to the denominator, dimensionless."""
    weight_decay: float = Field(default=0.01, ge=0.0, le=10.0)
    """Decoupled weight decay, dimensionless; 0 = off. Not applied to biases and LayerNorm."""
    no_prox: bool = False
    """Adan only: decay as in AdamW instead of the proximal form."""
    max_grad_norm: float = Field(default=1.0, ge=0.0)
    """Clip gradients to this global L2 norm; 0 = no clipping."""
    warmup_fraction: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the steps (of each stage's, with two) over which the rate rises linearly from 0; 0 = none;
    unset = 0.1, or `warmup_steps`."""
    warmup_steps: int | None = Field(default=None, ge=0, le=100_000_000)
    """The same as a number of steps; unset = `warmup_fraction`."""
    schedule: Literal["linear", "constant"] = "linear"
    """After the warm-up: linear decay to 0, or constant."""
    masters: Literal["fp32", "split"] = "fp32"
    """What completes half parameters to fp32: a copy, or (adan, bf16) the lower 16 bits alone."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Format that the moments m and v are kept in; bf16 is for adan only, whose n stays fp32."""

    @model_validator(mode="after")
    def _consistent(self) -> Optimizer:
        require_available(f"optimizer.implementation[{self.name}]", self.implementation)
        for field in ("masters", "moments"):
            self._require_served(field)
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and warmup_fraction {self.warmup_fraction:g} are both "
                "set; remove one"
            )
        wanted = 2 if self.name is OptimizerName.adamw else 3
        if self.betas is not None:
            if len(self.betas) != wanted:
                raise ValueError(
                    f"betas has {len(self.betas)} values, but {self.name} takes {wanted}; "
                    "change optimizer.betas or optimizer.name"
                )
            for beta in self.betas:
                if not 0.0 <= beta < 1.0:
                    raise ValueError(f"beta {beta} is outside [0, 1); change optimizer.betas")
        if self.no_prox and self.name is not OptimizerName.adan:
            raise ValueError(
                f"no_prox belongs to adan, not {self.name}; "
                "remove optimizer.no_prox or set optimizer.name: adan"
            )
        return self

    def _require_served(self, field: str) -> None:
        """Refuse a way of storing things that the update rule does not have."""
        value = str(getattr(self, field))
        served = AVAILABLE[f"optimizer.{field}[{self.name}]"]
        if value not in served:
            owners = [name for name in OptimizerName if value in AVAILABLE[f"optimizer.{field}[{name}]"]]
            raise ValueError(
                f"{field} {value} belongs to {', '.join(owners)}, not {self.name}; "
                f"set optimizer.name: {owners[0]} or optimizer.{field}: {served[0]}"
            )

    def warmup_of(self, total_steps: int) -> int:
        """Steps of warm-up in a run, or a stage, of so many steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        fraction = DEFAULT_WARMUP if self.warmup_fraction is None else self.warmup_fraction
        return math.ceil(fraction * total_steps)
