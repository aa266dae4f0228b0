"""Statistical efficiency and goodput from the noise of gradients. Pure.

Pollux (Qiao et al., OSDI 2021), in the notation of its code: `sqr` estimates the squared norm of the
true gradient, `var` the variance of a gradient over the base batch. A step's progress grows
with the batch, but less than the batch does; the efficiency is what is left of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY = 0.999
"""Of the averages, per base batch seen."""
LEAST_KEPT = 0.99
"""Of the averages, per step: steps of many base batches would otherwise hardly be averaged."""


@dataclass(frozen=True, slots=True)
class GradientMoments:
    """Estimates from one step.

    Attributes:
        sqr: The true gradient's squared norm; a single estimate may be negative.
        var: The gradient's variance (summed over elements) at the base batch.
    """

    sqr: float
    var: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.sqr) and math.isfinite(self.var)


def from_squares(
    parts: int, mean_of_squares: float, square_of_mean: float, *, scale: float
) -> GradientMoments:
    """Returns the moments from the gradients of n >= 2 equal parts of a batch: workers or micro-batches.

        sqr = (n |g|^2 - mean_i |g_i|^2) / (n - 1)
        var = (mean_i |g_i|^2 - |g|^2) scale / (n - 1)

    `scale` is the whole batch / base batch.
    """
    return GradientMoments(
        sqr=(parts * square_of_mean - mean_of_squares) / (parts - 1),
        var=(mean_of_squares - square_of_mean) * scale / (parts - 1),
    )


def from_consecutive(product: float, squared_difference: float, *, scale: float) -> GradientMoments:
    """Returns the moments from the gradients g and g' of two steps in a row, each of one part.

        sqr ~ g . g',    var ~ |g - g'|^2 scale / 2

    Biased by the parameters' change in between; Adan holds both gradients already.
    """
    return GradientMoments(sqr=product, var=squared_difference * scale / 2)


@dataclass(slots=True)
class NoiseScale:
    """Averages of the moments over a run, corrected for their start at zero.

    Attributes:
        scale: Batch of a step / base batch.
        sqr_sum, var_sum: Exponential averages before correction.
        weight: Their total weight so far.
    """

    scale: float
    sqr_sum: float = 0.0
    var_sum: float = 0.0
    weight: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale {self.scale} is not a ratio of batches; give one above 0")

    def add(self, moments: GradientMoments) -> None:
        """Takes in a step, unless it is not finite."""
        if not moments.finite:
            return
        keep = max(DECAY**self.scale, LEAST_KEPT)
        self.sqr_sum = keep * self.sqr_sum + (1 - keep) * moments.sqr
        self.var_sum = keep * self.var_sum + (1 - keep) * moments.var
        self.weight = keep * self.weight + (1 - keep)

    @property
    def sqr(self) -> float:
        return max(0.0, self.sqr_sum / self.weight) if self.weight else 0.0

    @property
    def var(self) -> float:
        return max(0.0, self.var_sum / self.weight) if self.weight else 0.0

    @property
    def noise_scale(self) -> float:
        """var / sqr, in base batches: the batch at which noise and gradient are equally strong."""
        return self.var / self.sqr if self.sqr else math.inf

    @property
    def efficiency(self) -> float | None:
        return efficiency(self.sqr, self.var, self.scale) if self.weight else None


def gain(sqr: float, var: float, k: float) -> float:
    """Returns the progress of a step with k base batches, relative to one with a single base batch.

    (var + sqr) / (var / k + sqr): 1 without noise, k when noise is all there is.
    """
    if not k > 0:
        raise ValueError(f"k is {k}; give a batch above 0")
    below = var / k + sqr
    return (var + sqr) / below if below > 0 else 1.0


def efficiency(sqr: float, var: float, k: float) -> float:
    """Returns the progress per example relative to the base batch: gain / k, in (0, 1] for k >= 1."""
    return gain(sqr, var, k) / k


def goodput(throughput: float, statistical_efficiency: float) -> float:
    return throughput * statistical_efficiency
