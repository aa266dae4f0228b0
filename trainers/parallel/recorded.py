"""Passes of one worker that are recorded once for each shape of a micro-batch, and then replayed.

Launching the kernels of a small model takes the host longer than computing them takes a GPU. A recording
(`trainers.device_kinds.backend.Recorder`; on a GPU a CUDA graph) gives the device all of a pass at once. It
reads and writes the same memory each time, so whatever differs from one micro-batch to the next is copied
there first: the batch, the factor of the loss, and the seeds of dropout, which are drawn from torch's CPU
generator in the order in which passes that are not recorded draw them. Gradients are added to memory that
stays (`keeps_gradients`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from cuda_ext import encoder
from trainers.data.batches import Batch
from trainers.device_kinds import kind_of
from trainers.models.student import Student
from trainers.parallel.replica import LossOf, Replica
from trainers.telemetry.gradient_noise import NoiseSource
from trainers.telemetry.timeline import Phase

_MOST_SEEDS = 4096
"""Seeds of one pass at most: a fused layer takes three."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """What replays the passes of one shape.

    Attributes:
        forward, backward: replay them.
        loss: where `forward` leaves the loss, summed over examples.
    """

    forward: Callable[[], None]
    backward: Callable[[], None]
    loss: torch.Tensor


@dataclass(slots=True)
class _Passes:
    """Forward and backward pass for micro-batches of one shape.

    Attributes:
        batch: memory of their tensors.
        seeds: how many a forward pass takes.
        recording: None = they are not recorded yet.
    """

    batch: Batch
    seeds: int = 0
    recording: _Recording | None = None


class RecordedReplica(Replica):
    """A model that no one shares, whose passes are recorded.

    The first micro-batch of a shape is computed as without recordings, and so are steps whose gradients are
    looked at one by one; the second is recorded.

    Args:
        student, module, place: see `Replica`.
        noise: looks at gradients by hooks, which a replay does not call.
    """

    keeps_gradients = True

    def __init__(self, student: Student, module: nn.Module, *, noise: NoiseSource, **place: Any) -> None:
        super().__init__(student, module, **place)
        self._noise = noise
        self._recorder = kind_of(self._device).backend.recorder(self._device)
        self._factor = torch.zeros((), dtype=torch.float32, device=self._device)
        self._seeds = _Seeds(self._device)
        self._passes: dict[Hashable, _Passes] = {}

    @override
    def _forward_backward(self, batch: Batch, loss_of: LossOf, factor: float | torch.Tensor) -> torch.Tensor:
        shape = batch.shape
        passes = self._passes.get(shape)
        first = passes is None
        if passes is None:
            with self._timeline.within(Phase.warm_up):
                passes = self._passes[shape] = self._counted(batch, loss_of)
        passes.batch.fill(batch)
        self._factor.copy_(factor) if isinstance(factor, torch.Tensor) else self._factor.fill_(factor)
        self._seeds.draw(passes.seeds)
        if first or self._noise.looks:
            return self._computed(passes, loss_of)
        if passes.recording is None:
            with self._timeline.within(Phase.warm_up):
                passes.recording = self._recorded(passes, loss_of)
        return self._replayed(passes.recording)

    def _counted(self, batch: Batch, loss_of: LossOf) -> _Passes:
        """Returns the passes of a new shape, after a forward pass that shows how many seeds it takes."""
        passes = _Passes(batch.empty_on(self._device))
        passes.batch.fill(batch)
        with torch.no_grad(), kind_of(self._device).backend.keep_random_state(self._device):
            self._recorder.rehearse(lambda: self._loss(passes, loss_of))
        passes.seeds = self._seeds.taken
        return passes

    def _loss(self, passes: _Passes, loss_of: LossOf) -> torch.Tensor:
        with self._seeds.handed_out(), self._arithmetic.context():
            return loss_of(self._forward(passes.batch), passes.batch)

    def _computed(self, passes: _Passes, loss_of: LossOf) -> torch.Tensor:
        self._timeline.enter(Phase.forward)
        loss = self._recorder.rehearse(lambda: self._loss(passes, loss_of))
        self._timeline.enter(Phase.backward)
        self._recorder.rehearse(lambda: self._backward(loss))
        return loss.detach()

    def _backward(self, loss: torch.Tensor) -> None:
        (loss * self._factor).backward()  # type: ignore[no-untyped-call]

    def _recorded(self, passes: _Passes, loss_of: LossOf) -> _Recording:
        loss, forward = self._recorder.record(lambda: self._loss(passes, loss_of))
        _, backward = self._recorder.record(lambda: self._backward(loss))
        return _Recording(forward, backward, loss.detach())

    def _replayed(self, recording: _Recording) -> torch.Tensor:
        self._timeline.enter(Phase.forward)
        recording.forward()
        self._timeline.enter(Phase.backward)
        recording.backward()
        return recording.loss


class _Seeds:
    """Seeds of a pass, in memory that its kernels read whenever it is replayed.

    Args:
        device: Device of the kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._there = torch.zeros(_MOST_SEEDS, dtype=torch.int64, device=device)
        self.taken = 0
        """How many the last pass took."""

    def draw(self, count: int) -> None:
        """Draws the next pass' seeds."""
        if count:
            seeds = encoder.fresh_seeds(count)
            self._there[:count].copy_(kind_of(self._device).backend.send(seeds, self._device))

    @contextmanager
    def handed_out(self) -> Iterator[None]:
        """Around a forward pass: its kernels take these."""
        self.taken = 0
        with encoder.seeds_from(self._take):
            yield

    def _take(self) -> torch.Tensor:
        self.taken += 1
        return self._there[self.taken - 1]
