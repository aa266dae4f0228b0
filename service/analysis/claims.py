"""A against B as a tested claim: is the difference real, how large is it, and how sure is that.

The rules, stated so that they can be argued with:

- Seeds that both sides ran are paired when every seed of the smaller side is among them and there
  are at least two; a paired comparison removes what a seed does to both sides alike.
- Paired: t-test of the differences below 20 pairs, Wilcoxon's signed-rank test from 20 on.
  Unpaired: Welch's t-test. All two-sided.
- Interval: bootstrap-t (studentised; Efron & Tibshirani 1993, ch. 12.5) with at least 5
  values a side. Below that resampling undercovers (83% instead of 95% for three
  normal values, simulated), and Student's interval is used and named.
- Equivalence: two one-sided t-tests (Schuirmann 1987) within the margin.
- Many pairs: Holm's step-down correction of the p-values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from service.analysis.candidates import Better
from service.analysis.errors import AnalysisError

Values = npt.NDArray[np.float64]
Test = Literal["paired t-test", "Wilcoxon signed-rank test", "Welch's t-test"]
Verdict = Literal["A is better", "B is better", "equivalent", "undecided"]

WILCOXON_FROM = 20
"""Pairs from which Wilcoxon's test replaces the paired t-test."""
BOOTSTRAP_FROM = 5
"""Values a side from which the interval is a bootstrap-t."""
RESAMPLES = 4000
POWER = 0.8
"""Chance of a decision that "about N more seeds" aims at."""
MOST_SEEDS = 1000
"""Seeds beyond which no number is named."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the seeds say about A against B on one metric. Differences are A minus B.

    Attributes:
        metric: name, with its unit.
        mean_a, mean_b: means over seeds.
        difference: mean difference, in the metric's unit.
        relative: difference divided by the size of B's mean; None when that is 0.
        low, high: confidence interval of the difference at level 1 - alpha.
        interval: how the interval was made.
        test: which test gave `p_value`.
        p_value: two-sided; Holm-corrected in `compare_all`.
        p_equivalent: the larger of the two one-sided p-values; None without a margin.
        pairs: number of seeds that were paired; 0 when unpaired.
        verdict: the answer in words.
        more_seeds: about how many more seeds a side an undecided claim needs; None when decided
            or beyond `MOST_SEEDS`.
    """

    metric: str
    mean_a: float
    mean_b: float
    difference: float
    relative: float | None
    low: float
    high: float
    interval: Literal["bootstrap-t", "Student's t", "exact"]
    test: Test
    p_value: float
    p_equivalent: float | None
    pairs: int
    verdict: Verdict
    more_seeds: int | None


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
    p_equivalent = None if margin is None else _equivalence(sample, margin)
    mean_a = float(np.mean([a[seed] for seed in shared] if paired else list(a.values())))
    mean_b = float(np.mean([b[seed] for seed in shared] if paired else list(b.values())))
    claim = Claim(
        metric=metric,
        mean_a=mean_a,
        mean_b=mean_b,
        difference=sample.difference,
        relative=sample.difference / abs(mean_b) if mean_b else None,
        low=low,
        high=high,
        interval=interval,
        test=test,
        p_value=p_value,
        p_equivalent=p_equivalent,
        pairs=len(shared) if paired else 0,
        verdict="undecided",
        more_seeds=None,
    )
    verdict = _verdict(claim, better, alpha)
    more = _more_seeds(sample, margin, alpha) if verdict == "undecided" else None
    return replace(claim, verdict=verdict, more_seeds=more)


def compare_all(
    metric: str,
    sides: Mapping[str, Mapping[int, float]],
    *,
    better: Better,
    margin: float | None = None,
    alpha: float = 0.05,
) -> dict[tuple[str, str], Claim]:
    """Every pair of sides, with p-values (of difference, and of equivalence) corrected by Holm."""
    if len(sides) < 2:
        raise AnalysisError("there is one configuration only; a comparison needs two")
    pairs = list(itertools.combinations(sides, 2))
    claims = [
        compare(metric, sides[a], sides[b], better=better, margin=margin, alpha=alpha) for a, b in pairs
    ]
    differs = holm([claim.p_value for claim in claims])
    same = holm([1.0 if claim.p_equivalent is None else claim.p_equivalent for claim in claims])
    corrected: dict[tuple[str, str], Claim] = {}
    for pair, claim, p_value, p_same in zip(pairs, claims, differs, same, strict=True):
        adjusted = replace(
            claim, p_value=p_value, p_equivalent=None if claim.p_equivalent is None else p_same
        )
        corrected[pair] = replace(adjusted, verdict=_verdict(adjusted, better, alpha))
    return corrected


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
        reach = float(stats.t.ppf(1 - alpha / 2, sample.freedom)) * sample.error
        return sample.difference - reach, sample.difference + reach, "Student's t"
    statistics = _bootstrap_t(sample)
    lower, upper = np.quantile(statistics, [alpha / 2, 1 - alpha / 2])
    low, high = sample.difference - upper * sample.error, sample.difference - lower * sample.error
    return float(low), float(high), "bootstrap-t"


def _bootstrap_t(sample: _Sample) -> Values:
    """Studentised differences of resamples; resamples without spread are left out.

    The generator's seed is fixed: the same rows always give the same interval.
    """
    generator = np.random.default_rng(20_210_915)

    def resampled(values: Values) -> tuple[Values, Values]:
        drawn = values[generator.integers(0, len(values), (RESAMPLES, len(values)))]
        return drawn.mean(axis=1), drawn.var(axis=1, ddof=1) / len(values)

    if sample.differences is not None:
        means, variances = resampled(sample.differences)
    else:
        means_a, variances_a = resampled(sample.a)
        means_b, variances_b = resampled(sample.b)
        means, variances = means_a - means_b, variances_a + variances_b
    errors = np.sqrt(variances)
    spread = errors > 1e-9 * sample.error
    studentised: Values = (means[spread] - sample.difference) / errors[spread]
    return studentised


def _test(sample: _Sample) -> tuple[Test, float]:
    differences = sample.differences
    name: Test = "Welch's t-test" if differences is None else "paired t-test"
    if sample.error == 0.0:  # Every seed says the same: the difference is known.
        return name, 1.0 if sample.difference == 0.0 else 0.0
    if differences is not None and len(differences) >= WILCOXON_FROM:
        return "Wilcoxon signed-rank test", float(stats.wilcoxon(differences).pvalue)
    return name, float(2 * stats.t.sf(abs(sample.difference) / sample.error, sample.freedom))


def _equivalence(sample: _Sample, margin: float) -> float:
    if sample.error == 0.0:
        return 0.0 if abs(sample.difference) < margin else 1.0
    above = stats.t.sf((sample.difference + margin) / sample.error, sample.freedom)
    below = stats.t.cdf((sample.difference - margin) / sample.error, sample.freedom)
    return float(max(above, below))


def _verdict(claim: Claim, better: Better, alpha: float) -> Verdict:
    """Equivalence first: a difference inside the margin is none that matters."""
    if claim.p_equivalent is not None and claim.p_equivalent < alpha:
        return "equivalent"
    if claim.p_value >= alpha:
        return "undecided"
    return "A is better" if (claim.difference < 0) == (better == "lower") else "B is better"


def _more_seeds(sample: _Sample, margin: float | None, alpha: float) -> int | None:
    """Further seeds a side until a decision has `POWER`, if the difference is what it seems.

    The nearer of two goals: showing the difference, or showing that it is within the margin.
    """
    if sample.error == 0.0:
        return None
    spread = sample.error * math.sqrt(sample.smallest)
    goals = [abs(sample.difference)]
    if margin is not None and margin > abs(sample.difference):
        goals.append(margin - abs(sample.difference))
    reach = stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(POWER)
    largest = max(goals)
    needed = math.ceil((reach * spread / largest) ** 2) if largest else MOST_SEEDS + 1
    return max(1, needed - sample.smallest) if needed <= MOST_SEEDS else None


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
