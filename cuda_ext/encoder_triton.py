"""The encoder's operators as Triton kernels, for CUDA; imports Triton.

A program works on whole rows, which stay in its registers; what is summed over rows is summed in fp32
by each program and then over the programs, in one order. With `TRITON_INTERPRET=1` in the environment
before the first import, the same functions run on CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ext.encoder_layer import shares

COLUMNS = 256
"""Columns that a program of `bias_gelu` works on."""

TOTAL_COLUMNS = 32
"""Columns that a program of `totals_kernel` works on."""

JOINT_COLUMNS, JOINT_ROWS = 16, 256
"""Columns that a program of `joint_gradient_kernel` works on, all rows of them, and rows at a time."""

# Products and sums in one rounding: Triton 3.9 warns where this is not said, and 3.10 does without.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _number(seed):
    """A seed that is a number, or lies in memory: a recorded launch finds another there in each replay."""
    seed = tl.to_tensor(seed)
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    return seed


@triton.jit
def _kept(seed, offset, row, width, below, scale, BLOCK: tl.constexpr):
    """Dropout's factors of a row: column c takes half-word c % 8 of counter row * ceil(width / 8) + c / 8."""
    counter = row.to(tl.int64) * tl.cdiv(width, 8) + tl.arange(0, BLOCK // 8)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    offset = tl.to_tensor(offset).to(tl.int64)
    a, b, c, d = tl.philox(
        seed,
        low,
        high,
        zero + (offset & 0xFFFFFFFF).to(tl.uint32),
        zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    lower = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))
    upper = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    bits = tl.reshape(tl.join(lower, upper), (BLOCK,)).to(tl.int32)
    return tl.where(bits >= below, scale, 0.0)


@triton.jit
def _normal_cdf(v):
    return 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))


@triton.jit
def bias_gelu_kernel(x_ptr, bias_ptr, out_ptr, count, width, BLOCK: tl.constexpr):
    """y = v Phi(v) with v = x + bias; a program takes BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v = x + tl.load(bias_ptr + at % width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, v * _normal_cdf(v), mask=inside)


@triton.jit
def bias_gelu_backward_kernel(
    grad_ptr, x_ptr, bias_ptr, out_ptr, sums_ptr, rows, width, each, stride, BLOCK: tl.constexpr
):
    """dx = g (Phi(v) + v phi(v)), and its sum over the program's rows."""
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * each, tl.minimum(rows, (program + 1) * each)):
        at = tl.cast(row, tl.int64) * width + columns
        v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + bias
        g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        density = 0.3989422804014327 * tl.exp(-0.5 * v * v)
        dx = g * (_normal_cdf(v) + v * density)
        tl.store(out_ptr + at, dx, mask=inside)
        total += dx
    tl.store(sums_ptr + program * stride + columns, total, mask=inside)


@triton.jit
def dropout_add_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, out_ptr, summed_ptr, mean_ptr, rstd_ptr,
    width, eps, seed, offset, below, scale, DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """summed = residual + dropout(x + bias); out = LayerNorm(summed); a program takes a row."""
    if DROPS:
        seed = _number(seed)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    v = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        v *= _kept(seed, offset, row, width, below, scale, BLOCK)
    v += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    stored = v.to(summed_ptr.dtype.element_ty)
    tl.store(summed_ptr + at, stored, mask=inside)
    v = stored.to(tl.float32)
    mean = tl.sum(v, 0) / width
    centred = tl.where(inside, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    norm_bias = tl.load(norm_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, centred * rstd * weight + norm_bias, mask=inside)


@triton.jit
def dropout_add_norm_backward_kernel(
    grad_ptr, other_ptr, summed_ptr, mean_ptr, rstd_ptr, weight_ptr, grad_x_ptr, grad_residual_ptr, sums_ptr,
    rows, width, each, stride, seed, offset, below, scale,
    OTHER: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """d summed = rstd (h - mean(h) - n mean(h n)) with h = g weight and n the normalised row."""
    if DROPS:
        seed = _number(seed)
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias_total = tl.zeros((BLOCK,), tl.float32)
    weight_total = tl.zeros((BLOCK,), tl.float32)
    norm_bias_total = tl.zeros((BLOCK,), tl.float32)
    for number in range(program * each, tl.minimum(rows, (program + 1) * each)):
        row = tl.cast(number, tl.int64)
        at = row * width + columns
        g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if OTHER:
            g += tl.load(other_ptr + at, mask=inside, other=0.0).to(tl.float32)
        summed = tl.load(summed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        n = tl.where(inside, (summed - tl.load(mean_ptr + row)) * rstd, 0.0)
        h = g * weight
        d = (h - tl.sum(h, 0) / width - n * (tl.sum(h * n, 0) / width)) * rstd
        tl.store(grad_residual_ptr + at, d, mask=inside)
        if DROPS:
            d *= _kept(seed, offset, row, width, below, scale, BLOCK)
        tl.store(grad_x_ptr + at, d, mask=inside)
        bias_total += d
        weight_total += g * n
        norm_bias_total += g
    sums = sums_ptr + program * stride + columns
    tl.store(sums, bias_total, mask=inside)
    tl.store(sums + width, weight_total, mask=inside)
    tl.store(sums + 2 * width, norm_bias_total, mask=inside)


@triton.jit
def _embedded(
    ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, columns, inside,
    width,
):  # fmt: skip
    word = tl.load(ids_ptr + row) * width + columns
    kind = tl.load(types_ptr + row) * width + columns
    position = tl.load(positions_ptr + row) * width + columns
    v = tl.load(words_ptr + word, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(type_table_ptr + kind, mask=inside, other=0.0).to(tl.float32)
    return v + tl.load(position_table_ptr + position, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def embed_norm_kernel(
    ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, weight_ptr, bias_ptr,
    out_ptr, mean_ptr, rstd_ptr, width, eps, seed, offset, below, scale,
    DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = dropout(LayerNorm(word + type + position)); a program takes a row."""
    if DROPS:
        seed = _number(seed)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    v = _embedded(
        ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, columns,
        inside, width,
    )  # fmt: skip
    mean = tl.sum(v, 0) / width
    centred = tl.where(inside, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = centred * rstd * weight + tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        y *= _kept(seed, offset, row, width, below, scale, BLOCK)
    tl.store(out_ptr + row * width + columns, y, mask=inside)


@triton.jit
def embed_norm_backward_kernel(
    grad_ptr, ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr,
    mean_ptr, rstd_ptr, weight_ptr, out_ptr, sums_ptr, rows, width, each, seed, offset, below, scale,
    DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the sum before the LayerNorm, which is looked up again."""
    if DROPS:
        seed = _number(seed)
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight_total = tl.zeros((BLOCK,), tl.float32)
    bias_total = tl.zeros((BLOCK,), tl.float32)
    for number in range(program * each, tl.minimum(rows, (program + 1) * each)):
        row = tl.cast(number, tl.int64)
        at = row * width + columns
        g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if DROPS:
            g *= _kept(seed, offset, row, width, below, scale, BLOCK)
        v = _embedded(
            ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, columns,
            inside, width,
        )  # fmt: skip
        rstd = tl.load(rstd_ptr + row)
        n = tl.where(inside, (v - tl.load(mean_ptr + row)) * rstd, 0.0)
        h = g * weight
        d = (h - tl.sum(h, 0) / width - n * (tl.sum(h * n, 0) / width)) * rstd
        tl.store(out_ptr + at, d, mask=inside)
        weight_total += g * n
        bias_total += g
    sums = sums_ptr + program * 2 * width + columns
    tl.store(sums, weight_total, mask=inside)
    tl.store(sums + width, bias_total, mask=inside)


@triton.jit
def cross_entropy_kernel(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, width, ignore_index, BLOCK: tl.constexpr
):
    """loss = log(sum(exp(x))) - x[label]; a program takes a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + columns < width
        x = tl.load(logits_ptr + row * width + first + columns, mask=inside, other=float("-inf"))
        most = tl.maximum(most, x.to(tl.float32))
    top = tl.max(most, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        inside = first + columns < width
        x = tl.load(logits_ptr + row * width + first + columns, mask=inside, other=float("-inf"))
        total += tl.exp(x.to(tl.float32) - top)
    lse = top + tl.log(tl.sum(total, 0))
    label = tl.load(labels_ptr + row)
    counts = label != ignore_index
    chosen = tl.load(logits_ptr + row * width + label, mask=counts, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(losses_ptr + row, tl.where(counts, lse - chosen, 0.0))


@triton.jit
def cross_entropy_backward_kernel(
    grad_ptr, logits_ptr, labels_ptr, lse_ptr, out_ptr, width, ignore_index, BLOCK: tl.constexpr
):
    """dx = g (softmax(x) - [column is the label])."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    label = tl.load(labels_ptr + row)
    g = tl.where(label != ignore_index, tl.load(grad_ptr + row), 0.0)
    x = tl.load(logits_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(lse_ptr + row)) - tl.where(columns == label, 1.0, 0.0)
    tl.store(out_ptr + row * width + columns, g * share, mask=inside)


@triton.jit
def totals_kernel(sums_ptr, out_ptr, programs, width, BLOCK: tl.constexpr):
    """Adds the programs' sums (programs, width), 64 programs at a time, in one order."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, programs, 64):
        numbers = begin + tl.arange(0, 64)
        there = (numbers < programs)[:, None] & inside[None, :]
        total += tl.sum(
            tl.load(sums_ptr + numbers[:, None] * width + columns[None, :], mask=there, other=0.0), 0
        )
    tl.store(out_ptr + columns, total, mask=inside)


@triton.jit
def joint_gradient_kernel(
    first_ptr, second_ptr, third_ptr, joint_ptr, out_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """joint = [first second third], and its sums over rows; a program takes columns of one of the three."""
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = first_ptr
    if part == 1:
        source = second_ptr
    elif part == 2:
        source = third_ptr
    numbers = tl.arange(0, ROWS)
    at = numbers[:, None] * width + columns[None, :]
    target = numbers[:, None] * (3 * width) + part * width + columns[None, :]
    total = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, rows, ROWS):
        there = (begin + numbers < rows)[:, None] & inside[None, :]
        first = tl.cast(begin, tl.int64) * width
        given = tl.load(source + first + at, mask=there, other=0.0)
        tl.store(joint_ptr + 3 * first + target, given, mask=there)
        total += tl.sum(given.to(tl.float32), 0)
    tl.store(out_ptr + part * width + columns, total, mask=inside)


def column_totals(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of each column over the programs, in a parameter's dtype."""
    programs, width = sums.shape
    out = sums.new_empty((width,), dtype=dtype)
    totals_kernel[(triton.cdiv(width, TOTAL_COLUMNS),)](sums, out, programs, width, BLOCK=TOTAL_COLUMNS)
    return out


def block_of(width: int) -> int:
    """Returns the columns that a program holds for rows of a width: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


def warps_of(block: int, *, sums: bool = False) -> int:
    """Returns the warps of a program, 1 to 16.

    Args:
        block: columns that it holds: 8 a thread, or 4 where it also holds sums over rows.
        sums: it holds sums over rows.
    """
    return max(1, min(16, block // (128 if sums else 256)))


def _require(x: Tensor) -> Tensor:
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"the encoder's CUDA kernels take float32, bfloat16 and float16, not {x.dtype}; convert the model"
        )
    return x.contiguous()


def _dropout(rate: float, seed: Tensor, offset: int) -> tuple[int | Tensor, int, int, float]:
    """The seed, offset, threshold and scale that the kernels take; a seed on the device stays there."""
    below = round(rate * 65536)
    return int(seed) if seed.is_cpu else seed, offset, below, 65536 / (65536 - below)


def _programs_sums(x: Tensor, count: int) -> Tensor:
    """Memory for `count` sums over rows of x (..., H), by each program."""
    width = x.shape[-1]
    return x.new_empty((shares(x.numel() // width)[0], count * width), dtype=torch.float32)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = x.shape[:-1]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """See `cuda_ext.encoder`; so are the functions below."""
    x = _require(x)
    out = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), 1024),)
        bias_gelu_kernel[grid](x, bias.contiguous(), out, x.numel(), x.shape[-1], BLOCK=1024)
    return out


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gradients of x and bias."""
    sums = _programs_sums(x, 1)
    out = bias_gelu_backward_sums(grad, x, bias, sums)
    return out, column_totals(sums, bias.dtype)


def bias_gelu_backward_sums(grad: Tensor, x: Tensor, bias: Tensor, sums: Tensor) -> Tensor:
    """Gradient of x; each program's sums of it over its rows become a line of `sums`."""
    x, width = _require(x), x.shape[-1]
    rows = x.numel() // width
    programs, each = shares(rows)
    out = torch.empty_like(x)
    grid = (programs, triton.cdiv(width, COLUMNS))
    bias_gelu_backward_kernel[grid](
        grad.contiguous(), x, bias.contiguous(), out, sums, rows, width, each, sums.stride(0), BLOCK=COLUMNS,
        num_warps=2,
    )  # fmt: skip
    return out


def dropout_add_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, rate: float,
    seed: Tensor, offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, sum before the LayerNorm, and its rows' mean and 1 / standard deviation."""
    x, width = _require(x), x.shape[-1]
    out, summed, (mean, rstd) = torch.empty_like(x), torch.empty_like(x), _statistics(x)
    drawn = _dropout(rate, seed, offset)
    block = block_of(width)
    if x.numel():
        dropout_add_norm_kernel[(x.numel() // width,)](
            x, bias.contiguous(), residual.contiguous(), weight.contiguous(), norm_bias.contiguous(), out,
            summed, mean, rstd, width, eps, *drawn, DROPS=drawn[2] > 0, BLOCK=block,
            num_warps=warps_of(block),
        )  # fmt: skip
    return out, summed, mean, rstd


def dropout_add_norm_backward(
    grad: Tensor, other_grad: Tensor | None, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    rate: float, seed: Tensor, offset: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, the residual, the bias, and the LayerNorm's weight and bias."""
    sums = _programs_sums(summed, 3)
    grads = dropout_add_norm_backward_sums(
        grad, other_grad, summed, mean, rstd, weight, rate, seed, offset, sums
    )
    return *grads, *column_totals(sums, weight.dtype).chunk(3)


def dropout_add_norm_backward_sums(
    grad: Tensor, other_grad: Tensor | None, summed: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor,
    rate: float, seed: Tensor, offset: int, sums: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of x and the residual; each program's sums for the other three become a line of `sums`."""
    width = summed.shape[-1]
    rows = summed.numel() // width
    programs, each = shares(rows)
    grad_x, grad_residual = torch.empty_like(summed), torch.empty_like(summed)
    drawn = _dropout(rate, seed, offset)
    block = block_of(width)
    grad = grad.contiguous()
    dropout_add_norm_backward_kernel[(programs,)](
        grad, grad if other_grad is None else other_grad.contiguous(), summed, mean, rstd,
        weight.contiguous(), grad_x, grad_residual, sums, rows, width, each, sums.stride(0), *drawn,
        OTHER=other_grad is not None, DROPS=drawn[2] > 0, BLOCK=block, num_warps=warps_of(block, sums=True),
    )  # fmt: skip
    return grad_x, grad_residual


def joint_gradient(grads: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three gradients (N, H) as one (N, 3 H), and its sums over rows in a parameter's dtype."""
    first, second, third = (_require(grad) for grad in grads)
    rows, width = first.shape
    joint, out = first.new_empty((rows, 3 * width)), first.new_empty((3 * width,), dtype=dtype)
    joint_gradient_kernel[(triton.cdiv(width, JOINT_COLUMNS), 3)](
        first, second, third, joint, out, rows, width, ROWS=JOINT_ROWS, BLOCK=JOINT_COLUMNS, num_warps=8
    )
    return joint, out


def embed_norm(
    ids: Tensor, types: Tensor, positions: Tensor, words: Tensor, position_table: Tensor, type_table: Tensor,
    weight: Tensor, bias: Tensor, eps: float, rate: float, seed: Tensor, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and its rows' mean and 1 / standard deviation before the LayerNorm."""
    words, width = _require(words), words.shape[1]
    out = words.new_empty((*ids.shape, width))
    mean, rstd = _statistics(out)
    drawn = _dropout(rate, seed, offset)
    block = block_of(width)
    if ids.numel():
        embed_norm_kernel[(ids.numel(),)](
            ids.contiguous(), types.contiguous(), positions.contiguous(), words, position_table.contiguous(),
            type_table.contiguous(), weight.contiguous(), bias.contiguous(), out, mean, rstd, width, eps,
            *drawn, DROPS=drawn[2] > 0, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out, mean, rstd


def embed_norm_backward(
    grad: Tensor, ids: Tensor, types: Tensor, positions: Tensor, words: Tensor, position_table: Tensor,
    type_table: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, rate: float, seed: Tensor, offset: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the three tables, and of the LayerNorm's weight and bias."""
    words, width = _require(words), words.shape[1]
    rows = ids.numel()
    programs, each = shares(rows)
    of_rows = words.new_empty((rows, width))
    sums = words.new_empty((programs, 2 * width), dtype=torch.float32)
    drawn = _dropout(rate, seed, offset)
    block = block_of(width)
    embed_norm_backward_kernel[(programs,)](
        grad.contiguous(), ids.contiguous(), types.contiguous(), positions.contiguous(), words,
        position_table.contiguous(), type_table.contiguous(), mean, rstd, weight.contiguous(), of_rows, sums,
        rows, width, each, *drawn, DROPS=drawn[2] > 0, BLOCK=block, num_warps=warps_of(block, sums=True),
    )  # fmt: skip
    tables = (
        torch.ops.aten.embedding_dense_backward(of_rows, indices.flatten(), table.shape[0], -1, False)
        for indices, table in ((ids, words), (positions, position_table), (types, type_table))
    )
    return (*tables, *column_totals(sums, weight.dtype).chunk(2))


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Losses, and the logarithm of each row's sum of exponentials."""
    logits, (losses, lse) = _require(logits), _statistics(logits)
    block = min(block_of(logits.shape[1]), 4096)
    if len(labels):
        cross_entropy_kernel[(len(labels),)](
            logits, labels.contiguous(), losses, lse, logits.shape[1], ignore_index, BLOCK=block,
            num_warps=warps_of(block),
        )  # fmt: skip
    return losses, lse


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int
) -> Tensor:
    """Gradient of the logits."""
    logits = _require(logits)
    out = torch.empty_like(logits)
    block = min(block_of(logits.shape[1]), 4096)
    if len(labels):
        grid = (len(labels), triton.cdiv(logits.shape[1], block))
        cross_entropy_backward_kernel[grid](
            grad.contiguous(), logits, labels.contiguous(), lse, out, logits.shape[1], ignore_index,
            BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out


OPERATORS = (
    bias_gelu, bias_gelu_backward, dropout_add_norm, dropout_add_norm_backward, embed_norm,
    embed_norm_backward, cross_entropy, cross_entropy_backward, bias_gelu_backward_sums,
    dropout_add_norm_backward_sums, column_totals, joint_gradient,
)  # fmt: skip
"""Each is `stillhouse::<its name>` on CUDA."""


def register() -> None:
    """Makes these the CUDA kernels of the operators, whose schemas are loaded."""
    for operator in OPERATORS:
        torch.library.impl(f"stillhouse::{operator.__name__}", "CUDA", operator)
