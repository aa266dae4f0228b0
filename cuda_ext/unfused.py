"""Adan in PyTorch operations: tensor by tensor, or over lists with foreach.

Both read top-down as the update in `csrc/adan_update.h`. They are what runs where no compiler
is, and what the fused kernels are measured against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext import masters
from cuda_ext.native import python_counts
from cuda_ext.tensor_batch import (
    Group,
    StepInputs,
    TensorBatch,
    bias_correction,
    combined_norm,
    gradient_factor,
    learning_rate,
)


def single(batches: list[TensorBatch], inputs: StepInputs) -> None:
    """One step, tensor by tensor: about eighteen operations for each parameter."""
    if _skipped(inputs):
        return
    norm = None
    if inputs.max_grad_norm > 0.0:
        norm = combined_norm([torch.linalg.vector_norm(_wide(g)) for b in batches for g in b.grads])
    factor = gradient_factor(inputs, norm)
    for batch in batches:
        for group, part in batch.per_group():
            for param, grad, state in zip(
                batch.params[part], batch.grads[part], batch.states[part], strict=True
            ):
                _update_one(group, param, grad, state, factor)
        python_counts["single_unfused"] += len(batch.params)


def multi(batches: list[TensorBatch], inputs: StepInputs) -> None:
    if _skipped(inputs):
        return
    norm = None
    if inputs.max_grad_norm > 0.0:
        norms = [
            n
            for b in batches
            for n in torch._foreach_norm(b.grads, dtype=torch.float32 if _short(b.grads) else None)
        ]
        norm = combined_norm(norms)
    factor = gradient_factor(inputs, norm)
    for batch in batches:
        for group, part in batch.per_group():
            _update_list(group, batch.params[part], batch.grads[part], batch.states[part], factor)
        python_counts["multi_unfused"] += len(batch.params)


def _skipped(inputs: StepInputs) -> bool:
    # PyTorch operations cannot be skipped on the device: this reads the flag and synchronises.
    return inputs.found_inf is not None and bool(inputs.found_inf.item() != 0.0)


def _short(tensors: list[Tensor]) -> bool:
    return tensors[0].dtype in (torch.bfloat16, torch.float16)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _count_step(state: dict[str, Tensor]) -> int:
    state["step"] += 1
    return int(state["step"].item())


def _rates(group: Group) -> tuple[float, float]:
    """Factors of theta and of the update: both kinds of weight decay in one form."""
    lr = learning_rate(group)
    decay = lr * float(group["weight_decay"])
    shrink = 1.0 - decay if group["no_prox"] else 1.0 / (1.0 + decay)
    return shrink, lr if group["no_prox"] else lr * shrink


def _update_one(
    group: Group,
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    factor: Tensor | None,
) -> None:
    b1, b2, b3 = group["betas"]
    step = _count_step(state)
    c1, c2, c3 = (bias_correction(beta, step) for beta in (b1, b2, b3))
    shrink, rate = _rates(group)
    theta = masters.load(param, state)
    m, v, n = _wide(state["exp_avg"]), _wide(state["exp_avg_diff"]), state["exp_avg_sq"]

    g = _wide(grad)
    if factor is not None:
        g = g * factor.to(g.dtype)
    if group["maximize"]:
        g = -g
    previous = g if step == 1 else _wide(state["g_prev"])
    d = g - previous
    state["g_prev"].copy_(g)

    m.mul_(b1).add_(g, alpha=1.0 - b1)
    v.mul_(b2).add_(d, alpha=1.0 - b2)
    d.mul_(b2).add_(g)
    n.mul_(b3).addcmul_(d, d, value=1.0 - b3)

    denominator = n.sqrt().div_(c3**0.5).add_(group["eps"])
    theta.mul_(shrink)
    theta.addcdiv_(m, denominator, value=-rate / c1)
    theta.addcdiv_(v, denominator, value=-rate * b2 / c2)

    masters.store(theta, param, state)
    if m is not state["exp_avg"]:
        state["exp_avg"].copy_(m)
        state["exp_avg_diff"].copy_(v)


def _update_list(
    group: Group,
    params: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Tensor]],
    factor: Tensor | None,
) -> None:
    b1, b2, b3 = group["betas"]
    steps = [_count_step(state) for state in states]
    c1, c2, c3 = ([bias_correction(beta, step) for step in steps] for beta in (b1, b2, b3))
    shrink, rate = _rates(group)
    thetas = [masters.load(param, state) for param, state in zip(params, states, strict=True)]
    ms = [_wide(state["exp_avg"]) for state in states]
    vs = [_wide(state["exp_avg_diff"]) for state in states]
    ns = [state["exp_avg_sq"] for state in states]
    kept = [state["g_prev"] for state in states]

    gs = [_wide(grad) for grad in grads]
    if factor is not None:
        gs = list(torch._foreach_mul(gs, factor.to(gs[0].dtype)))
    if group["maximize"]:
        gs = list(torch._foreach_neg(gs))
    previous = [g if step == 1 else _wide(old) for g, old, step in zip(gs, kept, steps, strict=True)]
    ds = list(torch._foreach_sub(gs, previous))
    torch._foreach_copy_(kept, gs)

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
        masters.store(theta, param, state)
    if ms[0] is not states[0]["exp_avg"]:
        torch._foreach_copy_([state["exp_avg"] for state in states], ms)
        torch._foreach_copy_([state["exp_avg_diff"] for state in states], vs)
