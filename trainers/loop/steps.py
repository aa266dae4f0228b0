"""One step: its sums over all workers, and a step whose sums are still in transit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trainers.data.batches import StepBatch
from trainers.loop.transfer import Transfer
from trainers.reporting import StopReason
from trainers.telemetry.timeline import Sent


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums of a step over all workers, the same on each.

    Attributes:
        loss_sum: Over the global batch.
        squares: Squared L2 norm of the gradients, which carry the loss scale.
        noise: Sum of squared norms of the gradient's parts.
        underflow_pct: Of rank 0's gradients, in a step that reports it.
    """

    loss_sum: float
    squares: float
    tokens: int
    padded_tokens: int
    noise: float
    underflow_pct: float
    stop: StopReason | None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.squares)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose numbers the host may not have read yet.

    Attributes:
        rate: Learning rate.
        timed: Whether its time counts in the rates.
        sent: Returns the cost of its gradient exchange, once the host has waited for it.
        transfer: Its numbers on their way to the host; None = they were read at once.
    """

    batch: StepBatch
    rate: float
    reports_underflow: bool
    timed: bool
    sent: Callable[[], Sent]
    transfer: Transfer | None = None
