from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator, model_validator

from trainers.config.section import Section


class Batch(Section):
    """How many examples one step sees."""

    global_size: int = Field(default=16, ge=1, le=65536)
    """Examples per optimizer update, over all workers and accumulation steps."""
    micro_size: int | Literal["auto"] = "auto"
    """Examples per forward-backward on one worker; auto = the worker's whole share of the global batch."""
    micro_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Positions per forward-backward on one worker at most, padding included; unset = limited by examples."""
    base_size: int = Field(default=1, ge=1, le=65536)
    """Batch that statistical efficiency is relative to, in examples; 1 = relative to single examples."""

    @field_validator("micro_size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 65536:
            raise ValueError(f"{value} is outside [1, 65536]; give a size or 'auto'")
        return value

    @model_validator(mode="after")
    def _one_limit(self) -> Batch:
        if self.micro_tokens is not None and self.micro_size != "auto":
            raise ValueError(
                f"micro_size {self.micro_size} and micro_tokens {self.micro_tokens} both limit a "
                "micro-batch; remove one of them"
            )
        return self


class Length(Section):
    """When training ends: exactly one of the two."""

    epochs: float | None = Field(default=None, gt=0.0, le=10_000)
    """Passes over the training data."""
    steps: int | None = Field(default=None, ge=0, le=100_000_000)
    """Optimizer updates; 0 = no training: the model is evaluated as it is given."""

    @model_validator(mode="after")
    def _one_of(self) -> Length:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        return self

    def total_steps(self, examples: int, global_size: int) -> int:
        """Returns the optimizer updates for a dataset of `examples`, dropping no example of an epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * math.ceil(examples / global_size)))
