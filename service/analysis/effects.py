"""What each axis does to a metric: main effects, interactions, and doubts about the tests.

The seed is the unit of replication, or of times its repeats (`service.analysis.repeats`). An axis' effect is
the claim that `compare` makes about two of its values: per replicate, the mean over the cells of the other
axes that every value has (`service.analysis.cells.sides`), tested by `service.analysis.claims` and corrected
over all pairs of the axis' values, so the two cannot contradict each other. Time, cost, energy and throughput
have effects that are ratios of means and read "-60%"; others, such as accuracy, are differences.

An interaction of two axes is tested on its contrasts within each seed, in logarithms where effects are
ratios, so that it means that the ratio itself changes (`service.analysis.uncertainty.of_blocks`). Seeds that
lack a cell are left out, as are cells of the other axes that some combination of values lacks.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import linalg, stats

from service.analysis.answers import AnalysisError, Claim, Effects, LevelEffect, Scale, Term
from service.analysis.cells import Side, sides
from service.analysis.claims import MOST_PAIRS, Family
from service.analysis.ranking import Configuration, label_of
from service.analysis.repeats import seed_of, units_of
from service.analysis.uncertainty import Resolution, of_blocks, resolution_of
from service.domain.formats import axis_value

Matrix = npt.NDArray[np.floating[Any]]
Codes = npt.NDArray[np.int64]
_VERDICTS: Mapping[str, Any] = {"A is better": "better", "B is better": "worse"}


def effects(
    metric: str,
    configurations: Sequence[Configuration],
    *,
    scale: Scale,
    family: Callable[[Sequence[Side]], Family],
    resolution: Resolution | None = None,
) -> Effects:
    """Tests every axis and every pair of axes.

    `scale` `ratio` compares means by ratio, and logarithms across axes; `family` makes claims about all
    pairs of some sides.

    Raises:
        AnalysisError: no axis with two values, no effect with two seeds on both sides, or values that are not
            positive on the ratio scale.
    """
    cells = [configuration for configuration in configurations if configuration.figures.get(metric)]
    grid = _grid(metric, cells, scale)
    steps = resolution_of(metric) if resolution is None else resolution
    levels: list[LevelEffect] = []
    terms: list[Term] = []
    checks: list[str] = []
    refused: list[str] = []
    for position, axis in enumerate(grid.axes):
        try:
            every, notes = sides(cells, [axis], [metric])
        except AnalysisError as error:
            refused.append(f"{axis}: {error}")
            continue
        checks += notes
        against_first, claims, reasons = _claims(axis, grid.axes[axis], family(every))
        refused += reasons
        if against_first:
            levels += [_level(axis, grid.axes[axis], claim, at, scale) for at, claim in against_first]
            seeds = min(min(claim.seeds_a, claim.seeds_b) for claim in claims)
            share = grid.share(grid.means_of(grid.codes[:, position]))
            terms.append(Term((axis,), seeds, min(claim.p_value for claim in claims), share))
    if not terms:
        raise AnalysisError(refused[0])
    left_out: list[tuple[str, str]] = []
    for pair in itertools.combinations(range(len(grid.axes)), 2):
        names = tuple(list(grid.axes)[at] for at in pair)
        term = _interaction(grid, pair, steps, scale)
        if term is None:
            left_out.append((names[0], names[1]))
        else:
            terms.append(term)
    return Effects(
        metric=metric,
        scale=scale,
        levels=tuple(levels),
        terms=tuple(terms),
        left_out=tuple(left_out),
        r_squared=grid.explained(),
        checks=tuple(dict.fromkeys((*grid.checks(), *checks, *refused))),
    )


def _claims(
    axis: str, values: Sequence[Any], family: Family
) -> tuple[list[tuple[int, Claim]], list[Claim], list[str]]:
    """Claims against an axis' first value, by position, and about all pairs; why others have none."""
    labels = [label_of({axis: value}) for value in values]
    of_first: list[tuple[int, Claim]] = []
    every: list[Claim] = []
    reasons: list[str] = []
    pairs = list(itertools.combinations(range(len(labels)), 2))
    for first, other in pairs if family.size <= MOST_PAIRS else pairs[: len(labels) - 1]:
        try:
            claim = family.claim(labels[other], labels[first])
        except AnalysisError as error:
            if first == 0:
                reasons.append(f"{labels[other]} (A) against {labels[0]} (B): {error}")
            continue
        every.append(claim)
        if first == 0:
            of_first.append((other, claim))
    return of_first, every, reasons


def _level(axis: str, values: Sequence[Any], claim: Claim, at: int, scale: Scale) -> LevelEffect:
    if scale == "ratio":
        assert claim.relative is not None  # Values are positive.
        assert claim.relative_low is not None
        assert claim.relative_high is not None
        effect, low, high = claim.relative, claim.relative_low, claim.relative_high
    else:
        effect, low, high = claim.difference, claim.low, claim.high
    verdict = _VERDICTS.get(claim.verdict, claim.verdict)
    p_value = claim.p_equivalent if claim.verdict == "equivalent" else claim.p_value
    assert p_value is not None  # Equivalence was tested.
    return LevelEffect(axis, values[at], values[0], effect, low, high, p_value, verdict)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Figures as arrays: C cells, S replicates, A axes that vary."""

    axes: Mapping[str, Sequence[Any]]
    replicates: Sequence[int]
    codes: Codes  # (C, A): each cell's value positions
    figures: Matrix  # (C, S): the metric, NaN = no run
    values: Matrix  # (C, S): the same on the model's scale

    @property
    def cell_means(self) -> Matrix:
        means: Matrix = np.nanmean(self.values, axis=1)
        return means

    def means_of(self, groups: Codes) -> Matrix:
        means: Matrix = np.bincount(groups, self.cell_means) / np.bincount(groups)
        return means

    @property
    def _total(self) -> float:
        return float(np.nanvar(self.values))

    def share(self, deviations: Matrix) -> float:
        return min(1.0, float(deviations.var()) / self._total) if self._total else 0.0

    def explained(self) -> float:
        """Share of the variance that the axes and their pairs explain, by least squares over all runs."""
        if not self._total:
            return 1.0
        columns = [np.ones((len(self.codes), 1))]
        positions = range(self.codes.shape[1])
        for group in itertools.combinations(positions, 2) if len(positions) > 1 else [(0,)]:
            _, of = np.unique(self.codes[:, group], axis=0, return_inverse=True)
            columns.append(np.eye(int(of.max()) + 1)[of.ravel()])
        counts, means = np.isfinite(self.values).sum(axis=1), self.cell_means
        design = np.hstack(columns)
        weighted = (design * counts[:, None]).T
        fitted = design @ (np.linalg.pinv(weighted @ design, hermitian=True) @ (weighted @ means))
        within = float(np.nansum((self.values - means[:, None]) ** 2))
        between = float(counts @ (means - fitted) ** 2)
        return max(0.0, 1.0 - (within + between) / (self._total * int(counts.sum())))

    def checks(self) -> list[str]:
        doubts: list[str] = []
        possible = math.prod(len(levels) for levels in self.axes.values())
        if len(self.codes) < possible:
            doubts.append(
                f"{possible - len(self.codes)} of {possible} cells have no run: an effect is over the cells "
                "that every value of its axis has"
            )
        counts = np.isfinite(self.values).sum(axis=1)
        if counts.min() < counts.max():
            doubts.append(f"cells have between {counts.min()} and {counts.max()} seeds")
        residuals = self.values - self.cell_means[:, None]
        residuals = residuals - np.nanmean(residuals, axis=0)
        residuals = residuals[np.isfinite(residuals)]
        spread = np.abs(residuals).max() > 1e-9 * np.nanmax(np.abs(self.values))
        if spread and 8 <= len(residuals) <= 5000 and stats.shapiro(residuals).pvalue < 0.01:
            doubts.append(
                "what seeds add to cells is not normal (Shapiro-Wilk p < 0.01): p-values are approximate"
            )
        return doubts


def _grid(metric: str, cells: Sequence[Configuration], scale: Scale) -> _Grid:
    if not cells:
        raise AnalysisError(f"no run has {metric}")
    axes: dict[str, list[Any]] = {}
    for cell in cells:
        for name, value in cell.point.items():
            levels = axes.setdefault(name, [])
            if value not in levels:
                levels.append(value)
    axes = {name: levels for name, levels in axes.items() if len(levels) > 1}
    for cell, name in itertools.product(cells, axes):
        if name not in cell.point:
            raise AnalysisError(
                f"{cell.label} has no {name}, which others vary; leave out runs without it (--filter)"
            )
    if not axes:
        raise AnalysisError("every axis has only one value; an effect needs at least two")
    seeds = {seed: at for at, seed in enumerate(dict.fromkeys(s for c in cells for s in c.figures[metric]))}
    figures = np.full((len(cells), len(seeds)), math.nan)
    for row, cell in enumerate(cells):
        for seed, value in cell.figures[metric].items():
            figures[row, seeds[seed]] = value
    if scale == "ratio" and np.nanmin(figures) <= 0:
        raise AnalysisError(f"{metric} is 0 or less in some run; ratios need positive values")
    codes = np.array([[levels.index(cell.point[name]) for name, levels in axes.items()] for cell in cells])
    return _Grid(axes, list(seeds), codes, figures, np.log(figures) if scale == "ratio" else figures)


def _interaction(grid: _Grid, pair: tuple[int, int], steps: Resolution, scale: Scale) -> Term | None:
    names = list(grid.axes)
    counts = [len(grid.axes[names[at]]) for at in pair]
    combination = grid.codes[:, pair[0]] * counts[1] + grid.codes[:, pair[1]]
    rest = np.delete(grid.codes, pair, axis=1)
    _, of = np.unique(rest, axis=0, return_inverse=True) if rest.size else (None, np.zeros(len(rest), int))
    of = of.ravel()
    whole = np.bincount(of) == counts[0] * counts[1]  # Cells are unique.
    chosen = np.flatnonzero(whole[of])
    if not len(chosen):
        return None
    together = np.isfinite(grid.values[chosen]).all(axis=0)
    replicates = [grid.replicates[at] for at in np.flatnonzero(together).tolist()]
    if len(replicates) < 2:
        return None
    table = np.zeros((counts[0] * counts[1], len(replicates)))
    np.add.at(table, combination[chosen], grid.values[np.ix_(chosen, together)])
    cells = len(chosen) // len(table)
    table /= cells
    contrasts = table.T @ np.kron(orthonormal_contrasts(counts[0]), orthonormal_contrasts(counts[1]))
    units = units_of(replicates, contrasts)
    if len(units) < len(replicates):
        contrasts = np.array([contrasts[of].mean(axis=0) for of in units])
    figures = grid.figures[np.ix_(chosen, together)]
    largest = np.abs(contrasts.mean(axis=0)).max()
    least = float(steps.run_variance(figures.ravel(), largest)) / cells
    if scale == "ratio":
        least /= float(figures.mean()) ** 2
    _, p_value = of_blocks(contrasts, least)
    means = table.mean(axis=1).reshape(counts)
    deviations = means - means.mean(axis=0) - means.mean(axis=1)[:, None]
    seeds = len({*map(seed_of, replicates)})
    return Term((names[pair[0]], names[pair[1]]), seeds, float(p_value), grid.share(deviations))


def orthonormal_contrasts(levels: int) -> Matrix:
    """Helmert contrasts between levels, (L, L - 1)."""
    contrasts: Matrix = np.ascontiguousarray(linalg.helmert(levels).T)
    return contrasts


def sentences(model: Effects, *, alpha: float = 0.05, margin: float | None = None) -> tuple[str, ...]:
    return tuple(_sentence(model, level, alpha, margin) for level in model.levels)


def _sentence(model: Effects, level: LevelEffect, alpha: float, margin: float | None) -> str:
    ratio = model.scale == "ratio"

    def amount(value: float) -> str:
        if math.isinf(value):
            return "no bound"
        return f"{value:+.1%}" if ratio else f"{value:+.3g}"

    interval = f"{amount(level.low)} to {amount(level.high)}"
    what = f"{level.axis}={axis_value(level.level)} against {axis_value(level.baseline)}"
    if level.verdict == "equivalent":
        return f"{what}: {model.metric} equivalent within {margin:g} ({interval})"
    if level.verdict == "undecided":
        return f"{what}: no significant effect on {model.metric} ({interval})"
    change = f"{what}: {model.metric} {amount(level.effect)} ({interval})"
    others = [term for term in model.terms if len(term.axes) == 2 and level.axis in term.axes]
    depends = [
        f"{_other(term.axes, level.axis)} (p = {term.p_value:.2g})" for term in others if term.p_value < alpha
    ]
    if depends:
        return f"{change} on average; how much depends on {', '.join(depends)}"
    if others:
        names = ", ".join(_other(term.axes, level.axis) for term in others)
        return f"{change} on average; no significant interaction with {names}"
    return change


def _other(axes: Sequence[str], axis: str) -> str:
    return axes[1] if axes[0] == axis else axes[0]
