"""Answers as records: what REST gives, what the client reads, what the report prints.

Every answer carries `notes`: what a reader must know to read it correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.analysis.results import Claim, Criterion, Definitions, Effects, WeightRange
from service.domain.grid import AxisValue
from service.domain.metrics import Metric, Spread
from service.domain.serialization import Number, Serializable

Point = Mapping[str, AxisValue]


@dataclass(frozen=True, slots=True)
class ComparedRow(Serializable):
    """One combination of axis values."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    figures: Mapping[str, Spread | None]
    """Mean, standard deviation between seeds and count by metric; null without a value."""
    finished: int
    """Runs with a result: succeeded, or stopped early."""
    planned: int
    """Runs in all."""
    incomplete: int
    """Runs with a result that ended early."""
    failures: Mapping[str, int]
    """How many runs failed, by failure class."""
    energy_provenance: str | None
    """Provenance of the row's energy: counter, sampled or modelled; `mixed` leaves the energy out."""
    shared: int = 0
    """Runs whose device other runs might use at the same time (`queue.share_device`)."""
    disturbed: int = 0
    """Runs with a result that neighbours disturbed while they were measured."""
    disturbed_by: Mapping[str, int] = field(default_factory=dict)
    """How many runs each neighbour disturbed: `foreign`, `other_experiment`, `same_experiment`."""


@dataclass(frozen=True, slots=True)
class TestedPair(Serializable):
    """A against B on one metric."""

    a: str
    """Label of A."""
    b: str
    """Label of B."""
    a_point: Point
    """Axis values of A."""
    b_point: Point
    """Axis values of B."""
    metric: str
    """Name with its unit."""
    claim: Claim | None
    """What the seeds say; null when no claim can be made."""
    text: str
    """The verdict with its numbers in one line, or why no claim can be made."""


@dataclass(frozen=True, slots=True)
class KernelRow(Serializable):
    """One kernel in one row's profiled runs."""

    label: str
    """Label of the row."""
    point: Point
    """Axis values of the row."""
    kernel: str
    """Name as compiled, cut to 160 characters."""
    runs: int
    """Profiled runs that launched it."""
    figures: Mapping[str, Number]
    """Means over those runs; counters that no run has are left out."""


@dataclass(frozen=True, slots=True)
class ComparisonAnswer(Serializable):
    """Runs side by side by axis and, when asked for, tested claims."""

    axes: tuple[str, ...]
    """Axes that make the rows, by dotted name."""
    metrics: tuple[Metric, ...]
    """The compared figures."""
    rows: tuple[ComparedRow, ...]
    """In the order in which the grid first reaches them."""
    best: Mapping[str, int]
    """Position of the row with the best mean by metric, over the cells that all rows have, of runs that
    trained to full length; not yet a proven difference, and none where a claim says otherwise."""
    claims: tuple[TestedPair, ...]
    """Tested pairs, metric by metric; empty when none were asked for."""
    notes: tuple[str, ...]
    """What a reader must know to read the answer correctly."""
    kernels: tuple[KernelRow, ...] = ()
    """Kernels of each row, the one with the most time first; empty when none were asked for or profiled."""


@dataclass(frozen=True, slots=True)
class Scored(Serializable):
    """One configuration's score."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    score: Number
    """Sum of the parts; lower is better."""
    parts: Mapping[str, Number]
    """Weight x value / largest value by metric, signed."""


@dataclass(frozen=True, slots=True)
class ScoreAnswer(Serializable):
    """Configurations by weighted score, the best (lowest) first."""

    strategy: str | None
    """Name of the weighting; null when the weights are your own."""
    definitions: Definitions | None
    """Whose time and occupancy the strategy weighs; null when the weights are your own."""
    criteria: tuple[Criterion, ...]
    """The weights."""
    ranking: tuple[Scored, ...]
    """All configurations that have every metric."""
    sensitivity: Mapping[str, tuple[WeightRange, ...]]
    """By metric, who wins at which share of the total weight; a metric without a trade-off is left out."""
    left_out: Mapping[str, str]
    """Why other configurations have no score, by label."""
    notes: tuple[str, ...]
    """What a reader must know to read the answer correctly."""


@dataclass(frozen=True, slots=True)
class FrontierMember(Serializable):
    """One configuration with its means over seeds."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    values: Mapping[str, Number]
    """Means by metric."""


@dataclass(frozen=True, slots=True)
class FrontierAnswer(Serializable):
    """The Pareto set: what nothing else beats on every metric at once."""

    metrics: tuple[Metric, ...]
    """Over what, with the direction that wins."""
    members: tuple[FrontierMember, ...]
    """What nothing dominates."""
    others: tuple[FrontierMember, ...]
    """What is dominated."""
    dominated: Mapping[str, tuple[str, ...]]
    """Dominators by label."""
    left_out: Mapping[str, str]
    """Why other configurations were not judged, by label."""
    notes: tuple[str, ...]
    """What a reader must know to read the answer correctly."""


@dataclass(frozen=True, slots=True)
class FittedEffects(Serializable):
    """Effects on one metric, also in words."""

    model: Effects
    """The tests."""
    sentences: tuple[str, ...]
    """One line per level effect."""


@dataclass(frozen=True, slots=True)
class EffectsAnswer(Serializable):
    """What each axis does to each metric."""

    items: tuple[FittedEffects, ...]
    """One per metric."""
    unanswered: Mapping[str, str]
    """Why other metrics have none, by name."""
    notes: tuple[str, ...]
    """What a reader must know to read the answer correctly."""


@dataclass(frozen=True, slots=True)
class Ratio(Serializable):
    """How many times better than the baseline, from means over seeds."""

    ratio: Number
    """Baseline / configuration where lower is better, else the inverse; 2 = twice as good."""
    low: Number | None
    """Lower end of the 95% interval of the means' ratio (Fieller), paired by seed like a claim; null with
    fewer than two seeds on a side."""
    high: Number | None
    """Upper end of it; may be infinite."""
    pairs: int
    """Seeds that were paired; 0 when unpaired."""


@dataclass(frozen=True, slots=True)
class SpeedupRow(Serializable):
    """One configuration against the baseline."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    ratios: Mapping[str, Ratio | None]
    """By metric; null without a positive mean on both sides."""


@dataclass(frozen=True, slots=True)
class TimeToTarget(Serializable):
    """Time until the target was first reached at an evaluation."""

    label: str
    """The configuration."""
    reached: int
    """Finished runs that reached it."""
    of: int
    """Finished runs that were evaluated on the way."""
    mean_s: Number | None
    """Mean over seeds from the start of a run, in seconds; null unless every run reached it, because a mean
    of the fastest would flatter."""
    speedup: Number | None
    """The baseline's mean / this one's; null when either is missing."""


@dataclass(frozen=True, slots=True)
class TimeTo(Serializable):
    """Time to a target value."""

    metric: str
    """The evaluated metric, `accuracy` for instance."""
    target: Number
    """Its value that must be reached."""
    rows: tuple[TimeToTarget, ...]
    """One per configuration."""


@dataclass(frozen=True, slots=True)
class SpeedupAnswer(Serializable):
    """Configurations against a named baseline."""

    baseline: str
    """Its label."""
    metrics: tuple[Metric, ...]
    """The compared figures."""
    rows: tuple[SpeedupRow, ...]
    """One per configuration with a result, the baseline among them."""
    time_to: TimeTo | None
    """Time to a target; null when no run was evaluated on the way."""
    left_out: Mapping[str, str]
    """Why other configurations have no row, by label."""
    notes: tuple[str, ...]
    """What a reader must know to read the answer correctly."""
