"""Length-bucketed batches: which examples each step sees, and the tensors they become.

The order is a pure function of lengths, seed and epoch, the same for every number of workers;
so a run resumes at any step by counting, and data-parallel workers see one worker's batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import pairwise
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trainers.data.selection import Indices
from trainers.data.tokens import TokenSet
from trainers.device_kinds import kind_of
from trainers.model_kinds.heads import IGNORED

POOL_BATCHES = 64  # Batches that are sorted by length together: more pad less, fewer mix lengths more freely
T = TypeVar("T")
AHEAD = 3  # Steps made ahead; more only take memory


def epoch_order(
    lengths: npt.NDArray[np.int64], seed: int, epoch: int, global_size: int, detour: int = 0
) -> Indices:
    """(N,) the order in which an epoch visits all examples; step i takes the i-th `global_size` of it.

    Examples are shuffled, sorted by length within pools of `POOL_BATCHES` batches, cut into batches, and the
    batches are shuffled. What does not fill a batch comes last.
    """
    rng = np.random.default_rng([seed, epoch, 3, detour] if detour else [seed, epoch, 3])
    shuffled = rng.permutation(len(lengths))
    full = len(lengths) // global_size * global_size
    body, rest = shuffled[:full], shuffled[full:]
    pool = POOL_BATCHES * global_size
    by_length = [
        part[np.argsort(lengths[part], kind="stable")]
        for part in (body[start : start + pool] for start in range(0, full, pool))
    ]
    if not by_length:
        return rest
    batches = np.concatenate(by_length).reshape(-1, global_size)
    return np.concatenate([rng.permutation(batches).reshape(-1), rest])


@dataclass(frozen=True, slots=True)
class _Tensors:
    def tensors(self) -> Iterator[torch.Tensor]:
        for own in fields(self):
            value = getattr(self, own.name)
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, _Tensors):
                yield from value.tensors()

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed: dict[str, Any] = {}
        for own in fields(self):
            value = getattr(self, own.name)
            if isinstance(value, torch.Tensor):
                changed[own.name] = change(value)
            elif isinstance(value, _Tensors):
                changed[own.name] = value.each(change)
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class Segments(_Tensors):
    """The row of a micro-batch: T tokens, a segment per example, and perhaps a last one of padding."""

    input_ids: torch.Tensor  # (1, T) token ids
    position_ids: torch.Tensor  # (1, T) position of each token in its segment
    token_type_ids: torch.Tensor | None  # (1, T) 1 in the second text of a pair; None when all is one text
    cu_seqlens: torch.Tensor  # (K + 1,) int32, segment k is `[cu_seqlens[k], cu_seqlens[k + 1])`
    first: torch.Tensor  # (B,) place of each example's first token in the row
    places: torch.Tensor  # (N,) place in the flattened (B, S) batch of each example's token, in row order
    guessed: torch.Tensor | None  # (M,) places in the row of `Batch.guessed`, in the same order
    lengths: tuple[int, ...]  # Tokens of each segment, on the host: no layer has to wait for them
    at_most: int | None = None  # Bound of the segments of all rows of this shape; None = this row's longest

    @property
    def longest(self) -> int:
        return max(self.lengths) if self.at_most is None else self.at_most

    def counted(self, pad_id: int) -> torch.Tensor:
        """(1, T) number of each token in its segment, from 1; padding, also within texts, is 0."""
        counts = (self.input_ids != pad_id).long()
        before = counts.cumsum(1) - counts
        places = torch.arange(counts.shape[1], device=counts.device)
        return (before - before.gather(1, places - self.position_ids) + 1) * counts

    def unpack(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns values (1, T, ...) of the row's tokens as (B, S, ...), 0 on padding."""
        flat = values.new_zeros((shape.numel(), *values.shape[2:]))
        placed = flat.index_copy(0, self.places, values[0, : self.places.shape[0]])
        return torch.unflatten(placed, 0, tuple(shape))


@dataclass(frozen=True, slots=True)
class Batch(_Tensors):
    """One micro-batch.

    Attributes:
        guessed: (M,) ascending positions in the flattened batch whose label is not `IGNORED`; None where
            nothing is guessed. Made on the CPU: a GPU's host waits for a size that depends on the data.
        segments: The same examples as one row, which encoders that pack read in place of (B, S); None = not
            packed. Heads give logits for (B, S) all the same, so that losses and scores see one shape.
    """

    input_ids: torch.Tensor  # (B, S) token ids
    attention_mask: torch.Tensor | None  # (B, S) bool, False on padding; None when nothing is padded
    token_type_ids: torch.Tensor | None  # (B, S) 1 in the second text of a pair; None when all is one text
    labels: torch.Tensor  # (B, ...) classes, numbers or spans, or (B, S) classes of tokens or guessed tokens
    rows: torch.Tensor  # (B,) number of each example in its part
    examples: int  # Examples that count; 0 for the stand-in of a worker without a share
    tokens: int  # Real tokens
    padded_tokens: int  # Positions that the encoder computes: B x S, or the row of `segments`
    teacher_logits: torch.Tensor | None = None  # Cached, in the head's shape, fp32
    guessed: torch.Tensor | None = None
    weights: torch.Tensor | None = None  # (B, ...) fp32 factors of each label's loss; None = 1
    segments: Segments | None = None

    def to(self, device: torch.device) -> Batch:
        if device.type == self.input_ids.device.type:
            return self
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self, device: torch.device) -> Batch:
        """Returns the same batch in memory that the device copies from while the host continues."""
        pinning = kind_of(device).backend.pinning(device)
        if pinning is None:
            return self
        with pinning:
            return self.each(torch.Tensor.pin_memory)

    def guesses_of_sequence(self) -> torch.Tensor:
        assert self.guessed is not None
        of_sequences = (self.labels != IGNORED).sum(1)
        return of_sequences.index_select(0, self.guessed // self.labels.shape[1])

    @property
    def computed_shape(self) -> torch.Size:
        """Shape of the token ids that the encoder reads: (B, S), or (1, T) of a packed batch."""
        return self.input_ids.shape if self.segments is None else self.segments.input_ids.shape

    def padded(self) -> Batch:
        """Returns the same batch without its row, for a model that does not pack."""
        return replace(self, segments=None)

    def unpacked(self, values: torch.Tensor) -> torch.Tensor:
        """Returns an encoder's values of tokens, (B, S, ...) or (1, T, ...), as (B, S, ...)."""
        return values if self.segments is None else self.segments.unpack(values, self.input_ids.shape)

    @property
    def shape(self) -> Hashable:
        """Equal for batches that fit into the same memory and are computed by the same kernels."""
        tensors = tuple((tensor.shape, tensor.dtype) for tensor in self.tensors())
        present = tuple(getattr(self, own.name) is not None for own in fields(self))
        return tensors, present, self.examples > 0, None if self.segments is None else self.segments.longest

    def empty_on(self, device: torch.device) -> Batch:
        return self.each(lambda tensor: torch.empty_like(tensor, device=device))

    def fill(self, other: Batch) -> None:
        """Copies the tensors of a batch of this shape, not the numbers known on the host."""
        for own, others in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(others, non_blocking=True)

    def uncounted(self) -> Batch:
        """Returns the same batch as a stand-in: it is computed, and neither loss nor gradients count."""
        return replace(self, examples=0, tokens=0, padded_tokens=0)


class Transform(Protocol):
    """A pure change of batches on the CPU, such as masking; seed and epoch (0-based) are 0 for validation."""

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch: ...


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one replica computes in one step; `global_examples` over all replicas normalise the loss."""

    micro_batches: list[Batch]
    global_examples: int

    def pinned(self, device: torch.device) -> StepBatch:
        return replace(self, micro_batches=[micro.pinned(device) for micro in self.micro_batches])


def collate(data: TokenSet, rows: Indices, pad_id: int, multiple: int) -> Batch:
    """Pads examples to their longest, rounded up to a multiple."""
    offsets = data.offsets
    lengths = offsets[rows + 1] - offsets[rows]
    longest = int(lengths.max())
    width = -(-longest // multiple) * multiple

    def padded(values: npt.NDArray[np.integer], filling: int) -> npt.NDArray[np.int64]:
        table = np.full((len(rows), width), filling, dtype=np.int64)
        for i, row in enumerate(rows):
            table[i, : lengths[i]] = values[offsets[row] : offsets[row + 1]]
        return table

    ids = padded(data.tokens, pad_id)
    labels = data.labels[rows] if data.token_labels is None else padded(data.token_labels, IGNORED)
    tokens = int(lengths.sum())
    real = np.arange(width) < lengths[:, None]
    types = None
    if data.second_at is not None:
        second = real & (np.arange(width) >= data.second_at[rows][:, None])
        types = torch.from_numpy(second.astype(np.int64))
    return Batch(
        torch.from_numpy(ids),
        None if tokens == ids.size else torch.from_numpy(real),
        types,
        torch.from_numpy(labels),
        torch.from_numpy(np.ascontiguousarray(rows)),
        len(rows),
        tokens,
        ids.size,
        weights=None if data.weights is None else torch.from_numpy(data.weights[rows]),
    )


@dataclass
class TrainingBatches:
    data: TokenSet
    _: KW_ONLY
    seed: int
    global_size: int
    micro_size: int
    replica: int
    replicas: int
    pad_id: int
    multiple: int  # Widths are rounded up to a multiple of it
    transform: Transform | None = None
    micro_tokens: int | None = None  # Limits the positions of a micro-batch in place of `micro_size`
    packs: bool = False  # The encoder computes no padding: replicas get equally many tokens

    def __post_init__(self) -> None:
        self._lengths = self.data.lengths
        self._epoch, self._detour = -1, 0
        self._order: Indices = np.empty(0, dtype=np.int64)
        self.steps_per_epoch = -(-len(self.data) // self.global_size)

    def take_detour(self, number: int) -> None:
        """Visits examples in another order from now on, so that no batch ahead repeats an earlier one.

        The current epoch is then no longer one pass: some examples are left out and some come again. 0 = the
        first order.
        """
        self._epoch, self._detour = -1, number

    def rows(self, step: int) -> Indices:
        """Examples of a step over all workers, ascending by length except in an epoch's last batch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = epoch_order(self._lengths, self.seed, epoch, self.global_size, self._detour)
            self._epoch = epoch
        return self._order[place * self.global_size : (place + 1) * self.global_size]

    def __getitem__(self, step: int) -> StepBatch:
        rows = self.rows(step)
        epoch = step // self.steps_per_epoch
        share = rows[self._places(rows)]
        if not len(share):
            # A short last batch leaves this replica without examples, but gradients are averaged
            # over all replicas: it computes one that counts nothing.
            return StepBatch([self._collate(rows[:1], epoch).uncounted()], len(rows))
        return StepBatch([self._collate(micro, epoch) for micro in self._divided(share)], len(rows))

    def _places(self, rows: Indices) -> Indices | slice:
        if self.packs:
            return balanced_shares(self._lengths[rows], self.replicas)[self.replica]
        # Every `replicas`-th, so that all are as wide.
        return slice(self.replica, None, self.replicas)

    def _divided(self, share: Indices) -> Iterator[Indices]:
        if self.micro_tokens is None:
            starts = range(0, len(share), self.micro_size)
            return (share[start : start + self.micro_size] for start in starts)
        lengths = self._lengths[share].tolist()
        edges = by_positions(lengths, self.micro_tokens, self.multiple, padded=not self.packs)
        return (share[start:end] for start, end in pairwise(edges))

    def _collate(self, rows: Indices, epoch: int) -> Batch:
        batch = collate(self.data, rows, self.pad_id, self.multiple)
        return batch if self.transform is None else self.transform(batch, seed=self.seed, epoch=epoch)


def balanced_shares(lengths: npt.NDArray[np.int64], replicas: int) -> list[Indices]:
    """Returns each replica's examples: in rounds, the longest to the one with the fewest tokens."""
    order = np.argsort(-lengths, kind="stable")
    totals = np.zeros(replicas, dtype=np.int64)
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for start in range(0, len(order), replicas):
        dealt = order[start : start + replicas]
        receivers = np.argsort(totals, kind="stable")[: len(dealt)]
        totals[receivers] += lengths[dealt]
        for place, receiver in zip(dealt.tolist(), receivers.tolist(), strict=True):
            shares[receiver].append(place)
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


def by_positions(lengths: Sequence[int], at_most: int, multiple: int, *, padded: bool) -> list[int]:
    """Returns the edges of the largest micro-batches of neighbours with at most so many positions.

    Widths and rows are rounded up to a multiple; `padded` ones are as wide as their longest example.
    """
    edges, longest, tokens = [0], 0, 0
    for place, length in enumerate(lengths):
        longest, tokens = max(longest, length), tokens + length
        count = place + 1 - edges[-1]
        width, rows = (longest, count) if padded else (tokens, 1)
        if count > 1 and rows * -(-width // multiple) * multiple > at_most:
            edges.append(place)
            longest = tokens = length
    return [*edges, len(lengths)]


def evaluation_rows(lengths: npt.NDArray[np.int64], batch_size: int, rank: int, world: int) -> list[Indices]:
    """Returns a worker's batches of similar length, longest first; all get as many, some perhaps empty."""
    order = np.argsort(-lengths, kind="stable")
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches += [order[:0]] * (-len(batches) % world)
    return batches[rank::world]


class Prefetcher(Generic[T]):
    """Calls `make(step)` for consecutive steps ahead of their use; making a batch draws no random numbers."""

    def __init__(self, make: Callable[[int], T], start: int, end: int) -> None:
        self._make, self._steps = make, iter(range(start, end))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stillhouse-batches")
        self._ahead: deque[Future[T]] = deque()
        for _ in range(AHEAD):
            self._begin()

    def next(self) -> T:
        item = self._ahead.popleft().result()
        self._begin()
        return item

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        if (step := next(self._steps, None)) is not None:
            self._ahead.append(self._thread.submit(self._make, step))
