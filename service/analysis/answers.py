"""Answers as records: what REST gives, what the client reads, what the report prints.

Every answer carries `notes`: what a reader must know to read it rightly, in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.analysis.records import Claim, Criterion, Effects, WeightRange
from service.comparison import Metric, Spread

Point = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One combination of axis values.

    Attributes:
        label: axis values in words.
        point: axis values by dotted name.
        figures: mean, standard deviation between seeds and count by metric; None without a value.
        finished: runs with a result (succeeded, or stopped early).
        planned: runs in all.
        incomplete: runs with a result that ended early.
        failures: how many runs failed, by failure class.
        energy_provenance: how the row's energy came to be; `mixed` leaves the energy out.
        shared: runs whose device other runs might use at the same time.
        disturbed: runs with a result that neighbours disturbed while they were measured.
        disturbed_by: how many runs each neighbour disturbed: `foreign`, `other_experiment`,
            `same_experiment`.
    """

    label: str
    point: Point
    figures: Mapping[str, Spread | None]
    finished: int
    planned: int
    incomplete: int
    failures: Mapping[str, int]
    energy_provenance: str | None
    shared: int = 0
    disturbed: int = 0
    disturbed_by: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TestedPair:
    """A against B on one metric.

    Attributes:
        a, b: labels of the two sides.
        a_point, b_point: their axis values by dotted name.
        metric: name, with its unit.
        claim: what the seeds say; None when no claim can be made.
        text: the verdict with its numbers in one line, or why no claim can be made.
    """

    a: str
    b: str
    a_point: Point
    b_point: Point
    metric: str
    claim: Claim | None
    text: str


@dataclass(frozen=True, slots=True)
class ComparisonAnswer:
    """Runs beside each other by axis and, when asked for, tested claims.

    Attributes:
        axes: dotted names that make the rows.
        metrics: the compared figures.
        rows: in the order in which the grid first reaches them.
        best: position of the row with the best mean by metric; not yet a proven difference.
        claims: tested pairs, metric by metric; empty when none were asked for.
        notes: what a reader must know, in words.
    """

    axes: tuple[str, ...]
    metrics: tuple[Metric, ...]
    rows: tuple[ComparedRow, ...]
    best: Mapping[str, int]
    claims: tuple[TestedPair, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scored:
    """One configuration's score and its parts (weight x normalised value, signed) by metric."""

    label: str
    point: Point
    score: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """Configurations by weighted score, the best (lowest) first.

    Attributes:
        strategy: name of the weighting; None when the weights are the user's own.
        definitions: whose time and occupancy the strategy weighs, `stillhouse` or `published`; None when
            the weights are the user's own.
        criteria: the weights.
        ranking: all configurations that have every metric.
        sensitivity: by metric, who wins at which share of the total weight; metrics that have
            nothing to be traded against are left out.
        left_out: why other configurations have no score, by label.
        notes: what a reader must know, in words.
    """

    strategy: str | None
    definitions: str | None
    criteria: tuple[Criterion, ...]
    ranking: tuple[Scored, ...]
    sensitivity: Mapping[str, tuple[WeightRange, ...]]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FrontierMember:
    """One configuration with its means over seeds."""

    label: str
    point: Point
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class FrontierAnswer:
    """The Pareto set.

    Attributes:
        metrics: over what, with the direction that wins.
        members: what nothing dominates.
        others: what is dominated.
        dominated: dominators by label.
        left_out: why other configurations were not judged, by label.
        notes: what a reader must know, in words.
    """

    metrics: tuple[Metric, ...]
    members: tuple[FrontierMember, ...]
    others: tuple[FrontierMember, ...]
    dominated: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FittedEffects:
    """The fitted model of one metric, and what it says in words."""

    model: Effects
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EffectsAnswer:
    """What each axis does to each metric.

    Attributes:
        items: one fitted model per metric.
        unanswered: why other metrics have none, by name.
        notes: what a reader must know, in words.
    """

    items: tuple[FittedEffects, ...]
    unanswered: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better than the baseline, from means over seeds.

    Attributes:
        ratio: baseline / configuration where lower is better, else the inverse; 2 = twice as good.
        low, high: 95% interval by Student's t on logarithms, paired by seed where the sides share
            seeds; None with fewer than two seeds on a side.
        pairs: seeds that were paired; 0 when unpaired.
    """

    ratio: float
    low: float | None
    high: float | None
    pairs: int


@dataclass(frozen=True, slots=True)
class SpeedupRow:
    """One configuration against the baseline; a ratio is None without a positive mean."""

    label: str
    point: Point
    ratios: Mapping[str, Ratio | None]


@dataclass(frozen=True, slots=True)
class TimeToTarget:
    """Time until the target was first reached at an evaluation.

    Attributes:
        label: the configuration.
        reached, of: how many of its finished runs reached the target.
        mean_s: mean over seeds, in seconds from the run's start; None unless every run reached it,
            because a mean of the lucky ones flatters.
        speedup: the baseline's mean / this one's; None when either is missing.
    """

    label: str
    reached: int
    of: int
    mean_s: float | None
    speedup: float | None


@dataclass(frozen=True, slots=True)
class TimeTo:
    """Time to a target value.

    Attributes:
        metric: the evaluated metric, for instance `accuracy`.
        target: its value that must be reached.
        rows: one per configuration.
    """

    metric: str
    target: float
    rows: tuple[TimeToTarget, ...]


@dataclass(frozen=True, slots=True)
class SpeedupAnswer:
    """Configurations against a named baseline.

    Attributes:
        baseline: its label.
        metrics: the compared figures.
        rows: one per configuration with a result, the baseline among them.
        time_to: time to a target; None when no run was evaluated on the way.
        left_out: why other configurations have no row, by label.
        notes: what a reader must know, in words.
    """

    baseline: str
    metrics: tuple[Metric, ...]
    rows: tuple[SpeedupRow, ...]
    time_to: TimeTo | None
    left_out: Mapping[str, str]
    notes: tuple[str, ...]
