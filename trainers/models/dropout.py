"""Dropout on the CPU, where drawing random numbers one by one is a quarter of a training step.

torch draws for each element (measured: 11 ns), and its attention with dropout takes all scores through memory
a dozen times. Here an element takes 16 random bits, and attention is computed for a few examples at a time,
whose scores stay in the cache; the backward pass draws the same bits again. The rate is met to 2^-17. Draws
are seeded from torch's generator, whose state in a checkpoint suffices.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from cuda_ext.encoder import LEVELS, threshold_of

CPU_ATTENTION = "stillhouse_cpu"
TORCH_ATTENTION = "sdpa"  # Names of this attention, and of torch's, among transformers' implementations

SCORES_AT_ONCE = 1 << 20
"""Elements of the score matrix that are worked on together: 4 MiB, so that they stay in the cache."""
_WORDS_PER_DRAW = 1 << 17
"""Each draw of so many 64-bit words has its own generator, so that threads can share the work."""


def install(model: nn.Module, *, attention: bool = True) -> None:
    """Replaces a model's dropout in layers and, where a token attends to all of its text, in attention."""
    for module in model.modules():
        if type(module) is nn.Dropout:
            module.__class__ = CpuDropout
        config = getattr(module, "config", None)
        # An encoder with an attention of its own keeps it.
        if attention and config is not None and config._attn_implementation == TORCH_ATTENTION:
            config._attn_implementation = CPU_ATTENTION


class CpuDropout(nn.Dropout):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rate = _Rate.of(self.p)
        if not self.training or rate.below == 0 or not input.is_cpu:
            return super().forward(input)
        dropped: torch.Tensor = _Dropped.apply(input, rate)  # type: ignore[no-untyped-call]
        return dropped


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
    """Scaled dot product attention in transformers' form: (B, heads, S, D) in, (B, S, heads, D) and None out.

    The mask is (B, 1, 1, S) bool, False on padding, which is at the end. Rows of padded queries are zeros, or
    attention over the real keys.
    """
    rate = _Rate.of(dropout)
    if rate.below == 0 or not query.is_cpu:
        torch_rate = dropout if rate.below else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, dropout_p=torch_rate, scale=scaling
        )
    else:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        examples = _Padded(_lengths(query, attention_mask))
        mixed = _DroppedAttention.apply(query, key, value, examples, rate, scale)  # type: ignore[no-untyped-call]
    return mixed.transpose(1, 2), None


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention within each segment of a row, (1, heads, T, D); drops what `attention` drops with padding."""
    rate = _Rate.of(dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if rate.below:
        examples = _Packed(lengths)
        dropped: torch.Tensor = _DroppedAttention.apply(query, key, value, examples, rate, scale)  # type: ignore[no-untyped-call]
        return dropped
    # Neighbours of one length are the examples of one batch.
    runs = [(length, len(list(same))) for length, same in groupby(filter(None, lengths))]
    sizes = [length * count for length, count in runs]
    split = [torch.split(tensor[0], sizes, dim=1) for tensor in (query, key, value)]
    mixed = []
    for number, (length, count) in enumerate(runs):
        q, k, v = (torch.unflatten(parts[number], 1, (count, length)).transpose(0, 1) for parts in split)
        out = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        mixed.append(out.transpose(0, 1).flatten(1, 2))
    return torch.cat(mixed or [value[0]], 1)[None]


AttentionInterface.register(CPU_ATTENTION, attention)


@dataclass(frozen=True, slots=True)
class _Rate:
    """In 65536ths: an element is dropped when its 16 bits are below `below`, and the rest is scaled."""

    below: int
    scale: float

    @classmethod
    def of(cls, rate: float) -> Self:
        return cls(*threshold_of(rate))

    def mask(self, bits: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        # The bits are read as signed numbers, because torch compares no unsigned ones.
        return torch.ge(bits, self.below - LEVELS // 2, out=into)


class _Bits:
    """Random bits from one seed, drawn in the same order by the forward and the backward pass."""

    def __init__(self, seed: int) -> None:
        self._seed, self._draw = seed, 0

    def take(self, shape: Sequence[int]) -> torch.Tensor:
        count = math.prod(shape)
        words = max(1, -(-count // 4))
        sizes = [min(_WORDS_PER_DRAW, words - start) for start in range(0, words, _WORDS_PER_DRAW)]
        numbers = range(self._draw, self._draw + len(sizes))
        self._draw += len(sizes)
        if len(sizes) == 1:
            whole = _words(self._seed, numbers[0], sizes[0])
        else:
            whole = np.concatenate(list(_drawers().map(_words, [self._seed] * len(sizes), numbers, sizes)))
        return torch.from_numpy(whole.view(np.int16))[:count].view(tuple(shape))


def _words(seed: int, number: int, count: int) -> np.ndarray:
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, number])))
    return generator.integers(0, 2**64, count, dtype=np.uint64)


@cache
def _drawers() -> ThreadPoolExecutor:
    """Threads that draw: numpy releases the interpreter meanwhile."""
    return ThreadPoolExecutor(min(8, torch.get_num_threads()), thread_name_prefix="stillhouse-bits")


# A forked process has none of its parent's threads.
os.register_at_fork(after_in_child=_drawers.cache_clear)


def _fresh_seed() -> int:
    return int(torch.randint(2**63 - 1, ()))


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: _Rate) -> torch.Tensor:
        bits = _Bits(_fresh_seed()).take(x.shape)
        ctx.save_for_backward(bits)
        ctx.rate = rate
        return _masked(x, bits, rate)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (bits,) = ctx.saved_tensors
        return _masked(grads[0], bits, ctx.rate), None


def _masked(x: torch.Tensor, bits: torch.Tensor, rate: _Rate) -> torch.Tensor:
    mask = rate.mask(bits, torch.empty_like(x, memory_format=torch.contiguous_format))
    return mask.mul_(x).mul_(rate.scale)


@dataclass(frozen=True, slots=True)
class _Group:
    """Heads of examples `[first, last)` that are computed together, `longest` tokens each at most."""

    first: int
    last: int
    heads: slice
    longest: int


def _groups(lengths: Sequence[int], heads: int) -> Iterator[_Group]:
    """Neighbouring examples as long as their scores fit; a long one's heads a few at a time."""
    first = 0
    while first < len(lengths):
        last, longest = first + 1, lengths[first]
        while last < len(lengths):
            wider = max(longest, lengths[last])
            if (last + 1 - first) * heads * wider * wider > SCORES_AT_ONCE:
                break
            last, longest = last + 1, wider
        at_once = heads if last - first > 1 else min(heads, max(1, SCORES_AT_ONCE // max(1, longest**2)))
        for head in range(0, heads if longest else 0, at_once):
            yield _Group(first, last, slice(head, head + at_once), longest)
        first = last


def _lengths(query: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    if mask is None:
        return [query.shape[2]] * query.shape[0]
    return list(mask[:, 0, 0].sum(-1).tolist())


class _Padded:
    """Where examples are in tensors (B, heads, S, D)."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, heads, S, D), in memory (B, S, heads, D); zero where nothing will be written."""
        batch, heads, width, depth = tensor.shape
        make = torch.empty if min(self.lengths, default=width) == width else torch.zeros
        return make((batch, width, heads, depth), dtype=tensor.dtype).transpose(1, 2)

    def part(self, tensor: torch.Tensor, group: _Group) -> torch.Tensor:
        return tensor[group.first : group.last, group.heads, : group.longest].flatten(0, 1)

    def put(self, tensor: torch.Tensor, group: _Group, values: torch.Tensor) -> None:
        place = tensor[group.first : group.last, group.heads, : group.longest]
        place.copy_(values.view(place.shape))


class _Packed(_Padded):
    """Where examples are in tensors (1, heads, T, D): one after the other."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self._edges = [0, *accumulate(lengths)]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, depth = tensor.shape
        return torch.empty((1, tokens, heads, depth), dtype=tensor.dtype).transpose(1, 2)

    def part(self, tensor: torch.Tensor, group: _Group) -> torch.Tensor:
        row = tensor[0, group.heads]
        if self._even(group):
            return self._view(row, group).flatten(0, 1)
        shape = (group.last - group.first, row.shape[0], group.longest, row.shape[2])
        padded = row.new_zeros(shape)
        for i, (begin, end) in enumerate(self._places(group)):
            padded[i, :, : end - begin] = row[:, begin:end]
        return padded.flatten(0, 1)

    def put(self, tensor: torch.Tensor, group: _Group, values: torch.Tensor) -> None:
        row = tensor[0, group.heads]
        by_example = torch.unflatten(values, 0, (group.last - group.first, -1))
        if self._even(group):
            self._view(row, group).copy_(by_example)
            return
        for i, (begin, end) in enumerate(self._places(group)):
            row[:, begin:end] = by_example[i, :, : end - begin]

    def _places(self, group: _Group) -> Iterator[tuple[int, int]]:
        return pairwise(self._edges[group.first : group.last + 1])

    def _even(self, group: _Group) -> bool:
        return all(length == group.longest for length in self.lengths[group.first : group.last])

    def _view(self, row: torch.Tensor, group: _Group) -> torch.Tensor:
        own = row[:, self._edges[group.first] : self._edges[group.last]]
        return torch.unflatten(own, 1, (-1, group.longest)).transpose(0, 1)


class _DroppedAttention(torch.autograd.Function):
    """O = (keep softmax(scale Q K^T)) V / (1 - rate), a few examples at a time.

    With P the softmax, M what is kept, s its scale, and dO the gradient of O: dV = (M P)^T (s dO);
    dP = M (s dO V^T);  dS = P (dP - rowsum(dP P));  dQ = scale dS K;  dK = scale dS^T Q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        examples: _Padded,
        rate: _Rate,
        scale: float,
    ) -> torch.Tensor:
        seed = _fresh_seed()
        ctx.save_for_backward(query, key, value)
        ctx.examples, ctx.rate, ctx.scale, ctx.seed = examples, rate, scale, seed
        lengths = examples.lengths
        mixed = examples.empty_like(value)
        bits = _Bits(seed)
        for group in _groups(lengths, query.shape[1]):
            q, k, v = (examples.part(tensor, group) for tensor in (query, key, value))
            shares = _softmax(q, k, scale, group, lengths)
            keep = rate.mask(bits.take(shares.shape), torch.empty_like(shares))
            out = torch.bmm(shares.mul_(keep).to(v.dtype), v * rate.scale)
            examples.put(mixed, group, out)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        examples, rate, scale = ctx.examples, ctx.rate, ctx.scale
        lengths = examples.lengths
        d_query, d_key, d_value = (examples.empty_like(tensor) for tensor in (query, key, value))
        nothing = query.new_empty(())
        bits = _Bits(ctx.seed)
        for group in _groups(lengths, query.shape[1]):
            q, k, v = (examples.part(tensor, group) for tensor in (query, key, value))
            gradient = examples.part(grads[0], group) * rate.scale
            shares = _softmax(q, k, scale, group, lengths)
            keep = rate.mask(bits.take(shares.shape), torch.empty_like(shares))
            d_shares = torch.bmm(gradient, v.transpose(1, 2)).to(shares.dtype).mul_(keep)
            examples.put(d_value, group, torch.bmm(keep.mul_(shares).to(v.dtype).transpose(1, 2), gradient))
            d_scores = torch._softmax_backward_data(d_shares, shares, -1, shares.dtype).to(q.dtype)
            examples.put(d_query, group, torch.baddbmm(nothing, d_scores, k, beta=0, alpha=scale))
            examples.put(
                d_key, group, torch.baddbmm(nothing, d_scores.transpose(1, 2), q, beta=0, alpha=scale)
            )
        return d_query, d_key, d_value, None, None, None


def _softmax(
    q: torch.Tensor, k: torch.Tensor, scale: float, group: _Group, lengths: Sequence[int]
) -> torch.Tensor:
    """Shares of a group in fp32: (examples x heads, longest, longest), 0 on padding."""
    scores = torch.baddbmm(q.new_empty(()), q, k.transpose(1, 2), beta=0, alpha=scale)
    by_example = scores.view(group.last - group.first, -1, group.longest, group.longest)
    for i, length in enumerate(lengths[group.first : group.last]):
        if length < group.longest:
            by_example[i, :, :, length:] = -math.inf
    return torch.softmax(scores, -1, dtype=torch.float32)
