"""Attention within segments next to plain float64 PyTorch: values, gradients, dropout, and their bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cuda_ext import encoder
from tests.cuda_ext.philox_reference import kept

SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 3
LENGTHS: dict[str, tuple[int, ...]] = {
    "one token": (1,),
    "tiny": (1, 2, 1, 3, 1, 1, 5, 2) * 4,
    "around a tile": (5, 6, 7, 15, 16, 17),
    "around a block of queries": (47, 48, 49, 97),
    "around a block of terms": (129, 64, 65, 1),
    "empty ones between": (4, 0, 9, 0),
}


@pytest.fixture(autouse=True)
def operators(kernels: None) -> None:
    encoder.require("cpu")
    torch.manual_seed(7)


def edges_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def drawn(lengths: Sequence[int], heads: int, depth: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sum(lengths), 3, heads, depth).to(dtype)


def plain(
    joint: Tensor, lengths: Sequence[int], *, scale: float | None = None, mask: Tensor | None = None
) -> Tensor:
    """The same, all scores of a segment at once; mask: (T, heads, longest)."""
    scale = joint.shape[-1] ** -0.5 if scale is None else scale
    mixed = []
    for first, last in pairwise([0, *accumulate(lengths)]):
        query, key, value = joint[first:last].unbind(1)
        shares = (torch.einsum("ihd,jhd->ihj", query, key) * scale).softmax(-1)
        if mask is not None:
            shares = shares * mask[first:last, :, : last - first].to(shares.dtype)
        mixed.append(torch.einsum("ihj,jhd->ihd", shares, value))
    return torch.cat(mixed)


def mask_of(lengths: Sequence[int], heads: int, rate: float) -> Tensor:
    rows, longest = sum(lengths) * heads, max(lengths)
    return kept(SEED, OFFSET, rows, longest, rate).view(-1, heads, longest)


def fused(
    joint: Tensor, lengths: Sequence[int], *, scale: float | None = None, rate: float = 0.0, seed: int = SEED
) -> Tensor:
    return encoder.segment_attention(
        *joint.unbind(1), edges_of(lengths), scale=scale, rate=rate, seed=torch.tensor(seed), offset=OFFSET
    )


def results(function: Callable[[Tensor], Tensor], joint: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the gradient for one fixed gradient of the output."""
    leaf = joint.detach().clone().requires_grad_()
    out = function(leaf)
    gradient = torch.linspace(-9, 9, out.numel(), dtype=torch.float64).view(out.shape).cos()
    (grad,) = torch.autograd.grad(out, leaf, gradient.to(out.dtype))
    return out.detach(), grad


def worst(joint: Tensor, lengths: Sequence[int], *, rate: float = 0.0, scale: float | None = None) -> float:
    """Largest difference from plain PyTorch in float64, relative to the largest element."""
    mask = mask_of(lengths, joint.shape[2], rate) if rate else None
    ours = results(lambda joint: fused(joint, lengths, scale=scale, rate=rate), joint)
    exact = results(lambda joint: plain(joint, lengths, scale=scale, mask=mask), joint.double())
    return max(
        float((mine.double() - theirs).abs().max() / theirs.abs().max())
        for mine, theirs in zip(ours, exact, strict=True)
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("depth", [1, 20, 64])
def test_values_and_gradients_follow_float64(lengths: tuple[int, ...], depth: int, capability: str) -> None:
    before = torch.ops.stillhouse.encoder_counters()
    for dtype, bound in ((torch.float32, 3e-6), (torch.float64, 1e-13)):
        assert worst(drawn(lengths, 2, depth, dtype), lengths) < bound
    forward, backward = torch.ops.stillhouse.encoder_counters()
    assert (forward - before[0], backward - before[1]) == (2 * sum(lengths), 2 * sum(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropped_scores_are_philox_of_token_head_and_key(dtype: torch.dtype, capability: str) -> None:
    lengths = (1, 9, 50, 3, 0, 17)
    bound = 3e-6 if dtype == torch.float32 else 1e-13
    assert worst(drawn(lengths, 3, 8, dtype), lengths, rate=0.25) < bound


@settings(max_examples=settings.default.max_examples * 2 // 5, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=8).filter(any),
    heads=st.integers(1, 5),
    depth=st.integers(1, 70),
    seed=st.integers(0, 2**32),
)
def test_values_and_gradients_follow_float64_at_any_size(
    lengths: list[int], heads: int, depth: int, seed: int
) -> None:
    encoder.require("cpu")
    torch.manual_seed(seed)
    assert worst(drawn(lengths, heads, depth), lengths, scale=0.3) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_short_formats_lose_their_rounding_only(dtype: torch.dtype, bound: float) -> None:
    lengths = (33, 1, 60)
    assert worst(drawn(lengths, 2, 32, dtype), lengths, rate=0.25) < bound


def test_gradients_are_those_of_the_operator_itself() -> None:
    joint = drawn((3, 1, 4), 2, 3, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda joint: fused(joint, (3, 1, 4), rate=0.25), (joint,))


def test_opcheck_of_both_operators() -> None:
    ops, seed, edges = torch.ops.stillhouse, torch.tensor(SEED), edges_of((5, 2, 9))
    given_ = [part.contiguous() for part in drawn((5, 2, 9), 2, 8).unbind(1)]
    sample = (edges, 0.3, 0.1, seed, 0)
    out, statistics = ops.segment_attention(*given_, *sample)
    leaves = [part.clone().requires_grad_() for part in given_]
    torch.library.opcheck(ops.segment_attention.default, (*leaves, *sample))
    torch.library.opcheck(
        ops.segment_attention_backward.default, (torch.randn_like(out), *given_, out, statistics, *sample)
    )


def test_compiled_code_is_one_graph_through_it() -> None:
    joint = drawn((6, 3), 2, 8)

    def block(joint: Tensor) -> Tensor:
        return fused(joint * 2, (6, 3), rate=0.1).sin()

    eager, traced = (
        results(run, joint) for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager"))
    )
    for mine, theirs in zip(eager, traced, strict=True):
        assert torch.equal(mine, theirs)


def masks(lengths: Sequence[int], heads: int, *, rate: float, seed: int = SEED) -> Tensor:
    """(T, heads, longest) what dropout keeps: equal scores, and values that tell the keys apart."""
    longest = max(lengths)
    joint = torch.zeros(sum(lengths), 3, heads, longest)
    for first, last in pairwise([0, *accumulate(lengths)]):
        joint[first:last, 2] = torch.eye(last - first, longest)[:, None]
    return (fused(joint, lengths, rate=rate, seed=seed) != 0).float()


def test_masks_have_the_rate_and_are_independent() -> None:
    rate, lengths = 0.1, (300, 300)
    first, other = (masks(lengths, 4, rate=rate, seed=seed) for seed in (1, 2))
    deviation = (rate * (1 - rate) / first.numel()) ** 0.5
    for mask in (first, other):
        assert abs(float(1 - mask.double().mean()) - rate) < 5 * deviation
    # Other seeds, queries, heads, keys and segments drop other scores.
    moved = (other, first.roll(1, 0), first.roll(1, 1), first.roll(8, 2), first.roll(300, 0))
    for mask in moved:
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), mask.flatten()]))[0, 1])) < 0.008


def test_a_seed_replays_its_mask_in_both_passes() -> None:
    lengths, heads = (20, 7), 2
    joint = torch.zeros(27, 3, heads, 20)
    assert torch.equal(masks(lengths, heads, rate=0.5), masks(lengths, heads, rate=0.5))
    # With equal scores dV of key j is the sum of what each query that kept it is given.
    leaf = joint.requires_grad_()
    out = fused(leaf, lengths, rate=0.5)
    gradient = torch.zeros_like(out)
    gradient[:20, :, :20] = torch.eye(20)[:, None]
    (grad,) = torch.autograd.grad(out, leaf, gradient)
    assert torch.equal(grad[:20, 2].permute(2, 1, 0) != 0, masks(lengths, heads, rate=0.5)[:20].bool())


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_results_do_not_depend_on_threads(rate: float) -> None:
    lengths, threads = (90, 3, 41, 1, 70, 12), torch.get_num_threads()
    joint, outcomes = drawn(lengths, 3, 32), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outcomes.append(results(lambda joint: fused(joint, lengths, rate=rate), joint))
    finally:
        torch.set_num_threads(threads)
    for outcome in outcomes[1:]:
        for one, other in zip(outcomes[0], outcome, strict=True):
            assert torch.equal(one, other)


def test_misaligned_and_strided_arguments_give_the_same() -> None:
    lengths = (19, 50)
    joint = drawn(lengths, 2, 33)
    moved = torch.empty(joint.numel() + 1)[1:].view(joint.shape).copy_(joint)
    strided = joint.transpose(0, 3).contiguous().transpose(0, 3)
    expected = fused(joint, lengths, rate=0.1)
    for given_ in (moved, strided):
        assert torch.equal(fused(given_, lengths, rate=0.1), expected)


def test_scores_far_apart_choose_one_key_and_stay_finite(capability: str) -> None:
    lengths = (40, 13)
    joint = drawn(lengths, 2, 16)
    joint[:, :2] *= 200
    assert worst(joint, lengths) < 2e-3  # a rounded score of 1e5 is off by 0.01
    out, grad = results(lambda joint: fused(joint, lengths, rate=0.1), joint)
    assert bool(out.isfinite().all() and grad.isfinite().all())


def test_not_a_number_reaches_its_own_segment_only(capability: str) -> None:
    joint = drawn((20, 20), 2, 16)
    joint[3, 1, 0, 5] = torch.nan
    out = fused(joint, (20, 20))
    assert bool(out[:20, 0].isnan().all())
    assert bool(out[:20, 1].isfinite().all() and out[20:].isfinite().all())


def test_no_scores_are_kept() -> None:
    lengths, kept_bytes = (200, 120), 0
    joint = drawn(lengths, 4, 16).requires_grad_()

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept_bytes
        kept_bytes += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        fused(joint, lengths, rate=0.1)
    tokens, heads, depth = 320, 4, 16
    assert kept_bytes <= 4 * tokens * heads * (3 * depth + depth + 2) + 64


def bad_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Mistakes, and what their message must have."""
    joint = drawn((4, 3), 2, 8)
    query, key, value = joint.unbind(1)
    edges = edges_of((4, 3))
    yield "query has shape", lambda: encoder.segment_attention(query[0], key, value, edges)
    yield "key is", lambda: encoder.segment_attention(query, key[:3], value, edges)
    yield "value is", lambda: encoder.segment_attention(query, key, value.double(), edges)
    yield "it must go from 0 to the 7 tokens", lambda: fused(joint, (4, 2))
    yield "it must not decrease", lambda: fused(joint, (4, 4, -1))
    yield "int32 on the CPU", lambda: encoder.segment_attention(query, key, value, edges.long())
    yield "scale is 0", lambda: fused(joint, (4, 3), scale=0.0)
    yield "rate is 1", lambda: fused(joint, (4, 3), rate=1.0)
    yield "take float32, float64", lambda: fused(joint.int(), (4, 3))


def test_a_mistake_is_refused_before_memory_is_touched() -> None:
    for message, call in bad_calls():
        with pytest.raises(RuntimeError, match=message):
            call()
