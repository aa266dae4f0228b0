"""How a training run communicates: it reports through a `Sink` and polls a `Stop`.

The loop never checks whether there is a receiver: `NullSink` and `NeverStop` are the null forms.
Only the worker of rank 0 has a real sink unless a method says otherwise.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol


class Provenance(StrEnum):
    """How a measurement came to be; different provenances never mix in one number."""

    counter = "counter"  # Read from a hardware or operating-system counter, or a clock
    sampled = "sampled"  # Integrated from samples
    modelled = "modelled"  # Computed from rated power, price or another assumption


Better = Literal["lower", "higher"]
Share = Literal["all", "some"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that a run reports."""

    unit: str  # Empty for words
    provenance: Provenance | None = Provenance.counter  # None = recorded by the run (energy)
    scope: str = "run"
    better: Better | None = None  # Winning direction; None = neither, or it depends on the question
    share: Share | None = None
    """A mean of values between 0 and 1 of each unit of the evaluated part: over `all` of them, or over
    `some`, such as the questions that have an answer; None = not such a mean."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A quantity with a unit over a window, in Unix time."""

    name: str  # Ends with its unit, such as `train_time_s`
    value: float
    unit: str  # Such as `kWh`, `MiB` or `1/s`
    provenance: Provenance
    scope: str  # Extent that it covers, such as `run` or `worker:0`
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """One metric value at one step. NaN and infinities are allowed and kept."""

    name: str
    step: int
    value: float
    at_s: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What happened before `train` was called; the run's own time begins later."""

    opened_s: float = field(default_factory=time.time)  # When the attempt was opened, Unix time
    submitted_s: float | None = None  # When the run was submitted; None = not known
    checkpoint_step: int | None = None  # Of the run's last checkpoint on record; None = there is none
    lives: tuple[tuple[float, float], ...] = ()  # Unix times when earlier attempts began and were last alive


class StopReason(StrEnum):
    """Why a run is asked to end before its length is reached."""

    cancel = "cancel"
    pause = "pause"
    early_stop = "early_stop"
    preempted = "preempted"


class Stop(Protocol):
    """Polled at each step boundary; must return at once."""

    def requested(self) -> StopReason | None: ...


class Fence(Protocol):
    """Which attempt at a run this is. Numbers only grow, and a later attempt shuts out all earlier ones."""

    @property
    def attempt(self) -> int: ...

    def holds(self) -> bool:
        """Whether this is still the current attempt, as far as can be known now; may block for seconds."""


@dataclass(frozen=True, slots=True)
class OnlyAttempt:
    attempt: int = 1

    def holds(self) -> bool:
        return True


Level = Literal["debug", "info", "warning", "error"]
Stream = Literal["log", "stdout", "stderr"]


class Sink:
    """Where a run's facts go; the base class drops them. No method blocks the loop or raises."""

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        """Called once, before the first step; resumed from step 0 = from the beginning.

        The facts are for reproducibility: versions, commit, data fingerprint, parameters, threads, ...
        """

    def points(self, points: Sequence[Point]) -> None:
        """Metric values; (name, step) is unique within an attempt."""

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        """Phase is `preparing`, `training`, `validating`, `saving` or `testing`."""

    def measurement(self, measurement: Measurement) -> None: ...

    def log(self, level: Level, message: str, stream: Stream = "log") -> None:
        """Takes a line of its own (`log`), or one that was written to stdout or stderr."""

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        """A checkpoint is complete on disk (manifest renamed into place)."""

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything reported is acknowledged; False when time ran out."""
        return True


class NullSink(Sink):
    """A sink without a receiver."""


class NeverStop:
    def requested(self) -> StopReason | None:
        return None


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How a call of `train` ended; returned on every rank, figures on rank 0."""

    status: Literal["completed", "stopped"]  # `completed` when the whole length was trained, else `stopped`
    stop_reason: StopReason | None  # Set when stopped
    step: int  # The last finished step
    total_steps: int  # Steps of the whole run
    summary: Mapping[str, float | int | str | None]  # Final figures by name, see `docs/metrics.md`
    checkpoint: str | None  # Path of the last verified checkpoint, if any
