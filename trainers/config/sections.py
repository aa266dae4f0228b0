"""The smaller sections of a run."""

import math
from enum import StrEnum
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from trainers.registry import Section

MAX_BATCH = 65536  # Examples
ASSUMED_BATCH = 16  # Examples that forecasts assume for a batch that is still to be found
BatchSize: TypeAlias = Annotated[
    Annotated[int, Field(ge=1, le=MAX_BATCH), Tag("number")] | Annotated[Literal["largest"], Tag("word")],
    Discriminator(lambda size: "word" if isinstance(size, str) and not size.isdigit() else "number"),
]


class BatchConfig(Section):
    """How many examples one step sees."""

    global_size: BatchSize = 16
    """Examples per optimizer update, over all workers and accumulation steps; largest = the most that the
    devices hold in one pass, found when the run starts."""
    per_worker_size: int | None = Field(default=None, ge=1, le=MAX_BATCH)
    """Examples per optimizer update on one worker (in a pipeline: on its stages together), from which
    `global_size` follows; unset = `global_size` counts."""
    micro_size: int | Literal["auto"] = "auto"
    """Examples per forward-backward on one worker; auto = the worker's whole share of the global batch."""
    micro_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Positions per forward-backward on one worker at most, padding included; unset = limited by examples."""
    base_size: int = Field(default=1, ge=1, le=MAX_BATCH)
    """Batch that statistical efficiency is relative to, in examples; 1 = relative to single examples."""

    @field_validator("micro_size")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 65536:
            raise ValueError(f"{value} is outside [1, 65536]; give a size or 'auto'")
        return value

    @property
    def size(self) -> int:
        """Examples per optimizer update; what is assumed until the largest is found."""
        return self.global_size if isinstance(self.global_size, int) else ASSUMED_BATCH

    @property
    def is_found(self) -> bool:
        return not isinstance(self.global_size, int)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
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
    def _one_of(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("give exactly one of epochs and steps")
        return self

    def total_steps(self, examples: int, global_size: int) -> int:
        """Returns the optimizer updates for a dataset of `examples`, dropping no example of an epoch."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * math.ceil(examples / global_size)))


class Evaluation(Section):
    """When the model is evaluated; never inside the timed region."""

    every_epochs: float | None = Field(default=None, gt=0.0, le=10_000)
    """Evaluate each time this many epochs have passed, and at the end; unset = 1, or `every_steps`."""
    every_steps: int | None = Field(default=None, ge=1, le=100_000_000)
    """Evaluate each time this many steps have passed, and at the end; unset = `every_epochs`."""
    at_start: bool = False
    """Also evaluate before the first step: points at step 0, never the best of a run that trains."""
    batch_size: int = Field(default=64, ge=1, le=MAX_BATCH)
    """Examples per forward pass on one worker."""

    @model_validator(mode="after")
    def _one_interval(self) -> Self:
        if self.every_epochs is not None and self.every_steps is not None:
            raise ValueError(
                f"every_epochs {self.every_epochs:g} and every_steps {self.every_steps} are both set; remove "
                "one of them"
            )
        return self

    def interval(self, steps_per_epoch: int) -> int:
        if self.every_steps is not None:
            return self.every_steps
        epochs = 1.0 if self.every_epochs is None else self.every_epochs
        return max(1, round(epochs * steps_per_epoch))


class Checkpointing(Section):
    """What a killed run loses at most."""

    every_steps: int | None = Field(default=None, ge=1)
    """Write a checkpoint each time this many steps have passed; unset = by time alone."""
    every_s: float = Field(default=30.0, ge=0.0)
    """Write a checkpoint when this many seconds have passed since the last; 0 = by steps alone."""
    keep: int = Field(default=2, ge=1, le=100)
    """How many of the newest checkpoints stay on disk."""


class Telemetry(Section):
    """What is measured during training."""

    sample_every_s: float = Field(default=0.5, ge=0.0, le=60.0)
    """Pause between samples of power, utilisation and memory, in seconds; 0 = off."""
    profile_steps: int = Field(default=0, ge=0, le=100)
    """Steps of a profiled window (kernels, launches, occupancy), outside the timed region; 0 = off."""
    kernel_counters: bool = False
    """Read the hardware counters of each kernel (GPU) in the step after the profiled window."""
    trace_steps: int = Field(default=0, ge=0, le=1000)
    """Steps of which every worker's phases are kept as a timeline, after the first ones; 0 = off."""
    histogram_steps: int = Field(default=0, ge=0, le=200)
    """Steps, spread evenly over the run, of which histograms of weights and gradients are kept; 0 = off."""
    gradient_noise: bool = True
    """Estimate the gradient noise scale, and with it statistical efficiency and goodput."""

    @model_validator(mode="after")
    def _counts_what_is_profiled(self) -> Self:
        if self.kernel_counters and not self.profile_steps:
            raise ValueError(
                "kernel_counters true counts the kernels of profiled steps, but profile_steps is 0; set "
                "profile_steps, such as 5"
            )
        return self


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
    embeddings: Literal["fp32", "fp16"] = "fp32"
    """Number format of word embeddings where they are looked up; fp16 = rounded, with parameters in fp32."""
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
