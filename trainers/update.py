"""One optimizer update: loss scale, learning rate, clipping, and the optimizer built over a model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainers.config import Optimizer, Precision, RunConfig
from trainers.models.latent import Latent
from trainers.models.student import parameter_name
from trainers.optimizers.info import Built
from trainers.optimizers.masters import stored_format
from trainers.optimizers.schedules import Options, Position

MINIMUM = 1.0  # At this scale an overflow is no longer the scale's doing
MAXIMUM = 2.0**24
_FACTOR = 2.0
RATE_FACTOR = "rate_factor"
"""Entry of a parameter group whose learning rate is the run's times this factor; absent = 1."""
_FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_PARTS_OF_PARAMETERS = ("master", "remainder")  # State that completes 16-bit parameters
UNDERFLOW_EVERY_STEPS = 32
"""Counting reads all gradients and launches three kernels for each, as much as the step itself."""


@dataclass(slots=True)
class LossScale:
    """The scale, equal on all workers. The base class is for runs that need none: always 1."""

    dynamic: ClassVar[bool] = False
    value: float = 1.0

    def back_off(self) -> bool:
        """Lowers the scale after non-finite gradients; returns False if the scale cannot be the reason."""
        return False

    def applied(self) -> None: ...

    def to_state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None: ...


@dataclass(slots=True)
class DynamicLossScale(LossScale):
    """The scale of fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2)."""

    dynamic: ClassVar[bool] = True
    growth_steps: int = 2000  # Applied steps in a row after which the scale doubles
    clean_steps: int = 0  # Applied steps since the last change

    def back_off(self) -> bool:
        self.clean_steps = 0
        if self.value <= MINIMUM:
            return False
        self.value = max(MINIMUM, self.value / _FACTOR)
        return True

    def applied(self) -> None:
        self.clean_steps += 1
        if self.clean_steps >= self.growth_steps:
            self.value, self.clean_steps = min(MAXIMUM, self.value * _FACTOR), 0

    def to_state(self) -> dict[str, float]:
        return {"value": self.value, "clean_steps": self.clean_steps}

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
        """Changes the scale as `applied` or `back_off` does; of a loss not finite it is not the reason."""
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


class Idle(torch.optim.Optimizer):
    """Stands in for the optimizer in a run that does not train: no step, no state."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("this run only evaluates")


def idle(model: nn.Module) -> Built:
    named = {parameter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    return Built(Idle(named.values()), None, None, names=tuple(named))


def build(config: Optimizer, model: nn.Module, layers_above: Callable[[str], int] | None = None) -> Built:
    """Builds the optimizer of a run over a model's trained parameters.

    Weight decay leaves out biases and LayerNorm: every parameter with fewer than two dimensions. Learned
    scales, the parameters without dimensions, may have a learning rate of their own. `layers_above` gives the
    number of layers above a parameter, by which `layer_decay` lowers its rate; None = rates are the same.
    """
    # Clipping stays with the loop: it reports the norm, and all workers agree on it first.
    trained = {parameter_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {name: p for name, p in trained.items() if p.ndim >= 2}
    rest = {name: p for name, p in trained.items() if p.ndim < 2}
    scales: dict[str, nn.Parameter] = {}
    if config.scale_learning_rate is not None:
        scales = {name: rest.pop(name) for name, p in trained.items() if p.ndim == 0}
    members: list[tuple[dict[str, nn.Parameter], dict[str, float]]] = [
        (decayed, {"weight_decay": config.weight_decay}),
        (rest, {"weight_decay": 0.0}),
    ]
    if scales and config.scale_learning_rate is not None:
        of_scales = config.scale_learning_rate / config.learning_rate
        members.append((scales, {"weight_decay": 0.0, RATE_FACTOR: of_scales}))
    if layers_above is not None and config.layer_decay < 1.0:
        whole, members = members, []
        for named, fields in whole:
            for above in sorted({layers_above(name) for name in named}):
                own = {name: parameter for name, parameter in named.items() if layers_above(name) == above}
                factor = fields.get(RATE_FACTOR, 1.0) * config.layer_decay**above
                members.append((own, {**fields, RATE_FACTOR: factor}))
    groups: list[dict[str, Any]] = [{"params": [*named.values()], **fields} for named, fields in members]
    stored = stored_format(groups)
    hyperparameters = config.hyperparameters(_FORMATS[stored])
    return replace(
        config.info.build(groups, hyperparameters),
        names=tuple(name for named, _ in members for name in named),
        masters=None if stored is torch.float32 else hyperparameters.masters,
        moments=config.moments,
    )


def restart(optimizer: torch.optim.Optimizer) -> None:
    """Resets moments, previous gradients and step counts; fp32 values of half parameters stay."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if name not in _PARTS_OF_PARAMETERS:
                value.zero_()


def learning_rate(config: Optimizer, step: int, total_steps: int, steps_per_epoch: int = 1) -> float:
    """Returns the learning rate of a step, without the factor of a schedule with state (`RateFactor`).

    The warm-up rises linearly from 0 to the peak and takes `w = warmup_steps` steps, or
    `ceil(warmup_fraction * total_steps)`; step i < w runs at `peak * (i + 1) / (w + 1)`, so that no step is
    wasted at rate 0. The schedule follows. Steps are 0-based and count within a stage.
    """
    warmup = config.warmup_of(total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    at = Position(step - warmup, total_steps - warmup, total_steps, steps_per_epoch)
    return config.schedule_info.rate(config.learning_rate, at, config.schedule_options)


class RateFactor:
    """Factor of the learning rate that follows from evaluations. The base class is for none: always 1."""

    @property
    def value(self) -> float:
        return 1.0

    def evaluated(self, validation_loss: float) -> None: ...

    def to_state(self) -> dict[str, float]:
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Takes a state; an empty one = start again."""


class Plateau(RateFactor):
    """The factor of torch's ReduceLROnPlateau. `options` are fields of the section `optimizer`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.restore({})

    @property
    def value(self) -> float:
        return float(self._torch.optimizer.param_groups[0]["lr"])

    def evaluated(self, validation_loss: float) -> None:
        self._torch.step(validation_loss)

    def to_state(self) -> dict[str, float]:
        plateau = self._torch
        return {"value": self.value, "best": plateau.best, "bad_evaluations": plateau.num_bad_epochs}

    def restore(self, state: dict[str, float]) -> None:
        stand_in = torch.optim.SGD([torch.zeros(())], lr=state.get("value", 1.0))
        self._torch = ReduceLROnPlateau(
            stand_in,
            factor=self._options["schedule_factor"],
            patience=self._options["schedule_patience"],
            min_lr=self._options["schedule_floor"],
            eps=0.0,
        )
        if state:
            self._torch.best, self._torch.num_bad_epochs = state["best"], int(state["bad_evaluations"])


def rate_factor_for(config: Optimizer) -> RateFactor:
    state = config.schedule_info.state
    if state is None:
        return RateFactor()
    factor: RateFactor = state(config.schedule_options)
    return factor


def counts_underflow(step: int, log_every_steps: int) -> bool:
    """Returns whether a reporting step (0-based) also counts underflow: about one in 32."""
    return step // UNDERFLOW_EVERY_STEPS != (step - log_every_steps) // UNDERFLOW_EVERY_STEPS


class Update:
    """The optimizer of a run and what happens to its gradients first.

    They pass through `half`, if not None; `counted` are the parameters of this worker's part of the norm.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        half: torch.dtype | None,
        max_grad_norm: float,
        counted: Sequence[nn.Parameter] | None = None,
        latent: Latent | None = None,
    ) -> None:
        self.optimizer, self.scale = optimizer, scale
        self._half, self._limit = half, max_grad_norm
        self._latent = latent or Latent()
        self._scale_there: DeviceLossScale | None = None
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._counted = self._parameters if counted is None else counted
        tables = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        self._dense = [p for p in self._parameters if p not in tables]
        # Fused and master steps divide gradients on their way in: no pass over memory of its own.
        self._divides = hasattr(optimizer, "grad_scale") or getattr(
            optimizer, "_step_supports_amp_scaling", False
        )

    def decide_on_device(self) -> None:
        """Keeps a dynamic loss scale on the device from now on, for `apply_if_finite`."""
        if isinstance(self.scale, DynamicLossScale):
            self._scale_there = DeviceLossScale(self.scale, self._parameters[0].device)

    @property
    def next_scale(self) -> float | torch.Tensor:
        """Loss scale of the next step; on the device if it is kept there."""
        return self.scale.value if self._scale_there is None else self._scale_there.value

    def follow_scale(self) -> None:
        """Copies the host's loss scale to the device, once the host has read all steps or rolled back."""
        if self._scale_there is not None:
            self._scale_there.follow()

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer's kernels decide if a step is taken, see `apply_if_finite`."""
        amp = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        return bool(getattr(self.optimizer, "skips_on_device", amp))

    def squares(self) -> torch.Tensor:
        """Squared L2 norm of the counted gradients, which carry the loss scale; float64, on the device."""
        gradients = [p.grad for p in self._counted if p.grad is not None]
        # In fp32, because a tensor's norm may leave the range of half precision when no element does;
        # its square may leave that of fp32.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        whole: torch.Tensor = torch.stack(list(norms)).double().square().sum()
        return whole

    def apply(self, norm: float, rate: float) -> float:
        """Takes one step; returns what clipping divided gradients by. `norm` is without the loss scale."""
        self._begin_apply(rate)
        clip = max(1.0, norm / self._limit) if self._limit > 0.0 else 1.0
        divisor = self.scale.value * clip
        if divisor == 1.0:
            self.optimizer.step()
        elif self._divides:
            device = self._parameters[0].device
            self.optimizer.grad_scale = torch.full((), divisor, device=device)  # type: ignore[attr-defined]
            self.optimizer.step()
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        else:
            torch._foreach_div_([p.grad for p in self._parameters if p.grad is not None], divisor)
            self.optimizer.step()
        self._latent.after_update()
        return clip

    def apply_if_finite(self, loss_sum: torch.Tensor, squares: torch.Tensor, rate: float) -> None:
        """Takes one step unless loss or gradients are not finite; the device decides, the host reads nothing.

        In this order, as in `apply` and with its numbers: norm = sqrt(squares) / scale; divisor = scale x
        max(1, norm / limit); skipped = not finite(loss) or not finite(squares).
        """
        self._begin_apply(rate)
        optimizer: Any = self.optimizer
        scale = self.next_scale
        divisor = torch.full_like(squares, scale) if isinstance(scale, float) else scale
        if self._limit > 0.0:
            divisor = divisor * (squares.sqrt() / divisor / self._limit).clamp(min=1.0)
        if self._limit > 0.0 or self.scale.dynamic or scale != 1.0:
            optimizer.grad_scale = divisor.float()
        loss_finite = loss_sum.isfinite()
        finite = loss_finite & squares.isfinite()
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        optimizer.grad_scale = optimizer.found_inf = None
        self._latent.after_update()
        if self._scale_there is not None:
            self._scale_there.step(loss_finite, finite)

    def _begin_apply(self, rate: float) -> None:
        self._latent.before_update()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get(RATE_FACTOR, 1.0)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def underflow_pct(self) -> torch.Tensor | None:
        """Share of gradient elements that are zero in half precision, loss scale included, in percent.

        Embedding tables are left out: most of their rows have no gradient in any step. None if gradients
        pass through no half precision. Stays on the device.
        """
        if self._half is None:
            return None
        gradients = [p.grad for p in self._dense if p.grad is not None]
        kept = torch.stack([gradient.to(self._half).count_nonzero() for gradient in gradients]).sum()
        return 100.0 * (1.0 - kept / sum(gradient.numel() for gradient in gradients))
