"""Answers as records: what REST gives, what the client reads, what the report prints.

Every answer carries `notes`: what a reader must know to read it correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from service.domain.grid import AxisValue
from service.domain.ledger import Interruptions
from service.domain.metrics import Metric, Spread
from service.domain.serialization import Number, Serializable
from trainers.metrics import Better

Point = Mapping[str, AxisValue]
Scale = Literal["ratio", "difference"]
Test = Literal["paired t-test", "Welch's t-test", "paired two-way test", "two-way test"]
Verdict = Literal["A is better", "B is better", "equivalent", "undecided"]
Finding = Literal["A is better", "B is better", "equivalent", "undecided", "conflicting", "untested"]


@dataclass(frozen=True, slots=True)
class ComparedRow(Serializable):
    """One combination of axis values."""

    label: str  # Axis values in words
    point: Point  # Axis values by dotted name
    figures: Mapping[str, Spread | None]
    """Mean, standard deviation between seeds and count by metric; null without a value."""
    finished: int  # Runs with a result: succeeded, or stopped early
    planned: int  # Runs in all
    incomplete: int  # Runs with a result that ended early
    failures: Mapping[str, int]  # How many runs failed, by failure class
    energy_provenance: str | None
    """Provenance of the row's energy: counter, sampled or modelled; `mixed` leaves the energy out."""
    shared: int = 0  # Runs whose device other runs might use at the same time (`queue.share_device`)
    disturbed: int = 0  # Runs with a result that neighbours disturbed while they were measured
    disturbed_by: Mapping[str, int] = field(default_factory=dict)
    """How many runs each neighbour disturbed: `foreign`, `other_experiment`, `same_experiment`."""
    interruptions: Interruptions | None = None
    """What interruptions cost on the market that its runs name, and what it saved; null = not on such."""


@dataclass(frozen=True, slots=True)
class TestedPair(Serializable):
    """A against B on one metric."""

    a: str  # Label of A
    b: str  # Label of B
    a_point: Point  # Axis values of A
    b_point: Point  # Axis values of B
    metric: str  # Name with its unit
    claim: Claim | None  # What the seeds say; null when no claim can be made
    text: str  # The verdict with its numbers in one line, or why no claim can be made


@dataclass(frozen=True, slots=True)
class SeedAgreement(Serializable):
    """Whether the repeats of a configuration's seed gave the same figures, and how much their time varied."""

    label: str  # Axis values in words
    point: Point  # Axis values by dotted name
    seed: int  # The seed
    runs: int  # Repeats that trained to full length
    equal: bool  # Whether training loss and judged figure are bitwise the same in all of them
    differing: Mapping[str, tuple[Number, Number]]  # Least and greatest value of those that are not, by name
    time_rsd_pct: Number | None
    """Relative standard deviation of their total times, in percent; null where fewer than two have one."""


MOST_KERNELS = 10  # Of a row


@dataclass(frozen=True, slots=True)
class KernelRow(Serializable):
    """One kernel in one row's profiled runs."""

    label: str  # Label of the row
    point: Point  # Axis values of the row
    kernel: str  # Name as compiled, cut to 160 characters
    runs: int  # Profiled runs that launched it
    figures: Mapping[str, Number]  # Means over those runs; counters that no run has are left out


@dataclass(frozen=True, slots=True)
class BestValue(Serializable):
    """The values of the nuisance axes at which one configuration is best."""

    label: str  # The configuration, without those axes
    point: Point  # Its axis values by dotted name, without those axes
    chosen: Point  # The chosen values by axis
    mean: Number  # Mean over seeds of the metric that chose, in its unit
    seeds: int  # How many seeds chose
    tried: int  # How many combinations of values were tried, failed ones too
    fewer_seeds: tuple[str, ...]  # Values that were not eligible because fewer seeds have the metric


@dataclass(frozen=True, slots=True)
class Tuning(Serializable):
    """How each configuration's best value of some axes was chosen."""

    axes: tuple[str, ...]  # The axes, by dotted name
    metric: Metric  # Figure of the validation part that chose, by its mean
    fresh: bool  # Whether figures and claims are over seeds that chose nothing
    best: tuple[BestValue, ...]  # One per configuration
    left_out: Mapping[str, str]  # Why other configurations have no best value, by label


@dataclass(frozen=True, slots=True)
class PublishedFigure(Serializable):
    """A printed figure next to the own mean."""

    label: str  # The row as printed
    point: Point  # Axis values of the own configuration
    metric: str  # Name with its unit
    printed: Number  # The printed value
    mean: Number  # Own mean over seeds
    low: Number | None
    """Lower end of the own mean's 95% interval over seeds (Student's t); null with fewer than two seeds."""
    high: Number | None  # Upper end of it
    seeds: int  # Own seeds
    ratio: Number | None  # Own mean / printed value; null where that is 0
    ratio_low: Number | None  # Lower end of the interval of the ratio; the printed value counts as exact
    ratio_high: Number | None  # Upper end of it


@dataclass(frozen=True, slots=True)
class Condition(Serializable):
    """A condition of a study next to that of own runs."""

    name: str  # As in the study: a field of the spec, or a fact of data or environment
    printed: str  # Its value there
    own: tuple[str, ...]  # Values that own runs have; empty if they report none
    differs: bool | None  # Whether any own run has another value; null if they report none


@dataclass(frozen=True, slots=True)
class PublishedComparison(Serializable):
    """Printed figures of a study next to own ones."""

    source: Mapping[str, str]  # Of the figures: title, authors, table, ...
    figures: tuple[PublishedFigure, ...]  # Row by row
    missing: Mapping[str, str]  # What own runs lack, by the row as printed
    conditions: tuple[Condition, ...]  # All conditions that the study gives


@dataclass(frozen=True, slots=True)
class ComparisonAnswer(Serializable):
    """Runs side by side by axis and, when asked for, tested claims."""

    axes: tuple[str, ...]  # Axes that make the rows, by dotted name
    metrics: tuple[Metric, ...]  # The compared figures
    rows: tuple[ComparedRow, ...]  # In the order in which the grid first reaches them
    best: Mapping[str, int]
    """Position of the row with the best mean by metric, over the cells that all rows have, of runs that
    trained to full length; not yet a proven difference, and none where a claim says otherwise."""
    claims: tuple[TestedPair, ...]  # Tested pairs, metric by metric; empty when none were asked for
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly
    kernels: tuple[KernelRow, ...] = ()
    """Kernels of each row, the one with the most time first; empty when none were asked for or profiled."""
    agreement: tuple[SeedAgreement, ...] = ()
    """Whether repeats of a seed agree, by configuration and seed; empty where no seed ran more than once."""
    tuning: Tuning | None = None  # How each row's best values were chosen; null unless asked for
    published: PublishedComparison | None = None  # Printed figures next to own ones; null unless given


@dataclass(frozen=True, slots=True)
class ScoredConfiguration(Serializable):
    """One configuration's score."""

    label: str  # Axis values in words
    point: Point  # Axis values by dotted name
    score: Number  # Sum of the parts; lower is better
    parts: Mapping[str, Number]  # Weight x value / largest value by metric, signed


@dataclass(frozen=True, slots=True)
class ScoreAnswer(Serializable):
    """Configurations by weighted score, the best (lowest) first."""

    strategy: str | None  # Name of the weighting; null when the weights are your own
    definitions: Definitions | None
    """Whose time and occupancy the strategy weighs; null when the weights are your own."""
    criteria: tuple[Criterion, ...]  # The weights
    ranking: tuple[ScoredConfiguration, ...]  # All configurations that have every metric
    sensitivity: Mapping[str, tuple[WeightRange, ...]]
    """By metric, who wins at which share of the total weight; a metric without a trade-off is left out."""
    left_out: Mapping[str, str]  # Why other configurations have no score, by label
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly


@dataclass(frozen=True, slots=True)
class FrontierMember(Serializable):
    """One configuration with its means over seeds."""

    label: str  # Axis values in words
    point: Point  # Axis values by dotted name
    values: Mapping[str, Number]  # Means by metric


@dataclass(frozen=True, slots=True)
class FrontierAnswer(Serializable):
    """The Pareto set: what nothing else beats on every metric at once."""

    metrics: tuple[Metric, ...]  # Over what, with the direction that wins
    members: tuple[FrontierMember, ...]  # What nothing dominates
    others: tuple[FrontierMember, ...]  # What is dominated
    dominated: Mapping[str, tuple[str, ...]]  # Dominators by label
    left_out: Mapping[str, str]  # Why other configurations were not judged, by label
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly


@dataclass(frozen=True, slots=True)
class FittedEffects(Serializable):
    """Effects on one metric, also in words."""

    model: Effects  # The tests
    sentences: tuple[str, ...]  # One line per level effect


@dataclass(frozen=True, slots=True)
class EffectsAnswer(Serializable):
    """What each axis does to each metric."""

    items: tuple[FittedEffects, ...]  # One per metric
    unanswered: Mapping[str, str]  # Why other metrics have none, by name
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly


@dataclass(frozen=True, slots=True)
class Ratio(Serializable):
    """How many times better than the baseline, from means over seeds."""

    ratio: Number  # Baseline / configuration where lower is better, else the inverse; 2 = twice as good
    low: Number | None
    """Lower end of the 95% interval of the means' ratio (Fieller), paired by seed like a claim; null with
    fewer than two seeds on a side."""
    high: Number | None  # Upper end of it; may be infinite
    pairs: int  # Seeds that were paired, or runs where each repeat of a seed counts; 0 when unpaired


@dataclass(frozen=True, slots=True)
class SpeedupRow(Serializable):
    """One configuration against the baseline."""

    label: str  # Axis values in words
    point: Point  # Axis values by dotted name
    ratios: Mapping[str, Ratio | None]  # By metric; null without a positive mean on both sides


@dataclass(frozen=True, slots=True)
class ScalingRow(Serializable):
    """One configuration against the same one on the fewest workers."""

    label: str  # Axis values in words
    point: Point  # Axis values by dotted name
    baseline: str  # Label of the configuration with the fewest workers
    workers: int  # Worker processes
    baseline_workers: int  # Worker processes of the baseline
    kind: Literal["strong", "weak"]
    """`strong`: both have the same global batch; `weak`: both have the same batch per worker."""
    global_batch_size: int  # Examples per update
    speedups: Mapping[str, Ratio | None]
    """How many times more examples a second, by metric: of times, from the examples that were trained on."""
    efficiencies: Mapping[str, Ratio | None]
    """The speed-ups and their intervals divided by how many times more workers there are; 1 = linear."""


@dataclass(frozen=True, slots=True)
class TimeToTarget(Serializable):
    """Time until the target was first reached at an evaluation."""

    label: str  # The configuration
    reached: int  # Finished runs that reached it
    of: int  # Finished runs that were evaluated on the way
    mean_s: Number | None
    """Mean over seeds from the start of a run, in seconds; null unless every run reached it, because a mean
    of the fastest would flatter."""
    speedup: Number | None  # The baseline's mean / this one's; null when either is missing


@dataclass(frozen=True, slots=True)
class TimeTo(Serializable):
    """Time to a target value."""

    metric: str  # The evaluated metric, `accuracy` for instance
    target: Number  # Its value that must be reached
    rows: tuple[TimeToTarget, ...]  # One per configuration


@dataclass(frozen=True, slots=True)
class SpeedupAnswer(Serializable):
    """Configurations against a named baseline."""

    baseline: str  # Its label
    metrics: tuple[Metric, ...]  # The compared figures
    rows: tuple[SpeedupRow, ...]  # One per configuration with a result, the baseline among them
    time_to: TimeTo | None  # Time to a target; null when no run was evaluated on the way
    left_out: Mapping[str, str]  # Why other configurations have no row, by label
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly
    scaling: tuple[ScalingRow, ...] = ()
    """Efficiency on several workers; empty unless `parallel.workers` is an axis, alone or linked."""


@dataclass(frozen=True, slots=True)
class TaskFigure(Serializable):
    """A task and the figure by which configurations are ranked on it."""

    task: str  # Its name
    metric: Metric  # The figure


@dataclass(frozen=True, slots=True)
class TaskStanding(Serializable):
    """One configuration over all tasks."""

    label: str  # Axis values in words, without those that the task sets
    point: Point  # Axis values by dotted name
    mean_rank: Number  # Mean over tasks of its rank by mean over seeds; 1 = the best; ties share their ranks
    low: Number | None
    """Lower end of its 95% interval, by bootstrap over seeds within each task; null with fewer than three
    seeds anywhere."""
    high: Number | None  # Upper end of it
    wins: int  # Tasks on which its mean is the best, ties included
    means: Mapping[str, Number]  # Means over seeds by task


@dataclass(frozen=True, slots=True)
class Improvement(Serializable):
    """How probable it is that a run of A is better than a run of B."""

    a: str  # Label of A
    b: str  # Label of B
    probability: Number
    """Share of pairs of seeds in which A is better, ties counting half, as the mean over tasks."""
    low: Number | None  # Lower end of its 95% interval, by the same bootstrap; null with too few seeds
    high: Number | None  # Upper end of it


@dataclass(frozen=True, slots=True)
class TasksAnswer(Serializable):
    """Configurations over several tasks."""

    tasks: tuple[TaskFigure, ...]  # The tasks, with their figures
    standings: tuple[TaskStanding, ...]  # Configurations with results on every task, the best mean rank first
    improvements: tuple[Improvement, ...]  # Pairs of them
    left_out: Mapping[str, str]  # Why other configurations have none, by label
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly


@dataclass(frozen=True, slots=True)
class Claim(Serializable):
    """What the seeds say about A against B on one metric. Differences are A minus B."""

    metric: str  # Name with its unit
    mean_a: Number  # Mean of A over the values that are tested
    mean_b: Number  # Mean of B over the values that are tested
    difference: Number  # Mean difference, in the metric's unit
    relative: Number | None  # Difference divided by the size of B's mean; null when that is 0
    relative_low: Number | None
    """Lower end of the interval of `relative`, which holds 0 exactly when `low` to `high` does: over seeds
    the interval of the means' ratio (Fieller), else that of the difference divided by the size of B's
    mean."""
    relative_high: Number | None  # Upper end of that interval; may be infinite
    error: Number  # Standard error of the difference, in the metric's unit
    low: Number
    """Lower end of the interval of the difference at level 1 - alpha, not corrected: it holds 0 exactly when
    the p-value before correction is not below alpha."""
    high: Number  # Upper end of that interval
    interval: Literal["Student's t", "two-way"]
    """How the interval was made: over seeds, or over seeds and examples."""
    test: Test  # Which test gave `p_value`
    p_value: Number
    """Two-sided, corrected over `claims` (Holm's steps, by Shaffer's count of pairs that can be equal)."""
    p_equivalent: Number | None  # Larger p-value of the two one-sided tests, corrected; null without a margin
    pairs: int  # Seeds that were paired, or runs where each repeat of a seed counts; 0 when unpaired
    seeds_a: int  # Seeds of A
    seeds_b: int  # Seeds of B
    examples: int
    """Examples that both sides were compared on; 0 = seeds alone, and the claim is about further seeds on the
    same examples."""
    resolution: Number
    """Least standard deviation that one run's figure is taken to have, in the metric's unit."""
    at_resolution: bool  # Whether seeds spread less than that, so that it stands in for their spread
    margin: Number | None  # Largest difference that counts as none; null when equivalence was not asked
    claims: int  # How many claims the p-values are corrected for; 1 = not corrected
    reversed: bool
    """Whether the means over all seeds of each side point the other way than those over the paired seeds,
    or are equal: then no side is called better."""
    verdict: Verdict  # The verdict
    more_seeds: int | None
    """About how many more seeds a side an undecided claim needs; null when decided, past 1000, or when only
    more examples would do."""


@dataclass(frozen=True, slots=True)
class Evidence(Serializable):
    """What one experiment says about two values of an axis."""

    experiment_id: int  # Number of the experiment
    pair: TestedPair  # As its `compare --by AXIS --claims` has it; its A and B may be the guideline's B and A
    depends_on: tuple[str, ...]
    """Axes of the experiment with which `effects` finds a significant interaction on the figure."""


@dataclass(frozen=True, slots=True)
class Guideline(Serializable):
    """What finished experiments say about two values of an axis on one figure."""

    axis: str  # The axis, by dotted name
    task: str  # Task of the runs
    hardware: str  # Their hardware by catalogue name; names joined by commas where an experiment has several
    metric: Metric  # The figure
    a: str  # Label of A
    b: str  # Label of B
    a_point: Point  # Axis value of A
    b_point: Point  # Axis value of B
    finding: Finding  # The verdict of all experiments that decide; `conflicting` where these disagree
    counts: Mapping[str, int]  # Experiments by verdict; `untested` = too few seeds for a claim
    smallest: Number | None
    """Smallest relative difference of A from B that an experiment measured (-0.2 = 20% less); null without a
    claim."""
    largest: Number | None  # Largest such difference
    seeds_fewest: int  # Seeds of a side of a claim, the fewest; 1 without a claim
    seeds_most: int  # The most
    evidence: tuple[Evidence, ...]  # One per experiment, the oldest first


@dataclass(frozen=True, slots=True)
class EvidenceSource(Serializable):
    """An experiment that guidelines rest on, with what limits its claims."""

    id: int  # Number of the experiment
    name: str  # Its name
    project: str  # Project that it belongs to
    ended_s: float | None  # When its last run ended
    tasks: tuple[str, ...]  # Tasks of its finished runs
    models: tuple[str, ...]  # Models that they trained
    hardware: tuple[str, ...]  # Their hardware by catalogue name
    devices: tuple[str, ...]  # GPUs or processors as the workers reported them
    runs: int  # Finished runs
    planned: int  # Runs in all
    seeds: int  # Seeds of the finished runs
    disturbed: int  # Finished runs that neighbours disturbed
    energy: tuple[str, ...]  # Provenance of their energy
    notes: tuple[str, ...]  # Notes of its comparisons


@dataclass(frozen=True, slots=True)
class Guide(Serializable):
    """Guidelines from finished experiments, the axes that most of them vary first."""

    guidelines: tuple[Guideline, ...]  # By axis, task, hardware, figure and pair of values
    sources: tuple[EvidenceSource, ...]  # Experiments that they quote
    left_out: Mapping[str, str]  # Why other experiments, or axes of experiments, say nothing
    notes: tuple[str, ...]  # What a reader must know to read the answer correctly


@dataclass(frozen=True, slots=True)
class LevelEffect(Serializable):
    """What one value of an axis does against its first one: what `compare --by AXIS --claims` says."""

    axis: str  # The axis
    level: AxisValue  # The value
    baseline: AxisValue  # The axis' first value
    effect: Number
    """Relative change (-0.6 = 60% less) on the ratio scale, else a difference in the metric's unit."""
    low: Number  # Lower end of its interval
    high: Number  # Upper end of its interval; may be infinite on the ratio scale
    p_value: Number
    """Two-sided, of no effect, corrected over all pairs of the axis' values; of equivalence where that is the
    verdict."""
    verdict: Literal["better", "worse", "equivalent", "undecided"]  # Of the value against the first one


@dataclass(frozen=True, slots=True)
class Term(Serializable):
    """Test of an axis (one name) or of an interaction (two names)."""

    axes: tuple[str, ...]  # One or two axes
    seeds: int  # Seeds that the test goes over; the fewest of any pair of values of an axis
    p_value: Number
    """Of no effect: the smallest corrected one of any pair of an axis' values; of an interaction by an F
    test with seeds as blocks and Box's lower bound of its degrees of freedom."""
    share: Number
    """Share of the total sum of squares that belongs to this term, in [0, 1], where all cells have run."""


@dataclass(frozen=True, slots=True)
class Effects(Serializable):
    """Effects of the axes on one metric."""

    metric: str  # Name with its unit
    scale: Scale  # `ratio` when effects are ratios of means, and interactions are of logarithms
    levels: tuple[LevelEffect, ...]  # Level effects, axis by axis
    terms: tuple[Term, ...]  # Tests of axes, then of interactions
    left_out: tuple[tuple[str, ...], ...]
    """Interactions that cannot be tested: a combination of values has no run, or fewer than two seeds ran
    all."""
    r_squared: Number  # Share of the variance between runs that axes and their two-way interactions explain
    checks: tuple[str, ...]  # What was left out, and what makes the tests doubtful; empty when nothing does


@dataclass(frozen=True, slots=True)
class ChosenConfiguration(Serializable):
    """The best configuration on the objective that meets every constraint, with its evidence."""

    winner: str  # Label of the chosen configuration
    winner_point: Mapping[str, AxisValue]  # Its axis values by dotted name
    objective: str  # Metric to be best on
    value: Number  # The winner's mean of it
    runner_up: str | None  # Next best configuration that meets the constraints; null if there is none
    over_runner_up: Claim | None
    """Winner (A) against runner-up (B) on the objective, corrected over all pairs of configurations; null
    when that cannot be tested, and then `sure` says why."""
    against_best: tuple[Claim, ...]
    """Winner (A) against the best (B) on each metric that may be a little worse, tested for equivalence
    within that difference and corrected alike; left out where the winner is the best itself or a side has too
    few seeds."""
    excluded: Mapping[str, str]  # Why each other configuration was left out, by label
    sure: str  # How sure the choice is, in one sentence
    text: str  # The answer in words


@dataclass(frozen=True, slots=True)
class PerValue(Serializable):
    """The best configuration with each value of an axis, chosen among those with that value alone."""

    axis: str  # The axis, by dotted name
    choices: Mapping[str, ChosenConfiguration]  # By the value in words, `hardware=v100`
    left_out: Mapping[str, str]  # Why other values have no choice
    best: str  # The value whose choice is best on the objective
    over_next: Claim | None
    """That choice (A) against the next value's (B) on the objective, corrected over all pairs of
    configurations; null when that cannot be tested, or no other value has a choice."""
    text: str  # Which value is best, in words


@dataclass(frozen=True, slots=True)
class Recommendation(ChosenConfiguration):
    """The choice among all configurations and, on request, among those with each value of an axis."""

    per: PerValue | None = None  # The choice for each value of an axis; null when none was asked for
    notes: tuple[str, ...] = ()  # What a reader must know to read the answer correctly


class Definitions(StrEnum):
    """Whose figures the strategies weigh."""

    stillhouse = "stillhouse"  # A run's whole time; occupancy of the SMs while kernels run
    published = "published"
    """Those of Chen and Sköld (2023): time, cost and energy without validation; occupancy averaged over wall
    time, idle included."""


@dataclass(frozen=True, slots=True)
class Criterion(Serializable):
    """One metric's part in the score."""

    metric: str  # Name with its unit
    weight: Number  # Not negative, dimensionless
    better: Better = "lower"  # Which direction wins; higher-is-better parts count negative


@dataclass(frozen=True, slots=True)
class WeightRange(Serializable):
    """Weights of one metric, the others scaled to fill up, over which one configuration wins."""

    low: Number  # From this share of the total weight, in [0, 1]
    high: Number  # To this one
    winner: str  # Label of the configuration


class AnalysisError(ValueError):
    """The question cannot be answered from these rows; the message names what is missing."""


class NotComparable(AnalysisError):
    """The runs answer different questions: another task or other data."""


class BadQuestion(AnalysisError):
    """The question itself is wrong; `parameter` is its part, such as `by` or `weight`."""

    def __init__(self, parameter: str, message: str) -> None:
        self.parameter = parameter
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Selection:
    """Narrows the runs that a question is about."""

    filter: str | None = None  # In the grammar of `service.db.filters`
    undisturbed: bool = False  # Leave out runs that neighbours disturbed while they were measured
    with_overhead: bool = False  # Add to each run an even share of its experiment's overhead


EVERYTHING = Selection()
