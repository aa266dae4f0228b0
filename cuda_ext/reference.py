"""Adan in plain float64 PyTorch: the oracle of every test and parity record.

Written from the mathematics, one tensor at a time, sharing no code with the implementations
that it judges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
        self.m = torch.zeros_like(self.theta)
        self.v = torch.zeros_like(self.theta)
        self.n = torch.zeros_like(self.theta)


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
