"""The encoder's elementwise work, fused: operators with autograd, C++ on the CPU, Triton on CUDA.

The backward passes recompute what is cheap: gelu's argument, a row's normalised values, dropout's mask. A
mask is Philox4x32-10 with the seed as key and (element, offset) as counter (`csrc/philox.h`), the same
on every device; its rate is met to 2^-17. Sums are fp32 for 16-bit activations.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cuda_ext import BuildError, native

LEVELS = 1 << 16  # Values of the bits that decide about an element's dropout

_registered: set[str] = set()


def require(device_type: str) -> None:
    if device_type in _registered:
        return
    native.require("cpu")  # the schemas, and the kernels of the CPU
    if "cpu" not in _registered:
        for name, shapes in _FAKES.items():
            torch.library.register_fake(f"stillhouse::{name}", shapes)
        for name, (backward, setup) in _FORMULAS.items():
            torch.library.register_autograd(f"stillhouse::{name}", backward, setup_context=setup)
        _registered.add("cpu")
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise BuildError(
                "the fused encoder's CUDA kernels need Triton, which is not installed; "
                "install triton, or set model.encoder to packed"
            )
        from cuda_ext import encoder_triton

        encoder_triton.register()
        _registered.add("cuda")
    elif device_type not in ("cpu", "meta"):
        raise BuildError(f"there are no encoder kernels for {device_type}; set model.encoder to packed")


def why_unavailable(device_type: str) -> str | None:
    return native.why_unavailable(device_type, require)


def fresh_seeds(count: int) -> Tensor:
    """(count,) seeds drawn from torch's CPU generator, so that a checkpoint's state replays every mask."""
    return torch.randint(2**63 - 1, (count,), dtype=torch.int64)


def fresh_seed() -> Tensor:
    """The next seed: one of `fresh_seeds`, or from `seeds_from`; int64, of no dimension."""
    return fresh_seeds(1)[0] if _source is None else _source()


@contextmanager
def seeds_from(source: Callable[[], Tensor]) -> Iterator[None]:
    """Replaces the source of seeds, as for seeds that are on the device that reads them."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


_source: Callable[[], Tensor] | None = None


def threshold_of(rate: float) -> tuple[int, float]:
    """Returns the 16-bit number below which a dropout rate drops an element, and the scale of the rest.

    At least one level of 65536 is kept, since the rest is scaled by its share.
    """
    below = min(round(rate * LEVELS), LEVELS - 1)
    return below, LEVELS / (LEVELS - below)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    result: Tensor = torch.ops.stillhouse.bias_gelu(x, bias)
    return result


def dropout_add_norm(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    *,
    eps: float,
    rate: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Returns LayerNorm(residual + dropout(x + bias)), (..., H).

    The seed is one int64 on the CPU or on the device of x; `offset` distinguishes masks of one seed.
    """
    seed = _NO_SEED if seed is None else seed
    out: Tensor = torch.ops.stillhouse.dropout_add_norm(
        x, bias, residual, weight, norm_bias, eps, rate, seed, offset
    )[0]
    return out


def embed_norm(
    ids: Tensor,
    types: Tensor,
    positions: Tensor,
    words: Tensor,
    position_table: Tensor,
    type_table: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    rate: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
    padding: tuple[int | None, int | None, int | None] = (None, None, None),
) -> Tensor:
    """Returns dropout(LayerNorm(word + type + position)), (*ids.shape, H), of int64 ids and (rows, H) tables.

    `padding` has the rows of words, positions and types without a gradient; None = all have one.
    """
    seed = _NO_SEED if seed is None else seed
    rows = [-1 if row is None else row for row in padding]
    out: Tensor = torch.ops.stillhouse.embed_norm(
        ids, types, positions, words, position_table, type_table, weight, bias, eps, rate, seed, offset, rows
    )[0]
    return out


def cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100) -> Tensor:
    """Returns the (N,) losses of (N, C) logits, 0 where the label is `ignore_index`; fp32 of 16-bit ones."""
    losses: Tensor = torch.ops.stillhouse.cross_entropy(logits, labels, ignore_index)[0]
    return losses


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    rate: float = 0.0,
    seed: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Returns dropout(softmax(scale Q K^T)) V within each segment of a row, (T, heads, D), on the CPU.

    No score is kept: the backward pass computes a few queries' at a time again. Segment k of the (T, heads,
    D) operands is `[cu_seqlens[k], cu_seqlens[k + 1])`, int32 on the CPU. A mask's row is (token, head), and
    its width the longest segment.
    """
    seed = _NO_SEED if seed is None else seed
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = torch.ops.stillhouse.segment_attention(
        query, key, value, cu_seqlens, scale, rate, seed, offset
    )[0]
    return out


_NO_SEED = torch.zeros((), dtype=torch.int64)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _keep(ctx: Any, output: Any, *tensors: Tensor) -> None:
    """Of an operator's outputs only the first has a gradient; None stands for one of zeros."""
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gelu_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    result: tuple[Tensor, Tensor] = torch.ops.stillhouse.bias_gelu_backward(grad, *ctx.saved_tensors)
    return result


def _norm_setup(ctx: Any, inputs: Any, output: Any) -> None:
    _x, bias, _residual, weight, _norm_bias, _eps, ctx.rate, seed, ctx.offset = inputs
    ctx.bias_dtype = bias.dtype
    _keep(ctx, output, *output[1:], weight, seed)


def _norm_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    summed, mean, rstd, weight, seed = ctx.saved_tensors
    grad_x, grad_residual, grad_bias, grad_weight, grad_norm_bias = (
        torch.ops.stillhouse.dropout_add_norm_backward(
            grad, None, summed, mean, rstd, weight, ctx.rate, seed, ctx.offset
        )
    )
    return grad_x, grad_bias.to(ctx.bias_dtype), grad_residual, grad_weight, grad_norm_bias, *(None,) * 4


def _embed_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tables, weight, _bias, _eps, ctx.rate, seed, ctx.offset, ctx.padding = inputs
    _keep(ctx, output, *tables, *output[1:], weight, seed)


def _embed_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    *given, seed = ctx.saved_tensors
    grads = torch.ops.stillhouse.embed_norm_backward(grad, *given, ctx.rate, seed, ctx.offset, ctx.padding)
    return (None, None, None, *grads, *(None,) * 5)


def _loss_setup(ctx: Any, inputs: Any, output: Any) -> None:
    logits, labels, ctx.ignore_index = inputs
    _keep(ctx, output, logits, labels, output[1])


def _loss_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    logits, labels, lse = ctx.saved_tensors
    grad_logits = torch.ops.stillhouse.cross_entropy_backward(grad, logits, labels, lse, ctx.ignore_index)
    return grad_logits, None, None


def _attention_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *given, edges, ctx.scale, ctx.rate, seed, ctx.offset = inputs
    _keep(ctx, output, *given, *output, edges, seed)


def _attention_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    *given, edges, seed = ctx.saved_tensors
    grads = torch.ops.stillhouse.segment_attention_backward(
        grad, *given, edges, ctx.scale, ctx.rate, seed, ctx.offset
    )
    return (*grads, None, None, None, None, None)


def _statistics(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=_wide(x))


def _fresh(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_embed(
    ids: Tensor, _types: Tensor, _positions: Tensor, words: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    out = words.new_empty((*ids.shape, words.shape[1]))
    return out, _statistics(out), _statistics(out)


_FAKES: dict[str, Any] = {
    "bias_gelu": lambda x, bias: _fresh(x),
    "bias_gelu_backward": lambda grad, x, bias: (_fresh(x), torch.empty_like(bias)),
    "dropout_add_norm": lambda x, *_: (_fresh(x), _fresh(x), _statistics(x), _statistics(x)),
    "dropout_add_norm_backward": lambda grad, other, summed, mean, rstd, weight, *_: (
        _fresh(summed),
        _fresh(summed),
        *(torch.empty_like(weight) for _ in range(3)),
    ),
    "embed_norm": _fake_embed,
    "embed_norm_backward": lambda grad, ids, types, positions, words, table, kinds, mean, rstd, weight, *_: (
        *(_fresh(given) for given in (words, table, kinds)),
        *(torch.empty_like(weight) for _ in range(2)),
    ),
    "cross_entropy": lambda logits, labels, ignore_index: (_statistics(logits), _statistics(logits)),
    "cross_entropy_backward": lambda grad, logits, labels, lse, ignore_index: _fresh(logits),
    "segment_attention": lambda query, *_: (
        _fresh(query),
        query.new_empty((*query.shape[:2], 2), dtype=_wide(query)),
    ),
    "segment_attention_backward": lambda grad, query, key, value, *_: tuple(map(_fresh, (query, key, value))),
}

_FORMULAS: dict[str, tuple[Any, Any]] = {
    "bias_gelu": (_gelu_backward, _gelu_setup),
    "dropout_add_norm": (_norm_backward, _norm_setup),
    "embed_norm": (_embed_backward, _embed_setup),
    "cross_entropy": (_loss_backward, _loss_setup),
    "segment_attention": (_attention_backward, _attention_setup),
}
