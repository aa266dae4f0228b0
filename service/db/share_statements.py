"""Statements about devices: what experiments could use, what they hold, and what they are allowed."""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, bindparam, func, select

from service.db.schema import ACTIVE, Real, allowances, experiments, placements, projects, runs
from service.domain.states import TERMINAL_EXPERIMENT_STATES, ExperimentState, RunState

_a, _p, _r, _x = allowances.c, placements.c, runs.c, experiments.c
_CLAIMABLE_OR_AT_WORK = frozenset(ExperimentState) - TERMINAL_EXPERIMENT_STATES - {ExperimentState.paused}
_AT_WORK = frozenset({RunState.queued, RunState.starting, RunState.running})

ALLOWED_ELSEWHERE = (
    select(_x.project, _a.hardware, func.sum(_a.devices).label("devices"))
    .join_from(allowances, experiments, _x.id == _a.experiment_id)
    .where(_a.pool != bindparam("in_pool"), ACTIVE)
    .group_by(_x.project, _a.hardware)
)
"""(project, hardware, devices) that experiments at work in other pools may hold."""

DIVIDE_IN_TURN = sa.text("SELECT pg_advisory_xact_lock(7305419)")
"""PostgreSQL: one scheduler divides the devices at a time."""

PROJECT_SETTINGS = select(projects.c.name, projects.c.settings)  # Settings of all projects


def reasons(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, reason) of experiments that may hold fewer devices than they could use."""
    return (
        select(_a.experiment_id, func.min(_a.reason).label("reason"))
        .where(_a.experiment_id.in_(list(experiment_ids)), _a.reason.is_not(None))
        .group_by(_a.experiment_id)
    )


def demand(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, hardware, devices, largest) of runs that train or could: all together, and the largest."""
    return (
        select(
            _r.experiment_id,
            _r.hardware,
            func.sum(_r.devices).label("devices"),
            func.max(_r.devices).label("largest"),
        )
        .where(_r.experiment_id.in_(list(experiment_ids)), _r.state.in_(sorted(_AT_WORK)))
        .group_by(_r.experiment_id, _r.hardware)
    )


_served = func.max(_p.placed_s).label("served_s"), func.max(_p.ready_s - _p.placed_s).label("restart_s")


def held(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, hardware, devices, served_s, restart_s) that experiments hold now, as in `served`."""
    return (
        select(_p.experiment_id, _p.hardware, func.sum(_p.devices), *_served)
        .where(_p.experiment_id.in_(list(experiment_ids)), _p.released_s.is_(None))
        .group_by(_p.experiment_id, _p.hardware)
    )


def placed(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, hardware, placed_s) of devices that are held, the longest held first."""
    return (
        select(_p.experiment_id, _p.hardware, _p.placed_s)
        .where(_p.experiment_id.in_(list(experiment_ids)), _p.released_s.is_(None))
        .order_by(_p.placed_s)
    )


def served(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, served_s, restart_s): when it last got devices, and its longest start of workers."""
    return (
        select(_p.experiment_id, *_served)
        .where(_p.experiment_id.in_(list(experiment_ids)))
        .group_by(_p.experiment_id)
    )


_by_user = (_x.project, _x.owner, _x.pool, _p.hardware)
_held_by_user = (
    select(*_by_user)
    .join_from(placements, experiments, _x.id == _p.experiment_id)
    .where(_p.released_s.is_(None))
    .group_by(*_by_user)
)
HELD_BY_EVERYBODY = _held_by_user.add_columns(
    func.sum(_p.devices).label("devices"), func.sum(_p.price_usd_per_hour).label("usd_per_hour")
)
"""(project, owner, pool, hardware, devices, usd_per_hour) that are held now."""

WANTED_BY_EVERYBODY = (
    select(_x.project, _x.owner, _x.pool, _r.hardware)
    .join_from(runs, experiments, _x.id == _r.experiment_id)
    .where(_r.state == RunState.queued, _x.state.in_(sorted(_CLAIMABLE_OR_AT_WORK)))
    .distinct()
)
"""(project, owner, pool, hardware) for which runs wait."""

_since = sa.case((_p.placed_s > bindparam("since"), _p.placed_s), else_=bindparam("since", type_=Real))

USED_SINCE = _held_by_user.add_columns(
    func.sum(_p.price_usd_per_hour * (bindparam("now", type_=Real) - _since)).label("usd_s_per_hour")
)
"""(project, owner, pool, hardware, USD x s/h) of devices that are held, between `since` and `now`."""
