"""Rows of the store as frozen records: what every reader of the database gets.

Times are Unix seconds (float, UTC). Each record is built from a row by `from_row`, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar

from service.grid import REFERENCE_CELL
from service.states import ExperimentState, RunState
from trainers.errors import FailureClass

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class _Record:
    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        """Build the record from a row that has a column for each field."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Experiment(_Record):
    """One submitted experiment; lists carry no spec text and no series."""

    id: int
    name: str
    owner: str
    state: ExperimentState
    priority: int
    attempt: int
    """Ray Jobs started for it; the fence for every write of a driver."""
    spec_sha256: str
    run_count: int
    submission_id: str | None
    """Ray Job of the current attempt, `stillhouse-<id>-<attempt>`."""
    lease_owner: str | None
    lease_until_s: float | None
    cancel_requested_s: float | None
    pause_requested_s: float | None
    not_before_s: float
    """Earliest time of the next claim; set by the delay before a retry."""
    failure_class: FailureClass | None
    failure_message: str | None
    created_s: float
    queued_s: float
    started_s: float | None
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class Run(_Record):
    """One point of the grid with one seed, with its latest progress and figures."""

    id: int
    experiment_id: int
    index: int
    cell: str
    seed: int
    point: dict[str, Any]
    """Axis values by dotted name."""
    state: RunState
    attempt: int
    """Attempts opened so far; the fence for every write of a worker."""
    own_failures: int
    infrastructure_failures: int
    not_before_s: float
    failure_class: FailureClass | None
    failure_message: str | None
    cancel_requested_s: float | None
    step: int
    total_steps: int | None
    phase: str | None
    checkpoint: str | None
    """Last verified checkpoint."""
    checkpoint_step: int | None
    started_s: float | None
    ended_s: float | None
    # Typed columns that people filter on, known at submission:
    task: str
    student: str
    precision: str
    optimizer: str
    implementation: str
    global_batch_size: int
    strategy: str
    workers: int
    hardware: str
    teacher: str | None
    """What it is distilled from; None = nothing."""
    # Typed columns that people filter on, from the summary; None until known:
    accuracy: float | None
    f1: float | None
    train_loss: float | None
    validation_loss: float | None
    total_time_s: float | None
    train_time_s: float | None
    cost_usd: float | None
    energy_kwh: float | None
    energy_provenance: str | None
    samples_per_s: float | None
    tokens_per_s: float | None
    peak_memory_mib: float | None
    exact_match: float | None
    map: float | None
    mrr: float | None
    top5_accuracy: float | None
    mfu_pct: float | None
    headline: str | None
    """Name of the metric by which the task is judged first."""
    score: float | None
    """Its value at the last evaluation."""
    test_score: float | None
    """Its value on the test part, which was scored once, at the end; None = there is none, or not yet."""
    validation_examples: int | None
    """What the headline on the validation part is a mean over: examples, or questions."""
    test_examples: int | None
    """The same of the test part."""
    best_score: float | None
    """Its best value over all evaluations."""
    best_step: int | None
    best_checkpoint: str | None
    """Checkpoint of the best evaluation."""
    reused_from: int | None
    """The run whose figures these are; None = its own."""
    waits_for: str | None
    """What it waits for while its turn has come and there is no room; None = nothing."""
    neighbours_foreign_pct: float | None
    """Share of the time in which processes outside the cluster used its node noticeably; None = not known."""
    neighbours_other_experiment_pct: float | None
    """The same for other experiments."""
    neighbours_same_experiment_pct: float | None
    """The same for other runs of its experiment."""
    first_attempt: int
    """First attempt of the present measurement; those before belong to measurements that it replaced."""

    @property
    def is_reference(self) -> bool:
        """Whether it repeats the first cell only to tell how the machine drifts; it is in no comparison."""
        return self.cell == REFERENCE_CELL


@dataclass(frozen=True, slots=True)
class Attempt(_Record):
    """One try at a run."""

    run_id: int
    number: int
    experiment_attempt: int
    state: RunState
    started_s: float
    ended_s: float | None
    resumed_from_step: int | None
    last_step: int
    node: str | None
    pid: int | None
    workers: int
    """Worker processes."""
    placement: str | None
    """Devices that it ran on, see `Placement`; None = it never got to run."""
    failure_class: FailureClass | None
    failure_message: str | None
    facts: dict[str, Any] | None
    """Reproducibility: versions, commit, fingerprints, hardware, threads, resolved config."""
    summary: dict[str, Any] | None
    """What the run ended with here, where it was measured again since; else None: see the run's summary."""


@dataclass(frozen=True, slots=True)
class Placement(_Record):
    """Devices that an experiment held for its workers, one run after the other.

    Attributes:
        id: Ray's id of the placement group.
        hardware: catalogue entry of the devices.
        workers: processes on them.
        devices: how many are held.
        price_usd_per_hour, power_w: of all of them.
        placed_s: Ray reserved them, Unix time.
        ready_s: the worker processes could take their first run; None = not yet, or they never could.
        released_s: Ray had them back; None = they are held.
        seen_s: last known to be held.
    """

    id: str
    hardware: str
    workers: int
    devices: int
    price_usd_per_hour: float
    power_w: float
    placed_s: float
    ready_s: float | None
    released_s: float | None
    seen_s: float


@dataclass(frozen=True, slots=True)
class Event(_Record):
    """Something that happened to an experiment; numbered from 1 in commit order."""

    experiment_id: int
    number: int
    run_id: int | None
    attempt: int | None
    at_s: float
    kind: str
    """An `EventKind`; a newer server may send others."""
    message: str
    data: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class LogLine(_Record):
    """One line for people, numbered within its attempt."""

    run_id: int
    attempt: int
    number: int
    at_s: float
    level: str
    message: str

    @property
    def cursor(self) -> int:
        """Place of the line among all lines of its run, over its attempts."""
        return (self.attempt << 32) + self.number


@dataclass(frozen=True, slots=True)
class PointRow(_Record):
    """One metric value at one step; `value` may be NaN or infinite."""

    name: str
    step: int
    attempt: int
    at_s: float
    value: float


@dataclass(frozen=True, slots=True)
class MeasurementRow(_Record):
    """A quantity with a unit over a window."""

    run_id: int
    attempt: int
    name: str
    value: float
    unit: str
    provenance: str
    scope: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One waiting experiment: where it stands and why it waits."""

    experiment: Experiment
    position: int
    """From 1, in the order in which the scheduler would claim."""
    reason: str
    """Why it waits, in one line."""


@dataclass(frozen=True, slots=True)
class Page(Generic[Record]):
    """One page of a list; `next_token` is None on the last."""

    items: list[Record]
    next_token: str | None
