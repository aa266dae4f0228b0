"""How far a difference between two configurations may be off, from seeds alone or from seeds and examples.

Pure, over arrays: `...` are any leading dimensions.

**Seeds alone.** Student's t over paired differences, or Welch's over two samples, with a variance that is at
least what the figure's resolution causes (`service.analysis.uncertainty`), for further seeds on the same
examples.

**Seeds and examples.** All configurations are scored on the same examples, and both seeds and examples are
samples. With d_si the difference of seed s on example i, the model is the crossed one of readers and cases in
diagnostic studies (Obuchowski & Rockette 1995; Hillis 2007):

    d_si = D + a_s + b_i + e_si,    Var(mean) = Var(a) / S + Var(b) / n + Var(e) / (S n)

The variance of the seeds' means holds the first and last part, with S - 1 degrees of freedom; the second
is the variance of the examples' means less the residual's, at least 0. Each part keeps its own quantile of t:

    reach^2 = t(S - 1)^2 V_seeds + t(n - 1)^2 V_interaction

which covers at least as often as stated whatever the parts' ratio is (Banerjee 1960), where one quantile with
Satterthwaite's degrees of freedom covers too rarely with two or three seeds.

A claim needs both sources, so the reach is also at least that over examples alone: McNemar's test
with its correction for continuity, and with one discordant example more on each side (Agresti & Min 2005).
With m discordant examples of n,

    reach = t(n - 1) sqrt(m + 2) / n + 1 / n

which is never surer than McNemar's exact test. For graded scores the sum of squared differences is m.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from service.domain.metrics import figure_of

Values = npt.NDArray[np.floating[Any]]

_LEAST_P = 1e-140
_FARTHEST = 14.0  # Logarithm of the ratio, relative to the estimate, beyond which an interval has no end
_NO_RATIO = 100.0  # Logarithm of a ratio that is none: its square is not a number
UNKNOWN_EXAMPLES = 100
"""Examples that a share is taken to have where their number is not known, or where it is a share of some."""
REPEATABILITY = 1e-3  # Share of a figure by which two runs of one configuration differ at least
_MOST_DECIMALS = 9
_WHOLE = 1e-9


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Squared standard errors (...) of a difference by source, with degrees of freedom; 0 = seeds alone.

    `seeds` includes the residual; `interaction` is what examples add, `examples` the error between examples
    alone if the sides are equal; `step` is the change of the mean when one example flips.
    """

    seeds: Values
    freedom: Values
    interaction: Values
    examples: Values
    example_freedom: Values
    step: float = 0.0

    @property
    def error(self) -> Values:
        total: Values = np.sqrt(np.maximum(self.seeds + self.interaction, self.examples))
        return total

    def reach(self, alpha: float, power: float = 0.5) -> Values:
        """Half the width of the interval; with `power` above 1/2, the difference shown with that chance."""
        quantile = _quantile(self.freedom, alpha, power)
        if self.step == 0.0:
            return quantile * np.sqrt(self.seeds)
        of_seeds = quantile**2
        of_examples = _quantile(self.example_freedom, alpha, power) ** 2
        both = of_seeds * self.seeds + of_examples * self.interaction
        half: Values = np.maximum(np.sqrt(both), np.sqrt(of_examples * self.examples) + self.step)
        return half

    def p_value(self, distance: float) -> float:
        """Two-sided error rate at which the reach is just the distance; of a single difference."""
        if abs(distance) <= self.step:
            return 1.0
        if self.step == 0.0:
            return float(2 * special.stdtr(self.freedom, -abs(distance) / math.sqrt(float(self.seeds))))

        def beyond(logarithm: float) -> float:
            return float(self.reach(math.exp(logarithm))) - abs(distance)

        least = math.log(_LEAST_P)
        if beyond(least) <= 0.0:
            return _LEAST_P
        return math.exp(optimize.brentq(beyond, least, 0.0, xtol=1e-12))

    def with_seeds(self, present: int, seeds: int, freedom: int) -> Self:
        """The same with another number of seeds per side that spread alike; examples unchanged."""
        return replace(self, seeds=self.seeds * (present / seeds), freedom=np.asarray(float(freedom)))


def of_pairs(differences: Values, run_variance: Values | float) -> Uncertainty:
    """Seeds alone, paired, from differences (..., S); a difference has twice a run's least variance."""
    seeds = differences.shape[-1]
    variance = np.maximum(differences.var(axis=-1, ddof=1), 2.0 * np.asarray(run_variance))
    return _of_seeds(variance / seeds, np.full_like(variance, seeds - 1.0))


def of_two_samples(a: Values, b: Values, run_variance: Values | float) -> Uncertainty:
    """Seeds alone, unpaired: Welch's variances (..., S_a) and (..., S_b), and Satterthwaite's freedom."""
    count_a, count_b = a.shape[-1], b.shape[-1]
    part_a = np.maximum(a.var(axis=-1, ddof=1), run_variance) / count_a
    part_b = np.maximum(b.var(axis=-1, ddof=1), run_variance) / count_b
    freedom = (part_a + part_b) ** 2 / (part_a**2 / (count_a - 1) + part_b**2 / (count_b - 1))
    return _of_seeds(part_a + part_b, freedom)


def of_blocks(contrasts: Values, variance: Values | float) -> tuple[Values, Values]:
    """Returns F statistic and p-value (...) of contrasts that are all 0, with seeds as blocks.

    The mean square of the orthonormal contrasts of cell means by seed (..., S, d) over that of their
    changes from seed to seed, with 1 and S - 1 degrees of freedom: Box's lower bound (Geisser & Greenhouse
    1958), which holds whatever variances and correlations the contrasts have. One contrast makes it the
    paired t-test, F = t^2.
    """
    seeds = contrasts.shape[-2]
    mean = contrasts.mean(axis=-2)
    spread = ((contrasts - mean[..., None, :]) ** 2).sum(axis=-2).mean(axis=-1) / (seeds - 1)
    f = seeds * (mean**2).mean(axis=-1) / np.maximum(spread, variance)
    return f, special.fdtrc(1.0, seeds - 1.0, f)


def relative_interval(
    a: Values, b: Values, run_variance: float, alpha: float, *, paired: bool
) -> tuple[float, float]:
    """Interval of mean(a) / mean(b) - 1 over seeds, for positive values; the upper end may be infinite.

    All ratios r for which the t-test of a - r b does not refuse 0 (Fieller 1954), so that it holds 0 exactly
    when the interval of the difference does. `a` and `b` are in one order where paired.
    """
    over, under = float(a.mean()), float(b.mean())
    count_a, count_b = len(a), len(b)
    of_a, of_b = float(a.var(ddof=1)), float(b.var(ddof=1))
    shared = float(((a - over) * (b - under)).sum()) / (count_a - 1) if paired else 0.0
    fixed = float(_quantile(np.asarray(count_a - 1.0), alpha, 0.5)) if paired else 0.0

    def beyond(logarithm: float) -> float:
        """How far 0 is outside the interval of a - r b."""
        r = math.exp(logarithm)
        if paired:
            variance = max(of_a - 2.0 * r * shared + r * r * of_b, (1.0 + r * r) * run_variance)
            return abs(over - r * under) - fixed * math.sqrt(variance / count_a)
        part_a = max(of_a, run_variance) / count_a
        part_b = r * r * max(of_b, run_variance) / count_b
        freedom = (part_a + part_b) ** 2 / (part_a**2 / (count_a - 1) + part_b**2 / (count_b - 1))
        reach = float(_quantile(np.asarray(freedom), alpha, 0.5)) * math.sqrt(part_a + part_b)
        return abs(over - r * under) - reach

    middle = math.log(over) - math.log(under)
    if abs(middle) > _NO_RATIO:
        return -1.0, math.inf

    def end(far: float) -> float:
        within, outside = middle, far
        if (far - middle) * -middle > 0.0:  # r = 1 is on this side.
            within, outside = (middle, 0.0) if beyond(0.0) > 0.0 else (0.0, far)
        if beyond(outside) <= 0.0:
            return math.copysign(math.inf, far - middle)
        if beyond(within) >= 0.0:  # Narrower than numbers this small can tell.
            return within
        return float(optimize.brentq(beyond, within, outside, xtol=1e-12))

    low, high = end(middle - _FARTHEST), end(middle + _FARTHEST)
    return math.expm1(low), math.expm1(high)


def with_examples(
    seeds: Uncertainty, difference: Values, squares: Values, residual: Values, count: int
) -> Uncertainty:
    """Adds examples as a source.

    `squares` (...) is the sum over examples of the squared difference between the sides' means over seeds,
    `residual` the squared standard error that seed and example together cause, from `residual_square`.
    """
    between = np.maximum(squares - count * difference**2, 0.0) / (count - 1) / count
    return replace(
        seeds,
        interaction=np.maximum(between - residual, 0.0),
        examples=(squares + 2.0) / count**2,
        example_freedom=np.full_like(squares, count - 1.0),
        step=1.0 / count,
    )


def residual_square(means: Values, unit_squares: Values, squares: Values, count: int) -> Values:
    """Residual mean square of the table of seeds by examples, divided by its S n entries (...).

    `means` (..., S) are over examples; `unit_squares` is the sum over examples of the squared mean over
    seeds, `squares` that of all entries.
    """
    seeds = means.shape[-1]
    mean = means.mean(axis=-1)
    of_seeds = count * ((means - mean[..., None]) ** 2).sum(axis=-1)
    of_units = seeds * (unit_squares - count * mean**2)
    rest = np.maximum(squares - seeds * count * mean**2 - of_seeds - of_units, 0.0)
    least: Values = rest / ((seeds - 1) * (count - 1)) / (seeds * count)
    return least


def _of_seeds(squared: Values, freedom: Values) -> Uncertainty:
    nothing = np.zeros_like(squared)
    return Uncertainty(squared, freedom, nothing, nothing, np.ones_like(squared))


def _quantile(freedom: Values, alpha: float, power: float) -> Values:
    quantile: Values = special.stdtrit(freedom, power) - special.stdtrit(freedom, alpha / 2)
    return quantile


@dataclass(frozen=True, slots=True)
class Resolution:
    """A figure's steps; `examples` is the number of examples that it is a share of, None = not a share."""

    examples: int | None

    def run_variance(self, values: Values, difference: Values | float = 0.0) -> Values:
        """Returns the least variance (...) between seeds of one run's figure, from values (..., R)."""
        if self.examples is not None:
            step = 1.0 / self.examples
            return np.maximum(step**2 / 4.0, np.abs(difference) * step / 2.0)
        largest = np.abs(values).max(axis=-1)
        least: Values = np.maximum(decimal_step(values) / 2.0, REPEATABILITY * largest) ** 2
        return least


def resolution_of(metric: str, *, headline: str | None = None, examples: float | None = None) -> Resolution:
    """Returns the steps of a metric, a share of so many examples; None or NaN = unknown."""
    figure = figure_of(metric, headline)
    if figure is None or figure.share is None:
        return Resolution(None)
    if examples is None or not examples >= 1:
        return Resolution(UNKNOWN_EXAMPLES)
    return Resolution(int(examples) if figure.share == "all" else min(UNKNOWN_EXAMPLES, int(examples)))


def decimal_step(values: Values) -> float:
    """Returns the largest power of ten, at most 1, that divides all values: 0.01 for 1.25 and 3.5."""
    first = float(values.flat[0])
    for decimals in range(_MOST_DECIMALS):
        factor = 10.0**decimals
        if _is_whole(first * factor):  # Rejects most before all values are looked at.
            scaled = values * factor
            if np.all(np.abs(scaled - np.round(scaled)) <= _WHOLE * np.maximum(1.0, np.abs(scaled))):
                return 1.0 / factor
    return float(10.0**-_MOST_DECIMALS)


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= _WHOLE * max(1.0, abs(value))
