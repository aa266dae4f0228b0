"""A against B as a tested claim: is the difference real, how large is it, and how sure is that.

The rules, stated so that they can be argued with:

- Seeds that both sides ran are paired when every seed of the smaller side is among them and there
  are at least two; a paired comparison removes what a seed does to both sides alike.
- Paired: t-test of the differences. Unpaired: Welch's t-test. Both two-sided, with a variance between
  seeds that is at least what the figure's steps cause (`service.analysis.resolution`): seeds that
  happen to agree are not evidence.
- Where both sides' scores of each example are known, examples are a source of error besides seeds, and a
  claim needs both (`service.analysis.uncertainty`).
- Interval: all differences that the same test would not refuse, so that it holds 0 exactly when
  p >= alpha (before correction).
- Equivalence: two one-sided tests (Schuirmann 1987) within the margin, with the same variance.
- Many pairs: Holm's step-down correction of the p-values.

Why t-tests for any number of seeds: `benchmarks.analysis` measures that they keep the family's error rate
for time-like and accuracy-like figures. Rank tests cannot go below p = 2^(1 - S), which no correction for
many claims survives with few seeds, and a bootstrap has nothing to resample there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from service.analysis.errors import AnalysisError
from service.analysis.resolution import Resolution, resolution_of
from service.analysis.results import Claim, Test, Verdict
from service.analysis.uncertainty import (
    Uncertainty,
    of_pairs,
    of_two_samples,
    residual_square,
    with_examples,
)
from trainers.figures import Better

Values = npt.NDArray[np.floating[Any]]
UnitScores = Mapping[int, Mapping[str, float]]
"""Scores of the evaluated part's examples by seed, then by the example's id; their mean is the figure."""
_Scores = Mapping[int, Values]

POWER = 0.8
"""Chance of a decision that "about N more seeds" aims at."""
MOST_SEEDS = 1000
"""Seeds beyond which no number is named."""


def compare(
    metric: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    *,
    better: Better,
    margin: float | None = None,
    alpha: float = 0.05,
    resolution: Resolution | None = None,
    scores: tuple[UnitScores, UnitScores] | None = None,
) -> Claim:
    """Tests A against B.

    Args:
        metric: name of the metric, with its unit.
        a, b: values by seed, in the metric's unit.
        better: Winning direction.
        margin: largest difference that counts as none, in the metric's unit.
        alpha: error rate of each claim.
        resolution: the figure's steps; None = by the metric's name, its number of examples not known.
        scores: of each example by seed, of A and of B. Used where they cover the seeds that are compared,
            on the same examples everywhere, and have the figures as their means.

    Raises:
        AnalysisError: with fewer than two seeds on a side, a value that is not finite, or a
            margin or alpha that makes no sense.
    """
    _check(metric, a, b, margin, alpha)
    steps = resolution_of(metric) if resolution is None else resolution
    tables = None if scores is None else _tables({"a": scores[0], "b": scores[1]})
    of_units = None if tables is None else (tables["a"], tables["b"])
    claim, uncertainty = _tested(metric, _sample(a, b, steps, of_units), margin, alpha)
    return _judged(claim, uncertainty, better, alpha)


def compare_pairs(
    metric: str,
    sides: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    *,
    better: Better,
    margin: float | None = None,
    alpha: float = 0.05,
    resolution: Resolution | None = None,
    scores: Mapping[str, UnitScores] | None = None,
) -> dict[tuple[str, str], Claim | AnalysisError]:
    """Tests some pairs of sides, with p-values (of difference, and of equivalence) corrected by Holm.

    A pair that cannot be tested has its error in the place of a claim; the others are corrected
    for as many claims as were tested. `scores` are of the sides that have them; the rest is as for
    `compare`.
    """
    known = _tables(scores or {})
    steps = resolution_of(metric) if resolution is None else resolution
    answers: dict[tuple[str, str], Claim | AnalysisError] = {}
    tested: dict[tuple[str, str], tuple[Claim, Uncertainty]] = {}
    for a, b in pairs:
        try:
            _check(metric, sides[a], sides[b], margin, alpha)
        except AnalysisError as error:
            answers[a, b] = error
            continue
        of_units = (known[a], known[b]) if a in known and b in known else None
        sample = _sample(sides[a], sides[b], steps, of_units)
        tested[a, b] = _tested(metric, sample, margin, alpha)
        answers[a, b] = tested[a, b][0]  # Keeps the order of the pairs.
    differs = holm([claim.p_value for claim, _ in tested.values()])
    same = holm([1.0 if claim.p_equivalent is None else claim.p_equivalent for claim, _ in tested.values()])
    for (pair, (claim, uncertainty)), p_value, p_same in zip(tested.items(), differs, same, strict=True):
        corrected = replace(
            claim,
            p_value=p_value,
            p_equivalent=None if claim.p_equivalent is None else p_same,
            claims=len(tested),
        )
        answers[pair] = _judged(corrected, uncertainty, better, alpha)
    return answers


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm 1979): family-wise error rate over all claims."""
    order = np.argsort(p_values)
    count, running = len(p_values), 0.0
    corrected = [0.0] * count
    for rank, position in enumerate(order):
        running = max(running, min(1.0, (count - rank) * p_values[position]))
        corrected[position] = running
    return corrected


_TESTS: Mapping[tuple[bool, bool], Test] = {
    (True, False): "paired t-test",
    (False, False): "Welch's t-test",
    (True, True): "paired two-way test",
    (False, True): "two-way test",
}
"""By whether seeds are paired, and whether examples are."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """What is compared: values of both sides, and how far their difference may be off.

    Attributes:
        a, b: values of the seeds that count (S_a,) and (S_b,), in one order where they are paired.
        pairs: seeds that are paired; 0 = none are.
        uncertainty: Uncertainty of the difference.
        examples: Examples that the sides are compared over; 0 = seeds alone.
        resolution: least standard deviation of one run's figure.
        at_resolution: whether seeds spread less than that.
    """

    a: Values
    b: Values
    pairs: int
    uncertainty: Uncertainty
    examples: int
    resolution: float
    at_resolution: bool

    @property
    def difference(self) -> float:
        return float(self.a.mean() - self.b.mean())


def _sample(
    a: Mapping[int, float],
    b: Mapping[int, float],
    resolution: Resolution,
    scores: tuple[_Scores, _Scores] | None,
) -> _Sample:
    shared = sorted(a.keys() & b.keys())
    paired = len(shared) >= 2 and len(shared) == min(len(a), len(b))
    seeds_a, seeds_b = (shared, shared) if paired else (list(a), list(b))
    left, right = np.array([a[seed] for seed in seeds_a]), np.array([b[seed] for seed in seeds_b])
    difference = left.mean() - right.mean()
    least = resolution.run_variance(np.concatenate((left, right)), difference)
    if paired:
        seeds = of_pairs(left - right, least)
        spread, at_least = (left - right).var(ddof=1), 2.0 * least
    else:
        seeds = of_two_samples(left, right, least)
        spread, at_least = min(left.var(ddof=1), right.var(ddof=1)), least
    tables = None
    if scores is not None:
        of_a, of_b = _rows(scores[0], seeds_a, left), _rows(scores[1], seeds_b, right)
        tables = None if of_a is None or of_b is None else (of_a, of_b)
    return _Sample(
        left,
        right,
        len(shared) if paired else 0,
        seeds if tables is None else _over_examples(seeds, *tables, paired=paired),
        0 if tables is None else tables[0].shape[1],
        math.sqrt(float(least)),
        bool(spread < at_least),
    )


def _tables(scores: Mapping[str, UnitScores]) -> dict[str, _Scores]:
    """Scores of each run as an array (n,), over the same examples in the same order.

    Runs that scored other examples than the first run are left out.
    """
    first = next((run for of in scores.values() for run in of.values()), {})
    return {
        side: {
            seed: np.fromiter((run[unit] for unit in first), float, len(first))
            for seed, run in of.items()
            if len(first) > 1 and run.keys() == first.keys()
        }
        for side, of in scores.items()
    }


def _rows(scores: _Scores, seeds: Sequence[int], figures: Values) -> Values | None:
    """A side's table (S, n); None where a seed has no scores, or they are not what its figure is a mean of.

    That is, to within half an example.
    """
    if not all(seed in scores for seed in seeds):
        return None
    table = np.array([scores[seed] for seed in seeds])
    fits = np.abs(table.mean(axis=1) - figures) <= 0.5 / table.shape[1]
    return table if fits.all() else None


def _over_examples(seeds: Uncertainty, a: Values, b: Values, *, paired: bool) -> Uncertainty:
    """Returns the uncertainty from seeds, with that from examples (S_a, n) and (S_b, n)."""
    between = a.mean(axis=0) - b.mean(axis=0)
    residual = _residual(a - b) if paired else _residual(a) + _residual(b)
    return with_examples(
        seeds,
        difference=between.mean(),
        squares=(between**2).sum(),
        residual=residual,
        count=len(between),
    )


def _residual(table: Values) -> Values:
    return residual_square(
        table.mean(axis=1), (table.mean(axis=0) ** 2).sum(), (table**2).sum(), table.shape[1]
    )


def _tested(metric: str, sample: _Sample, margin: float | None, alpha: float) -> tuple[Claim, Uncertainty]:
    """Returns the claim before correction and verdict."""
    uncertainty, difference = sample.uncertainty, sample.difference
    reach = float(uncertainty.reach(alpha))
    mean_b = float(sample.b.mean())
    claim = Claim(
        metric=metric,
        mean_a=float(sample.a.mean()),
        mean_b=mean_b,
        difference=difference,
        relative=difference / abs(mean_b) if mean_b else None,
        error=float(uncertainty.error),
        low=difference - reach,
        high=difference + reach,
        interval="two-way" if sample.examples else "Student's t",
        test=_TESTS[sample.pairs > 0, sample.examples > 0],
        p_value=uncertainty.p_value(difference),
        p_equivalent=None if margin is None else _equivalence(uncertainty, difference, margin),
        pairs=sample.pairs,
        seeds_a=len(sample.a),
        seeds_b=len(sample.b),
        examples=sample.examples,
        resolution=sample.resolution,
        at_resolution=sample.at_resolution,
        margin=margin,
        claims=1,
        verdict="undecided",
        more_seeds=None,
    )
    return claim, uncertainty


def _equivalence(uncertainty: Uncertainty, difference: float, margin: float) -> float:
    """Returns the larger of the two one-sided p-values: that of the margin's nearer end."""
    room = margin - abs(difference)
    one_sided = uncertainty.p_value(room) / 2
    return one_sided if room > 0 else 1.0 - one_sided


def _judged(claim: Claim, uncertainty: Uncertainty, better: Better, alpha: float) -> Claim:
    verdict = _verdict(claim, better, alpha)
    more = _more_seeds(claim, uncertainty, alpha) if verdict == "undecided" else None
    return replace(claim, verdict=verdict, more_seeds=more)


def _verdict(claim: Claim, better: Better, alpha: float) -> Verdict:
    """Equivalence first: a difference inside the margin is none that matters."""
    if claim.p_equivalent is not None and claim.p_equivalent < alpha:
        return "equivalent"
    if claim.p_value >= alpha:
        return "undecided"
    return "A is better" if (claim.difference < 0) == (better == "lower") else "B is better"


def _more_seeds(claim: Claim, uncertainty: Uncertainty, alpha: float) -> int | None:
    """Further seeds a side until the test decides with `POWER`, if the difference is what it seems.

    The nearer of two goals: showing the difference, or showing that it is within the margin.
    With several claims the level is Bonferroni's, which Holm's first step needs. None where no number
    does, as when the examples are too few.
    """
    present = min(claim.seeds_a, claim.seeds_b)
    goals = [abs(claim.difference)]
    if claim.margin is not None and claim.margin > abs(claim.difference):
        goals.append(claim.margin - abs(claim.difference))
    sides = 1 if claim.pairs else 2

    def decides(seeds: int) -> bool:
        then = uncertainty.with_seeds(present, seeds, sides * (seeds - 1))
        return bool(then.reach(alpha / claim.claims, POWER) <= max(goals))

    if not decides(MOST_SEEDS):
        return None
    needed = bisect.bisect_left(range(MOST_SEEDS), True, lo=2, key=decides)
    return max(1, needed - present)


def _check(
    metric: str, a: Mapping[int, float], b: Mapping[int, float], margin: float | None, alpha: float
) -> None:
    for side, values in (("A", a), ("B", b)):
        if len(values) < 2:
            count = "one seed" if values else "no seed"
            raise AnalysisError(f"{side} has {count} with {metric}; a claim needs at least two")
        bad = sorted(seed for seed, value in values.items() if not math.isfinite(value))
        if bad:
            raise AnalysisError(
                f"{side} has a {metric} that is not finite at seed {bad[0]}; leave that seed out"
            )
    if margin is not None and not 0 < margin < math.inf:
        raise AnalysisError(f"margin {margin} is not a positive number of {metric}'s unit")
    if not 0 < alpha < 1:
        raise AnalysisError(f"alpha {alpha} is not between 0 and 1")
