"""How a training run talks to the outside: it reports through a `Sink` and asks a `Stop`.

The loop never asks whether somebody listens: `NullSink` and `NeverStop` are the null forms.
Only the worker of rank 0 holds a real sink unless a method says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol


class Provenance(StrEnum):
    """How a measurement came to be; different provenances never mix in one number."""

    counter = "counter"
    """Read from a hardware or operating-system counter, or a clock."""
    sampled = "sampled"
    """Integrated from samples."""
    modelled = "modelled"
    """Computed from rated power, price or another assumption."""


Better = Literal["lower", "higher"]
Share = Literal["all", "some"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that a run reports.

    Attributes:
        unit: Unit of its value; empty for words.
        provenance: Origin of the value; None = recorded by the run (energy).
        scope: Extent that it covers.
        better: Winning direction; None = neither, or it depends on the question.
        share: a mean over what lies between 0 and 1 for each unit of the evaluated part: over `all` of
            them, or over `some`, such as the questions that have an answer; None = it is no such mean.
    """

    unit: str
    provenance: Provenance | None = Provenance.counter
    scope: str = "run"
    better: Better | None = None
    share: Share | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """A quantity with a unit over a window.

    Attributes:
        name: Name with its unit, such as `train_time_s`.
        value: Value in `unit`.
        unit: `s`, `kWh`, `MiB`, `USD`, `1/s`, ...
        provenance: Origin of the value.
        scope: Extent that it covers: `run`, `worker:0`, `device:0`, ...
        start_s, end_s: the window, in Unix time.
    """

    name: str
    value: float
    unit: str
    provenance: Provenance
    scope: str
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
class Clock:
    """When things happened before `train` was called; the run's own time begins later.

    Attributes:
        opened_s: the attempt was opened; in Unix time.
        submitted_s: the run was submitted; None = not known.
    """

    opened_s: float = field(default_factory=time.time)
    submitted_s: float | None = None


class StopReason(StrEnum):
    """Why a run is asked to end before its length is reached."""

    cancel = "cancel"
    pause = "pause"
    early_stop = "early_stop"
    preempted = "preempted"


class Stop(Protocol):
    """Asked at each step boundary; must return at once."""

    def requested(self) -> StopReason | None:
        """Returns the reason to stop now, or None to go on."""
        ...


class Fence(Protocol):
    """Which attempt at a run this is. Numbers only grow, and a later attempt shuts out all earlier ones."""

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        ...

    def holds(self) -> bool:
        """Whether this is still the current attempt, as far as can be known now; may block for seconds."""
        ...


@dataclass(frozen=True, slots=True)
class OnlyAttempt:
    """A fence where there is no other attempt at the same time."""

    attempt: int = 1

    def holds(self) -> bool:
        """Returns True."""
        return True


class Sink(Protocol):
    """Where a run's facts go. No method blocks the loop or raises for a slow receiver."""

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        """Called once, before the first step.

        Args:
            total_steps: optimizer updates of the whole run.
            resumed_from_step: step of the checkpoint that was restored; 0 = from the beginning.
            facts: reproducibility (versions, commit, data fingerprint, parameters, threads, ...).
        """
        ...

    def points(self, points: Sequence[Point]) -> None:
        """Metric values; (name, step) is unique within an attempt."""
        ...

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        """Where the run is: phase is `preparing`, `training`, `validating`, `saving` or `testing`."""
        ...

    def measurement(self, measurement: Measurement) -> None:
        """A quantity over a window."""
        ...

    def log(self, level: Literal["debug", "info", "warning", "error"], message: str) -> None:
        """One line for people."""
        ...

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        """A checkpoint is complete on disk (manifest renamed into place)."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was reported is acknowledged; False when time ran out."""
        ...


class NullSink:
    """Takes everything and keeps nothing."""

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Mapping[str, object]) -> None:
        """Ignore."""

    def points(self, points: Sequence[Point]) -> None:
        """Ignore."""

    def progress(self, *, step: int, total_steps: int, phase: str) -> None:
        """Ignore."""

    def measurement(self, measurement: Measurement) -> None:
        """Ignore."""

    def log(self, level: Literal["debug", "info", "warning", "error"], message: str) -> None:
        """Ignore."""

    def checkpoint(self, *, step: int, path: str, verified: bool) -> None:
        """Ignore."""

    def flush(self, timeout_s: float) -> bool:
        """Nothing is pending."""
        return True


class NeverStop:
    """A stop that never comes."""

    def requested(self) -> StopReason | None:
        """Goes on."""
        return None


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How a call of `train` ended; returned on every rank, figures on rank 0.

    Attributes:
        status: `completed` when the whole length was trained, else `stopped`.
        stop_reason: set when status is `stopped`.
        step: the last finished step.
        total_steps: steps of the whole run.
        summary: final figures by name with unit (`accuracy`, `total_time_s`, ...); the
            names are columns of the run's summary and are listed in `docs/metrics.md`.
        checkpoint: path of the last verified checkpoint, when there is one.
    """

    status: Literal["completed", "stopped"]
    stop_reason: StopReason | None
    step: int
    total_steps: int
    summary: Mapping[str, float | int | str | None]
    checkpoint: str | None
