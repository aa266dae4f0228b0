"""Statements that read curves of many runs at once, averaged over buckets of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, func, select

from service.db.schema import (
    BUCKET_STEPS,
    attempts,
    latest_points,
    metric_names,
    point_extremes,
    points,
    run_summaries,
    runs,
)
from service.domain.grid import REFERENCE_CELL

_r = runs.c
_p = points.c
_e = point_extremes.c


def begun_runs(experiment_id: int, condition: sa.ColumnElement[bool] | None) -> Select[Any]:
    """Returns (id, cell, state) of the runs that ever began or are reused, in grid order."""
    statement = (
        select(_r.id, _r.cell, _r.state)
        .where(
            _r.experiment_id == experiment_id,
            _r.cell != REFERENCE_CELL,
            sa.or_(_r.attempt > 0, _r.reused_from.is_not(None)),
        )
        .order_by(_r.index)
    )
    return statement if condition is None else statement.where(condition)


def attempts_of(run_ids: Iterable[int]) -> Select[Any]:
    """Returns (run, number, start, end or last sign of life) of all attempts at runs, oldest first."""
    a = attempts.c
    return (
        select(a.run_id, a.number, a.started_s, func.coalesce(a.ended_s, a.seen_s).label("until_s"))
        .where(a.run_id.in_(list(run_ids)))
        .order_by(a.run_id, a.number)
    )


def rates(run_ids: Iterable[int]) -> Select[Any]:
    """Returns (run, price per hour, power) of the devices of runs."""
    return select(_r.id, _r.price_usd_per_hour, _r.power_w).where(_r.id.in_(list(run_ids)))


def name_id(name: str) -> Select[Any]:
    """Returns the id of a metric's name."""
    return select(metric_names.c.id).where(metric_names.c.name == name)


def last_step(run_ids: Iterable[int], name_id: int) -> Select[Any]:
    """Returns the last step at which any of the runs has a point of a metric."""
    c = latest_points.c
    return select(func.max(c.step)).where(c.run_id.in_(list(run_ids)), c.name_id == name_id)


def _visible(run_ids: Sequence[int]) -> sa.CTE:
    """Attempts with the last step of each that no newer attempt does again; NULL = all are visible."""
    a = attempts.c
    ceiling = func.min(a.resumed_from_step).over(partition_by=a.run_id, order_by=a.number, rows=(1, None))
    return (
        select(a.run_id, a.number, ceiling.label("ceiling")).where(a.run_id.in_(list(run_ids))).cte("visible")
    )


def averages(run_ids: Sequence[int], name_id: int, width: int) -> Select[Any]:
    """Points in buckets of `width` steps.

    Returns:
        (run, bucket, attempt, count, mean step, mean time, mean, least, greatest).
    """
    visible = _visible(run_ids)
    bucket = (_p.step // width).label("bucket")
    return (
        select(
            _p.run_id, bucket, _p.attempt, func.count(_p.value), func.avg(_p.step), func.avg(_p.at_s),
            func.avg(_p.value), func.min(_p.value), func.max(_p.value),
        )
        .select_from(visible)
        .join(
            points,
            (_p.run_id == visible.c.run_id)
            & (_p.name_id == name_id)
            & (_p.attempt == visible.c.number)
            & sa.or_(visible.c.ceiling.is_(None), _p.step <= visible.c.ceiling),
        )
        .group_by(_p.run_id, bucket, _p.attempt)
    )  # fmt: skip


def middles(run_ids: Sequence[int], name_id: int, width: int) -> Select[Any]:
    """The same of long series from their kept extremes: the mean is that of least and greatest values.

    Args:
        run_ids: the runs.
        name_id: the metric.
        width: a multiple of `BUCKET_STEPS`.
    """
    visible = _visible(run_ids)
    bucket = (_e.bucket // (width // BUCKET_STEPS)).label("wide_bucket")
    return (
        select(
            _e.run_id, bucket, _e.attempt, func.count(_e.low), func.avg(_e.low_step), func.avg(_p.at_s),
            func.avg((_e.low + _e.high) / 2.0), func.min(_e.low), func.max(_e.high),
        )
        .select_from(visible)
        .join(
            point_extremes,
            (_e.run_id == visible.c.run_id)
            & (_e.name_id == name_id)
            & (_e.attempt == visible.c.number)
            & sa.or_(visible.c.ceiling.is_(None), (_e.bucket + 1) * BUCKET_STEPS <= visible.c.ceiling + 1),
        )
        .join(
            points,
            (_p.run_id == _e.run_id)
            & (_p.name_id == _e.name_id)
            & (_p.attempt == _e.attempt)
            & (_p.step == _e.low_step),
        )
        .group_by(_e.run_id, bucket, _e.attempt)
    )  # fmt: skip


def point_names(experiment_ids: Sequence[int]) -> Select[Any]:
    """Returns the metrics that runs of experiments have points of."""
    source = func.coalesce(_r.reused_from, _r.id)
    return (
        select(metric_names.c.name)
        .where(
            metric_names.c.id.in_(
                select(latest_points.c.name_id)
                .join(runs, source == latest_points.c.run_id)
                .where(_r.experiment_id.in_(list(experiment_ids)))
            )
        )
        .order_by(metric_names.c.name)
    )


def some_summaries(experiment_ids: Sequence[int], most: int) -> Select[Any]:
    """Returns what some runs ended with: figures that one run has, others of its experiment have too."""
    return (
        select(run_summaries.c.summary)
        .join(runs, _r.id == run_summaries.c.run_id)
        .where(_r.experiment_id.in_(list(experiment_ids)))
        .order_by(_r.id.desc())
        .limit(most)
    )
