"""A worker's passes, recorded once for each shape of a micro-batch and then replayed.

Launching the kernels of a small model takes the host longer than computing them takes a GPU. A recording
(`device_kinds.backend.PassRecorder`; on a GPU a CUDA graph) gives the device all of a pass at once. It
reads and writes the same memory each time, so whatever differs from one micro-batch to the next is copied
there first: the batch, the factor of the loss, and the seeds of dropout, which are drawn from torch's CPU
generator in the order in which passes that are not recorded draw them. Gradients have memory that stays: a
step's first backward pass writes it, and the others add to it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import SimpleNamespace

import torch
from torch import nn

from cuda_ext import encoder
from trainers.data.batches import Batch, StepBatch
from trainers.device_kinds import kind_of
from trainers.parallel.exchange import exchange_for
from trainers.parallel.replica import LossOf, Replica, Setup
from trainers.telemetry.timeline import Phase, Sent

_MOST_SEEDS = 4096  # Seeds of one pass at most: a fused layer takes three
_STEPS_AHEAD = 512  # Steps whose shapes are recorded before the first of them
_ALIGNED = 64  # Gradients begin at multiples of this many elements, so that kernels read them in wide words


@dataclass(frozen=True, slots=True)
class _Recording:
    """Replays the passes of one shape; a step's first micro-batch has a backward pass of its own."""

    forward: Callable[[], None]
    first: Callable[[], None]
    further: Callable[[], None]
    loss: torch.Tensor  # Output of `forward`, summed over examples


@dataclass(slots=True)
class _Passes:
    batch: Batch  # Memory of their tensors
    seeds: int = 0  # Number that a forward pass takes
    recording: _Recording | None = None  # None = not recorded yet


class RecordedReplica(Replica):
    """A model whose passes are recorded.

    Shapes of the coming steps are recorded before the first of them. Of any other shape the first micro-batch
    is computed as without recordings, and the second is recorded. Steps whose gradients are looked at one by
    one, by hooks that a replay does not call, are not replayed.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._noise, self._accumulates = setup.noise, setup.accumulates
        self._recorder = kind_of(self._device).backend.recorder(self._device)
        self._factor = torch.zeros((), dtype=torch.float32, device=self._device)
        self._seeds = _Seeds(self._device)
        self._passes: dict[Hashable, _Passes] = {}
        self._trained = self.counted()
        self._sums = _GradientMemory()
        self._first = True

    def prepare(self, steps: Iterable[StepBatch], loss_of: LossOf) -> None:
        batches: dict[Hashable, Batch] = {}
        for step in islice(steps, _STEPS_AHEAD):
            for batch in step.micro_batches:
                batches.setdefault(batch.shape, batch)
        # The largest first: what they leave free in the recordings' memory, others use.
        for shape, batch in sorted(batches.items(), key=lambda item: -item[1].padded_tokens):
            passes = self._passes[shape] = self._counted(batch, loss_of)
            with kind_of(self._device).backend.keep_random_state(self._device):
                # Kernels are loaded and chosen when they first run, which may not be in a recording.
                loss = self._forwarded(passes, loss_of)
                self._recorder.rehearse(partial(self._backward, loss, first=True))
            passes.recording = self._recorded(passes, loss_of)

    def gradients(self, batch: StepBatch, loss_of: LossOf, scale: float | torch.Tensor) -> torch.Tensor:
        self._first = True
        loss_sum = super().gradients(batch, loss_of, scale)
        self._sums.hand_out()
        return loss_sum

    def _forward_backward(self, batch: Batch, loss_of: LossOf, factor: float | torch.Tensor) -> torch.Tensor:
        shape = batch.shape
        passes = self._passes.get(shape)
        new = passes is None
        if passes is None:
            with self._timeline.within(Phase.warm_up):
                passes = self._passes[shape] = self._counted(batch, loss_of)
        passes.batch.fill(batch)
        self._factor.copy_(factor) if isinstance(factor, torch.Tensor) else self._factor.fill_(factor)
        self._seeds.draw(passes.seeds)
        replays = not (new or self._noise.looks)
        if replays and passes.recording is None:
            with self._timeline.within(Phase.warm_up):
                passes.recording = self._recorded(passes, loss_of)
        self._timeline.enter(Phase.forward)
        if replays and passes.recording is not None:
            loss = passes.recording.loss
            passes.recording.forward()
            self._timeline.enter(Phase.backward)
            (passes.recording.first if self._first else passes.recording.further)()
        else:
            loss = self._forwarded(passes, loss_of)
            self._timeline.enter(Phase.backward)
            self._recorder.rehearse(partial(self._backward, loss, first=self._first))
        self._first = False
        return loss.detach()

    def _counted(self, batch: Batch, loss_of: LossOf) -> _Passes:
        """Returns the passes of a new shape, after a forward pass that shows how many seeds it takes."""
        passes = _Passes(batch.empty_on(self._device))
        passes.batch.fill(batch)
        with torch.no_grad(), kind_of(self._device).backend.keep_random_state(self._device):
            self._forwarded(passes, loss_of)
        passes.seeds = self._seeds.taken
        return passes

    def _loss(self, passes: _Passes, loss_of: LossOf) -> torch.Tensor:
        with self._seeds.handed_out(), self._arithmetic.context():
            return loss_of(self._forward(passes.batch), passes.batch)

    def _forwarded(self, passes: _Passes, loss_of: LossOf) -> torch.Tensor:
        return self._recorder.rehearse(lambda: self._loss(passes, loss_of))

    def _backward(self, loss: torch.Tensor, *, first: bool, repeats: bool = False) -> None:
        """Writes the gradients of a step's first micro-batch, or adds those of another."""
        found = torch.autograd.grad(
            loss * self._factor, self._trained, retain_graph=repeats, allow_unused=True
        )
        self._sums.take(self._trained, found, first=first)

    def _recorded(self, passes: _Passes, loss_of: LossOf) -> _Recording:
        loss, forward = self._recorder.record(lambda: self._loss(passes, loss_of))
        again = self._accumulates
        _, first = self._recorder.record(partial(self._backward, loss, first=True, repeats=again))
        further = first
        if again:
            _, further = self._recorder.record(partial(self._backward, loss, first=False))
        return _Recording(forward, first, further, loss.detach())


class RecordedDistributedReplica(RecordedReplica):
    """A recorded replica of several; gradients are averaged afterwards, by an exchange without state."""

    name = "ddp"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._exchange = exchange_for(setup.config, setup.module, setup.optimizer, setup.total_steps)
        self._bytes_before = self._exchange.bytes_sent

    def begin_step(self, step: int, loss_scale: float) -> None:
        self._exchange.begin_step(step, loss_scale)
        self._noise.faithful = self._exchange.faithful

    def gradients(self, batch: StepBatch, loss_of: LossOf, scale: float | torch.Tensor) -> torch.Tensor:
        loss_sum = super().gradients(batch, loss_of, scale)
        self._timeline.enter(Phase.communication)
        for memory in self._sums.whole:
            self._noise.see(memory)
        # As `torch.distributed.GradBucket`: all gradients of a format.
        buckets = [SimpleNamespace(buffer=lambda memory=memory: memory) for memory in self._sums.whole]
        for reduced in [self._exchange.start(bucket) for bucket in buckets]:
            reduced.wait()
        return loss_sum

    def launched(self) -> Callable[[], Sent]:
        before, self._bytes_before = self._bytes_before, self._exchange.bytes_sent
        sent = Sent(self._bytes_before - before)
        return lambda: sent


class _GradientMemory:
    """Memory of a step's gradients, the same in all steps; `whole` has all of a format in one tensor."""

    def __init__(self) -> None:
        self.whole: list[torch.Tensor] = []
        self._used: list[nn.Parameter] = []
        self._parts: list[torch.Tensor] = []

    def take(
        self, trained: list[nn.Parameter], found: tuple[torch.Tensor | None, ...], *, first: bool
    ) -> None:
        """Writes gradients, or adds them; those of parameters without any are None."""
        gradients = [gradient for gradient in found if gradient is not None]
        if not self._parts:
            self._used = [p for p, gradient in zip(trained, found, strict=True) if gradient is not None]
            self._lay_out()
        (torch._foreach_copy_ if first else torch._foreach_add_)(self._parts, gradients)

    def hand_out(self) -> None:
        for parameter, part in zip(self._used, self._parts, strict=True):
            parameter.grad = part

    def _lay_out(self) -> None:
        places: list[tuple[torch.dtype, int]] = []
        sizes: Counter[torch.dtype] = Counter()
        for parameter in self._used:
            places.append((parameter.dtype, sizes[parameter.dtype]))
            sizes[parameter.dtype] += -(-parameter.numel() // _ALIGNED) * _ALIGNED
        device = self._used[0].device
        memory = {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.whole = list(memory.values())
        self._parts = [
            memory[dtype][begin : begin + parameter.numel()].view(parameter.shape)
            for parameter, (dtype, begin) in zip(self._used, places, strict=True)
        ]


class _Seeds:
    """Seeds of a pass, in memory that its kernels read whenever it is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there = torch.zeros(_MOST_SEEDS, dtype=torch.int64, device=device)
        self.taken = 0  # How many the last pass took

    def draw(self, count: int) -> None:
        if count:
            seeds = encoder.fresh_seeds(count)
            self._there[:count].copy_(kind_of(self._device).backend.send(seeds, self._device))

    def handed_out(self) -> AbstractContextManager[None]:
        self.taken = 0
        return encoder.seeds_from(self._take)

    def _take(self) -> torch.Tensor:
        self.taken += 1
        return self._there[self.taken - 1]
