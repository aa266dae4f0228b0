"""Answers about experiments over the wire: comparisons, scores, frontiers, effects, recommendations."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from api.shapes import AxisValue, Number, Shape

Better = Literal["lower", "higher"]
Point = dict[str, AxisValue]


class MetricShape(Shape):
    """A figure that runs are compared by."""

    name: str
    """Name with its unit."""
    better: Better
    """Which direction wins."""


class SpreadShape(Shape):
    """A figure over seeds."""

    mean: Number
    """Mean of the cells' means, in the metric's unit."""
    sd: Number | None
    """Standard deviation between seeds of one cell, pooled; null when no cell has two values."""
    n: int
    """Values that went in."""


class ComparedRowShape(Shape):
    """One combination of axis values."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    figures: dict[str, SpreadShape | None]
    """By metric; null without a value."""
    finished: int
    """Runs with a result."""
    planned: int
    """Runs in all."""
    incomplete: int
    """Runs with a result that ended early."""
    failures: dict[str, int]
    """How many runs failed, by failure class."""
    energy_provenance: str | None
    """counter, sampled or modelled; `mixed` leaves the energy out."""
    shared: int
    """Runs whose device other runs might use at the same time (`queue.share_device`)."""
    disturbed: int
    """Runs with a result that neighbours disturbed while they were measured."""
    disturbed_by: dict[str, int]
    """How many runs each neighbour disturbed: `foreign`, `other_experiment`, `same_experiment`."""


class ClaimShape(Shape):
    """What the seeds say about A against B on one metric; differences are A minus B."""

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
    error: Number
    """Standard error of the difference."""
    low: Number
    """Lower end of the interval of the difference, at level 1 - alpha."""
    high: Number
    """Upper end of that interval."""
    interval: Literal["Student's t", "two-way"]
    """How the interval was made: over seeds, or over seeds and examples."""
    test: Literal["paired t-test", "Welch's t-test", "paired two-way test", "two-way test"]
    """Which test gave `p_value`."""
    p_value: Number
    """Two-sided, corrected by Holm over `claims`."""
    p_equivalent: Number | None
    """Larger p-value of the two one-sided tests, corrected; null without a margin."""
    pairs: int
    """Seeds that were paired; 0 when unpaired."""
    seeds_a: int
    """Seeds of A."""
    seeds_b: int
    """Seeds of B."""
    examples: int
    """Examples that both sides were compared on; 0 = seeds alone."""
    resolution: Number
    """Least standard deviation that one run's figure is taken to have, in the metric's unit."""
    at_resolution: bool
    """Whether seeds spread less than that, so that it stands in for their spread."""
    margin: Number | None
    """Largest difference that counts as none; null when equivalence was not asked."""
    claims: int
    """How many claims the p-values are corrected for."""
    verdict: Literal["A is better", "B is better", "equivalent", "undecided"]
    """The answer."""
    more_seeds: int | None
    """About how many more seeds a side an undecided claim needs; null when decided, past 1000, or when only
    more examples would do."""


class TestedPairShape(Shape):
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
    claim: ClaimShape | None
    """What the seeds say; null when no claim can be made."""
    text: str
    """The verdict with its numbers, or why no claim can be made."""


class ComparisonShape(Shape):
    """Runs beside each other by axis and, when asked for, tested claims."""

    axes: list[str]
    """Axes that make the rows."""
    metrics: list[MetricShape]
    """The compared figures."""
    rows: list[ComparedRowShape]
    """In the order in which the grid first reaches them."""
    best: dict[str, int]
    """Position of the row with the best mean by metric; not yet a proven difference."""
    claims: list[TestedPairShape]
    """Tested pairs; empty when none were asked for."""
    notes: list[str]
    """What a reader must know."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "axes": ["precision"],
                "metrics": [{"name": "cost_usd", "better": "lower"}],
                "rows": [
                    {
                        "label": "precision=fp32",
                        "point": {"precision": "fp32"},
                        "figures": {"cost_usd": {"mean": 0.62, "sd": 0.01, "n": 5}},
                        "finished": 5,
                        "planned": 5,
                        "incomplete": 0,
                        "failures": {},
                        "energy_provenance": "counter",
                        "shared": 0,
                        "disturbed": 0,
                        "disturbed_by": {},
                    }
                ],
                "best": {},
                "claims": [],
                "notes": [],
            }
        }
    )


class CriterionShape(Shape):
    """One metric's part in the score."""

    metric: str
    """Name with its unit."""
    weight: Number
    """Not negative, dimensionless."""
    better: Better
    """Which direction wins; higher-is-better parts count negative."""


class ScoredShape(Shape):
    """One configuration's score."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    score: Number
    """Sum of the parts; lower is better."""
    parts: dict[str, Number]
    """Weight x value / largest value by metric, signed."""


class WeightRangeShape(Shape):
    """Shares of the total weight over which one configuration wins."""

    low: Number
    """From this share of the total weight, in [0, 1]."""
    high: Number
    """To this one."""
    winner: str
    """Label of the configuration."""


class ScoreShape(Shape):
    """Configurations by weighted score, the best first."""

    strategy: str | None
    """Name of the weighting; null when the weights are your own."""
    definitions: Literal["stillhouse", "published"] | None
    """Whose time and occupancy the strategy weighs; null when the weights are your own."""
    criteria: list[CriterionShape]
    """The weights."""
    ranking: list[ScoredShape]
    """All configurations that have every metric."""
    sensitivity: dict[str, list[WeightRangeShape]]
    """By metric, who wins at which share of the total weight."""
    left_out: dict[str, str]
    """Why other configurations have no score."""
    notes: list[str]
    """What a reader must know."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "strategy": "balance",
                "definitions": "stillhouse",
                "criteria": [{"metric": "cost_usd", "weight": 0.3, "better": "lower"}],
                "ranking": [
                    {
                        "label": "precision=bf16",
                        "point": {"precision": "bf16"},
                        "score": 0.12,
                        "parts": {"cost_usd": 0.12},
                    }
                ],
                "sensitivity": {"cost_usd": [{"low": 0.0, "high": 1.0, "winner": "precision=bf16"}]},
                "left_out": {"precision=fp16": "out_of_memory: does not fit"},
                "notes": [],
            }
        }
    )


class FrontierMemberShape(Shape):
    """One configuration with its means over seeds."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    values: dict[str, Number]
    """Means by metric."""


class FrontierShape(Shape):
    """The Pareto set: what nothing else beats on every metric at once."""

    metrics: list[MetricShape]
    """Over what, with the direction that wins."""
    members: list[FrontierMemberShape]
    """What nothing dominates."""
    others: list[FrontierMemberShape]
    """What is dominated."""
    dominated: dict[str, list[str]]
    """Dominators by label."""
    left_out: dict[str, str]
    """Why other configurations were not judged."""
    notes: list[str]
    """What a reader must know."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "metrics": [
                    {"name": "cost_usd", "better": "lower"},
                    {"name": "accuracy", "better": "higher"},
                ],
                "members": [
                    {
                        "label": "precision=bf16",
                        "point": {"precision": "bf16"},
                        "values": {"cost_usd": 0.31, "accuracy": 0.91},
                    }
                ],
                "others": [
                    {
                        "label": "precision=fp32",
                        "point": {"precision": "fp32"},
                        "values": {"cost_usd": 0.62, "accuracy": 0.91},
                    }
                ],
                "dominated": {"precision=fp32": ["precision=bf16"]},
                "left_out": {},
                "notes": [],
            }
        }
    )


class LevelEffectShape(Shape):
    """What one value of an axis does against the axis' first value, averaged over all else."""

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
    """Upper end of its interval."""
    p_value: Number
    """Two-sided t test of no effect."""


class TermShape(Shape):
    """F test of an axis (one name) or of an interaction (two names)."""

    axes: list[str]
    """One or two axes."""
    f: Number
    """F statistic."""
    p_value: Number
    """Of no effect."""
    share: Number
    """Share of the total sum of squares that only this term explains."""


class ModelShape(Shape):
    """The factorial model of one metric."""

    metric: str
    """Name with its unit."""
    scale: Literal["ratio", "difference"]
    """`ratio` when logarithms were modelled."""
    levels: list[LevelEffectShape]
    """Level effects, axis by axis."""
    terms: list[TermShape]
    """Tests of axes, then of interactions."""
    left_out: list[list[str]]
    """Interactions that the runs cannot tell apart from the rest."""
    r_squared: Number
    """Share of variance explained."""
    checks: list[str]
    """What makes the model doubtful; empty when nothing does."""


class FittedEffectsShape(Shape):
    """The model of one metric, and what it says in words."""

    model: ModelShape
    """The fitted model."""
    sentences: list[str]
    """One line per level effect."""


class EffectsShape(Shape):
    """What each axis does to each metric."""

    items: list[FittedEffectsShape]
    """One fitted model per metric."""
    unanswered: dict[str, str]
    """Why other metrics have none."""
    notes: list[str]
    """What a reader must know."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "items": [
                    {
                        "model": {
                            "metric": "total_time_s",
                            "scale": "ratio",
                            "levels": [
                                {
                                    "axis": "precision",
                                    "level": "fp16",
                                    "baseline": "fp32",
                                    "effect": -0.6,
                                    "low": -0.62,
                                    "high": -0.58,
                                    "p_value": 1e-9,
                                }
                            ],
                            "terms": [{"axes": ["precision"], "f": 812.0, "p_value": 1e-9, "share": 0.97}],
                            "left_out": [],
                            "r_squared": 0.99,
                            "checks": [],
                        },
                        "sentences": ["precision=fp16 against fp32: total_time_s -60.0% (-62.0% to -58.0%)"],
                    }
                ],
                "unanswered": {},
                "notes": [],
            }
        }
    )


class RecommendationShape(Shape):
    """The best configuration on the objective that meets every constraint, with its evidence."""

    winner: str
    """Label of the chosen configuration."""
    winner_point: Point
    """Its axis values by dotted name."""
    objective: str
    """Metric to be best on."""
    value: Number
    """The winner's mean of it."""
    runner_up: str | None
    """The next best that meets the constraints."""
    over_runner_up: ClaimShape | None
    """Winner (A) against runner-up (B) on the objective; null when that cannot be tested."""
    against_best: list[ClaimShape]
    """Winner (A) against the best (B) on each metric that may be a little worse."""
    excluded: dict[str, str]
    """Why each other configuration was left out."""
    sure: str
    """How sure the choice is."""
    text: str
    """The answer in words."""
    notes: list[str]
    """What a reader must know."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "winner": "precision=bf16",
                "winner_point": {"precision": "bf16"},
                "objective": "cost_usd",
                "value": 0.31,
                "runner_up": "precision=fp32",
                "over_runner_up": None,
                "against_best": [],
                "excluded": {"precision=fp16": "accuracy 0.88 misses accuracy within 0.005 of the best"},
                "sure": "better than the runner-up, p = 0.001 (paired t-test)",
                "text": "Use precision=bf16: cost_usd 0.31 with accuracy within 0.005 of the best.",
                "notes": [],
            }
        }
    )


class RatioShape(Shape):
    """How many times better than the baseline."""

    ratio: Number
    """2 = twice as good, whichever direction wins."""
    low: Number | None
    """Lower end of the 95% interval; null with fewer than two seeds on a side."""
    high: Number | None
    """Upper end of it."""
    pairs: int
    """Seeds that were paired; 0 when unpaired."""


class SpeedupRowShape(Shape):
    """One configuration against the baseline."""

    label: str
    """Axis values in words."""
    point: Point
    """Axis values by dotted name."""
    ratios: dict[str, RatioShape | None]
    """By metric; null without a positive mean on both sides."""


class TimeToTargetShape(Shape):
    """Time until the target was first reached at an evaluation."""

    label: str
    """The configuration."""
    reached: int
    """Runs that reached it."""
    of: int
    """Runs that were evaluated on the way."""
    mean_s: Number | None
    """Mean over seeds from the start of a run; null unless every run reached it."""
    speedup: Number | None
    """The baseline's mean / this one's; null when either is missing."""


class TimeToShape(Shape):
    """Time to a target value."""

    metric: str
    """The evaluated metric."""
    target: Number
    """Its value that must be reached."""
    rows: list[TimeToTargetShape]
    """One per configuration."""


class SpeedupShape(Shape):
    """Configurations against a named baseline."""

    baseline: str
    """Its label."""
    metrics: list[MetricShape]
    """The compared figures."""
    rows: list[SpeedupRowShape]
    """One per configuration with a result."""
    time_to: TimeToShape | None
    """Time to a target; null when no run was evaluated on the way."""
    left_out: dict[str, str]
    """Why other configurations have no row."""
    notes: list[str]
    """What a reader must know."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "baseline": "precision=fp32",
                "metrics": [{"name": "total_time_s", "better": "lower"}],
                "rows": [
                    {
                        "label": "precision=bf16",
                        "point": {"precision": "bf16"},
                        "ratios": {"total_time_s": {"ratio": 2.1, "low": 2.0, "high": 2.2, "pairs": 3}},
                    }
                ],
                "time_to": {
                    "metric": "accuracy",
                    "target": 0.9,
                    "rows": [
                        {"label": "precision=bf16", "reached": 3, "of": 3, "mean_s": 41.0, "speedup": 2.0}
                    ],
                },
                "left_out": {},
                "notes": [],
            }
        }
    )
