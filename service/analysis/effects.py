"""What each axis does to a metric: main effects, interactions, and whether the model may be believed.

A linear model over the axes as categories, with sum-to-zero coding and all two-way interactions
that the rows can tell apart. Metrics where ratios are the natural language (time, cost, energy,
throughput) are modelled as logarithms, so that an effect reads "-60%" and an interaction means
that the ratio itself changes; others (accuracy) are modelled as they are. Terms are tested by
comparing residual sums of squares with and without them (type III, F test), with a noise that is at
least what the figure's steps cause (`service.analysis.resolution`); level effects are
differences of least-squares means, which weigh every cell alike even when seeds are missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from service.analysis.candidates import label_of
from service.analysis.errors import AnalysisError
from service.analysis.resolution import Resolution, resolution_of
from service.analysis.results import Effects, LevelEffect, Scale, Term
from service.domain.formats import axis_value

Matrix = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Observation:
    """One run: its axis values by dotted name and the metric, in the metric's unit."""

    point: Mapping[str, Any]
    value: float


def effects(
    metric: str,
    observations: Sequence[Observation],
    *,
    scale: Scale,
    alpha: float = 0.05,
    resolution: Resolution | None = None,
) -> Effects:
    """Fits the model and tests every axis and every pair of axes.

    Args:
        metric: name of the metric, with its unit.
        observations: the runs.
        scale: `ratio` models logarithms.
        alpha: error rate of the intervals.
        resolution: the figure's steps, which noise is at least; None = by the metric's name.

    Raises:
        AnalysisError: without an axis of two values, without repeated seeds to tell noise from
            effects, for values that are not finite, or not positive on the ratio scale.
    """
    values = _checked_values(metric, observations, scale)
    cells = _cells(observations, values)
    axes = _axes(cells.points)
    full, left_out = _full_design(cells, axes, len(values))
    freedom = len(values) - full.matrix.shape[1]
    if freedom < 1:
        raise AnalysisError(
            f"{len(values)} runs cannot separate the effects on {metric} from noise; add seeds"
        )
    coefficients, inverse, between = _fit(full.matrix, cells)
    residuals = values - (full.matrix @ coefficients)[cells.of]
    steps = resolution_of(metric) if resolution is None else resolution
    unexplained = cells.within + between
    noise = max(unexplained / freedom, _least_noise(observations, steps, scale))
    total = float(((values - values.mean()) ** 2).sum())
    terms = tuple(
        _test(term, coefficients[columns], inverse[columns, columns], noise, freedom, total)
        for term, columns in full.columns.items()
        if term
    )
    covariance = inverse * noise
    levels = tuple(
        _level(full, axes, axis, level, coefficients, covariance, freedom, scale, alpha)
        for axis, axis_levels in axes.items()
        for level in axis_levels[1:]
    )
    return Effects(
        metric=metric,
        scale=scale,
        levels=levels,
        terms=terms,
        left_out=left_out,
        r_squared=1.0 - unexplained / total if total else 1.0,
        checks=_checks(cells, axes, residuals, unexplained),
    )


def _least_noise(observations: Sequence[Observation], resolution: Resolution, scale: Scale) -> float:
    """Returns the variance that the figure's steps alone cause, on the model's scale."""
    figures = np.array([observation.value for observation in observations], dtype=float)
    least = float(resolution.run_variance(figures))
    return least / float(figures.mean()) ** 2 if scale == "ratio" else least


@dataclass(frozen=True, slots=True)
class _Cells:
    """The rows by cell: all that a model of the axes needs, since it is constant within a cell.

    Attributes:
        points: axis values of each of the C cells.
        of: (N,) cell of each row.
        counts, means: (C,) rows and mean of each cell.
        within: sum of squares within cells.
    """

    points: Sequence[Mapping[str, Any]]
    of: npt.NDArray[np.int64]
    counts: Matrix
    means: Matrix
    within: float


def _cells(observations: Sequence[Observation], values: Matrix) -> _Cells:
    points: list[Mapping[str, Any]] = []
    known: dict[tuple[Any, ...], int] = {}
    of: list[int] = []
    for observation in observations:
        point = observation.point
        key = (*point, *point.values())
        number = known.get(key)
        if number is None:
            number = known[key] = len(points)
            points.append(point)
        of.append(number)
    index = np.array(of)
    counts = np.bincount(index).astype(float)
    means = np.bincount(index, values) / counts
    # A cell of equal rows has no spread, whatever rounding did to its mean.
    spread = values - means[index]
    spread[np.abs(spread) <= 1e-14 * np.abs(values)] = 0.0
    return _Cells(points, index, counts, means, float(spread @ spread))


@dataclass(frozen=True, slots=True)
class _Design:
    """A design matrix (C, P) and which of its columns belong to which term; `()` = intercept."""

    matrix: Matrix
    columns: Mapping[tuple[str, ...], slice]


def _checked_values(metric: str, observations: Sequence[Observation], scale: Scale) -> Matrix:
    if not observations:
        raise AnalysisError(f"no run has {metric}")
    values = np.array([observation.value for observation in observations], dtype=float)
    if not np.isfinite(values).all():
        raise AnalysisError(
            f"{metric} is not finite in {int((~np.isfinite(values)).sum())} runs; leave them out"
        )
    if scale == "ratio":
        if (values <= 0).any():
            raise AnalysisError(f"{metric} is 0 or less in some run; ratios need positive values")
        logarithms: Matrix = np.log(values)
        return logarithms
    return values


def _axes(points: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Values of each axis that varies, in order of appearance.

    Raises:
        AnalysisError: when no axis has two values, or a point lacks one of the axes.
    """
    axes: dict[str, list[Any]] = {}
    for point in points:
        for name, value in point.items():
            levels = axes.setdefault(name, [])
            if value not in levels:
                levels.append(value)
    for point in points:
        for name in axes:
            if name not in point:
                raise AnalysisError(
                    f"{label_of(point)} has no value of axis '{name}'; compare like with like"
                )
    varied = {name: levels for name, levels in axes.items() if len(levels) > 1}
    if not varied:
        raise AnalysisError("every axis has only one value; an effect needs at least two")
    return varied


def _coding(levels: int) -> Matrix:
    """Sum-to-zero coding (L, L - 1): the last level is minus the sum of the others."""
    coding: Matrix = np.vstack([np.eye(levels - 1), -np.ones(levels - 1)])
    return coding


def _design(
    points: Sequence[Mapping[str, Any]], axes: Mapping[str, list[Any]], pairs: Sequence[tuple[str, str]]
) -> _Design:
    blocks: list[Matrix] = [np.ones((len(points), 1))]
    columns: dict[tuple[str, ...], slice] = {(): slice(0, 1)}
    main = {
        name: _coding(len(levels))[[levels.index(point[name]) for point in points]]
        for name, levels in axes.items()
    }
    terms: dict[tuple[str, ...], Matrix] = {(name,): block for name, block in main.items()}
    for a, b in pairs:
        product = main[a][:, :, None] * main[b][:, None, :]
        terms[a, b] = product.reshape(len(points), -1)
    width = 1
    for term, block in terms.items():
        columns[term] = slice(width, width + block.shape[1])
        width += block.shape[1]
        blocks.append(block)
    return _Design(np.hstack(blocks), columns)


def _full_design(
    cells: _Cells, axes: Mapping[str, list[Any]], rows: int
) -> tuple[_Design, tuple[tuple[str, str], ...]]:
    """Returns all axes and as many two-way interactions as keep the matrix of full rank."""
    design = _design(cells.points, axes, [])
    if not _is_full_rank(design.matrix):
        raise AnalysisError("two axes always change together; their effects cannot be separated")
    kept: list[tuple[str, str]] = []
    left_out: list[tuple[str, str]] = []
    for pair in itertools.combinations(axes, 2):
        wider = _design(cells.points, axes, [*kept, pair])
        if wider.matrix.shape[1] < rows and _is_full_rank(wider.matrix):
            kept.append(pair)
            design = wider
        else:
            left_out.append(pair)
    return design, tuple(left_out)


def _is_full_rank(matrix: Matrix) -> bool:
    """Entries are -1, 0 and 1, so that a rank that is not full shows in the products, far from rounding."""
    eigenvalues = np.linalg.eigvalsh(matrix.T @ matrix)
    return bool(eigenvalues[0] > 1e-9 * eigenvalues[-1])


def _fit(design: Matrix, cells: _Cells) -> tuple[Matrix, Matrix, float]:
    """Least squares over all rows: coefficients (P,), (X'X)^-1, and the sum of squares of cell means."""
    weighted = design * cells.counts[:, None]
    inverse = np.linalg.inv(weighted.T @ design)
    coefficients = inverse @ (weighted.T @ cells.means)
    residuals = cells.means - design @ coefficients
    residuals[np.abs(residuals) <= 1e-12 * np.abs(cells.means)] = 0.0
    return coefficients, inverse, float(cells.counts @ residuals**2)


def _test(
    term: tuple[str, ...], coefficients: Matrix, inverse: Matrix, noise: float, freedom: int, total: float
) -> Term:
    """F test; b' C^-1 b is the sum of squares that a model without the term leaves besides."""
    explained = float(coefficients @ np.linalg.solve(inverse, coefficients))
    size = len(coefficients)
    f = explained / size / noise
    return Term(term, f, float(stats.f.sf(f, size, freedom)), explained / total if total else 0.0)


def _level(
    full: _Design,
    axes: Mapping[str, list[Any]],
    axis: str,
    level: Any,
    coefficients: Matrix,
    covariance: Matrix,
    freedom: int,
    scale: Scale,
    alpha: float,
) -> LevelEffect:
    """Returns the difference of least-squares means; with sum coding all other terms average to zero."""
    contrast = np.zeros(len(coefficients))
    baseline = axes[axis][0]
    coding = _coding(len(axes[axis]))
    contrast[full.columns[axis,]] = coding[axes[axis].index(level)] - coding[0]
    difference = float(contrast @ coefficients)
    error = math.sqrt(max(0.0, float(contrast @ covariance @ contrast)))
    reach = float(stats.t.ppf(1 - alpha / 2, freedom)) * error
    t = abs(difference) / error
    read = math.expm1 if scale == "ratio" else float
    return LevelEffect(
        axis,
        level,
        baseline,
        read(difference),
        read(difference - reach),
        read(difference + reach),
        float(2 * stats.t.sf(t, freedom)),
    )


def _checks(
    cells: _Cells, axes: Mapping[str, list[Any]], residuals: Matrix, unexplained: float
) -> tuple[str, ...]:
    """Doubts about the model: missing cells, uneven seeds, residuals that are not alike."""
    found: list[str] = []
    possible = math.prod(len(levels) for levels in axes.values())
    if len(cells.points) < possible:
        found.append(
            f"{possible - len(cells.points)} of {possible} cells have no run: effects are extrapolated there"
        )
    fewest, most = int(cells.counts.min()), int(cells.counts.max())
    if most == 1:
        found.append("one run per cell: interactions are treated as noise; add seeds to separate them")
    if fewest < most:
        found.append(f"cells have between {fewest} and {most} runs")
    if unexplained == 0.0:
        return tuple(found)
    if 8 <= len(residuals) <= 5000 and stats.shapiro(residuals).pvalue < 0.01:
        found.append("residuals are not normal (Shapiro-Wilk p < 0.01): p-values are approximate")
    if _unlike_spread(cells, residuals) < 0.01:
        found.append("cells differ in spread (Levene p < 0.01): p-values are approximate")
    return tuple(found)


def _unlike_spread(cells: _Cells, residuals: Matrix) -> float:
    """p-value of Levene's test about medians (Brown & Forsythe 1974), over cells of three rows or more."""
    order = np.argsort(cells.of, kind="stable")
    groups = np.split(residuals[order], np.cumsum(cells.counts.astype(int))[:-1])
    distances = [np.abs(group - np.median(group)) for group in groups if len(group) >= 3]
    if len(distances) < 2:
        return 1.0
    sizes = np.array([len(distance) for distance in distances])
    means = np.array([distance.mean() for distance in distances])
    every = np.concatenate(distances)
    within = float(((every - np.repeat(means, sizes)) ** 2).sum())
    between = float(sizes @ (means - every.mean()) ** 2)
    freedom = len(every) - len(sizes)
    if within == 0.0 or freedom < 1:
        return 1.0
    return float(stats.f.sf(between / (len(sizes) - 1) / (within / freedom), len(sizes) - 1, freedom))


def sentences(model: Effects, *, alpha: float = 0.05) -> tuple[str, ...]:
    """Returns the level effects in words, such as "precision=bf16 takes 60% less total_time_s than fp32"."""
    return tuple(_sentence(model, level, alpha) for level in model.levels)


def _sentence(model: Effects, level: LevelEffect, alpha: float) -> str:
    ratio = model.scale == "ratio"

    def amount(value: float) -> str:
        return f"{value:+.1%}" if ratio else f"{value:+.3g}"

    interval = f"{amount(level.low)} to {amount(level.high)}"
    what = f"{level.axis}={axis_value(level.level)} against {axis_value(level.baseline)}"
    if not level.p_value < alpha:
        return f"{what}: no significant effect on {model.metric} ({interval})"
    change = f"{what}: {model.metric} {amount(level.effect)} ({interval})"
    others = [term for term in model.terms if len(term.axes) == 2 and level.axis in term.axes]
    depends = [
        f"{_other(term.axes, level.axis)} (p = {term.p_value:.2g})" for term in others if term.p_value < alpha
    ]
    if depends:
        return f"{change} on average; how much depends on {', '.join(depends)}"
    if others and not any(level.axis in pair for pair in model.left_out):
        return f"{change} at any {', '.join(_other(term.axes, level.axis) for term in others)}"
    return change


def _other(axes: Sequence[str], axis: str) -> str:
    return axes[1] if axes[0] == axis else axes[0]
