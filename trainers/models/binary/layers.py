"""Layers that compute with quantised copies of their latent fp32 weights: Linear, Embedding, attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from trainers.models.binary.quantisers import (
    SMALLEST_SCALE,
    Derivative,
    Float,
    Inputs,
    WeightQuantiser,
    signs,
)


@dataclass(frozen=True, slots=True)
class FrozenInputs:
    """Levels of inputs: `bits` 0 = floating point, `signed` = on both sides of 0; see `quantisers.Inputs`."""

    bits: int
    signed: bool
    scale: float
    shift: float


@dataclass(frozen=True, slots=True)
class FrozenLinear:
    """`y = sum(q t) (a s) + bias`, with t from `signs` (out, in); fp32 s."""

    signs: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor
    inputs: FrozenInputs

    @property
    def stored_scale(self) -> torch.Tensor:
        return self.scale[:1] if bool((self.scale == self.scale[:1]).all()) else self.scale


class BinaryLinear(nn.Linear):
    """A Linear over quantised weights s t and inputs a q: `y = (sum(q t)) (a s) + bias`.

    Made of a Linear by `quantise`: its parameters become the latent weights. Elastic inputs add the learned
    parameters `input_scale` a and `input_shift` b, of shape ().
    """

    weights: WeightQuantiser
    inputs: Inputs | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale, shift = learned_of(self, "input", self.inputs, input)
        product: torch.Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, scale, shift, self.weights, self.inputs
        )
        return product

    @torch.no_grad()
    def frozen(self) -> FrozenLinear:
        """Signs, scales and bias of a trained layer whose weights are signs."""
        quantised, scale = self.weights.quantise(self.weight.detach())
        assert scale is not None
        inputs = self.inputs
        a, b = (float(value) for value in learned_of(self, "input", inputs, None))
        return FrozenLinear(
            signs=quantised >= 0,
            scale=scale.expand(self.out_features, 1).flatten().clone(),
            bias=scale.new_zeros(self.out_features) if self.bias is None else self.bias.detach().clone(),
            inputs=FrozenInputs(0, True, a, b)
            if inputs is None
            else FrozenInputs(inputs.bits, inputs.signed, a, b),
        )


def quantise(linear: nn.Linear, weights: WeightQuantiser, inputs: Inputs | None) -> None:
    """Turns a Linear into a `BinaryLinear` in place; replaces the quantisers of a `BinaryLinear`."""
    linear.__class__ = BinaryLinear
    assert isinstance(linear, BinaryLinear)
    learn(linear, "input", inputs, getattr(linear, "inputs", None))
    linear.weights, linear.inputs = weights, inputs


def learn(module: nn.Module, name: str, inputs: Inputs | None, before: Inputs | None = None) -> None:
    """Adds learned `name_scale` and `name_shift`, which await `calibrating`; ones of these levels stay."""
    if inputs is None or not inputs.learned:
        for parameter in (f"{name}_scale", f"{name}_shift"):
            module.register_parameter(parameter, None)
        return
    if before is not None and before.learned and (before.bits, before.signed) == (inputs.bits, inputs.signed):
        return
    device = next((parameter.device for parameter in module.parameters()), None)
    for parameter in (f"{name}_scale", f"{name}_shift"):
        module.register_parameter(parameter, nn.Parameter(torch.zeros((), device=device)))


def learned_of(
    module: nn.Module, name: str, inputs: Inputs | None, x: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and shift of a module's inputs x, the scale bounded below; 1 and 0 where none are learned.

    Within `calibrating`, a scale that is still 0 is first set from x.
    """
    if inputs is None or not inputs.learned:
        like = next(module.parameters())
        return like.new_ones(()), like.new_zeros(())
    scale, shift = getattr(module, f"{name}_scale"), getattr(module, f"{name}_shift")
    if x is not None and getattr(module, "calibrates", False) and float(scale) == 0.0:
        scale.data.copy_(inputs.initial_scale(x.detach()))
    return _Bounded.apply(scale), shift  # type: ignore[no-untyped-call]


class _Bounded(torch.autograd.Function):
    """max(scale, smallest); the gradient passes, so that a scale can come back."""

    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor) -> torch.Tensor:
        return scale.clamp(min=SMALLEST_SCALE)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Product(torch.autograd.Function):
    """y = (sum(q t)) (a s) + bias, in this order, with one rounding each.

    With G the gradient of y: `d(s t) = a G^T q`, `d(a q) = (G s) t`, then through the quantisers. As in a
    Linear, only its input and its weights are saved; levels and signs are recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        weights: WeightQuantiser,
        inputs: Inputs | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, scale, shift)
        ctx.weights, ctx.inputs, ctx.has_bias = weights, inputs, bias is not None
        quantised, weight_scale = weights.quantise(weight)
        levels = x if inputs is None else inputs.levels(x, scale, shift)
        y = functional.linear(levels, quantised)
        factor = None if weight_scale is None else weight_scale.expand(weight.shape[0], 1).flatten()
        if inputs is not None and inputs.learned:
            factor = scale.expand(weight.shape[0]) if factor is None else factor * scale
        if factor is not None:
            y.mul_(factor)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale, shift = ctx.saved_tensors
        weights, inputs = ctx.weights, ctx.inputs
        grad = grads[0]
        rows = grad.reshape(-1, grad.shape[-1])
        levels = x if inputs is None else inputs.levels(x, scale, shift)
        grad_weight = grad_x = grad_scale = grad_shift = None
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t() @ levels.reshape(-1, levels.shape[-1])
            if inputs is not None and inputs.learned:
                grad_weight.mul_(scale)
            grad_weight = weights.gradient(weight, grad_weight)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            quantised, weight_scale = weights.quantise(weight)
            # The weights are smaller than the gradient of y.
            grad_x = grad @ (quantised if weight_scale is None else quantised.mul_(weight_scale))
            if inputs is not None:
                grad_x, grad_scale, grad_shift = inputs.gradients(x, scale, shift, levels, grad_x)
        grad_bias = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, grad_scale, grad_shift, None, None


class _Quantised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale, shift)
        ctx.inputs = inputs
        return inputs.levels(x, scale, shift).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, scale, shift = ctx.saved_tensors
        levels = ctx.inputs.levels(x, scale, shift)
        # `gradients` may overwrite what it is given.
        return *ctx.inputs.gradients(x, scale, shift, levels, grads[0].clone()), None


def quantised(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    result: torch.Tensor = _Quantised.apply(x, scale, shift, inputs)  # type: ignore[no-untyped-call]
    return result


class SignEmbedding(nn.Embedding):
    """Word embeddings of -1 and +1 times the mean of each row's absolute values."""

    derivative: Derivative

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = _SignRows.apply(super().forward(input), self.derivative)  # type: ignore[no-untyped-call]
        return rows


class _SignRows(torch.autograd.Function):
    """s sign(w) with s = mean|w| over the last dimension; the scale counts as constant, see `Sign`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, derivative: Derivative) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.derivative = derivative
        return signs(rows).mul_(rows.abs().mean(-1, keepdim=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rows,) = ctx.saved_tensors
        factor = ctx.derivative(rows)
        return grads[0] if factor is None else grads[0] * factor, None


def has_signs(linear: BinaryLinear) -> bool:
    return not isinstance(linear.weights, Float)


ELASTIC_ATTENTION = "stillhouse_elastic"
"""The name that this attention has among transformers' implementations."""

OPERANDS = {"query": True, "key": True, "value": True, "probs": False}
"""Operands of attention's products, and whether their levels are on both sides of 0."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Quantised attention in transformers' form: (B, heads, S, D) in, (B, S, heads, D) and None out.

    `P = Q(softmax(Q(q) Q(k)^T / sqrt(D)))`, then dropout, and `P Q(v)`, each Q with a scale of its own (BiT,
    arXiv 2205.13016). The mask is (B, 1, 1, S) bool, False on padding.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (_quantised(module, *one) for one in (("query", query), ("key", key), ("value", value)))
    scores = (q @ k.transpose(2, 3)) * scale
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    probs = _quantised(module, "probs", torch.softmax(scores, -1))
    probs = functional.dropout(probs, dropout, training=dropout > 0.0)
    return (probs @ v).transpose(1, 2), None


def _quantised(module: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    inputs: Inputs = module.operands[name]
    scale, shift = learned_of(module, name, inputs, x)
    return quantised(x, scale, shift, inputs)


AttentionInterface.register(ELASTIC_ATTENTION, attention)
