"""Grids without any effect, thousands at a time: how often does an axis or an interaction seem to have one?

The runs of one seed are alike to a degree: either all of them (`seed`), or those that differ only in the
first axis (`first axis`), which is what makes a model of independent runs believe that it has more of them.
Each axis is judged by the claims about all pairs of its values, each pair of axes by the test of its
interaction: the functions that `service.analysis.effects` calls, over arrays, and compared with what it
says of some grids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from benchmarks.families import ALPHA, Array, judge
from service.analysis.claims import Family
from service.analysis.effects import effects, orthonormal_contrasts
from service.analysis.ranking import Configuration, label_of
from service.analysis.uncertainty import Resolution, of_blocks

GRIDS = ((2, 2, 2), (2, 3), (4, 3))
"""Values of each axis."""
SEEDS = (2, 3, 5, 10)
CORRELATIONS = (0.0, 0.5, 0.99)
TOGETHER = ("seed", "first axis")
TRIALS = 40_000
EXAMPLES = 1_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One test in grids of one kind.

    Attributes:
        metric: `total_time_s` or `accuracy`.
        grid, seeds: of an experiment.
        correlation: of the runs of one seed.
        together: which runs of a seed correlate.
        term: axes by number.
        trials: how many are simulated.
        rate: share where the term is called significant.
    """

    metric: str
    grid: tuple[int, ...]
    seeds: int
    correlation: float
    together: str
    term: tuple[int, ...]
    trials: int
    rate: float

    @property
    def error(self) -> float:
        """Standard error of the rate; without a claim, as if there were one."""
        rate = max(self.rate, 1.0 / self.trials)
        return math.sqrt(rate * (1.0 - rate) / self.trials)


def cells(scale: float, generator: np.random.Generator) -> Iterator[Cell]:
    """Every cell, simulated.

    Args:
        scale: of the number of grids; 1 = as they are kept.
        generator: of all randomness.
    """
    trials = max(20, int(scale * TRIALS))
    for grid, seeds, correlation, together, metric in itertools.product(
        GRIDS, SEEDS, CORRELATIONS, TOGETHER, ("total_time_s", "accuracy")
    ):
        if correlation == 0.0 and together != TOGETHER[0]:
            continue
        figures = _figures(generator, metric, (trials, *grid, seeds), correlation, together)
        found = dict(_judged(metric, figures, grid))
        _same_as_effects(metric, figures, found)
        for term, false in found.items():
            yield Cell(metric, grid, seeds, correlation, together, term, trials, float(false.mean()))


def _figures(
    generator: np.random.Generator, metric: str, size: tuple[int, ...], correlation: float, together: str
) -> Array:
    """Figures (T, *grid, S)."""
    shared = list(size)
    for axis in range(1, len(size) - 1) if together == "seed" else (1,):
        shared[axis] = 1
    noise = math.sqrt(correlation) * generator.normal(0.0, 1.0, shared)
    noise = noise + math.sqrt(1.0 - correlation) * generator.normal(0.0, 1.0, size)
    if metric == "total_time_s":
        seconds: Array = 20.0 * np.exp(0.05 * noise)
        return seconds
    chance = special.expit(special.logit(0.9) + 0.3 * noise)
    return generator.binomial(EXAMPLES, chance) / EXAMPLES


def _judged(
    metric: str, figures: Array, grid: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], npt.NDArray[np.bool_]]]:
    resolution = Resolution(EXAMPLES if metric == "accuracy" else None)
    axes = range(len(grid))
    for axis in axes:
        others = tuple(1 + other for other in axes if other != axis)
        yield (axis,), judge(metric, figures.mean(axis=others), resolution, True)
    scaled = np.log(figures) if metric == "total_time_s" else figures
    for pair in itertools.combinations(axes, 2):
        others = tuple(1 + other for other in axes if other not in pair)
        table = scaled.mean(axis=others).reshape(len(figures), grid[pair[0]] * grid[pair[1]], -1)
        basis = np.kron(orthonormal_contrasts(grid[pair[0]]), orthonormal_contrasts(grid[pair[1]]))
        contrasts = table.swapaxes(1, 2) @ basis
        flat = figures.reshape(len(figures), -1)
        least = resolution.run_variance(flat, np.abs(contrasts.mean(axis=1)).max(axis=-1))
        least = least / math.prod(grid[other - 1] for other in others)
        if metric == "total_time_s":
            least = least / flat.mean(axis=1) ** 2
        yield pair, of_blocks(contrasts, least)[1] < ALPHA


def _same_as_effects(
    metric: str, figures: Array, found: Mapping[tuple[int, ...], npt.NDArray[np.bool_]]
) -> None:
    """Asserts that `effects` says the same of the first grid, and of one where each term seems to matter."""
    resolution = Resolution(EXAMPLES if metric == "accuracy" else None)
    for at in sorted({0, *(int(false.argmax()) for false in found.values())}):
        grid = figures[at]
        cells = [
            Configuration(label_of(point), point, {metric: dict(enumerate(grid[index].tolist()))}, {})
            for index in np.ndindex(grid.shape[:-1])
            for point in [{f"axis{number}": value for number, value in enumerate(index)}]
        ]

        def family(every: Any) -> Family:
            values = {side.label: side.values[metric] for side in every}
            return Family(metric, values, better="lower", resolution=resolution)

        scale: Any = "ratio" if metric == "total_time_s" else "difference"
        model = effects(metric, cells, scale=scale, family=family, resolution=resolution)
        said = {tuple(int(axis[4:]) for axis in term.axes): term.p_value < ALPHA for term in model.terms}
        assert said == {term: bool(false[at]) for term, false in found.items()}, (metric, grid.shape, at)
