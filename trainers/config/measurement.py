from __future__ import annotations

from pydantic import Field, model_validator

from trainers.config.section import Section


class Evaluation(Section):
    """When the model is evaluated; never inside the timed region."""

    every_epochs: float = Field(default=1.0, gt=0.0, le=10_000)
    """Evaluate each time this many epochs have passed, and at the end."""
    batch_size: int = Field(default=64, ge=1, le=65536)
    """Examples per forward pass on one worker."""


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
    gradient_noise: bool = True
    """Estimate the gradient noise scale, and with it statistical efficiency and goodput."""

    @model_validator(mode="after")
    def _counts_what_is_profiled(self) -> Telemetry:
        if self.kernel_counters and not self.profile_steps:
            raise ValueError(
                "kernel_counters true counts the kernels of profiled steps, but profile_steps is 0; set "
                "profile_steps, such as 5"
            )
        return self
