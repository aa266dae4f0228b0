"""What the analysis finds, as records; they load neither scipy nor numpy, so that a client can read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainers.figures import Better

Scale = Literal["ratio", "difference"]
Test = Literal["paired t-test", "Welch's t-test", "paired two-way test", "two-way test"]
Verdict = Literal["A is better", "B is better", "equivalent", "undecided"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What the seeds say about A against B on one metric. Differences are A minus B.

    Attributes:
        metric: name, with its unit.
        mean_a, mean_b: means over seeds.
        difference: mean difference, in the metric's unit.
        relative: difference divided by the size of B's mean; None when that is 0.
        error: standard error of the difference, in the metric's unit.
        low, high: confidence interval of the difference at level 1 - alpha, not corrected; it holds 0
            exactly when the p-value before correction is not below alpha.
        interval: how the interval was made: over seeds, or over seeds and examples.
        test: which test gave `p_value`.
        p_value: two-sided; Holm-corrected over `claims`.
        p_equivalent: the larger of the two one-sided p-values; None without a margin.
        pairs: number of seeds that were paired; 0 when unpaired.
        seeds_a, seeds_b: seeds on each side.
        examples: examples that both sides were compared on; 0 = seeds alone, and the claim is about
            further seeds on the same examples.
        resolution: least standard deviation that one run's figure is taken to have, in the metric's unit.
        at_resolution: whether seeds spread less than that, so that it stands in for their spread.
        margin: largest difference that counts as none; None when equivalence was not asked.
        claims: how many claims the p-values are corrected for; 1 = not corrected.
        verdict: the answer in words.
        more_seeds: about how many more seeds a side an undecided claim needs; None when decided, or
            when it takes more than `MOST_SEEDS` or more examples.
    """

    metric: str
    mean_a: float
    mean_b: float
    difference: float
    relative: float | None
    error: float
    low: float
    high: float
    interval: Literal["Student's t", "two-way"]
    test: Test
    p_value: float
    p_equivalent: float | None
    pairs: int
    seeds_a: int
    seeds_b: int
    examples: int
    resolution: float
    at_resolution: bool
    margin: float | None
    claims: int
    verdict: Verdict
    more_seeds: int | None


@dataclass(frozen=True, slots=True)
class LevelEffect:
    """What one value of an axis does against the axis' first value, averaged over all else.

    Attributes:
        axis, level, baseline: the axis and the two values.
        effect: relative change (-0.6 = 60% less) on the ratio scale, else a difference in the
            metric's unit.
        low, high: confidence interval of `effect`.
        p_value: two-sided t test of no effect.
    """

    axis: str
    level: Any
    baseline: Any
    effect: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Term:
    """F test of an axis (one name) or of an interaction (two names)."""

    axes: tuple[str, ...]
    f: float
    p_value: float
    share: float
    """Share of the total sum of squares that only this term explains, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The fitted model of one metric.

    Attributes:
        metric: name, with its unit.
        scale: `ratio` when logarithms were modelled.
        levels: level effects, axis by axis.
        terms: tests of axes, then of interactions.
        left_out: interactions that the rows cannot tell apart from the rest.
        r_squared: share of variance explained.
        checks: what makes the model doubtful, in words; empty when nothing does.
    """

    metric: str
    scale: Scale
    levels: tuple[LevelEffect, ...]
    terms: tuple[Term, ...]
    left_out: tuple[tuple[str, str], ...]
    r_squared: float
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A choice with its evidence.

    Attributes:
        winner: label of the chosen configuration.
        winner_point: its axis values by dotted name.
        objective: metric that was minimised (or maximised).
        value: the winner's mean of it.
        runner_up: the next best that meets the constraints; None when there is no other.
        over_runner_up: winner (A) against runner-up (B) on the objective; None when that cannot
            be tested, and then `sure` says why.
        against_best: for each `within_of_best` constraint, the winner (A) against the best
            configuration (B) on that metric, tested for equivalence within the constraint's value;
            left out where the winner is the best itself or a side has too few seeds.
        excluded: why each other configuration was left out, by label.
        sure: how sure the choice is, in one sentence.
        text: the answer in words.
        notes: what a reader must know, in words.
    """

    winner: str
    winner_point: Mapping[str, Any]
    objective: str
    value: float
    runner_up: str | None
    over_runner_up: Claim | None
    against_best: tuple[Claim, ...]
    excluded: Mapping[str, str]
    sure: str
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Criterion:
    """One metric's part in the score; `weight` is dimensionless and not negative."""

    metric: str
    weight: float
    better: Better = "lower"


@dataclass(frozen=True, slots=True)
class WeightRange:
    """Weights of one metric, the others scaled to fill up, over which one configuration wins."""

    low: float
    high: float
    winner: str
