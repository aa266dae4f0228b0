"""What the driver and a trial say to each other, from a run whose turn has come to how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from service.scheduling.run_plan import Shape
from trainers.config import RunConfig
from trainers.errors import FailureClass
from trainers.reporting import Clock, StopReason


@dataclass(frozen=True, slots=True)
class Turn:
    """A run whose turn has come: it gets a place in the cluster, and only there an attempt.

    Attributes:
        number: Number of this turn in its sweep.
        run_id: the run.
        attempt: number that its next attempt will have.
        config: Configuration to train.
        shape: Resources taken from the cluster.
        isolated: it has processes of its own, used for nothing before or after it.
    """

    number: int
    run_id: int
    attempt: int
    config: RunConfig
    shape: Shape
    isolated: bool

    @property
    def name(self) -> str:
        """Name of its trial, unique in the sweep."""
        return f"run-{self.run_id}-{self.attempt}-{self.number}"


@dataclass(frozen=True, slots=True)
class Ready:
    """A trial's report that its workers could begin at once.

    Attributes:
        placement: Ray's id of the devices that they hold.
        at_s: since when, Unix time; of the first report of processes that are reused.
    """

    placement: str | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one run, opened for workers that are ready.

    Attributes:
        turn: What to train, and where.
        attempt: the attempt that was opened for it.
        clock: when the run was submitted and the attempt opened.
    """

    turn: Turn
    attempt: int
    clock: Clock = field(default_factory=Clock)

    @property
    def run_id(self) -> int:
        """The run."""
        return self.turn.run_id

    @property
    def config(self) -> RunConfig:
        """What to train."""
        return self.turn.config

    @property
    def shape(self) -> Shape:
        """What it takes from the cluster."""
        return self.turn.shape


@dataclass(frozen=True, slots=True)
class Grant:
    """The driver's answer to `Ready`.

    Attributes:
        assignment: Assignment to train; None = the run should no longer be trained.
    """

    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, as its worker saw it.

    Attributes:
        kind: trained to its length, stopped at a step boundary, or failed.
        stop_reason: Reason of `stopped`.
        summary: final figures, for `completed` and `stopped`.
        failure: class and one line, for `failed`.
    """

    kind: Literal["completed", "stopped", "failed"]
    stop_reason: StopReason | None = None
    summary: Mapping[str, float | int | str | None] = field(default_factory=dict)
    failure: tuple[FailureClass, str] | None = None
