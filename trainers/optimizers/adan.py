"""Adan in plain PyTorch: single-tensor and foreach (arXiv 2208.06677, the official code's betas)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Adan(torch.optim.Optimizer):
    """Adaptive Nesterov momentum.

    At a parameter's step t, with gradient g (already clipped) and the one before, g_prev:

        d  = g - g_prev                       (0 at t = 1)
        m <- b1*m + (1-b1)*g
        v <- b2*v + (1-b2)*d
        n <- b3*n + (1-b3)*(g + b2*d)^2
        D  = sqrt(n)/sqrt(1-b3^t) + eps
        u  = (m/(1-b1^t) + b2*v/(1-b2^t)) / D
        proximal: theta <- (theta - lr*u) / (1 + lr*wd)
        no_prox:  theta <- (1 - lr*wd)*theta - lr*u
        g_prev <- g

    Steps are counted per parameter, so that one unfrozen late gets its own corrections, which
    are computed in double. `state_dict` holds `g_prev`: a resumed run takes the same d.

    Args:
        params: parameters or groups.
        lr: learning rate.
        betas: decay rates b1, b2, b3.
        eps: added after the bias correction.
        weight_decay: decoupled.
        no_prox: decay as in AdamW instead of the proximal form.
        foreach: many tensors per call instead of one.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        foreach: bool = True,
    ) -> None:
        for beta in betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"beta {beta} is outside [0, 1)")
        if lr < 0.0 or eps <= 0.0 or weight_decay < 0.0:
            raise ValueError(
                f"lr {lr}, eps {eps} and weight_decay {weight_decay} must not be negative, eps not 0"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "no_prox": no_prox,
            "foreach": foreach,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            update = _foreach if group["foreach"] else _single
            parameters = [p for p in group["params"] if p.grad is not None]
            # foreach kernels want one device and dtype per call.
            by_kind: dict[tuple[torch.device, torch.dtype], list[Any]] = {}
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    raise RuntimeError("Adan takes no sparse gradients")
                self._begin(parameter, parameter.grad)
                by_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for tensors in by_kind.values():
                update(tensors, [p.grad for p in tensors], [self.state[p] for p in tensors], group)
        return loss

    def _begin(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        """Make a parameter's state at its first step and count the step."""
        state = self.state[parameter]
        if not state:
            # A host tensor, as in torch's optimizers: counting it synchronises no device.
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["previous_grad"] = grad.detach().clone(memory_format=torch.preserve_format)
        state["step"] += 1


def _corrections(step: float, betas: tuple[float, float, float]) -> tuple[float, float, float]:
    first, second, third = (1.0 - beta**step for beta in betas)
    return first, second, math.sqrt(third)


def _single(
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[dict[str, Any]],
    group: dict[str, Any],
) -> None:
    b1, b2, b3 = group["betas"]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    for parameter, grad, state in zip(parameters, grads, states, strict=True):
        m, v, n, previous = (
            state[name] for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")
        )
        c1, c2, c3 = _corrections(state["step"].item(), group["betas"])
        diff = previous.neg_().add_(grad)  # the storage of g_prev holds d until it holds g
        m.mul_(b1).add_(grad, alpha=1 - b1)
        v.mul_(b2).add_(diff, alpha=1 - b2)
        diff.mul_(b2).add_(grad)
        n.mul_(b3).addcmul_(diff, diff, value=1 - b3)
        denominator = n.sqrt().div_(c3).add_(eps)
        if group["no_prox"]:
            parameter.mul_(1 - lr * decay)
        parameter.addcdiv_(m, denominator, value=-lr / c1)
        parameter.addcdiv_(v, denominator, value=-lr * b2 / c2)
        if not group["no_prox"]:
            parameter.div_(1 + lr * decay)
        previous.copy_(grad)


def _foreach(
    parameters: list[torch.Tensor],
    grads: list[torch.Tensor],
    states: list[dict[str, Any]],
    group: dict[str, Any],
) -> None:
    b1, b2, b3 = group["betas"]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    m, v, n, previous = (
        [state[name] for state in states]
        for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")
    )
    corrections = [_corrections(state["step"].item(), group["betas"]) for state in states]
    torch._foreach_neg_(previous)
    torch._foreach_add_(previous, grads)
    torch._foreach_mul_(m, b1)
    torch._foreach_add_(m, grads, alpha=1 - b1)
    torch._foreach_mul_(v, b2)
    torch._foreach_add_(v, previous, alpha=1 - b2)
    torch._foreach_mul_(previous, b2)
    torch._foreach_add_(previous, grads)
    torch._foreach_mul_(n, b3)
    torch._foreach_addcmul_(n, previous, previous, value=1 - b3)
    denominators = torch._foreach_sqrt(n)
    torch._foreach_div_(denominators, [c3 for _, _, c3 in corrections])
    torch._foreach_add_(denominators, eps)
    if group["no_prox"]:
        torch._foreach_mul_(parameters, 1 - lr * decay)
    torch._foreach_addcdiv_(parameters, m, denominators, [-lr / c1 for c1, _, _ in corrections])
    torch._foreach_addcdiv_(parameters, v, denominators, [-lr * b2 / c2 for _, c2, _ in corrections])
    if not group["no_prox"]:
        torch._foreach_div_(parameters, 1 + lr * decay)
    torch._foreach_copy_(previous, grads)
