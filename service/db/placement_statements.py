"""Statements about devices that experiments hold, and about runs that wait for some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, func, select, update

from service.db.schema import placements, runs
from service.domain.states import RunState

_p, _r = placements.c, runs.c


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
