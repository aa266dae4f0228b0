"""The tensors that one launch works on, and what is the same for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]
"""A parameter group: lr, betas, eps, weight_decay, no_prox, maximize."""


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step besides the tensors; all scalars stay on their device."""

    grad_scale: Tensor | None = None
    """Loss scale that the gradients still carry; float32."""
    found_inf: Tensor | None = None
    """Not 0: the step is skipped; float32."""
    max_grad_norm: float = 0.0
    """0 turns clipping off."""


@dataclass
class TensorBatch:
    """Parameters of one device and one storage format.

    The lists run in parallel. `group_sizes` cuts them into consecutive parameter groups.
    """

    device: torch.device
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    group_sizes: list[int] = field(default_factory=list)

    def add(self, group: Group, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if not self.groups or self.groups[-1] is not group:
            self.groups.append(group)
            self.group_sizes.append(0)
        self.group_sizes[-1] += 1
        self.params.append(param)
        self.grads.append(grad)
        self.states.append(state)

    def per_group(self) -> list[tuple[Group, slice]]:
        parts, begin = [], 0
        for group, size in zip(self.groups, self.group_sizes, strict=True):
            parts.append((group, slice(begin, begin + size)))
            begin += size
        return parts

    def of(self, name: str) -> list[Tensor]:
        return [state[name] for state in self.states]


def learning_rate(group: Group) -> float:
    """Synchronises when the learning rate is a tensor on a device."""
    return float(group["lr"])


def combined_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of several parts from the norms of the parts."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(list(norms)))


def gradient_factor(inputs: StepInputs, norm: Tensor | None) -> Tensor | None:
    """Inverse loss scale times clip coefficient as one float64 tensor; None when it is 1.

    A norm that is NaN makes the factor NaN: the damage is as visible as without clipping.
    """
    factor = None if inputs.grad_scale is None else inputs.grad_scale.double().reciprocal().reshape(())
    if norm is not None:
        scale = 1.0 if factor is None else factor
        ratio = inputs.max_grad_norm / (norm.double() * scale + 1e-6)
        clip = torch.where(ratio > 1.0, torch.ones_like(ratio), ratio)
        factor = clip if factor is None else clip * factor
    return factor


def bias_correction(beta: float, step: int) -> float:
    """1 - beta^step without cancellation; 1 for beta = 1, a mean that is frozen and corrected already."""
    return 1.0 if beta in (0.0, 1.0) else -math.expm1(step * math.log(beta))
