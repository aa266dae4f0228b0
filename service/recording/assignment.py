"""What the driver and a trial exchange, from a run's turn to its ending."""

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
    """A run whose turn has come: it waits for a place in the cluster, and gets an attempt only there.

    Attributes:
        number: number of this turn in its sweep.
        attempt: number that its next attempt will have.
        shape: resources taken from the cluster.
        isolated: its processes serve no other run, before or after.
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
        at_s: Unix time of the first such report; reused processes repeat it.
    """

    placement: str | None
    at_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one run, opened for workers that are ready.

    Attributes:
        clock: when the run was submitted and the attempt opened.
    """

    turn: Turn
    attempt: int
    clock: Clock = field(default_factory=Clock)

    @property
    def run_id(self) -> int:
        return self.turn.run_id

    @property
    def config(self) -> RunConfig:
        return self.turn.config

    @property
    def shape(self) -> Shape:
        return self.turn.shape


@dataclass(frozen=True, slots=True)
class Grant:
    """The driver's answer to `Ready`; None = the run should no longer be trained."""

    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, according to its worker.

    Attributes:
        kind: trained to its length, stopped at a step boundary, or failed.
        summary: final figures, for `completed` and `stopped`.
        failure: class and one line, for `failed`.
    """

    kind: Literal["completed", "stopped", "failed"]
    stop_reason: StopReason | None = None
    summary: Mapping[str, float | int | str | None] = field(default_factory=dict)
    failure: tuple[FailureClass, str] | None = None
