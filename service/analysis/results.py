"""What the analysis returns, as records that load neither scipy nor numpy, for the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from service.domain.grid import AxisValue
from service.domain.serialization import Number, Serializable
from trainers.metrics import Better

Scale = Literal["ratio", "difference"]
Test = Literal["paired t-test", "Welch's t-test", "paired two-way test", "two-way test"]
Verdict = Literal["A is better", "B is better", "equivalent", "undecided"]


@dataclass(frozen=True, slots=True)
class Claim(Serializable):
    """What the seeds say about A against B on one metric. Differences are A minus B."""

    metric: str
    """Name with its unit."""
    mean_a: Number
    """Mean of A over seeds."""
    mean_b: Number
    """Mean of B over seeds."""
    difference: Number
    """Mean difference, in the metric's unit."""
    relative: Number | None
    """Difference divided by the size of B's mean; null when that is 0."""
    relative_low: Number | None
    """Lower end of the interval of `relative`, which holds 0 exactly when `low` to `high` does: over seeds
    the interval of the means' ratio (Fieller), else that of the difference divided by the size of B's
    mean."""
    relative_high: Number | None
    """Upper end of that interval; may be infinite."""
    error: Number
    """Standard error of the difference, in the metric's unit."""
    low: Number
    """Lower end of the interval of the difference at level 1 - alpha, not corrected: it holds 0 exactly when
    the p-value before correction is not below alpha."""
    high: Number
    """Upper end of that interval."""
    interval: Literal["Student's t", "two-way"]
    """How the interval was made: over seeds, or over seeds and examples."""
    test: Test
    """Which test gave `p_value`."""
    p_value: Number
    """Two-sided, corrected over `claims` (Holm's steps, by Shaffer's count of pairs that can be equal)."""
    p_equivalent: Number | None
    """Larger p-value of the two one-sided tests, corrected; null without a margin."""
    pairs: int
    """Seeds that were paired; 0 when unpaired."""
    seeds_a: int
    """Seeds of A."""
    seeds_b: int
    """Seeds of B."""
    examples: int
    """Examples that both sides were compared on; 0 = seeds alone, and the claim is about further seeds on the
    same examples."""
    resolution: Number
    """Least standard deviation that one run's figure is taken to have, in the metric's unit."""
    at_resolution: bool
    """Whether seeds spread less than that, so that it stands in for their spread."""
    margin: Number | None
    """Largest difference that counts as none; null when equivalence was not asked."""
    claims: int
    """How many claims the p-values are corrected for; 1 = not corrected."""
    reversed: bool
    """Whether the means over all seeds of each side point the other way than those over the paired seeds,
    or are equal: then no side is called better."""
    verdict: Verdict
    """The verdict."""
    more_seeds: int | None
    """About how many more seeds a side an undecided claim needs; null when decided, past 1000, or when only
    more examples would do."""


@dataclass(frozen=True, slots=True)
class LevelEffect(Serializable):
    """What one value of an axis does against its first one: what `compare --by AXIS --claims` says."""

    axis: str
    """The axis."""
    level: AxisValue
    """The value."""
    baseline: AxisValue
    """The axis' first value."""
    effect: Number
    """Relative change (-0.6 = 60% less) on the ratio scale, else a difference in the metric's unit."""
    low: Number
    """Lower end of its interval."""
    high: Number
    """Upper end of its interval; may be infinite on the ratio scale."""
    p_value: Number
    """Two-sided, of no effect, corrected over all pairs of the axis' values; of equivalence where that is the
    verdict."""
    verdict: Literal["better", "worse", "equivalent", "undecided"]
    """Of the value against the first one."""


@dataclass(frozen=True, slots=True)
class Term(Serializable):
    """Test of an axis (one name) or of an interaction (two names)."""

    axes: tuple[str, ...]
    """One or two axes."""
    seeds: int
    """Seeds that the test goes over; the fewest of any pair of values of an axis."""
    p_value: Number
    """Of no effect: the smallest corrected one of any pair of an axis' values; of an interaction by an F
    test with seeds as blocks and Box's lower bound of its degrees of freedom."""
    share: Number
    """Share of the total sum of squares that belongs to this term, in [0, 1], where all cells have run."""


@dataclass(frozen=True, slots=True)
class Effects(Serializable):
    """Effects of the axes on one metric."""

    metric: str
    """Name with its unit."""
    scale: Scale
    """`ratio` when effects are ratios of means, and interactions are of logarithms."""
    levels: tuple[LevelEffect, ...]
    """Level effects, axis by axis."""
    terms: tuple[Term, ...]
    """Tests of axes, then of interactions."""
    left_out: tuple[tuple[str, ...], ...]
    """Interactions that cannot be tested: a combination of values has no run, or fewer than two seeds ran
    all."""
    r_squared: Number
    """Share of the variance between runs that axes and their two-way interactions explain."""
    checks: tuple[str, ...]
    """What was left out, and what makes the tests doubtful; empty when nothing does."""


@dataclass(frozen=True, slots=True)
class Recommendation(Serializable):
    """The best configuration on the objective that meets every constraint, with its evidence."""

    winner: str
    """Label of the chosen configuration."""
    winner_point: Mapping[str, AxisValue]
    """Its axis values by dotted name."""
    objective: str
    """Metric to be best on."""
    value: Number
    """The winner's mean of it."""
    runner_up: str | None
    """The next best that meets the constraints; null when there is no other."""
    over_runner_up: Claim | None
    """Winner (A) against runner-up (B) on the objective, corrected over all pairs of configurations; null
    when that cannot be tested, and then `sure` says why."""
    against_best: tuple[Claim, ...]
    """Winner (A) against the best (B) on each metric that may be a little worse, tested for equivalence
    within that difference and corrected alike; left out where the winner is the best itself or a side has too
    few seeds."""
    excluded: Mapping[str, str]
    """Why each other configuration was left out, by label."""
    sure: str
    """How sure the choice is, in one sentence."""
    text: str
    """The answer in words."""
    notes: tuple[str, ...] = ()
    """What a reader must know to read the answer correctly."""


class Definitions(StrEnum):
    """Whose time and occupancy the strategies weigh."""

    stillhouse = "stillhouse"
    """A run's whole time; occupancy of the SMs while kernels run."""
    published = "published"
    """The study's: time of training without validation; occupancy averaged over wall time, idle included."""


@dataclass(frozen=True, slots=True)
class Criterion(Serializable):
    """One metric's part in the score."""

    metric: str
    """Name with its unit."""
    weight: Number
    """Not negative, dimensionless."""
    better: Better = "lower"
    """Which direction wins; higher-is-better parts count negative."""


@dataclass(frozen=True, slots=True)
class WeightRange(Serializable):
    """Weights of one metric, the others scaled to fill up, over which one configuration wins."""

    low: Number
    """From this share of the total weight, in [0, 1]."""
    high: Number
    """To this one."""
    winner: str
    """Label of the configuration."""
