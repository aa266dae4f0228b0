"""The four implementations of Adan's step, over batches of tensors.

The unfused ones are PyTorch operations, over single tensors or lists: they run where no compiler is, and the
fused kernels are measured against them. They read top-down as the update in `csrc/adan_update.h`. The fused
ones call the compiled operators, one launch per tensor or one for a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from cuda_ext import adan_state, native

Group = Mapping[str, Any]  # A parameter group: lr, betas, eps, weight_decay, no_prox, maximize
GROUPS_PER_LAUNCH = 16  # Parameter groups whose hyper-parameters fit in one CUDA launch's arguments


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step besides the tensors; all scalars stay on their device."""

    grad_scale: Tensor | None = None  # Loss scale that the gradients still carry; float32
    found_inf: Tensor | None = None  # Not 0: the step is skipped; float32
    max_grad_norm: float = 0.0  # 0 turns clipping off


@dataclass
class GroupPart:
    """Parameters of one group; lists run in parallel. A batch has parts of one device and storage format."""

    group: Group
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    def add(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        self.params.append(param)
        self.grads.append(grad)
        self.states.append(state)

    def one_by_one(self) -> Iterator[GroupPart]:
        for param, grad, state in zip(self.params, self.grads, self.states, strict=True):
            yield GroupPart(self.group, [param], [grad], [state])


Batch = list[GroupPart]


def _gradients(batch: Batch) -> list[Tensor]:
    return [grad for part in batch for grad in part.grads]


def combined_norm(norms: Sequence[Tensor]) -> Tensor:
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


def fused(batches: list[Batch], inputs: StepInputs, *, multi: bool) -> None:
    """One launch per tensor, or per batch and sixteen groups; clipping adds one launch for the norm."""
    norm = None
    if inputs.max_grad_norm > 0.0:
        # One norm for all batches: the optimizer refuses clipping over several devices.
        norm = combined_norm([native.grad_norm(_gradients(batch)) for batch in batches])
    for batch in batches:
        if multi:
            for first in range(0, len(batch), GROUPS_PER_LAUNCH):
                _launch(batch[first : first + GROUPS_PER_LAUNCH], inputs, norm)
        else:
            for one in chain.from_iterable(part.one_by_one() for part in batch):
                _launch([one], inputs, norm)


def _launch(batch: Batch, inputs: StepInputs, norm: Tensor | None) -> None:
    hyper_parameters: list[float] = []
    groups, states = [part.group for part in batch], [state for part in batch for state in part.states]
    for group in groups:
        lr = 0.0 if isinstance(group["lr"], Tensor) else group["lr"]
        hyper_parameters += (lr, *group["betas"], group["eps"], group["weight_decay"])
    flags = [int(group["no_prox"]) + 2 * int(group["maximize"]) for group in groups]
    completing = next((name for name in adan_state.STATE_NAMES if name in states[0]), None)
    torch.ops.stillhouse.adan_(
        [param for part in batch for param in part.params],
        _gradients(batch),
        *([state[name] for state in states] for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "g_prev")),
        [state[completing] for state in states] if completing else [],
        [state["step"] for state in states],
        [len(part.params) for part in batch],
        hyper_parameters,
        flags,
        _lr_tensors(groups, batch[0].params[0].device),
        inputs.grad_scale,
        inputs.found_inf,
        norm,
        inputs.max_grad_norm,
    )


def _lr_tensors(groups: Sequence[Group], device: torch.device) -> list[Tensor]:
    """Learning rates on the device when one is a tensor: a CUDA graph then replays its current value."""
    rates = [group["lr"] for group in groups]
    if not any(isinstance(rate, Tensor) for rate in rates):
        return []
    return [
        rate.to(device, torch.float32, non_blocking=True)
        if isinstance(rate, Tensor)
        else torch.full((), rate, dtype=torch.float32, device=device)
        for rate in rates
    ]


def unfused(batches: list[Batch], inputs: StepInputs, *, multi: bool) -> None:
    """About eighteen operations, for each parameter or for a list of them."""
    # PyTorch operations cannot be skipped on the device: this reads the flag and synchronises.
    if inputs.found_inf is not None and bool(inputs.found_inf.item() != 0.0):
        return
    norm = None
    if inputs.max_grad_norm > 0.0:
        norms: list[Tensor] = []
        for batch in batches:
            short = batch[0].grads[0].dtype in (torch.bfloat16, torch.float16)
            norms += torch._foreach_norm(_gradients(batch), dtype=torch.float32 if short else None)
        norm = combined_norm(norms)
    factor = gradient_factor(inputs, norm)
    for part in chain.from_iterable(batches):
        for cut in [part] if multi else part.one_by_one():
            _update(cut.group, cut.params, cut.grads, cut.states, factor)
        native.python_counts["multi_unfused" if multi else "single_unfused"] += len(part.params)


def _wide(tensors: list[Tensor]) -> list[Tensor]:
    short = tensors[0].dtype in (torch.bfloat16, torch.float16)
    return [tensor.float() for tensor in tensors] if short else tensors


def _update(
    group: Group,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    factor: Tensor | None,
) -> None:
    b1, b2, b3 = group["betas"]
    for state in states:
        state["step"] += 1
    steps = [int(state["step"].item()) for state in states]
    c1, c2, c3 = ([bias_correction(beta, step) for step in steps] for beta in (b1, b2, b3))
    lr = float(group["lr"])  # synchronises when it is a tensor on a device
    # Both kinds of weight decay in one form.
    decay = lr * float(group["weight_decay"])
    shrink = 1.0 - decay if group["no_prox"] else 1.0 / (1.0 + decay)
    rate = lr if group["no_prox"] else lr * shrink

    thetas = [adan_state.load(param, state) for param, state in zip(params, states, strict=True)]
    ms, vs = _wide([state["exp_avg"] for state in states]), _wide([state["exp_avg_diff"] for state in states])
    ns, previous_gs = [state["exp_avg_sq"] for state in states], [state["g_prev"] for state in states]

    gs = _wide(grads)
    if factor is not None:
        gs = list(torch._foreach_mul(gs, factor.to(gs[0].dtype)))
    if group["maximize"]:
        gs = list(torch._foreach_neg(gs))
    previous = [g if step == 1 else old for g, old, step in zip(gs, _wide(previous_gs), steps, strict=True)]
    ds = list(torch._foreach_sub(gs, previous))
    torch._foreach_copy_(previous_gs, gs)

    torch._foreach_mul_(ms, b1)
    torch._foreach_add_(ms, gs, alpha=1.0 - b1)
    torch._foreach_mul_(vs, b2)
    torch._foreach_add_(vs, ds, alpha=1.0 - b2)
    torch._foreach_mul_(ds, b2)
    torch._foreach_add_(ds, gs)
    torch._foreach_mul_(ns, b3)
    torch._foreach_addcmul_(ns, ds, ds, value=1.0 - b3)

    denominators = torch._foreach_sqrt(ns)
    torch._foreach_div_(denominators, [c**0.5 for c in c3])
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_mul_(thetas, shrink)
    torch._foreach_addcdiv_(thetas, ms, denominators, [-rate / c for c in c1])
    torch._foreach_addcdiv_(thetas, vs, denominators, [-rate * b2 / c for c in c2])

    for theta, param, state in zip(thetas, params, states, strict=True):
        adan_state.store(theta, param, state)
    if ms[0] is not states[0]["exp_avg"]:
        torch._foreach_copy_([state["exp_avg"] for state in states], ms)
        torch._foreach_copy_([state["exp_avg_diff"] for state in states], vs)
