"""One step: the numbers that all workers must agree on, and their way to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch

from trainers.data.batches import StepBatch
from trainers.device_kinds import kind_of
from trainers.reporting import StopReason
from trainers.telemetry.timeline import Sent

Number = float | torch.Tensor
N = TypeVar("N")
M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class StepSums(Generic[N]):
    """One worker's part of a step, or the sums over all workers, which are the same on each."""

    loss_sum: N
    squares: N  # Squared L2 norm of the gradients, which carry the loss scale
    tokens: N
    padded_tokens: N
    noise: N  # Sum of squared norms of the gradient's parts
    underflow_pct: N  # Of rank 0's gradients, in a step that reports it
    checkpoint_due: N  # Workers for which a checkpoint is due
    checkpoint_whole: N  # Workers for which the checkpoint in flight is complete
    stops: tuple[N, ...]  # Workers that ask to stop, by reason
    objective: tuple[N, ...]  # See `Objective.local_sums`

    def numbers(self) -> list[N]:
        scalars = [getattr(self, one.name) for one in fields(self)[:-2]]
        return [*scalars, *self.stops, *self.objective]

    def with_numbers(self, numbers: Sequence[M]) -> StepSums[M]:
        """Returns the record with other `numbers`, in the same order."""
        names = [one.name for one in fields(self)[:-2]]
        scalars: dict[str, Any] = dict(zip(names, numbers, strict=False))
        rest, stops = numbers[len(names) :], len(self.stops)
        return StepSums(**scalars, stops=tuple(rest[:stops]), objective=tuple(rest[stops:]))


def is_finite(sums: StepSums[float]) -> bool:
    return math.isfinite(sums.loss_sum) and math.isfinite(sums.squares)


def stop_reason(sums: StepSums[float]) -> StopReason | None:
    return next((reason for reason, votes in zip(StopReason, sums.stops, strict=True) if votes), None)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose numbers the host may not have read yet."""

    batch: StepBatch
    rate: float  # Learning rate
    reports_underflow: bool
    timed: bool  # Whether its time counts in the rates
    sent: Callable[[], Sent]  # Returns the cost of its gradient exchange, once the host has waited for it
    sums: StepSums[Number]  # This worker's part, or the sums over all workers on the device
    transfer: Transfer | None = None  # The sums on their way to the host; None = they are read at once


class Transfer:
    """Begins to copy numbers and device scalars to the host without waiting."""

    def __init__(self, values: Sequence[Number], device: torch.device) -> None:
        backend = kind_of(device).backend
        self._values, self._backend = values, backend
        there = torch.stack([value.double() for value in values if isinstance(value, torch.Tensor)])
        self._here = backend.host_memory(there.shape, there.dtype)
        self._here.copy_(there, non_blocking=True)
        self._arrival = backend.moment(device)

    def read(self) -> list[float]:
        """Returns the numbers in order; waits until those of the device have arrived."""
        self._backend.wait(self._arrival)
        arrived = iter(self._here.tolist())
        return [next(arrived) if isinstance(value, torch.Tensor) else value for value in self._values]
