"""What each axis does to a metric: main effects, interactions, and whether the model may be believed.

A linear model over the axes as categories, with sum-to-zero coding and all two-way interactions
that the rows can tell apart. Metrics where ratios are the natural language (time, cost, energy,
throughput) are modelled as logarithms, so that an effect reads "-60%" and an interaction means
that the ratio itself changes; others (accuracy) are modelled as they are. Terms are tested by
comparing residual sums of squares with and without them (type III, F test); level effects are
differences of least-squares means, which weigh every cell alike even when seeds are missing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from service.analysis.errors import AnalysisError

Matrix = npt.NDArray[np.floating[Any]]
Scale = Literal["ratio", "difference"]


@dataclass(frozen=True, slots=True)
class Observation:
    """One run: its axis values by dotted name and the metric, in the metric's unit."""

    point: Mapping[str, Any]
    value: float


@dataclass(frozen=True, slots=True)
class LevelEffect:
    """What one value of an axis does against the axis' first value, averaged over all else.

    Attributes:
        axis, level, baseline: the axis and the two values.
        effect: relative change (-0.6 = 60% less) on the ratio scale, else a difference in the
            metric's unit.
        low, high: confidence interval of `effect`.
        p_value: two-sided t test of no effect.
    """

    axis: str
    level: Any
    baseline: Any
    effect: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True, slots=True)
class Term:
    """F test of an axis (one name) or of an interaction (two names)."""

    axes: tuple[str, ...]
    f: float
    p_value: float
    share: float
    """Share of the total sum of squares that only this term explains, in [0, 1]."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The fitted model of one metric.

    Attributes:
        metric: name, with its unit.
        scale: `ratio` when logarithms were modelled.
        levels: level effects, axis by axis.
        terms: tests of axes, then of interactions.
        left_out: interactions that the rows cannot tell apart from the rest.
        r_squared: share of variance explained.
        checks: what makes the model doubtful, in words; empty when nothing does.
    """

    metric: str
    scale: Scale
    levels: tuple[LevelEffect, ...]
    terms: tuple[Term, ...]
    left_out: tuple[tuple[str, str], ...]
    r_squared: float
    checks: tuple[str, ...]


def effects(
    metric: str, observations: Sequence[Observation], *, scale: Scale, alpha: float = 0.05
) -> Effects:
    """Fit the model and test every axis and every pair of axes.

    Raises:
        AnalysisError: without an axis of two values, without repeated seeds to tell noise from
            effects, for values that are not finite, or not positive on the ratio scale.
    """
    values = _checked_values(metric, observations, scale)
    axes = _axes(observations)
    full, left_out = _full_design(observations, axes)
    freedom = len(values) - full.matrix.shape[1]
    if freedom < 1:
        raise AnalysisError(f"{len(values)} runs cannot tell the effects on {metric} from noise; add seeds")
    coefficients, residuals = _fit(full.matrix, values)
    noise = float(residuals @ residuals) / freedom
    total = float(((values - values.mean()) ** 2).sum())
    terms = tuple(_test(full, term, values, noise, freedom, total) for term in full.columns if term)
    covariance = np.linalg.inv(full.matrix.T @ full.matrix) * noise
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
        r_squared=1.0 - noise * freedom / total if total else 1.0,
        checks=_checks(observations, axes, residuals, noise),
    )


@dataclass(frozen=True, slots=True)
class _Design:
    """A design matrix (N, P) and which of its columns belong to which term; `()` = intercept."""

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


def _axes(observations: Sequence[Observation]) -> dict[str, list[Any]]:
    """Values of each axis that varies, in order of appearance.

    Raises:
        AnalysisError: when no axis has two values.
    """
    axes: dict[str, list[Any]] = {}
    for observation in observations:
        for name, value in observation.point.items():
            levels = axes.setdefault(name, [])
            if value not in levels:
                levels.append(value)
    varied = {name: levels for name, levels in axes.items() if len(levels) > 1}
    if not varied:
        raise AnalysisError("every axis has one value only; an effect needs at least two")
    return varied


def _coded(levels: Sequence[Any], value: Any) -> Matrix:
    """Sum-to-zero coding: the last level is minus the sum of the others."""
    at = levels.index(value)
    if at == len(levels) - 1:
        return -np.ones(len(levels) - 1)
    row: Matrix = np.eye(len(levels) - 1)[at]
    return row


def _design(
    points: Sequence[Mapping[str, Any]], axes: Mapping[str, list[Any]], pairs: Sequence[tuple[str, str]]
) -> _Design:
    blocks: list[Matrix] = [np.ones((len(points), 1))]
    columns: dict[tuple[str, ...], slice] = {(): slice(0, 1)}
    main = {
        name: np.array([_coded(levels, point[name]) for point in points]) for name, levels in axes.items()
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
    observations: Sequence[Observation], axes: Mapping[str, list[Any]]
) -> tuple[_Design, tuple[tuple[str, str], ...]]:
    """All axes and as many two-way interactions as keep the matrix of full rank."""
    points = [observation.point for observation in observations]
    for number, point in enumerate(points):
        for name in axes:
            if name not in point:
                raise AnalysisError(f"run {number} has no value of axis '{name}'; compare like with like")
    design = _design(points, axes, [])
    if np.linalg.matrix_rank(design.matrix) < design.matrix.shape[1]:
        raise AnalysisError("two axes always change together; their effects cannot be told apart")
    kept: list[tuple[str, str]] = []
    left_out: list[tuple[str, str]] = []
    for pair in itertools.combinations(axes, 2):
        wider = _design(points, axes, [*kept, pair])
        if np.linalg.matrix_rank(wider.matrix) == wider.matrix.shape[1] < len(points):
            kept.append(pair)
            design = wider
        else:
            left_out.append(pair)
    return design, tuple(left_out)


def _fit(design: Matrix, values: Matrix) -> tuple[Matrix, Matrix]:
    coefficients = np.linalg.lstsq(design, values, rcond=None)[0]
    return coefficients, values - design @ coefficients


def _test(
    full: _Design, term: tuple[str, ...], values: Matrix, noise: float, freedom: int, total: float
) -> Term:
    columns = full.columns[term]
    _, residuals = _fit(np.delete(full.matrix, columns, axis=1), values)
    explained = max(0.0, float(residuals @ residuals) - noise * freedom)
    size = columns.stop - columns.start
    f = explained / size / noise if noise > 0 else math.inf if explained > 0 else 0.0
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
    """Difference of least-squares means; with sum coding all other terms average to zero."""
    contrast = np.zeros(len(coefficients))
    baseline = axes[axis][0]
    contrast[full.columns[axis,]] = _coded(axes[axis], level) - _coded(axes[axis], baseline)
    difference = float(contrast @ coefficients)
    error = math.sqrt(max(0.0, float(contrast @ covariance @ contrast)))
    reach = float(stats.t.ppf(1 - alpha / 2, freedom)) * error
    t = abs(difference) / error if error else math.inf if difference else 0.0
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
    observations: Sequence[Observation], axes: Mapping[str, list[Any]], residuals: Matrix, noise: float
) -> tuple[str, ...]:
    """Doubts about the model: missing cells, uneven seeds, residuals that are not alike."""
    found: list[str] = []
    cells: dict[tuple[Any, ...], list[float]] = {}
    for observation, residual in zip(observations, residuals, strict=True):
        key = tuple(observation.point[name] for name in axes)
        cells.setdefault(key, []).append(float(residual))
    possible = math.prod(len(levels) for levels in axes.values())
    if len(cells) < possible:
        found.append(
            f"{possible - len(cells)} of {possible} cells have no run: effects are extrapolated there"
        )
    sizes = {len(cell) for cell in cells.values()}
    if len(sizes) > 1:
        found.append(f"cells have between {min(sizes)} and {max(sizes)} runs")
    if noise == 0.0:
        return tuple(found)
    if 8 <= len(residuals) <= 5000 and stats.shapiro(residuals).pvalue < 0.01:
        found.append("residuals are not normal (Shapiro-Wilk p < 0.01): p-values are approximate")
    groups = [cell for cell in cells.values() if len(cell) >= 3]
    if len(groups) >= 2 and stats.levene(*groups).pvalue < 0.01:
        found.append("cells differ in spread (Levene p < 0.01): p-values are approximate")
    return tuple(found)
