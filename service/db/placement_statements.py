"""Statements about devices that experiments hold, and about runs that wait for some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, func, select, update

from service.db.schema import ACTIVE, attempts, experiments, placements, runs
from service.db.statements import ACTIVE_RUN_STATES
from service.domain.states import RunState

_a, _p, _r, _x = attempts.c, placements.c, runs.c, experiments.c


def placements_of(experiment_id: int) -> Select[Any]:
    """Returns all placements of an experiment, oldest first."""
    return select(placements).where(_p.experiment_id == experiment_id).order_by(_p.placed_s, _p.id)


def devices_held_by_others(experiment_id: int) -> Select[Any]:
    """(experiment, hardware, devices) that other experiments hold now."""
    return (
        select(_p.experiment_id, _p.hardware, func.sum(_p.devices))
        .where(_p.released_s.is_(None), _p.experiment_id != experiment_id)
        .group_by(_p.experiment_id, _p.hardware)
        .order_by(_p.experiment_id, _p.hardware)
    )


def held_now(limit: int) -> Select[Any]:
    """Returns devices that are held, oldest first, each with its experiment and the run that is on it."""
    active = (
        select(_r.experiment_id, _r.id.label("run_id"), _a.node, _a.placement)
        .join(attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
        .where(_r.state.in_(ACTIVE_RUN_STATES))
        .subquery()
    )
    on_it = (active.c.experiment_id == _p.experiment_id) & (active.c.placement == _p.id)
    return (
        select(
            _x.pool,
            _p.hardware,
            _p.devices,
            _p.workers,
            _p.placed_s,
            active.c.node,
            active.c.run_id,
            _x.id,
            _x.name,
            _x.owner,
            _x.project,
        )
        .join(experiments, _x.id == _p.experiment_id)
        .outerjoin(active, on_it)
        .where(_p.released_s.is_(None))
        .order_by(_p.placed_s, _p.experiment_id, _p.id)
        .limit(limit)
    )


def close_placements(experiment_id: int, *, before_attempt: int | None = None) -> Update:
    """Ends placements that are still open when they were last seen: their driver is gone.

    Args:
        experiment_id: the experiment.
        before_attempt: only those of earlier attempts at it; None = all.
    """
    statement = update(placements).where(_p.experiment_id == experiment_id, _p.released_s.is_(None))
    if before_attempt is not None:
        statement = statement.where(_p.experiment_attempt < before_attempt)
    return statement.values(released_s=_p.seen_s)


WAITING_AT_WORK = (
    select(_x.id, _r.waits_for)
    .join_from(runs, experiments, _x.id == _r.experiment_id)
    .where(_r.waits_for.is_not(None), _r.state == RunState.queued, ACTIVE)
    .group_by(_x.id, _r.waits_for)
    .order_by(_x.id, func.min(_r.id))
)
"""(experiment, what runs wait for) of those that have a driver, by index of the runs that wait."""


def clear_waiting(experiment_id: int) -> Update:
    """Removes what an experiment's runs wait for: its driver is gone, and the next one looks again."""
    return (
        update(runs)
        .where(_r.experiment_id == experiment_id, _r.waits_for.is_not(None))
        .values(waits_for=None)
    )


def set_waiting(experiment_id: int, reasons: Mapping[int, str | None]) -> Update:
    """Sets what queued runs wait for."""
    return (
        update(runs)
        .where(_r.experiment_id == experiment_id, _r.state == RunState.queued, _r.id.in_(list(reasons)))
        .values(waits_for=sa.case(dict(reasons), value=_r.id, else_=None))
    )
