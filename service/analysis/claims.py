"""A against B as a tested claim: is the difference real, how large is it, and how sure is that.

The rules, stated so that they can be argued with:

- Seeds that both sides ran are paired when every seed of the smaller side is among them and there
  are at least two; a paired comparison removes what a seed does to both sides alike.
- Repeats of a seed are one value of accuracy and several of time (`service.analysis.repeats`).
- Paired: t-test of the differences. Unpaired: Welch's t-test. Both two-sided, with a variance between
  seeds that is at least what the figure's steps cause (`service.analysis.uncertainty`): seeds that
  happen to agree are not evidence.
- Where both sides' scores of each example are known, examples are a source of error besides seeds, and a
  claim needs both (`service.analysis.uncertainty`).
- Interval: all differences that the same test would not refuse, so that it holds 0 exactly when
  p >= alpha (before correction).
- Equivalence: two one-sided tests (Schuirmann 1987) within the margin, with the same variance.
- Many pairs: corrected over all pairs of the sides, asked for or not, so that a pair may be picked from the
  figures. Holm's step-down correction of the p-values, for differences by Shaffer's (1986) count: if some
  pairs of k sides are unequal, the others cannot all be equal.
- A side whose mean over all its seeds is not the better one is not called better, so that a claim over
  the paired seeds never contradicts the means in a table.

Why t-tests for any number of seeds: `benchmarks.analysis` measures that they keep the family's error rate
for time-like and accuracy-like figures. Rank tests cannot go below p = 2^(1 - S), which no correction for
many claims survives with few seeds, and a bootstrap has nothing to resample there.
"""

import bisect
import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from service.analysis.answers import AnalysisError, Claim, Test, Verdict
from service.analysis.repeats import compared_values, seed_of
from service.analysis.uncertainty import (
    Resolution,
    Uncertainty,
    of_pairs,
    of_two_samples,
    relative_interval,
    residual_square,
    resolution_of,
    with_examples,
)
from trainers.metrics import Better

Values = npt.NDArray[np.floating[Any]]
UnitScores = Mapping[int, Mapping[str, float]]
"""Scores of the evaluated part's examples by seed, then by the example's id; their mean is the figure."""
_Scores = Mapping[int, Values]

POWER = 0.8  # Chance of a decision that "about N more seeds" aims at
MOST_SEEDS = 1000
MOST_PAIRS = 500  # Pairs that are tested at once; more is a question no one asked
_TESTS: Mapping[tuple[bool, bool], Test] = {
    (True, False): "paired t-test",
    (False, False): "Welch's t-test",
    (True, True): "paired two-way test",
    (False, True): "two-way test",
}


class Family:
    """All pairs of some sides on one metric, corrected together; above `MOST_PAIRS` by Bonferroni.

    Args:
        sides: Values by replicate, in the metric's unit.
        margin: Largest difference that counts as none, in the metric's unit.
        resolution: The figure's steps; None = derived from the metric's name.
        scores: Of each example by seed. Used where they cover the compared seeds, on the same examples
            everywhere, and have the figures as their means.
    """

    def __init__(
        self,
        metric: str,
        sides: Mapping[str, Mapping[int, float]],
        *,
        better: Better,
        margin: float | None = None,
        alpha: float = 0.05,
        resolution: Resolution | None = None,
        scores: Mapping[str, UnitScores] | None = None,
    ) -> None:
        self.metric, self.sides, self.better, self.margin, self.alpha = metric, sides, better, margin, alpha
        self._scores = _tables(scores or {})
        self._steps = resolution_of(metric) if resolution is None else resolution
        self._tests: dict[tuple[str, str], tuple[Claim, Uncertainty]] = {}
        testable = [side for side, values in sides.items() if _untestable(metric, values) is None]
        self.size = math.comb(len(testable), 2)
        self._corrected = self._correct(testable) if self.size <= MOST_PAIRS else None

    def claim(self, a: str, b: str) -> Claim:
        for name, side in (("A", a), ("B", b)):
            if reason := _untestable(self.metric, self.sides[side]):
                raise AnalysisError(f"{name} has {reason}")
        claim, uncertainty = self._test(a, b)
        if self._corrected is not None:
            p_value, p_equivalent = self._corrected[frozenset((a, b))]
        else:
            p_value, p_equivalent = (
                min(1.0, self.size * p) for p in (claim.p_value, claim.p_equivalent or 0.0)
            )
        corrected = replace(
            claim,
            p_value=p_value,
            p_equivalent=None if claim.p_equivalent is None else p_equivalent,
            claims=self.size,
        )
        verdict = _verdict(corrected, self.better, self.alpha)
        more = _more_seeds(corrected, uncertainty, self.alpha) if verdict == "undecided" else None
        return replace(corrected, verdict=verdict, more_seeds=more)

    def _test(self, a: str, b: str) -> tuple[Claim, Uncertainty]:
        if (a, b) not in self._tests:
            of_units = (self._scores[a], self._scores[b]) if a in self._scores and b in self._scores else None
            sides = self.sides[a], self.sides[b]
            self._tests[a, b] = _tested(self.metric, *sides, self._steps, of_units, self.margin, self.alpha)
        return self._tests[a, b]

    def _correct(self, testable: Sequence[str]) -> Mapping[frozenset[str], tuple[float, float]]:
        pairs = list(itertools.combinations(testable, 2))
        differs, same = [1.0] * len(pairs), [1.0] * len(pairs)
        for at, (a, b) in enumerate(pairs):
            with contextlib.suppress(AnalysisError):  # They ran different seeds, and too few.
                claim = self._test(a, b)[0]
                differs[at] = claim.p_value
                same[at] = 1.0 if claim.p_equivalent is None else claim.p_equivalent
        differs, same = shaffer(differs, len(testable)), holm(same)
        return {frozenset(pair): of for pair, of in zip(pairs, zip(differs, same, strict=True), strict=True)}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (Holm 1979): family-wise error rate over all claims."""
    return _step_down(p_values, range(len(p_values), 0, -1))


def shaffer(p_values: Sequence[float], sides: int) -> list[float]:
    """Holm's correction of all pairs of some sides, by how many can still be equal (Shaffer 1986)."""
    return _step_down(p_values, equal_pairs_left(sides))


def equal_pairs_left(sides: int) -> list[int]:
    """Returns how many of all pairs can still be equal after one, two, ... are found unequal."""
    counts = _equal_pairs(sides)
    return [max(of for of in counts if of <= left) for left in range(math.comb(sides, 2), 0, -1)]


@functools.cache
def _equal_pairs(sides: int) -> frozenset[int]:
    if sides == 0:
        return frozenset({0})
    return frozenset(
        math.comb(first, 2) + others
        for first in range(1, sides + 1)
        for others in _equal_pairs(sides - first)
    )


def _step_down(p_values: Sequence[float], factors: Sequence[int]) -> list[float]:
    running = 0.0
    corrected = [0.0] * len(p_values)
    for factor, position in zip(factors, np.argsort(p_values, kind="stable"), strict=True):
        running = max(running, min(1.0, factor * p_values[position]))
        corrected[position] = running
    return corrected


def _tables(scores: Mapping[str, UnitScores]) -> dict[str, _Scores]:
    """Returns each run's scores as an array (n,), on the examples of the first run, in one order."""
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
    """Returns a side's scores (S, n); None where a seed has none, or they do not add up to its figure."""
    if not all(seed in scores for seed in seeds):
        return None
    table = np.array([scores[seed] for seed in seeds])
    fits = np.abs(table.mean(axis=1) - figures) <= 0.5 / table.shape[1]
    return table if fits.all() else None


def _over_examples(seeds: Uncertainty, a: Values, b: Values, *, paired: bool) -> Uncertainty:
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


def _tested(
    metric: str,
    a: Mapping[int, float],
    b: Mapping[int, float],
    resolution: Resolution,
    scores: tuple[_Scores, _Scores] | None,
    margin: float | None,
    alpha: float,
) -> tuple[Claim, Uncertainty]:
    """Returns the claim of two sides by themselves, without a verdict."""
    of = compared_values(a, b)
    left, right, paired = of.a, of.b, of.pairs > 0
    if min(len(left), len(right)) < 2:
        raise AnalysisError(
            f"A and B share fewer than two runs with {metric}, and one has a single seed; a claim needs two "
            "seeds of both, or two repeats of a seed that both ran"
        )
    difference = float(left.mean() - right.mean())
    least = float(resolution.run_variance(np.concatenate((left, right)), difference))
    if paired:
        uncertainty = of_pairs(left - right, least)
        spread, at_least = (left - right).var(ddof=1), 2.0 * least
    else:
        uncertainty = of_two_samples(left, right, least)
        spread, at_least = min(left.var(ddof=1), right.var(ddof=1)), least
    examples = 0
    if scores is not None:
        of_a, of_b = _rows(scores[0], of.of_a, left), _rows(scores[1], of.of_b, right)
        if of_a is not None and of_b is not None:
            uncertainty, examples = _over_examples(uncertainty, of_a, of_b, paired=paired), of_a.shape[1]
    overall = difference
    if paired or len(left) + len(right) < len(a) + len(b):
        overall = statistics.fmean(a.values()) - statistics.fmean(b.values())
    reach, size = float(uncertainty.reach(alpha)), abs(float(right.mean()))
    relative: tuple[float, float] | tuple[None, None] = (None, None)
    if size and not examples and min(left.min(), right.min()) > 0.0:
        relative = relative_interval(left, right, least, alpha, paired=paired)
    elif size:
        relative = (difference - reach) / size, (difference + reach) / size
    claim = Claim(
        metric=metric,
        mean_a=float(left.mean()),
        mean_b=float(right.mean()),
        difference=difference,
        relative=difference / size if size else None,
        relative_low=relative[0],
        relative_high=relative[1],
        error=float(uncertainty.error),
        low=difference - reach,
        high=difference + reach,
        interval="two-way" if examples else "Student's t",
        test=_TESTS[paired, examples > 0],
        p_value=uncertainty.p_value(difference),
        p_equivalent=None if margin is None else _equivalence(uncertainty, difference, margin),
        pairs=of.pairs,
        seeds_a=len({*map(seed_of, of.of_a)}),
        seeds_b=len({*map(seed_of, of.of_b)}),
        examples=examples,
        resolution=math.sqrt(least),
        at_resolution=bool(spread < at_least),
        margin=margin,
        claims=1,
        reversed=overall * difference <= 0.0 and difference != 0.0,
        verdict="undecided",
        more_seeds=None,
    )
    return claim, uncertainty


def _equivalence(uncertainty: Uncertainty, difference: float, margin: float) -> float:
    room = margin - abs(difference)
    one_sided = uncertainty.p_value(room) / 2
    return one_sided if room > 0 else 1.0 - one_sided


def _verdict(claim: Claim, better: Better, alpha: float) -> Verdict:
    """Equivalence first: a difference inside the margin does not matter."""
    if claim.p_equivalent is not None and claim.p_equivalent < alpha:
        return "equivalent"
    if claim.p_value >= alpha or claim.reversed:
        return "undecided"
    return "A is better" if (claim.difference < 0) == (better == "lower") else "B is better"


def _more_seeds(claim: Claim, uncertainty: Uncertainty, alpha: float) -> int | None:
    """Returns the seeds to add per side for the test to decide with `POWER`, if the difference is real.

    The nearer of two goals counts: showing the difference, or that it is within the margin. With several
    claims the level is Bonferroni's, which Holm's first step needs. None where no number suffices, as with
    too few examples.
    """
    present = min(claim.seeds_a, claim.seeds_b)
    each = max(1, claim.pairs // present)  # Runs of a seed that count
    goals = [abs(claim.difference)]
    if claim.margin is not None and claim.margin > abs(claim.difference):
        goals.append(claim.margin - abs(claim.difference))
    sides = 1 if claim.pairs else 2

    def decides(seeds: int) -> bool:
        then = uncertainty.with_seeds(present, seeds, sides * (seeds * each - 1))
        return bool(then.reach(alpha / claim.claims, POWER) <= max(goals))

    if not decides(MOST_SEEDS):
        return None
    needed = bisect.bisect_left(range(MOST_SEEDS), True, lo=2 if each == 1 else 1, key=decides)
    return max(1, needed - present)


def _untestable(metric: str, values: Mapping[int, float]) -> str | None:
    if len(values) < 2:
        return f"{'one seed' if values else 'no seed'} with {metric}; a claim needs at least two"
    return None
