"""Statements about `attempt_usage`: what each attempt used, kept up to date with attempts and measurements.

A row changes in the transaction that changes what it sums up: the attempt's opening and end, and the
measurements that it reports. Totals are sums over these rows, which are narrow and lie next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Insert, Select, Update, bindparam, func, select, update

from service.db.schema import Real, attempt_usage, attempts, measurements, placements, runs
from service.db.statements import VISIBLE_RUN
from service.domain.states import UNFINISHED_RUN_STATES, RunState
from trainers.errors import FAILURES_OF_MACHINES
from trainers.telemetry.usage import J_PER_KWH

_u, _a, _r, _p = attempt_usage.c, attempts.c, runs.c, placements.c


def _largest(left: Any, right: Any) -> sa.ColumnElement[Any]:
    return sa.case((left > right, left), else_=right)


def _smallest(left: Any, right: Any) -> sa.ColumnElement[Any]:
    return sa.case((left < right, left), else_=right)


def open_usage(run_id: int, number: int, *, placement: str | None, started_s: float) -> Insert:
    """Returns the row of an attempt that has just been opened; its devices are those of its run."""
    return sa.insert(attempt_usage).from_select(
        ["experiment_id", "run_id", "number", "placement", "devices", "price_usd_per_hour", "power_w",
         "started_s"],
        select(
            _r.experiment_id, _r.id, sa.literal(number), sa.literal(placement, sa.Text()), _r.devices,
            _r.price_usd_per_hour, _r.power_w, sa.literal(started_s, Real),
        ).where(_r.id == run_id),
    )  # fmt: skip


_charged_until = (
    select(
        sa.case(
            (
                _a.failure_class.in_(sorted(FAILURES_OF_MACHINES)),
                _smallest(_a.ended_s, func.coalesce(_a.seen_s, _a.started_s)),
            ),
            else_=_a.ended_s,
        )
    )
    .where(_a.run_id == _u.run_id, _a.number == _u.number)
    .scalar_subquery()
)


def settle_attempts(experiment_id: int, attempts: Iterable[tuple[int, int]]) -> Update:
    """Takes over when attempts, by (run, number), ended or were last known to be alive."""
    return (
        update(attempt_usage)
        .where(_u.experiment_id == experiment_id, sa.tuple_(_u.run_id, _u.number).in_(sorted(attempts)))
        .values(until_s=_charged_until)
    )


def settle_open_attempts(experiment_id: int) -> Update:
    """Takes over the end of every attempt of an experiment that was open so far."""
    return (
        update(attempt_usage)
        .where(_u.experiment_id == experiment_id, _u.until_s.is_(None))
        .values(until_s=_charged_until)
    )


ADD_MEASURED = (
    update(attempt_usage)
    .where(
        _u.experiment_id == bindparam("experiment"),
        _u.run_id == bindparam("run"),
        _u.number == bindparam("current"),
    )
    .values(
        covered_s=_u.covered_s + bindparam("covered", type_=Real),
        energy_kwh=_u.energy_kwh + bindparam("energy", type_=Real),
        overhead_s=_u.overhead_s + bindparam("overhead", type_=Real),
    )
)
"""Add what new measurements of an attempt tell."""

MEASUREMENT_KEY = ("run_id", "attempt", "name", "scope", "start_s", "end_s")


def stored_measurements(keys: Iterable[tuple[Any, ...]]) -> Select[Any]:
    """Returns which of these keys, in the order of `MEASUREMENT_KEY`, are stored already."""
    key = [measurements.c[name] for name in MEASUREMENT_KEY]
    return select(*key).where(sa.tuple_(*key).in_(list(keys)))


def usage_of(experiment_id: int) -> Select[Any]:
    """Returns all usage rows of an experiment."""
    return select(attempt_usage).where(_u.experiment_id == experiment_id)


def forget_usage(experiment_id: int) -> sa.Delete:
    """Removes an experiment's usage rows, to be counted again."""
    return sa.delete(attempt_usage).where(_u.experiment_id == experiment_id)


def experiments_with_usage() -> Select[Any]:
    """Experiments with an attempt, the newest first."""
    return (
        select(_r.experiment_id)
        .where(_r.attempt > 0, _r.reused_from.is_(None), VISIBLE_RUN)
        .distinct()
        .order_by(_r.experiment_id.desc())
    )


_experiments = bindparam("experiments", expanding=True, type_=sa.BigInteger())
_now = bindparam("now", type_=Real)
_time_s = _largest(func.coalesce(_u.until_s, _now) - _u.started_s, 0.0)
_charged = (
    select(
        _u.experiment_id,
        _u.placement,
        func.sum(_time_s).label("time_s"),
        func.sum(_time_s * _u.devices).label("device_s"),
        func.sum(_time_s * _u.price_usd_per_hour).label("cost"),
        func.sum(
            _u.energy_kwh + _largest(_time_s - _u.covered_s, 0.0) * _u.power_w / J_PER_KWH
        ).label("energy_kwh"),
        func.sum(_smallest(_time_s, _u.overhead_s) * _u.price_usd_per_hour).label("overhead"),
    )
    .where(_u.experiment_id.in_(_experiments))
    .group_by(_u.experiment_id, _u.placement)
    .cte("charged")
)  # fmt: skip
_ends_s = func.coalesce(_p.released_s, _now)
_held_s = _largest(_ends_s - _p.placed_s, 0.0)
_start_s = _smallest(_held_s, _largest(func.coalesce(_p.ready_s, _ends_s) - _p.placed_s, 0.0))
_outside_s = _start_s + _largest(_held_s - _start_s - func.coalesce(_charged.c.time_s, 0.0), 0.0)

TOTALS = sa.union_all(
    select(
        _charged.c.experiment_id,
        func.sum(_charged.c.device_s).label("device_s"),
        func.sum(_charged.c.cost).label("cost"),
        func.sum(_charged.c.energy_kwh).label("energy_kwh"),
        func.sum(_charged.c.overhead).label("overhead"),
    ).group_by(_charged.c.experiment_id),
    select(
        _p.experiment_id,
        func.sum(_outside_s * _p.devices),
        func.sum(_outside_s * _p.price_usd_per_hour),
        func.sum(_outside_s * _p.power_w / J_PER_KWH),
        func.sum(_outside_s * _p.price_usd_per_hour),
    )
    .outerjoin_from(
        placements,
        _charged,
        (_charged.c.experiment_id == _p.experiment_id) & (_charged.c.placement == _p.id),
    )
    .where(_p.experiment_id.in_(_experiments))
    .group_by(_p.experiment_id),
)
"""(experiment, device seconds, USD x s/h, kWh, USD x s/h of overhead) inside attempts, and on devices outside
them; no row = nothing."""

_done = (_r.state == RunState.succeeded) & _r.reused_from.is_(None)
_cost = func.coalesce(_r.cost_usd, _r.total_time_s * _r.price_usd_per_hour / 3600)
_done_steps = _r.step - func.coalesce(_a.resumed_from_step, 0)
_moves = (
    (_r.state == RunState.running) & _u.until_s.is_(None) & (_done_steps > 0) & _r.total_steps.is_not(None)
)
_step_usd = (
    _largest(_now - _u.started_s, 0.0)
    * _u.price_usd_per_hour
    / 3600
    / sa.cast(func.nullif(_done_steps, 0), Real)
)


def _sum_where(chosen: sa.ColumnElement[bool], value: Any) -> sa.ColumnElement[Any]:
    return func.coalesce(func.sum(sa.case((chosen, value))), 0)


PROSPECTS = (
    select(
        _r.experiment_id,
        _sum_where(_r.state.in_(sorted(UNFINISHED_RUN_STATES)), 1).label("unfinished"),
        _sum_where(_done & _cost.is_not(None), 1).label("done"),
        _sum_where(_done, _cost).label("done_usd"),
        _sum_where(_moves, 1).label("moving"),
        _sum_where(_moves, _step_usd * _r.total_steps).label("moving_usd"),
        _sum_where(_moves, _step_usd * _largest(_r.total_steps - _r.step, 0)).label("moving_rest_usd"),
    )
    .outerjoin(attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
    .outerjoin(
        attempt_usage,
        (_u.experiment_id == _r.experiment_id) & (_u.run_id == _r.id) & (_u.number == _r.attempt),
    )
    .where(_r.experiment_id.in_(_experiments))
    .group_by(_r.experiment_id)
)
"""What the rest of several experiments is forecast from, see `Prospect`."""
