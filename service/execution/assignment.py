"""What the driver gives to a trial, and what comes back when the trial has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from service.execution.run_plan import Shape
from trainers.config import RunConfig
from trainers.errors import FailureClass
from trainers.reporting import Clock, StopReason


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one run, for one trial.

    Attributes:
        run_id: the run.
        attempt: the attempt that was opened for it.
        config: what to train.
        shape: what it takes from the cluster.
        isolated: it has processes of its own, used for nothing before or after it.
        clock: when the run was submitted and the attempt opened.
    """

    run_id: int
    attempt: int
    config: RunConfig
    shape: Shape
    isolated: bool
    clock: Clock = field(default_factory=Clock)


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, as its worker saw it.

    Attributes:
        kind: trained to its length, stopped at a step boundary, or failed.
        stop_reason: for `stopped`.
        summary: final figures, for `completed` and `stopped`.
        failure: class and one line, for `failed`.
    """

    kind: Literal["completed", "stopped", "failed"]
    stop_reason: StopReason | None = None
    summary: Mapping[str, float | int | str | None] = field(default_factory=dict)
    failure: tuple[FailureClass, str] | None = None
