"""The number format of forward and backward. Parameters and optimizer state stay fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainers.config import Precision
from trainers.errors import BadSpecError


class Arithmetic:
    """How a run computes: fp32 throughout.

    Attributes:
        name: what really runs, for the record.
    """

    name = "fp32"

    def prepare(self, model: nn.Module) -> None:
        """Change the model's modules where the arithmetic asks for it; parameters stay."""

    def context(self) -> AbstractContextManager[None]:
        """Around each forward pass."""
        return nullcontext()


class Autocast(Arithmetic):
    """Matrix products in bf16 by torch's autocast."""

    name = "bf16 autocast"

    def __init__(self, device: torch.device) -> None:
        self._device = device.type

    def context(self) -> AbstractContextManager[None]:
        """See `Arithmetic.context`."""
        return torch.autocast(self._device, dtype=torch.bfloat16)


class RoundedBf16(Arithmetic):
    """bf16 on a CPU that has no instructions for it.

    There torch multiplies bf16 matrices one element at a time (measured on AVX2: 7,600 ms for a
    product that takes 140 ms in fp32). The same numbers come from fp32 products of operands
    rounded to bf16: a bf16 unit too sums in fp32 and rounds the result. So accuracy is that of
    bf16, and time is not: it is that of fp32 plus the rounding.
    """

    name = "bf16 operands and results, fp32 arithmetic (this CPU has no bf16 instructions)"

    def prepare(self, model: nn.Module) -> None:
        """Let every Linear round; names and parameters stay as they are."""
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = _RoundedLinear


def arithmetic_for(precision: Precision, device: torch.device) -> Arithmetic:
    """The arithmetic of a precision on a device.

    Raises:
        BadSpecError: the device cannot compute in the precision.
    """
    if precision is Precision.fp32:
        return Arithmetic()
    if precision is Precision.bf16:
        return Autocast(device) if _has_bf16(device) else RoundedBf16()
    raise BadSpecError(f"precision {precision.value} cannot be trained here; change precision")


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _RoundedLinear(nn.Linear):
    """A Linear whose operands and results are rounded to bf16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _RoundedProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class _RoundedProduct(torch.autograd.Function):
    """y = round(round(x) round(W)^T + round(b)), and its gradients by the same rule.

    The operands are kept for the backward pass in bf16: half the memory, as real bf16 has it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x16, w16 = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        ctx.save_for_backward(x16, w16)
        ctx.has_bias = bias is not None
        return _round(functional.linear(x16.float(), w16.float(), None if bias is None else _round(bias)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x16, w16 = ctx.saved_tensors
        grad = _round(grads[0])
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = _round(grad @ w16.float())
        grad_weight = _round(rows.t() @ x16.reshape(-1, x16.shape[-1]).float())
        return grad_x, grad_weight, _round(rows.sum(0)) if ctx.has_bias else None


def _round(tensor: torch.Tensor) -> torch.Tensor:
    """To the nearest bf16 value, kept in fp32."""
    return tensor.to(torch.bfloat16).float()
