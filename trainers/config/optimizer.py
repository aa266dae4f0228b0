import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainers.optimizers import OPTIMIZERS, SCHEDULES, Implementation, OptimizerInfo, ScheduleInfo
from trainers.optimizers.adamw import ADAMW
from trainers.optimizers.info import Hyperparameters
from trainers.optimizers.schedules import LINEAR
from trainers.registry import NameIn, Section, described

DEFAULT_WARMUP = 0.1  # Share of the steps that are warm-up where nothing is set


class Optimizer(Section):
    """The update rule, its hyperparameters and its schedule."""

    name: Annotated[str, NameIn(OPTIMIZERS), described(OPTIMIZERS)] = ADAMW.name
    """Update rule."""
    implementation: Implementation = Implementation.auto
    """How the step is executed; auto = the fastest that is available here."""
    learning_rate: float = Field(default=1e-4, gt=0.0, le=10.0)
    """Peak learning rate, dimensionless."""
    layer_decay: float = Field(default=1.0, gt=0.0, le=1.0)
    """Learning rate of each layer by that of the layer above it: the head has the whole rate, the embeddings
    the least; 1 = the same for all."""
    scale_learning_rate: float | None = Field(default=None, gt=0.0, le=10.0)
    """Peak learning rate of the learned scales and shifts of quantised inputs; unset = `learning_rate`."""
    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], ...] | None = None
    """Decay rates, as many as the update rule has; unset = its usual ones, such as (0.9, 0.999) for adamw."""
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
    schedule: Annotated[str, NameIn(SCHEDULES), described(SCHEDULES)] = LINEAR.name
    """Learning rate after the warm-up."""
    schedule_power: float = Field(default=1.0, gt=0.0, le=100.0)
    """polynomial only: power of the share of steps left; 1 = linear."""
    schedule_floor: float = Field(default=0.0, ge=0.0, lt=1.0)
    """cosine, polynomial, warmup_stable_decay, plateau: lowest rate, share of the peak; 0 = none."""
    schedule_step_epochs: float = Field(default=1.0, gt=0.0, le=10_000)
    """step only: epochs from one drop to the next."""
    schedule_factor: float = Field(default=0.1, gt=0.0, lt=1.0)
    """step, plateau: what a drop multiplies the rate by."""
    schedule_decay_fraction: float = Field(default=0.1, gt=0.0, le=1.0)
    """warmup_stable_decay only: share of all steps, the last ones, over which the rate falls."""
    schedule_patience: int = Field(default=10, ge=0, le=10_000)
    """plateau only: evaluations in a row without a lower validation loss (by 0.01%) that change nothing; the
    next one lowers the rate."""
    masters: Literal["fp32", "split"] | None = None
    """What completes half parameters to fp32: a copy, or (adan, bf16) the lower 16 bits alone; unset = split
    where the optimizer and the format have it, else fp32."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Format that the moments m and v are kept in; bf16 is for adan only, whose n stays fp32."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for field, choices_of in _SERVED.items():
            self._require_served(field, choices_of)
        if self.warmup_steps is not None and self.warmup_fraction is not None:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} and warmup_fraction {self.warmup_fraction:g} are both "
                "set; remove one"
            )
        count = len(self.info.betas)
        if self.betas is not None and len(self.betas) != count:
            raise ValueError(
                f"betas has {len(self.betas)} values, but {self.name} takes {count}; "
                "change optimizer.betas or optimizer.name"
            )
        for choice, registry in _OWNERS.items():
            for field in sorted({option for info in registry.values() for option in info.options}):
                self._require_own(field, choice, registry)
        decays = "schedule_decay_fraction" in self.schedule_info.options
        if decays and self.warmup_steps is None and self.warmup_share + self.schedule_decay_fraction > 1.0:
            raise ValueError(
                f"schedule_decay_fraction {self.schedule_decay_fraction:g} and a warm-up of "
                f"{self.warmup_share:g} are more than all steps; lower one of them"
            )
        return self

    def _require_served(self, field: str, choices_of: Callable[[OptimizerInfo], Sequence[str]]) -> None:
        value, served = getattr(self, field), choices_of(self.info)
        if value is not None and str(value) not in served:
            owners = [info.name for info in OPTIMIZERS.values() if value in choices_of(info)]
            change = f"set optimizer.name: {owners[0]} or " if owners else "set "
            raise ValueError(
                f"{field} {value} belongs to {', '.join(owners) or 'no optimizer'}, not {self.name}; "
                f"{change}optimizer.{field}: {served[0]}"
            )

    def _require_own(
        self, field: str, choice: str, registry: Mapping[str, OptimizerInfo | ScheduleInfo]
    ) -> None:
        chosen: str = getattr(self, choice)
        is_set = getattr(self, field) != type(self).model_fields[field].default
        if is_set and field not in registry[chosen].options:
            owners = [info.name for info in registry.values() if field in info.options]
            raise ValueError(
                f"{field} belongs to {', '.join(owners)}, not {chosen}; "
                f"remove optimizer.{field} or set optimizer.{choice}: {owners[0]}"
            )

    @property
    def info(self) -> OptimizerInfo:
        return OPTIMIZERS[self.name]

    @property
    def schedule_info(self) -> ScheduleInfo:
        return SCHEDULES[self.schedule]

    @property
    def schedule_options(self) -> dict[str, Any]:
        return {field: getattr(self, field) for field in self.schedule_info.options}

    def hyperparameters(self, stored: str) -> Hyperparameters:
        return Hyperparameters(
            implementation=self.implementation,
            learning_rate=self.learning_rate,
            betas=self.betas or self.info.betas,
            eps=self.eps,
            masters=self.info.masters_of(stored, self.masters),
            moments=self.moments,
            options={field: getattr(self, field) for field in self.info.options},
        )

    def warmup_of(self, total_steps: int) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.ceil(self.warmup_share * total_steps)

    @property
    def warmup_share(self) -> float:
        """Share of the steps that are warm-up, unless `warmup_steps` is set."""
        return DEFAULT_WARMUP if self.warmup_fraction is None else self.warmup_fraction


_SERVED: Mapping[str, Callable[[OptimizerInfo], Sequence[str]]] = {
    "implementation": lambda info: (Implementation.auto, *info.implementations),
    "masters": lambda info: tuple(info.masters),
    "moments": lambda info: info.moments,
}
"""Fields whose values depend on the update rule, and the values that it has."""

_OWNERS: Mapping[str, Mapping[str, OptimizerInfo | ScheduleInfo]] = {
    "name": OPTIMIZERS,
    "schedule": SCHEDULES,
}
"""Fields that choose an entry, whose `options` are fields that only some entries have."""
