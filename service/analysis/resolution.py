"""How finely one run's figure can be read: the least spread between seeds that a claim may assume. Pure.

Figures come in steps, so seeds that agree say little about the next one. An accuracy over n examples moves
in steps of 1/n; a time is no more repeatable than its clock and its machine. A variance below what those
steps cause is chance, and is replaced by it:

- A share of n examples: one example could have gone either way in each run, 1 / (4 n^2). Where two
  configurations differ by d, at least n |d| examples were judged differently (of b + c discordant examples
  the difference is |b - c| / n; McNemar 1947), each by the toss of a coin if the configurations are equal:
  |d| / (2 n) for each of the two runs. The larger of the two counts.
- Everything else: the larger of half a step of the decimals that the values have, and `REPEATABILITY` of
  the largest value, squared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from service.domain.metrics import figure_of

Values = npt.NDArray[np.floating[Any]]

UNKNOWN_EXAMPLES = 100
"""Examples that a share is taken to have where their number is not known, or where it is a share of some."""
REPEATABILITY = 1e-3
"""Share of a figure by which two runs of one configuration differ at least."""
_MOST_DECIMALS = 9
_WHOLE = 1e-9


@dataclass(frozen=True, slots=True)
class Resolution:
    """A figure's steps; `examples` is the number of examples that it is a share of, None = not a share."""

    examples: int | None

    def run_variance(self, values: Values, difference: Values | float = 0.0) -> Values:
        """Returns the least variance (...) of one run's figure between seeds.

        Args:
            values: Of the compared runs (..., R).
            difference: Between the two sides' means (...).
        """
        if self.examples is not None:
            step = 1.0 / self.examples
            return np.maximum(step**2 / 4.0, np.abs(difference) * step / 2.0)
        largest = np.abs(values).max(axis=-1)
        least: Values = np.maximum(decimal_step(values) / 2.0, REPEATABILITY * largest) ** 2
        return least


def resolution_of(metric: str, *, headline: str | None = None, examples: float | None = None) -> Resolution:
    """Returns the steps of a metric by its name.

    Args:
        headline: Metric that `score` and `best_score` are values of.
        examples: In the part; None or NaN = unknown.
    """
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
