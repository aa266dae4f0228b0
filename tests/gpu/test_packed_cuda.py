"""Attention of a packed row on a GPU, next to each example by itself in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import current_flash_attention_impl

from trainers.data.batches import Segments, collate
from trainers.data.segments import pack
from trainers.data.tokens import TokenSet
from trainers.device_kinds.cuda_backend import CudaBackend
from trainers.models import packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")

LENGTHS = [200, 64, 7, 131, 2]
DROPS = [
    (packed_attention.flash, torch.bfloat16, 2e-2),
    (packed_attention.flash, torch.float16, 5e-3),
    (packed_attention.padded, torch.float32, 1e-5),
    (packed_attention.padded, torch.float16, 5e-3),
]
"""Kernels that take dropout."""
CASES = [
    *DROPS,
    (packed_attention.efficient, torch.float32, 1e-5),
    (packed_attention.efficient, torch.float16, 5e-3),
]


def row_of(lengths: list[int]) -> Segments:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    data = TokenSet(np.ones(offsets[-1], dtype=np.int64), offsets, np.zeros(len(lengths), dtype=np.int64))
    segments = pack(collate(data, np.arange(len(lengths)), 0, 8), pad_id=0, multiple=8).segments
    assert segments is not None
    return segments.each(torch.Tensor.cuda)


def row() -> Segments:
    return row_of(LENGTHS)


def heads(segments: Segments, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (1, sum(segments.lengths), 12, 64)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)
    ]


def skip_without(kernel: object, dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability()
    if kernel is packed_attention.flash and not packed_attention.has_flash(dtype, 64, capability):
        pytest.skip("no flash attention on this GPU")


@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), CASES)
def test_a_row_attends_as_its_examples_alone_do(kernel, dtype, tolerance):
    skip_without(kernel, dtype)
    segments = row()
    ours = heads(segments, dtype)
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    mixed = kernel(*ours, segments, 0.0, None)
    split = [tensor.transpose(1, 2).split(segments.lengths, 2) for tensor in theirs]
    alone = [functional.scaled_dot_product_attention(*parts) for parts in zip(*split, strict=True)]
    expected = torch.cat(alone, 2).transpose(1, 2)
    torch.testing.assert_close(mixed.double(), expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(mixed)
    mixed.backward(upstream)
    expected.backward(upstream.double())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=4 * tolerance, atol=4 * tolerance)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of operators that it overrides
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 5e-3)])
def test_flash_attention_3_attends_as_flash_attention_does(dtype, tolerance):
    backend, device = CudaBackend(), torch.device("cuda", 0)
    backend.attend_without_dropout(device)
    try:
        if current_flash_attention_impl() != "FA3":
            pytest.skip("no flash-attn-3, or not sm_90")
        test_a_row_attends_as_its_examples_alone_do(packed_attention.flash, dtype, tolerance)
        test_the_backward_pass_drops_what_the_forward_pass_dropped(
            packed_attention.flash, dtype, tolerance, 0.0
        )
    finally:
        backend.begin_run()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), CASES)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(kernel, dtype, tolerance, dropout):
    """At a fixed mask the output is linear in V: <O(V), g> = <V, O^T(g)>."""
    skip_without(kernel, dtype)
    if dropout and (kernel, dtype, tolerance) not in DROPS:
        pytest.skip("takes no dropout")
    query, key, value = heads(row(), dtype)
    mixed = kernel(query, key, value, row(), dropout, None)
    upstream = torch.randn_like(mixed)
    (gradient,) = torch.autograd.grad(mixed, value, upstream)
    forward = (mixed.detach().double() * upstream.double()).sum()
    backward = (value.detach().double() * gradient.double()).sum()
    scale = float(mixed.detach().double().norm() * upstream.double().norm())
    assert abs(float(forward - backward)) < tolerance * scale / 10


@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), DROPS)
def test_heads_and_examples_draw_masks_of_their_own(kernel, dtype, tolerance):
    """Of equal examples with equal heads, equal outputs would be one mask drawn for all."""
    skip_without(kernel, dtype)
    segments = row_of([64] * 4)
    query, key = (torch.zeros(1, 256, 4, 64, device="cuda", dtype=dtype) for _ in range(2))
    mixed = kernel(query, key, torch.ones_like(query), segments, 0.2, None)
    each = mixed[0, :, :, 0].unflatten(0, (4, 64)).transpose(1, 2).flatten(0, 1)
    assert len(each.unique(dim=0)) == 16


@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), DROPS)
def test_dropped_attention_keeps_its_mean_and_replays_from_its_seed(kernel, dtype, tolerance):
    skip_without(kernel, dtype)
    segments = row()
    query, key, value = heads(segments, dtype)
    torch.manual_seed(2)
    first = kernel(query, key, torch.ones_like(value), segments, 0.2, None)
    again = kernel(query, key, torch.ones_like(value), segments, 0.2, None)
    assert not torch.equal(first, again)
    torch.manual_seed(2)
    assert torch.equal(kernel(query, key, torch.ones_like(value), segments, 0.2, None), first)
    assert float(first.double().mean()) == pytest.approx(1.0, abs=0.01)
