"""The encoder's operators as Triton kernels, for CUDA; imports Triton.

A program works on tiles of a few whole rows. Each warp has rows of its own, in parts of which a lane reads 16
bytes at a time; only rows wider than 1,024 are shared by the warps of a program. So a row's sums are shuffles
inside a warp, and no lane is idle at BERT's widths. What is summed over rows is summed in fp32 by each lane,
by each program, and then over the programs, in one order. With `TRITON_INTERPRET=1` in the environment before
the first import, the same functions run on CPU tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cuda_ext.encoder import threshold_of
from cuda_ext.encoder_layer import programs_of

TOTAL_COLUMNS = 32  # Columns that a program of `totals_kernel` works on

_WARPS = 4

_MOST_TYPES = 8  # Rows of the largest type table of whose gradient each is a sum over all rows of a batch

# Products and sums in one rounding: Triton 3.9 warns where this is not said, and 3.10 does without.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

VARYING = ("rows", "programs", "seed", "offset")
"""Arguments that change from step to step: no kernel is compiled again for one that 16 divides, or a 1."""


@triton.jit
def _number(seed):
    """The seed may be a number, or in memory, where each replay of a recorded launch finds another."""
    seed = tl.core.to_tensor(seed)
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    return seed


@triton.jit
def _kept(seed, offset, row, first, width, below, scale, ROWS: tl.constexpr, PART: tl.constexpr):
    """Dropout's factors of columns from `first` on.

    Column c takes half-word c % 8 of counter row * ceil(width / 8) + c / 8.
    """
    counter = row.to(tl.int64) * tl.cdiv(width, 8) + (first // 8 + tl.arange(0, PART // 8))[None, :]
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    offset = tl.core.to_tensor(offset).to(tl.int64)
    third = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    fourth = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, third, fourth)
    lower = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))
    upper = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    bits = tl.reshape(tl.join(lower, upper), (ROWS, PART)).to(tl.int32)
    return tl.where(bits >= below, scale, 0.0)


@triton.jit
def _read(ptr, at, inside):
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rows(first, ROWS: tl.constexpr):
    return first + tl.arange(0, ROWS)[:, None]


@triton.jit
def _columns(row, first, PART: tl.constexpr):
    """Columns of a part, for each row: so parameters are read in the layout of the activations."""
    return first + tl.arange(0, PART)[None, :] + row * 0


@triton.jit
def _store_sum(ptr, total, first, width, PART: tl.constexpr):
    columns = first + tl.arange(0, PART)
    tl.store(ptr + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _upper_tail(v):
    """Phi(-|v|), whose logarithm is a polynomial.

    Up to |v| = 7 its relative error is below 1.4e-5, an eighteenth of half a unit in fp16's last place and a
    145th in bf16's. From there on it is below 2e-12.
    """
    a = tl.abs(v)
    log = a * -1.5882628758845385e-06 + 5.61545166419819e-05
    log = log * a - 0.0008832264575175941
    log = log * a + 0.008303269743919373
    log = log * a - 0.0535014308989048
    log = log * a - 0.4589642286300659
    log = log * a - 1.1510356664657593
    return tl.exp2(log * a - 1.0000139474868774)


@triton.jit
def _gelu(v, dtype: tl.constexpr):
    if dtype == tl.float32:
        return 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    else:
        return tl.maximum(v, 0.0) - tl.abs(v) * _upper_tail(v)


@triton.jit
def _gelu_slope(v, dtype: tl.constexpr):
    """Phi(v) + v phi(v), for a product that is stored in a dtype."""
    if dtype == tl.float32:
        cdf = 0.5 * (1.0 + tl.erf(v * 0.7071067811865476))
    else:
        tail = _upper_tail(v)
        cdf = tl.where(v < 0.0, tail, 1.0 - tail)
    return cdf + v * (0.3989422804014327 * tl.exp2(v * v * -0.7213475204444817))


@triton.jit(do_not_specialize=VARYING)
def bias_gelu_kernel(x_ptr, bias_ptr, out_ptr, rows, width, ROWS: tl.constexpr, PART: tl.constexpr):
    """y = v Phi(v) with v = x + bias."""
    row = _rows(tl.program_id(0) * ROWS, ROWS)
    columns = _columns(row, tl.program_id(1) * PART, PART)
    inside = (row < rows) & (columns < width)
    at = row.to(tl.int64) * width + columns
    v = _read(x_ptr, at, inside) + _read(bias_ptr, columns, inside)
    tl.store(out_ptr + at, _gelu(v, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def bias_gelu_backward_kernel(
    grad_ptr, x_ptr, bias_ptr, out_ptr, sums_ptr, rows, width, stride,
    ROWS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """dx = g (Phi(v) + v phi(v)), and its sum over the program's rows."""
    begin = tl.program_id(1) * PART
    columns = _columns(_rows(0, ROWS), begin, PART)
    bias = _read(bias_ptr, columns, columns < width)
    total = tl.zeros((ROWS, PART), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = _rows(first, ROWS)
        inside = (row < rows) & (columns < width)
        at = row.to(tl.int64) * width + columns
        g = _read(grad_ptr, at, inside)
        dx = g * _gelu_slope(_read(x_ptr, at, inside) + bias, out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, dx, mask=inside)
        total += dx
    _store_sum(sums_ptr + tl.program_id(0) * stride, total, begin, width, PART)


@triton.jit
def _moments(parts, width, eps, ROWS: tl.constexpr, PART: tl.constexpr):
    total = tl.zeros((ROWS, PART), tl.float32)
    for i in tl.static_range(len(parts)):
        total += parts[i]
    mean = tl.sum(total, 1)[:, None] / width
    squares = tl.zeros((ROWS, PART), tl.float32)
    for i in tl.static_range(len(parts)):
        inside = (i * PART + tl.arange(0, PART) < width)[None, :]
        centred = tl.where(inside, parts[i] - mean, 0.0)
        squares += centred * centred
    return mean, 1.0 / tl.sqrt(tl.sum(squares, 1)[:, None] / width + eps)


@triton.jit
def _store_means(means_ptr, of_h, of_hn, row, rows, width):
    means = tl.join(tl.sum(of_h, 1), tl.sum(of_hn, 1)) / width
    tl.store(means_ptr + 2 * row + tl.arange(0, 2)[None, :], means, mask=row < rows)


@triton.jit
def _norm_slope(h, n, means_ptr, row, rows, rstd):
    of_h = _read(means_ptr, 2 * row, row < rows)
    of_hn = _read(means_ptr, 2 * row + 1, row < rows)
    return (h - of_h - n * of_hn) * rstd


@triton.jit(do_not_specialize=VARYING)
def dropout_add_norm_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, out_ptr, summed_ptr, mean_ptr, rstd_ptr,
    rows, width, eps, seed, offset: tl.int64, below, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """summed = residual + dropout(x + bias); out = LayerNorm(summed)."""
    if DROPS:
        seed = _number(seed)
    row = _rows(tl.program_id(0) * ROWS, ROWS)
    at = row.to(tl.int64) * width
    summed = ()
    for i in tl.static_range(PARTS):
        columns = _columns(row, i * PART, PART)
        inside = (row < rows) & (columns < width)
        v = _read(x_ptr, at + columns, inside) + _read(bias_ptr, columns, inside)
        if DROPS:
            v *= _kept(seed, offset, row, i * PART, width, below, scale, ROWS, PART)
        stored = (v + _read(residual_ptr, at + columns, inside)).to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + at + columns, stored, mask=inside)
        summed += (stored.to(tl.float32),)  # type: ignore[assignment]
    mean, rstd = _moments(summed, width, eps, ROWS, PART)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    for i in tl.static_range(PARTS):
        columns = _columns(row, i * PART, PART)
        inside = (row < rows) & (columns < width)
        y = (summed[i] - mean) * rstd * _read(weight_ptr, columns, inside)
        tl.store(out_ptr + at + columns, y + _read(norm_bias_ptr, columns, inside), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def dropout_add_norm_backward_kernel(
    grad_ptr, other_ptr, summed_ptr, mean_ptr, rstd_ptr, weight_ptr, grad_x_ptr, grad_residual_ptr,
    means_ptr, sums_ptr, rows, width, stride, seed, offset: tl.int64, below, scale,
    OTHER: tl.constexpr, DROPS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Gradients of the residual and of x; sums over the program's rows for bias, weight and norm_bias.

    d summed = rstd (h - mean(h) - n mean(h n)) with h = g weight and n the normalised row. The means of the
    program's rows come first; then, part by part, all of its rows again, which are still cached: so sums
    over rows take the registers of one part.
    """
    if DROPS:
        seed = _number(seed)
    begin, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for first in range(begin, rows, step):
        row = _rows(first, ROWS)
        mean, rstd = _read(mean_ptr, row, row < rows), _read(rstd_ptr, row, row < rows)
        of_h = tl.zeros((ROWS, PART), tl.float32)
        of_hn = tl.zeros((ROWS, PART), tl.float32)
        for i in tl.static_range(PARTS):
            columns = _columns(row, i * PART, PART)
            inside = (row < rows) & (columns < width)
            at = row.to(tl.int64) * width + columns
            h = _read(grad_ptr, at, inside)
            if OTHER:
                h += _read(other_ptr, at, inside)
            h *= _read(weight_ptr, columns, columns < width)
            of_h += h
            of_hn += h * ((_read(summed_ptr, at, inside) - mean) * rstd)
        _store_means(means_ptr, of_h, of_hn, row, rows, width)
    tl.debug_barrier()
    for i in range(PARTS):
        columns = _columns(_rows(0, ROWS), i * PART, PART)
        weight = _read(weight_ptr, columns, columns < width)
        of_bias = tl.zeros((ROWS, PART), tl.float32)
        of_weight = tl.zeros((ROWS, PART), tl.float32)
        of_norm_bias = tl.zeros((ROWS, PART), tl.float32)
        for first in range(begin, rows, step):
            row = _rows(first, ROWS)
            inside = (row < rows) & (columns < width)
            at = row.to(tl.int64) * width + columns
            g = _read(grad_ptr, at, inside)
            if OTHER:
                g += _read(other_ptr, at, inside)
            rstd = _read(rstd_ptr, row, row < rows)
            n = (_read(summed_ptr, at, inside) - _read(mean_ptr, row, row < rows)) * rstd
            d = _norm_slope(g * weight, n, means_ptr, row, rows, rstd)
            tl.store(grad_residual_ptr + at, d, mask=inside)
            if DROPS:
                d *= _kept(seed, offset, row, i * PART, width, below, scale, ROWS, PART)
            tl.store(grad_x_ptr + at, d, mask=inside)
            of_bias += d
            of_weight += g * n
            of_norm_bias += g
        sums = sums_ptr + tl.program_id(0) * stride
        _store_sum(sums, of_bias, i * PART, width, PART)
        _store_sum(sums + width, of_weight, i * PART, width, PART)
        _store_sum(sums + 2 * width, of_norm_bias, i * PART, width, PART)


@triton.jit
def _embedded(
    ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, rows, columns,
    width,
):  # fmt: skip
    there = row < rows
    inside = there & (columns < width)
    word = tl.load(ids_ptr + row, mask=there, other=0) * width + columns
    kind = tl.load(types_ptr + row, mask=there, other=0) * width + columns
    position = tl.load(positions_ptr + row, mask=there, other=0) * width + columns
    v = _read(words_ptr, word, inside) + _read(type_table_ptr, kind, inside)
    return v + _read(position_table_ptr, position, inside)


@triton.jit(do_not_specialize=VARYING)
def embed_norm_kernel(
    ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, weight_ptr, bias_ptr,
    out_ptr, mean_ptr, rstd_ptr, rows, width, eps, seed, offset: tl.int64, below, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """out = dropout(LayerNorm(word + type + position))."""
    if DROPS:
        seed = _number(seed)
    row = _rows(tl.program_id(0) * ROWS, ROWS)
    parts = ()
    for i in tl.static_range(PARTS):
        v = _embedded(
            ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, rows,
            _columns(row, i * PART, PART), width,
        )  # fmt: skip
        parts += (v,)  # type: ignore[assignment]
    mean, rstd = _moments(parts, width, eps, ROWS, PART)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    for i in tl.static_range(PARTS):
        columns = _columns(row, i * PART, PART)
        inside = (row < rows) & (columns < width)
        y = (parts[i] - mean) * rstd * _read(weight_ptr, columns, inside) + _read(bias_ptr, columns, inside)
        if DROPS:
            y *= _kept(seed, offset, row, i * PART, width, below, scale, ROWS, PART)
        tl.store(out_ptr + row.to(tl.int64) * width + columns, y, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def embed_norm_backward_kernel(
    grad_ptr, ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr,
    mean_ptr, rstd_ptr, weight_ptr, out_ptr, means_ptr, sums_ptr, rows, width, seed, offset: tl.int64,
    below, scale,
    DROPS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Gradient of the sum before the LayerNorm, which is looked up again; sums for weight and bias.

    In two passes, like that of `dropout_add_norm`.
    """
    if DROPS:
        seed = _number(seed)
    begin, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for first in range(begin, rows, step):
        row = _rows(first, ROWS)
        mean, rstd = _read(mean_ptr, row, row < rows), _read(rstd_ptr, row, row < rows)
        of_h = tl.zeros((ROWS, PART), tl.float32)
        of_hn = tl.zeros((ROWS, PART), tl.float32)
        for i in range(PARTS):
            columns = _columns(row, i * PART, PART)
            at = row.to(tl.int64) * width + columns
            h = _read(grad_ptr, at, (row < rows) & (columns < width))
            h *= _read(weight_ptr, columns, columns < width)
            if DROPS:
                h *= _kept(seed, offset, row, i * PART, width, below, scale, ROWS, PART)
            v = _embedded(
                ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, rows,
                columns, width,
            )  # fmt: skip
            of_h += h
            of_hn += h * ((v - mean) * rstd)
        _store_means(means_ptr, of_h, of_hn, row, rows, width)
    tl.debug_barrier()
    for i in range(PARTS):
        columns = _columns(_rows(0, ROWS), i * PART, PART)
        weight = _read(weight_ptr, columns, columns < width)
        of_weight = tl.zeros((ROWS, PART), tl.float32)
        of_bias = tl.zeros((ROWS, PART), tl.float32)
        for first in range(begin, rows, step):
            row = _rows(first, ROWS)
            inside = (row < rows) & (columns < width)
            at = row.to(tl.int64) * width + columns
            g = _read(grad_ptr, at, inside)
            if DROPS:
                g *= _kept(seed, offset, row, i * PART, width, below, scale, ROWS, PART)
            v = _embedded(
                ids_ptr, types_ptr, positions_ptr, words_ptr, position_table_ptr, type_table_ptr, row, rows,
                columns, width,
            )  # fmt: skip
            rstd = _read(rstd_ptr, row, row < rows)
            n = (v - _read(mean_ptr, row, row < rows)) * rstd
            tl.store(out_ptr + at, _norm_slope(g * weight, n, means_ptr, row, rows, rstd), mask=inside)
            of_weight += g * n
            of_bias += g
        sums = sums_ptr + tl.program_id(0) * 2 * width
        _store_sum(sums, of_weight, i * PART, width, PART)
        _store_sum(sums + width, of_bias, i * PART, width, PART)


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


@triton.jit(do_not_specialize=VARYING)
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


@triton.jit(do_not_specialize=VARYING)
def joint_gradient_kernel(
    first_ptr, second_ptr, third_ptr, joint_ptr, sums_ptr, rows, width, ROWS: tl.constexpr, PART: tl.constexpr
):
    """joint = [first second third], and its sums over the program's rows, for some columns of one of them."""
    part = tl.program_id(2)
    begin = tl.program_id(1) * PART
    columns = _columns(_rows(0, ROWS), begin, PART)
    source = first_ptr
    if part == 1:
        source = second_ptr
    elif part == 2:
        source = third_ptr
    total = tl.zeros((ROWS, PART), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = _rows(first, ROWS)
        inside = (row < rows) & (columns < width)
        at = row.to(tl.int64) * width
        given = tl.load(source + at + columns, mask=inside, other=0.0)
        tl.store(joint_ptr + 3 * at + part * width + columns, given, mask=inside)
        total += given.to(tl.float32)
    _store_sum(sums_ptr + (tl.program_id(0) * 3 + part) * width, total, begin, width, PART)


@triton.jit(do_not_specialize=VARYING)
def type_gradient_kernel(grad_ptr, types_ptr, sums_ptr, rows, width, ROWS: tl.constexpr, PART: tl.constexpr):
    kind = tl.program_id(2)
    begin = tl.program_id(1) * PART
    columns = _columns(_rows(0, ROWS), begin, PART)
    total = tl.zeros((ROWS, PART), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = _rows(first, ROWS)
        counts = tl.load(types_ptr + row, mask=row < rows, other=-1) == kind
        total += _read(grad_ptr, row.to(tl.int64) * width + columns, counts & (columns < width))
    sums = sums_ptr + (tl.program_id(0) * tl.num_programs(2) + kind) * width
    _store_sum(sums, total, begin, width, PART)


def column_totals(sums: Tensor, dtype: torch.dtype) -> Tensor:
    programs, width = sums.shape
    out = sums.new_empty((width,), dtype=dtype)
    totals_kernel[(triton.cdiv(width, TOTAL_COLUMNS),)](sums, out, programs, width, BLOCK=TOTAL_COLUMNS)
    return out


def tile_of(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns a tile of rows of a width, as arguments of a kernel: `PARTS` of `PART` columns, `ROWS` rows.

    A lane reads 16 bytes of a part, and holds at most 32 columns in all; fewer are idle in a smaller part.
    """
    lane = 16 // dtype.itemsize
    warp = 32 * lane
    size = max(16, int(triton.next_power_of_2(triton.cdiv(width * lane, 32))))
    sizes = [size]
    while size < warp:
        size *= 2
        sizes.append(size)
    part = min(sizes, key=lambda size: (triton.cdiv(width, size) * size, -size))
    return {
        "ROWS": max(1, _WARPS * warp // part),
        "PARTS": triton.cdiv(width, part),
        "PART": part,
        "num_warps": max(_WARPS, part // warp),
    }


def columns_of(width: int, dtype: torch.dtype, *, lines: int = 1) -> tuple[dict[str, int], int]:
    """Returns the tile of a part of each row, for sums over rows alone, and how many parts there are.

    A lane reads `lines` rows before it uses the first.
    """
    lane = 16 // dtype.itemsize
    part = max(16, min(32 * lane, int(triton.next_power_of_2(width))))
    tile = {"ROWS": lines * _WARPS * 32 * lane // part, "PART": part, "num_warps": _WARPS}
    return tile, triton.cdiv(width, part)


def _require(x: Tensor) -> Tensor:
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"the encoder's CUDA kernels take float32, bfloat16 and float16, not {x.dtype}; convert the model"
        )
    return x.contiguous()


def _dropout(rate: float, seed: Tensor, offset: int) -> tuple[int | Tensor, int, int, float]:
    below, scale = threshold_of(rate)
    return int(seed) if seed.is_cpu else seed, offset, below, scale


def _programs_sums(x: Tensor, count: int) -> Tensor:
    width = x.shape[-1]
    return x.new_empty((programs_of(x), count * width), dtype=torch.float32)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    shape = x.shape[:-1]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    x, width = _require(x), x.shape[-1]
    out = torch.empty_like(x)
    if x.numel():
        tile, parts = columns_of(width, x.dtype)
        rows = x.numel() // width
        grid = (triton.cdiv(rows, tile["ROWS"]), parts)
        bias_gelu_kernel[grid](x, bias.contiguous(), out, rows, width, **tile)
    return out


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    sums = _programs_sums(x, 1)
    out = bias_gelu_backward_sums(grad, x, bias, sums)
    return out, column_totals(sums, bias.dtype)


def bias_gelu_backward_sums(grad: Tensor, x: Tensor, bias: Tensor, sums: Tensor) -> Tensor:
    """Gradient of x; each program's sums of it over its rows become a line of `sums`."""
    x, width = _require(x), x.shape[-1]
    out = torch.empty_like(x)
    tile, parts = columns_of(width, x.dtype)
    bias_gelu_backward_kernel[(len(sums), parts)](
        grad.contiguous(), x, bias.contiguous(), out, sums, x.numel() // width, width, sums.stride(0), **tile
    )
    return out


def dropout_add_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, rate: float,
    seed: Tensor, offset: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, sum before the LayerNorm, and its rows' mean and 1 / standard deviation."""
    x, width = _require(x), x.shape[-1]
    out, summed, (mean, rstd) = torch.empty_like(x), torch.empty_like(x), _statistics(x)
    drawn = _dropout(rate, seed, offset)
    tile = tile_of(width, x.dtype)
    if x.numel():
        rows = x.numel() // width
        dropout_add_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            x, bias.contiguous(), residual.contiguous(), weight.contiguous(), norm_bias.contiguous(), out,
            summed, mean, rstd, rows, width, eps, *drawn, DROPS=drawn[2] > 0, **tile,
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
    width = summed.shape[-1]
    grad_x, grad_residual = torch.empty_like(summed), torch.empty_like(summed)
    drawn = _dropout(rate, seed, offset)
    grad = grad.contiguous()
    means = mean.new_empty((mean.numel(), 2))
    dropout_add_norm_backward_kernel[(len(sums),)](
        grad, grad if other_grad is None else other_grad.contiguous(), summed, mean, rstd,
        weight.contiguous(), grad_x, grad_residual, means, sums, len(means), width, sums.stride(0), *drawn,
        OTHER=other_grad is not None, DROPS=drawn[2] > 0, **tile_of(width, summed.dtype),
    )  # fmt: skip
    return grad_x, grad_residual


def _sums_of_columns(x: Tensor, count: int) -> tuple[Tensor, dict[str, int], tuple[int, int, int]]:
    tile, parts = columns_of(x.shape[1], x.dtype, lines=4)
    programs = triton.cdiv(2 * programs_of(x), parts * count)
    sums = x.new_empty((programs, count * x.shape[1]), dtype=torch.float32)
    return sums, tile, (programs, parts, count)


def joint_gradient(grads: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three gradients (N, H) as one (N, 3 H), and its sums over rows in a parameter's dtype."""
    first, second, third = (_require(grad) for grad in grads)
    rows, width = first.shape
    joint = first.new_empty((rows, 3 * width))
    sums, tile, grid = _sums_of_columns(first, 3)
    joint_gradient_kernel[grid](first, second, third, joint, sums, rows, width, **tile)
    return joint, column_totals(sums, dtype)


def embed_norm(
    ids: Tensor, types: Tensor, positions: Tensor, words: Tensor, position_table: Tensor, type_table: Tensor,
    weight: Tensor, bias: Tensor, eps: float, rate: float, seed: Tensor, offset: int,
    padding: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, and its rows' mean and 1 / standard deviation before the LayerNorm."""
    words, width = _require(words), words.shape[1]
    out = words.new_empty((*ids.shape, width))
    mean, rstd = _statistics(out)
    drawn = _dropout(rate, seed, offset)
    tile = tile_of(width, words.dtype)
    if rows := ids.numel():
        embed_norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
            ids.contiguous(), types.contiguous(), positions.contiguous(), words, position_table.contiguous(),
            type_table.contiguous(), weight.contiguous(), bias.contiguous(), out, mean, rstd, rows, width,
            eps, *drawn, DROPS=drawn[2] > 0, **tile,
        )  # fmt: skip
    return out, mean, rstd


def embed_norm_backward(
    grad: Tensor, ids: Tensor, types: Tensor, positions: Tensor, words: Tensor, position_table: Tensor,
    type_table: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, rate: float, seed: Tensor, offset: int,
    padding: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the three tables, and of the LayerNorm's weight and bias."""
    words, width = _require(words), words.shape[1]
    rows = ids.numel()
    of_rows = words.new_empty((rows, width))
    sums = _programs_sums(of_rows, 2)
    drawn = _dropout(rate, seed, offset)
    embed_norm_backward_kernel[(len(sums),)](
        grad.contiguous(), ids.contiguous(), types.contiguous(), positions.contiguous(), words,
        position_table.contiguous(), type_table.contiguous(), mean, rstd, weight.contiguous(), of_rows,
        mean.new_empty((rows, 2)), sums, rows, width, *drawn, DROPS=drawn[2] > 0,
        **tile_of(width, words.dtype),
    )  # fmt: skip
    return (
        _table_gradient(of_rows, ids, words, padding[0]),
        _table_gradient(of_rows, positions, position_table, padding[1]),
        _type_gradient(of_rows, types, type_table, padding[2]),
        *column_totals(sums, weight.dtype).chunk(2),
    )


def _table_gradient(of_rows: Tensor, indices: Tensor, table: Tensor, padding: int) -> Tensor:
    result: Tensor = torch.ops.aten.embedding_dense_backward(
        of_rows, indices.flatten(), table.shape[0], padding, False
    )
    return result


def _type_gradient(of_rows: Tensor, types: Tensor, table: Tensor, padding: int) -> Tensor:
    """One sum over all rows for each type: torch would sort rows and add up those of a type in sequence."""
    if len(table) > _MOST_TYPES or padding >= 0:
        return _table_gradient(of_rows, types, table, padding)
    sums, tile, grid = _sums_of_columns(of_rows, len(table))
    type_gradient_kernel[grid](of_rows, types.contiguous(), sums, *of_rows.shape, **tile)
    return column_totals(sums, table.dtype).view(table.shape)


def _block_of(width: int) -> int:
    return min(4096, max(16, int(triton.next_power_of_2(width))))


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Losses, and the logarithm of each row's sum of exponentials."""
    logits, (losses, lse) = _require(logits), _statistics(logits)
    block = _block_of(logits.shape[1])
    if len(labels):
        cross_entropy_kernel[(len(labels),)](
            logits, labels.contiguous(), losses, lse, logits.shape[1], ignore_index, BLOCK=block,
            num_warps=max(1, block // 256),
        )  # fmt: skip
    return losses, lse


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int
) -> Tensor:
    logits = _require(logits)
    out = torch.empty_like(logits)
    block = _block_of(logits.shape[1])
    if len(labels):
        grid = (len(labels), triton.cdiv(logits.shape[1], block))
        cross_entropy_backward_kernel[grid](
            grad.contiguous(), logits, labels.contiguous(), lse, out, logits.shape[1], ignore_index,
            BLOCK=block, num_warps=max(1, block // 256),
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
