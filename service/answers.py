"""What the API answers, as frozen records: what `service.client` gives that the store has no record for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service import records
from service.preview import PlannedRun
from service.records import Event, LogLine, Run
from service.states import RunState


@dataclass(frozen=True, slots=True)
class Experiment(records.Experiment):
    """An experiment with the states of its runs."""

    run_states: dict[RunState, int]
    """How many runs are in each state."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What an experiment has used so far."""

    cost_usd: float
    energy_kwh: float
    device_hours: float
    overhead_usd: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """Where a queued experiment stands and why it waits."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExperimentDetail(Experiment):
    """An experiment with its totals and, while it waits, its place in the queue."""

    totals: Totals
    waiting: Waiting | None


@dataclass(frozen=True, slots=True)
class ExperimentPage:
    """One page of experiments."""

    items: list[Experiment]
    next_page_token: str | None


@dataclass(frozen=True, slots=True)
class RunPage:
    """One page of runs."""

    items: list[Run]
    next_page_token: str | None


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over steps, as columns of equal length."""

    steps: list[int]
    values: list[float]
    at_s: list[float]
    attempts: list[int]


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One waiting experiment."""

    position: int
    reason: str
    experiment: Experiment


@dataclass(frozen=True, slots=True)
class Queue:
    """Everything that waits, and the schedulers that could claim it."""

    items: list[QueueEntry]
    schedulers_alive: list[str]


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of the cluster."""

    id: str
    name: str
    alive: bool
    resources: dict[str, float]
    available: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray cluster as the scheduler last saw it."""

    at_s: float | None
    age_s: float | None
    reachable: bool
    dashboard_url: str | None
    nodes: list[Node]
    totals: dict[str, float]


@dataclass(frozen=True, slots=True)
class HardwareEntry:
    """One kind of device of the catalogue."""

    name: str
    device: str
    accelerator_type: str | None
    memory_gib: float | None
    bandwidth_gb_s: float | None
    tdp_w: float
    price_usd_per_hour: float
    price_date: str
    price_source: str
    precisions: list[str]
    peak_tflops: dict[str, float] | None
    source: str | None
    """Data sheet of memory, bandwidth, power and peaks; None = no data sheet."""
    without_data_sheet: list[str]
    aliases: list[str]


@dataclass(frozen=True, slots=True)
class Validated:
    """A spec that is valid, with all defaults filled in."""

    name: str
    sha256: str
    run_count: int
    spec: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """An estimate with the ends of its interval."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a whole grid will take; 90% intervals."""

    runs: int
    """Runs that are forecast."""
    cost_usd: Span
    energy_kwh: Span
    device_hours: Span
    basis: list[str]
    """What it rests on, in words."""
    unknown: list[str]
    """Why other runs are not forecast."""
    warnings: list[str]
    """What does not fit into the budget."""


@dataclass(frozen=True, slots=True)
class Preview:
    """The runs that a spec would make, or the first of them."""

    run_count: int
    """Runs of the whole grid."""
    reused_count: int
    """Those that take the figures of others."""
    cluster_age_s: float | None
    """Age of the view of the cluster; None = there is none, and capacity was not judged."""
    items: list[PlannedRun]
    next_page_token: str | None = None
    forecast: Forecast | None = None
    """What the whole grid will take; with the first page only."""


@dataclass(frozen=True, slots=True)
class Happened:
    """Live: something happened to the experiment."""

    event: Event


@dataclass(frozen=True, slots=True)
class RunChanged:
    """Live: a run as it is now, with the last value of each metric.

    While it prepares its data, `line` is the newest line of its log, which says how far it is.
    """

    run: Run
    latest: dict[str, float]
    line: LogLine | None = None


@dataclass(frozen=True, slots=True)
class ExperimentChanged:
    """Live: the experiment as it is now."""

    experiment: Experiment


@dataclass(frozen=True, slots=True)
class Ended:
    """Live: the experiment has ended; the last message."""

    experiment: Experiment


@dataclass(frozen=True, slots=True)
class NewPoints:
    """Live: points that were not there before, by metric; a (metric, step) again replaces the old."""

    series: dict[str, NewSeries]


@dataclass(frozen=True, slots=True)
class NewSeries:
    """Points of one metric as columns of equal length."""

    steps: list[int]
    values: list[float]
    at_s: list[float]


@dataclass(frozen=True, slots=True)
class NewLine:
    """Live: a line of the log."""

    line: LogLine


@dataclass(frozen=True, slots=True)
class RunEnded:
    """Live: the run has ended; the last message."""

    run: Run
