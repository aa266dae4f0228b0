"""A layer of the encoder in two operations around its attention, with few kernels in the backward pass.

What they save over the single operators of `cuda_ext.encoder`: a gradient that reaches a tensor twice is
added by the product that computes its second part, sums over rows of a whole layer are added up by one
kernel, and the gradients of queries, keys and values are joined by the kernel that sums them for the biases.
Under autocast, weights and their gradients are converted by one kernel each. Dtypes of gradients are those of
the parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_NO_SEED = torch.zeros((), dtype=torch.int64)
_ops: Any = torch.ops.stillhouse


@cache
def _resident(device: torch.device) -> int:
    """Programs of four warps with up to 128 registers a thread that a GPU runs at once."""
    if device.type != "cuda":
        return 512
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def programs_of(x: Tensor) -> int:
    """Programs that share the rows of x (..., H) where sums over rows are taken."""
    rows = x.numel() // x.shape[-1]
    return max(1, min(_resident(x.device), -(-rows // 4)))


def adjoin(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Moves parameters into one memory, one after the other, so that their join is a view.

    Names, values, gradients and optimizer state stay. Parameters that cannot be joined are left alone.
    """
    alike = {(parameter.dtype, parameter.device, parameter.shape[1:]) for parameter in parameters}
    if len(alike) > 1 or _adjacent(parameters):
        return
    whole = torch.cat([parameter.detach() for parameter in parameters])
    edges = accumulate((len(parameter) for parameter in parameters), initial=0)
    for parameter, (begin, end) in zip(parameters, pairwise(edges), strict=True):
        parameter.data = whole[begin:end]


def _adjacent(parts: Sequence[Tensor]) -> bool:
    memory, at = parts[0].untyped_storage()._cdata, parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage()._cdata != memory or part.storage_offset() != at or not part.is_contiguous():
            return False
        at += part.numel()
    return True


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Along their first dimension: a view where they are adjacent, see `adjoin`."""
    if not _adjacent(parts):
        return torch.cat([part.detach() for part in parts])
    first = parts[0].detach()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())


def _converted(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    converted = list(tensors)
    others = [
        i for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)) if tensor.dtype != dtype
    ]
    for i in others:
        converted[i] = torch.empty_like(tensors[i], dtype=dtypes[i])
    if others:
        torch._foreach_copy_([converted[i] for i in others], [tensors[i] for i in others])
    return converted


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        dtype = _product_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        weight, bias = _converted([_joined(weights), _joined(biases)], [dtype, dtype])
        joint = torch.addmm(bias, rows, weight.t()).view(*x.shape[:-1], -1)
        ctx.save_for_backward(rows, weight)
        ctx.stored, ctx.x = weights[0].dtype, (x.shape, x.dtype)
        ctx.set_materialize_grads(False)
        return (*joint.chunk(count, -1), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        shape, dtype = ctx.x
        *given, residual = grads
        width = len(weight) // len(given)
        zeros = rows.new_zeros(()).expand(len(rows), width) if None in given else rows
        parts = [zeros if grad is None else grad.reshape(-1, width) for grad in given]
        joint, of_bias = _ops.joint_gradient(parts, ctx.stored)
        if residual is None:
            of_x = joint @ weight
        else:
            of_x = torch.addmm(residual.reshape(rows.shape).to(joint.dtype), joint, weight)
        (of_weight,) = _converted([joint.t() @ rows], [ctx.stored])
        return of_x.to(dtype).view(shape), *torch.split(of_weight, width), *torch.split(of_bias, width)


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns x W^T + b of each weight (O, I) and bias (O,), computed as one product, and x.

    Use the returned x elsewhere: its gradient is then added by a product.
    """
    results: tuple[Tensor, ...] = _Projections.apply(x, *weights, *biases)  # type: ignore[no-untyped-call]
    return results


@dataclass(frozen=True, slots=True)
class NormAfter:
    """A product (H, I) that is followed by bias, dropout, residual and LayerNorm; `seed`: see `encoder`."""

    weight: Tensor
    bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    eps: float
    rate: float = 0.0
    seed: Tensor | None = None


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        mix_weight: Tensor, mix_bias: Tensor, mix_norm: Tensor, mix_shift: Tensor,
        inner_weight: Tensor, inner_bias: Tensor,
        outer_weight: Tensor, outer_bias: Tensor, outer_norm: Tensor, outer_shift: Tensor,
        settings: tuple[tuple[float, float, Tensor], tuple[float, float, Tensor]],
    ) -> Tensor:  # fmt: skip
        dtype = _product_dtype(x)
        stored = mix_weight.dtype
        ctx.dtypes = stored, x.dtype, residual.dtype
        given = (mix_weight, inner_weight, outer_weight)
        mix, inner, outer = _converted([weight.detach() for weight in given], [dtype] * 3)
        mixed = x.reshape(-1, x.shape[-1]).to(dtype)
        around = residual.reshape(len(mixed), -1).to(dtype)
        (_, rate, seed), (_, outer_rate, outer_seed) = settings
        hidden, *first = _ops.dropout_add_norm(
            mixed @ mix.t(), mix_bias, around, mix_norm, mix_shift, *settings[0], 0
        )
        argument = hidden @ inner.t()
        activated = _ops.bias_gelu(argument, inner_bias)
        out, *second = _ops.dropout_add_norm(
            activated @ outer.t(), outer_bias, hidden, outer_norm, outer_shift, *settings[1], 0
        )
        operands = mixed, hidden, argument, activated, mix, inner, outer
        ctx.save_for_backward(*operands, inner_bias, mix_norm, outer_norm, seed, outer_seed, *first, *second)
        ctx.rates, ctx.shapes = (rate, outer_rate), (x.shape, residual.shape)
        return out.view(residual.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (
            mixed, hidden, argument, activated, mix, inner, outer, inner_bias, mix_norm, outer_norm, seed,
            outer_seed, *statistics,
        ) = ctx.saved_tensors  # fmt: skip
        first, second = statistics[:3], statistics[3:]
        rate, outer_rate = ctx.rates
        stored, of_x, of_residual = ctx.dtypes
        width, inner_width = hidden.shape[-1], argument.shape[-1]
        # Of the first LayerNorm and the bias before it, of the inner bias, and of the second LayerNorm.
        # One line per program over its rows; one in all on the CPU.
        lines = (1 if hidden.is_cpu else programs_of(hidden), 6 * width + inner_width)
        sums = hidden.new_empty(lines, dtype=torch.promote_types(hidden.dtype, torch.float32))
        first_sums, inner_sums, second_sums = torch.split(sums, [3 * width, inner_width, 3 * width], -1)

        grad_product, grad_hidden = _ops.dropout_add_norm_backward_sums(
            grads[0].reshape(hidden.shape), None, *second, outer_norm, outer_rate, outer_seed, 0, second_sums
        )
        grad_outer = grad_product.t() @ activated
        grad_argument = _ops.bias_gelu_backward_sums(grad_product @ outer, argument, inner_bias, inner_sums)
        grad_inner = grad_argument.t() @ hidden
        grad_hidden.addmm_(grad_argument, inner)  # In place: elsewhere the product copies what it adds first.
        grad_product, grad_residual = _ops.dropout_add_norm_backward_sums(
            grad_hidden, None, *first, mix_norm, rate, seed, 0, first_sums
        )
        grad_mix = grad_product.t() @ mixed
        totals = _ops.column_totals(sums, stored)
        mix_bias, mix_norm, mix_shift, inner_bias, outer_bias, outer_norm, outer_shift = totals.split(
            [width] * 3 + [inner_width] + [width] * 3
        )
        grad_mix, grad_inner, grad_outer = _converted([grad_mix, grad_inner, grad_outer], [stored] * 3)
        x_shape, residual_shape = ctx.shapes
        return (
            (grad_product @ mix).to(of_x).view(x_shape),
            grad_residual.to(of_residual).view(residual_shape),
            grad_mix, mix_bias, mix_norm, mix_shift,
            grad_inner, inner_bias,
            grad_outer, outer_bias, outer_norm, outer_shift,
            None,
        )  # fmt: skip


def after_attention(
    x: Tensor, residual: Tensor, mix: NormAfter, inner: tuple[Tensor, Tensor], outer: NormAfter
) -> Tensor:
    """Returns (..., H) LN(h + dropout(gelu(h W2^T + b2) W3^T + b3)), h = LN(residual + dropout(x W1^T + b1)).

    x is the attention's result, residual the layer's input; `mix` has W1, `inner` W2 (I, H), `outer` W3.
    """
    settings = tuple(
        (part.eps, part.rate, _NO_SEED if part.seed is None else part.seed) for part in (mix, outer)
    )
    result: Tensor = _AfterAttention.apply(  # type: ignore[no-untyped-call]
        x,
        residual,
        *(mix.weight, mix.bias, mix.norm_weight, mix.norm_bias),
        *inner,
        *(outer.weight, outer.bias, outer.norm_weight, outer.norm_bias),
        settings,
    )
    return result


# The backward passes' operators, in pieces whose sums over rows are still to be added up.

_LIBRARY: Any = torch.library.Library("stillhouse", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("bias_gelu_backward_sums(Tensor grad, Tensor x, Tensor bias, Tensor(a!) sums) -> Tensor")
_LIBRARY.define(
    "dropout_add_norm_backward_sums(Tensor grad, Tensor? other_grad, Tensor summed, Tensor mean, "
    "Tensor rstd, Tensor weight, float rate, Tensor seed, int offset, Tensor(a!) sums) -> (Tensor, Tensor)"
)
_LIBRARY.define("column_totals(Tensor sums, ScalarType dtype) -> Tensor")
_LIBRARY.define("joint_gradient(Tensor[] grads, ScalarType dtype) -> (Tensor, Tensor)")


def _gelu_sums(grad: Tensor, x: Tensor, bias: Tensor, sums: Tensor) -> Tensor:
    result, total = _ops.bias_gelu_backward(grad, x, bias.to(sums.dtype))
    sums[0] = total
    return result  # type: ignore[no-any-return]


def _norm_sums(
    grad: Tensor, other_grad: Tensor | None, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    rate: float, seed: Tensor, offset: int, sums: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad_x, grad_residual, *totals = _ops.dropout_add_norm_backward(
        grad, other_grad, summed, mean, rstd, weight.to(sums.dtype), rate, seed, offset
    )
    torch.cat(totals, out=sums[0])
    return grad_x, grad_residual


def _joint_gradient(grads: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    joint = torch.cat(tuple(grads), -1)
    return joint, joint.sum(0, dtype=torch.promote_types(joint.dtype, torch.float32)).to(dtype)


def _fake_joint(grads: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, width = len(grads[0]), sum(grad.shape[1] for grad in grads)
    return grads[0].new_empty((rows, width)), grads[0].new_empty((width,), dtype=dtype)


_PIECES: tuple[tuple[str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("bias_gelu_backward_sums", _gelu_sums, lambda grad, x, *_: torch.empty_like(x)),
    (
        "dropout_add_norm_backward_sums",
        _norm_sums,
        lambda grad, other, summed, *_: (torch.empty_like(summed), torch.empty_like(summed)),
    ),
    (
        "column_totals",
        lambda sums, dtype: sums.sum(0).to(dtype),
        lambda sums, dtype: sums.new_empty(sums.shape[1:], dtype=dtype),
    ),
    ("joint_gradient", _joint_gradient, _fake_joint),
)
for _name, _on_cpu, _fake in _PIECES:
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    torch.library.register_fake(f"stillhouse::{_name}", _fake, lib=_LIBRARY)
