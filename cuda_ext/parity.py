"""Adan in plain float64 PyTorch, and the parity of a fast step with it over the first steps from one seed.

The reference is the oracle of every test and parity record: written from the mathematics, one tensor at a
time, sharing no code with the implementations that it judges.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cuda_ext import adan_state, native
from cuda_ext.adan import Adan

# Sizes around a vector, a stage and a chunk, and BERT's vocabulary; a matrix; nothing at all.
DEFAULT_SHAPES: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,), (1023,), (1025,), (30522,), (50, 768), (0,))

_UNIT = 2.0**-24  # one rounding of fp32
_ROUNDINGS_PER_STEP = 4.0


@dataclass
class ReferenceState:
    """State of one parameter; every tensor is float64 and shaped like the parameter."""

    theta: Tensor
    m: Tensor = field(init=False)
    v: Tensor = field(init=False)
    n: Tensor = field(init=False)
    g_prev: Tensor | None = None
    step: int = 0

    def __post_init__(self) -> None:
        self.theta = self.theta.detach().to(torch.float64).clone()
        self.m, self.v, self.n = (torch.zeros_like(self.theta) for _ in range(3))


def clip_coefficient(gradients: Sequence[Tensor], max_grad_norm: float) -> float:
    """Factor that brings the global norm of `gradients` down to `max_grad_norm`; 1 when it is 0."""
    if max_grad_norm == 0.0:
        return 1.0
    norm = math.sqrt(sum(float(g.to(torch.float64).square().sum()) for g in gradients))
    return min(1.0, max_grad_norm / (norm + 1e-6))


def reference_step(
    state: ReferenceState,
    gradient: Tensor,
    *,
    lr: float,
    betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    no_prox: bool = False,
    maximize: bool = False,
    factor: float = 1.0,
) -> None:
    """Advances `state` by one step.

    In order: g = factor * gradient, negated when maximizing; d = g - g_prev, 0 at the first
    step; m, v, n as exponential means of g, d and (g + b2 d)^2; bias corrections; the step;
    weight decay; g_prev = g. `factor` is the inverse loss scale times the clip coefficient.
    """
    b1, b2, b3 = betas
    g = gradient.detach().to(torch.float64) * (-factor if maximize else factor)
    d = torch.zeros_like(g) if state.g_prev is None else g - state.g_prev
    state.step += 1
    state.m = b1 * state.m + (1 - b1) * g
    state.v = b2 * state.v + (1 - b2) * d
    state.n = b3 * state.n + (1 - b3) * (g + b2 * d) ** 2
    denominator = state.n.sqrt() / math.sqrt(1 - b3**state.step) + eps
    u = (state.m / (1 - b1**state.step) + b2 * state.v / (1 - b2**state.step)) / denominator
    if no_prox:
        state.theta = (1 - lr * weight_decay) * state.theta - lr * u
    else:
        state.theta = (state.theta - lr * u) / (1 + lr * weight_decay)
    state.g_prev = g


@dataclass(frozen=True)
class ParityRecord:
    """Distance of an implementation from the reference after `steps` steps, and its bounds."""

    implementation: str
    requested: str
    fallback_reason: str | None
    device: str
    dtype: str
    master_weights: str
    moments_dtype: str
    capability: str
    seed: int
    steps: int
    elements: int
    parameter_error: float
    """Largest |theta - reference|, over the largest |reference| of its tensor; worst tensor.
    Of a 16-bit parameter with a master, theta is the master's value."""
    update_error: float
    """The same for the total movement theta - theta_0: an optimizer that does nothing has 1."""
    parameter_bound: float
    update_bound: float
    passed: bool
    kernels_ran: dict[str, int]  # Counters of the kernels during these steps
    torch_version: str
    recorded_at_s: float


def measure_parity(
    implementation: str = "auto",
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    steps: int = 10,
    seed: int = 0,
    shapes: Sequence[tuple[int, ...]] = DEFAULT_SHAPES,
    max_grad_norm: float = 0.0,
    master_weights: str = "auto",
    moments_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> ParityRecord:
    """Runs an implementation next to the float64 reference and returns their distance at the end.

    Both start from the same values and take the same gradients, drawn on the CPU from `seed`. `shapes` are
    those of the parameters, `dtype` that of parameters and gradients; `options` are `reference_step`'s, other
    arguments `Adan`'s.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    begin = [draw(shape, 0.1) for shape in shapes]
    params = [torch.nn.Parameter(value.to(device, copy=True)) for value in begin]
    states = [ReferenceState(value) for value in begin]
    hyper = {"lr": 1e-3, "weight_decay": 0.01, **options}
    optimizer = Adan(
        params,
        **hyper,
        max_grad_norm=max_grad_norm,
        implementation=implementation,
        master_weights=master_weights,
        moments_dtype=moments_dtype,
    )
    before = native.counters()
    for _ in range(steps):
        gradients = [draw(shape, 0.01) for shape in shapes]
        factor = clip_coefficient(gradients, max_grad_norm)
        for param, state, gradient in zip(params, states, gradients, strict=True):
            param.grad = gradient.to(device)
            reference_step(state, gradient, **hyper, factor=factor)
        optimizer.step()
    kernels_ran = {name: count - before.get(name, 0) for name, count in native.counters().items()}

    parameter_error, update_error = _errors(optimizer, params, states, begin)
    parameter_bound, update_bound = _bounds(dtype, steps, master_weights, moments_dtype, max_grad_norm)
    return ParityRecord(
        implementation=optimizer.implementation,
        requested=implementation,
        fallback_reason=optimizer.fallback_reason,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        master_weights=master_weights,
        moments_dtype=str(moments_dtype).removeprefix("torch."),
        capability=_capability(optimizer.implementation, torch.device(device)),
        seed=seed,
        steps=steps,
        elements=sum(value.numel() for value in begin),
        parameter_error=parameter_error,
        update_error=update_error,
        parameter_bound=parameter_bound,
        update_bound=update_bound,
        passed=parameter_error <= parameter_bound and update_error <= update_bound,
        kernels_ran=kernels_ran,
        torch_version=torch.__version__,
        recorded_at_s=time.time(),
    )


def _errors(
    optimizer: Adan, params: Sequence[Tensor], states: Sequence[ReferenceState], begin: Sequence[Tensor]
) -> tuple[float, float]:
    """Largest errors of the parameters and of their movement, both relative."""
    of_parameter = of_update = 0.0
    for param, state, value in zip(params, states, begin, strict=True):
        if value.numel() == 0:
            continue
        theta = adan_state.load(param.detach(), optimizer.state[param])
        error = float((theta.cpu().double() - state.theta).abs().max())
        movement = float((state.theta - value.double()).abs().max())
        of_parameter = max(of_parameter, error / float(state.theta.abs().max()))
        of_update = max(of_update, error / max(movement, 1e-30))
    return of_parameter, of_update


def _bounds(
    dtype: torch.dtype, steps: int, master_weights: str, moments_dtype: torch.dtype, max_grad_norm: float
) -> tuple[float, float]:
    """Errors that rounding explains: of the parameter and of its movement, both relative."""
    short = dtype is not torch.float32
    if short and master_weights == "none":
        return 1.0, 1.5  # movements below half a unit of the storage are lost; only the order of size is left
    previous = adan_state.state_dtypes(dtype, torch.float32)["g_prev"]
    rounds = previous is not dtype or max_grad_norm != 0.0  # stored as it came, a gradient is exact
    if torch.bfloat16 in (moments_dtype, previous if rounds else None):
        return 1e-2, 5e-2  # m and v, or g_prev, carry 8 bits
    return (1.0 + _ROUNDINGS_PER_STEP * steps) * _UNIT, 1e-2


def _capability(implementation: str, device: torch.device) -> str:
    if implementation.endswith("_unfused"):
        return "PyTorch operations"
    if device.type == "cpu":
        return native.cpu_capability()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
