"""A against B as a tested claim: is the difference real, how large is it, and how sure is that.

The rules, stated so that they can be argued with:

- Seeds that both sides ran are paired when every seed of the smaller side is among them and there
  are at least two; a paired comparison removes what a seed does to both sides alike.
- Paired: t-test of the differences below 20 pairs, Wilcoxon's signed-rank test from 20 on.
  Unpaired: Welch's t-test. All two-sided.
- Interval: bootstrap-t (studentised; Efron & Tibshirani 1993, ch. 12.5) with at least 8
  values a side. Below that it is either too narrow (three normal values: 83% instead of 95%,
  simulated) or wild (five: one in a hundred is 6 times as wide as Student's, and 15 times where
  values are skewed), and Student's interval is used and named.
- Equivalence: two one-sided t-tests (Schuirmann 1987) within the margin.
- Many pairs: Holm's step-down correction of the p-values.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from service.analysis.errors import AnalysisError
from service.analysis.records import Claim, Test, Verdict
from trainers.figures import Better

Values = npt.NDArray[np.float64]

WILCOXON_FROM = 20
"""Pairs from which Wilcoxon's test replaces the paired t-test."""
BOOTSTRAP_FROM = 8
"""Values a side from which the interval is a bootstrap-t."""
RESAMPLES = 4000
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
) -> Claim:
    """Test A against B.

    Args:
        metric: name of the metric, with its unit.
        a, b: values by seed, in the metric's unit.
        better: which direction wins.
        margin: largest difference that counts as none, in the metric's unit.
        alpha: error rate of each claim.

    Raises:
        AnalysisError: with fewer than two seeds on a side, a value that is not finite, or a
            margin or alpha that makes no sense.
    """
    _check(metric, a, b, margin, alpha)
    shared = sorted(a.keys() & b.keys())
    paired = len(shared) >= 2 and len(shared) == min(len(a), len(b))
    sample = _paired(a, b, shared) if paired else _unpaired(a, b)
    low, high, interval = _interval(sample, alpha)
    test, p_value = _test(sample)
    mean_a, mean_b = float(sample.a.mean()), float(sample.b.mean())
    claim = Claim(
        metric=metric,
        mean_a=mean_a,
        mean_b=mean_b,
        difference=sample.difference,
        relative=sample.difference / abs(mean_b) if mean_b else None,
        error=sample.error,
        low=low,
        high=high,
        interval=interval,
        test=test,
        p_value=p_value,
        p_equivalent=None if margin is None else _equivalence(sample, margin),
        pairs=len(shared) if paired else 0,
        seeds_a=len(sample.a),
        seeds_b=len(sample.b),
        margin=margin,
        claims=1,
        verdict="undecided",
        more_seeds=None,
    )
    return _judged(claim, better, alpha)


def compare_pairs(
    metric: str,
    sides: Mapping[str, Mapping[int, float]],
    pairs: Sequence[tuple[str, str]],
    *,
    better: Better,
    margin: float | None = None,
    alpha: float = 0.05,
) -> dict[tuple[str, str], Claim | AnalysisError]:
    """Test some pairs of sides, with p-values (of difference, and of equivalence) corrected by Holm.

    A pair that cannot be tested has its error in the place of a claim; the others are corrected
    for as many claims as were tested.
    """
    answers: dict[tuple[str, str], Claim | AnalysisError] = {}
    for a, b in pairs:
        try:
            answers[a, b] = compare(metric, sides[a], sides[b], better=better, margin=margin, alpha=alpha)
        except AnalysisError as error:
            answers[a, b] = error
    tested = {pair: answer for pair, answer in answers.items() if isinstance(answer, Claim)}
    differs = holm([claim.p_value for claim in tested.values()])
    same = holm([1.0 if claim.p_equivalent is None else claim.p_equivalent for claim in tested.values()])
    for (pair, claim), p_value, p_same in zip(tested.items(), differs, same, strict=True):
        corrected = replace(
            claim,
            p_value=p_value,
            p_equivalent=None if claim.p_equivalent is None else p_same,
            claims=len(tested),
        )
        answers[pair] = _judged(corrected, better, alpha)
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


@dataclass(frozen=True, slots=True)
class _Sample:
    """Values behind a difference: `differences` when paired, else both sides."""

    differences: Values | None
    a: Values
    b: Values
    difference: float
    error: float
    """Standard error of the difference."""
    freedom: float
    """Degrees of freedom (Welch-Satterthwaite when unpaired)."""

    @property
    def smallest(self) -> int:
        return min(len(self.a), len(self.b))


def _paired(a: Mapping[int, float], b: Mapping[int, float], seeds: Sequence[int]) -> _Sample:
    left, right = np.array([a[s] for s in seeds]), np.array([b[s] for s in seeds])
    differences = left - right
    error = float(differences.std(ddof=1)) / math.sqrt(len(seeds))
    return _Sample(
        differences, left, right, float(differences.mean()), _exact_zero(error, left, right), len(seeds) - 1
    )


def _unpaired(a: Mapping[int, float], b: Mapping[int, float]) -> _Sample:
    left, right = np.array(list(a.values())), np.array(list(b.values()))
    part_a, part_b = left.var(ddof=1) / len(left), right.var(ddof=1) / len(right)
    error = _exact_zero(math.sqrt(part_a + part_b), left, right)
    freedom = (
        (part_a + part_b) ** 2 / (part_a**2 / (len(left) - 1) + part_b**2 / (len(right) - 1))
        if error
        else float(len(left) + len(right) - 2)
    )
    return _Sample(None, left, right, float(left.mean() - right.mean()), error, float(freedom))


def _exact_zero(error: float, a: Values, b: Values) -> float:
    """0 where the spread is rounding alone, so that it is not divided by."""
    scale = max(float(np.abs(a).max()), float(np.abs(b).max()))
    return 0.0 if error <= 1e-14 * scale else error


def _interval(
    sample: _Sample, alpha: float
) -> tuple[float, float, Literal["bootstrap-t", "Student's t", "exact"]]:
    if sample.error == 0.0:
        return sample.difference, sample.difference, "exact"
    if sample.smallest < BOOTSTRAP_FROM:
        reach = float(special.stdtrit(sample.freedom, 1 - alpha / 2)) * sample.error
        return sample.difference - reach, sample.difference + reach, "Student's t"
    statistics = _bootstrap_t(sample)
    lower, upper = np.quantile(statistics, [alpha / 2, 1 - alpha / 2])
    low, high = sample.difference - upper * sample.error, sample.difference - lower * sample.error
    return float(low), float(high), "bootstrap-t"


def _bootstrap_t(sample: _Sample) -> Values:
    """Studentised differences of resamples; resamples without spread are left out."""
    if sample.differences is not None:
        means, variances = _resampled(sample.differences, 0)
    else:
        means_a, variances_a = _resampled(sample.a, 0)
        means_b, variances_b = _resampled(sample.b, 1)
        means, variances = means_a - means_b, variances_a + variances_b
    errors = np.sqrt(variances)
    spread = errors > 1e-9 * sample.error
    studentised: Values = (means[spread] - sample.difference) / errors[spread]
    return studentised


def _resampled(values: Values, stream: int) -> tuple[Values, Values]:
    """Mean and squared standard error of each resample, (RESAMPLES,)."""
    count = len(values)
    middle = float(values.mean())
    shares, centred = _resamples(count, stream), values - middle
    means = shares @ centred
    variances = np.maximum(shares @ centred**2 - means**2, 0.0) / (count - 1)
    return means + middle, variances


@functools.lru_cache(maxsize=8)
def _resamples(count: int, stream: int) -> Values:
    """How often each value is drawn in each resample, as shares (RESAMPLES, count).

    The generator's seed is fixed: the same rows always give the same interval.
    """
    generator = np.random.default_rng((20_210_915, stream))
    return generator.multinomial(count, np.full(count, 1 / count), RESAMPLES) / count


def _test(sample: _Sample) -> tuple[Test, float]:
    differences = sample.differences
    name: Test = "Welch's t-test" if differences is None else "paired t-test"
    if sample.error == 0.0:  # Every seed says the same: the difference is known.
        return name, 1.0 if sample.difference == 0.0 else 0.0
    if differences is not None and len(differences) >= WILCOXON_FROM:
        return "Wilcoxon signed-rank test", float(stats.wilcoxon(differences).pvalue)
    return name, float(2 * special.stdtr(sample.freedom, -abs(sample.difference) / sample.error))


def _equivalence(sample: _Sample, margin: float) -> float:
    if sample.error == 0.0:
        return 0.0 if abs(sample.difference) < margin else 1.0
    above = special.stdtr(sample.freedom, -(sample.difference + margin) / sample.error)
    below = special.stdtr(sample.freedom, (sample.difference - margin) / sample.error)
    return float(max(above, below))


def _judged(claim: Claim, better: Better, alpha: float) -> Claim:
    verdict = _verdict(claim, better, alpha)
    more = _more_seeds(claim, alpha) if verdict == "undecided" else None
    return replace(claim, verdict=verdict, more_seeds=more)


def _verdict(claim: Claim, better: Better, alpha: float) -> Verdict:
    """Equivalence first: a difference inside the margin is none that matters."""
    if claim.p_equivalent is not None and claim.p_equivalent < alpha:
        return "equivalent"
    if claim.p_value >= alpha:
        return "undecided"
    return "A is better" if (claim.difference < 0) == (better == "lower") else "B is better"


def _more_seeds(claim: Claim, alpha: float) -> int | None:
    """Further seeds a side until a t-test decides with `POWER`, if the difference is what it seems.

    The nearer of two goals: showing the difference, or showing that it is within the margin.
    With several claims the level is Bonferroni's, which Holm's first step needs.
    """
    if claim.error == 0.0:
        return None
    present = min(claim.seeds_a, claim.seeds_b)
    spread = claim.error * math.sqrt(present)
    goals = [abs(claim.difference)]
    if claim.margin is not None and claim.margin > abs(claim.difference):
        goals.append(claim.margin - abs(claim.difference))
    sides = 1 if claim.pairs else 2

    def decides(seeds: int) -> bool:
        freedom = sides * (seeds - 1)
        reach = special.stdtrit(freedom, 1 - alpha / claim.claims / 2) + special.stdtrit(freedom, POWER)
        return bool(reach * spread <= max(goals) * math.sqrt(seeds))

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
            raise AnalysisError(f"{side} has {count} with {metric}; no claim can be made from fewer than two")
        bad = sorted(seed for seed, value in values.items() if not math.isfinite(value))
        if bad:
            raise AnalysisError(f"{side} has a {metric} that is not finite at seed {bad[0]}; leave it out")
    if margin is not None and not 0 < margin < math.inf:
        raise AnalysisError(f"margin {margin} is not a positive number of {metric}'s unit")
    if not 0 < alpha < 1:
        raise AnalysisError(f"alpha {alpha} is not between 0 and 1")
