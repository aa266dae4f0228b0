"""Pipelines by `torch.distributed.pipelining`: its schedules over this worker's chunks.

Hidden states travel as one flat tensor each, of one size for all micro-batches of a step: torch's stages
allocate their receive buffers before the passes begin, and batches of a run differ in length.
The rest of each tensor is padding that no layer sees. Sizes are rounded up, so that a run has few
of them and schedules are made once for each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from trainers.data.batches import Batch
from trainers.models.student import Output
from trainers.parallel.pipeline.layers import ModelChunk, sent_dtype
from trainers.parallel.pipeline.replica import PipelineReplica
from trainers.parallel.replica import LossOf, Setup
from trainers.telemetry.timeline import Phase, Timeline

_SIZES = 8
"""Different sizes of hidden states that a run sends at most: one in so many of its greatest is padding."""


@dataclass(slots=True)
class _Step:
    """The step in progress; `capacity` counts the elements of hidden states that are sent."""

    micro_batches: list[Batch]
    loss: Callable[[torch.Tensor, Batch], torch.Tensor]
    capacity: int


class TorchPipeline(PipelineReplica):
    """A stage that runs a schedule of torch: gpipe, 1f1b, interleaved or zero_bubble."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._kind = setup.config.parallel.schedule or "1f1b"
        self._unit = math.ceil(setup.config.micro_size * setup.config.task.max_length / _SIZES)
        self._step: _Step | None = None
        self._ready: dict[tuple[int, int], Any] = {}

    def _run(self, micro_batches: list[Batch], loss_of: LossOf, factor: float) -> torch.Tensor:
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)

        def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
            found = loss_of(Output(logits), batch)
            loss_sum.add_(found.detach())
            return found * factor

        micro_batches = self._completed(micro_batches)
        tokens = max(batch.computed_shape.numel() for batch in micro_batches)
        capacity = self._unit * math.ceil(tokens / self._unit) * self._width
        self._step = _Step(micro_batches, loss, capacity)
        schedule = self._schedule(len(micro_batches), capacity)
        # The batch itself is here already: what goes through torch's hands is its number.
        numbers = torch.arange(len(micro_batches))
        first = (numbers,) if 0 in self._chunks else ()
        target = numbers if len(self._layout.chunks) - 1 in self._chunks else None
        try:
            schedule.step(*first, target=target, return_outputs=False, number=numbers)
        except RuntimeError as error:
            # Around what a pass raised torch puts an error of its own, which lists the stage's input.
            if isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
        self._step = None
        return loss_sum

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "engine": "torch", "schedule": self._kind}

    def _completed(self, micro_batches: list[Batch]) -> list[Batch]:
        """Adds stand-ins if the schedule needs more micro-batches."""
        count, stages = len(micro_batches), self._workers.stages
        if self._kind != "interleaved" or count <= stages:
            return micro_batches
        # Its rounds have a micro-batch for each stage.
        return micro_batches + [micro_batches[-1].uncounted()] * (-count % stages)

    def _schedule(self, count: int, capacity: int) -> Any:
        if (count, capacity) in self._ready:
            return self._ready[count, capacity]
        stages: Any = [self._stage(number, chunk, capacity) for number, chunk in self._chunks.items()]
        options: dict[str, Any] = {"loss_fn": lambda loss, _number: loss, "scale_grads": False}
        kind: Any = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleZBVZeroBubble}.get(
            self._kind
        )
        if kind is None:
            # With fewer micro-batches than stages 1F1B is GPipe, and torch has it by that name alone.
            kind = ScheduleGPipe if self._kind == "gpipe" or count < self._workers.stages else Schedule1F1B
            stages = stages[0]
        self._ready[count, capacity] = kind(stages, count, **options)
        return self._ready[count, capacity]

    def _stage(self, number: int, chunk: ModelChunk, capacity: int) -> PipelineStage:
        with self._arithmetic.context():
            sent = sent_dtype(self._device)
        hidden = torch.empty(capacity, dtype=sent, device=self._device, requires_grad=True)
        last = number + 1 == len(self._layout.chunks)
        return _TimedStage(
            _StageModule(self, chunk, first=number == 0, last=last),
            number,
            len(self._layout.chunks),
            self._device,
            input_args=(torch.zeros(1, dtype=torch.int64),) if number == 0 else (hidden,),
            output_args=(torch.zeros((), device=self._device, requires_grad=True),) if last else (hidden,),
            group=self._groups.line,
            timeline=self._timeline,
        )

    def apply(
        self, chunk: ModelChunk, received: torch.Tensor | None, number: int, *, last: bool
    ) -> torch.Tensor:
        """Runs a chunk over one micro-batch; returns hidden states to send, or the loss on the last chunk."""
        assert self._step is not None
        batch = self._step.micro_batches[number]
        hidden = None
        if received is not None:
            shape = (*batch.computed_shape, self._width)
            hidden = received[: math.prod(shape)].view(shape)
        with self._arithmetic.context():
            hidden = None if hidden is None else hidden.to(self._hidden_dtype())
            after = chunk(hidden, batch)
            if last:
                return self._step.loss(after, batch)
            flat = after.to(sent_dtype(self._device)).reshape(-1)
        return functional.pad(flat, (0, self._step.capacity - flat.numel()))


class _StageModule(nn.Module):
    """A chunk as torch's stages call it: with the number of a micro-batch in place of the batch."""

    def __init__(self, replica: TorchPipeline, chunk: ModelChunk, *, first: bool, last: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._replica, self._first, self._last = replica, first, last

    def forward(self, received: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        hidden = None if self._first else received
        return self._replica.apply(self.chunk, hidden, int(number), last=self._last)


class _TimedStage(PipelineStage):
    """A stage that reports its phases; between its passes it waits for its neighbours."""

    def __init__(self, *args: Any, timeline: Timeline, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timeline = timeline

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(Phase.forward, super().forward_one_chunk, *args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(Phase.backward, super().backward_one_chunk, *args, **options)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        return self._timed(Phase.backward, super().backward_weight_one_chunk, *args, **options)

    def _timed(self, phase: Phase, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self._timeline.enter(phase)
        try:
            return work(*args, **options)
        finally:
            self._timeline.enter(Phase.bubble)
