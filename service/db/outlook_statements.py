"""Statements about forecasts of starts: what they rest on, what was forecast, and how far it was off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Delete, Select, bindparam, delete, func, select

from service.db.schema import experiments, runs, start_errors, start_forecasts
from service.domain.states import RunState

_e, _f, _r, _x = start_errors.c, start_forecasts.c, runs.c, experiments.c

FORECASTS_IN = select(start_forecasts).where(_f.pool == bindparam("in_pool"))
"""All forecasts of a pool."""

ERRORS = select(start_errors).order_by(_e.id)
"""How far forecasts were off, the oldest first."""


def starts_of(experiment_ids: Iterable[int], *, since_s: float) -> Select[Any]:
    """(experiment, start) that were forecast since then."""
    return select(_f.experiment_id, _f.start).where(
        _f.experiment_id.in_(list(experiment_ids)), _f.start.is_not(None), _f.at_s >= since_s
    )


def projects_of(experiment_ids: Iterable[int]) -> Select[Any]:
    return select(_x.id, _x.project).where(_x.id.in_(list(experiment_ids)))


def at_work(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, hardware, started_s, step, total_steps) of runs that train, the oldest first."""
    return (
        select(_r.experiment_id, _r.hardware, _r.started_s, _r.step, _r.total_steps)
        .where(_r.experiment_id.in_(list(experiment_ids)), _r.state == RunState.running)
        .order_by(_r.started_s)
    )


def times(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, ended, least, mean, most) of the times of runs that succeeded, in seconds."""
    time_s = _r.total_time_s
    return (
        select(
            _r.experiment_id,
            func.count().label("ended"),
            func.min(time_s).label("least"),
            func.avg(time_s).label("mean"),
            func.max(time_s).label("most"),
        )
        .where(
            _r.experiment_id.in_(list(experiment_ids)),
            _r.state == RunState.succeeded,
            _r.reused_from.is_(None),
            time_s > 0,
        )
        .group_by(_r.experiment_id)
    )


def states_of(experiment_ids: Iterable[int]) -> Select[Any]:
    return select(_x.id, _x.state, _x.started_s).where(_x.id.in_(list(experiment_ids)))


def forget_forecasts(pool: str, *, but: Iterable[int]) -> Delete:
    """Removes the forecasts of a pool, except of some experiments."""
    return delete(start_forecasts).where(_f.pool == pool, _f.experiment_id.not_in(list(but)))


def forget_errors(reason: str, *, keep: int) -> Delete:
    newest = select(_e.id).where(_e.reason == reason).order_by(_e.id.desc()).limit(keep).subquery()
    return delete(start_errors).where(_e.reason == reason, _e.id.not_in(sa.select(newest.c.id)))
