"""What experiments and runs have used: totals from running sums, ledgers from every measurement."""

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select, update

from service.db import schema, statements
from service.domain.ledger import (
    OVERHEAD_TIME,
    WINDOW_ENERGY,
    WINDOWS,
    Account,
    AttemptUsage,
    Ledger,
    Measured,
    Prospect,
    Sum,
    account,
    charged_until_s,
    ledger,
)
from service.domain.records import ExperimentCost, Placement, Totals
from service.domain.states import UNFINISHED_RUN_STATES, RunState
from service.store.base import StorePart, lock_experiment, read_experiment, read_run, records, transaction
from trainers.errors import FAILURES_OF_MACHINES
from trainers.telemetry.timeline import OVERHEAD
from trainers.telemetry.usage import J_PER_KWH

_u, _p, _a, _r = schema.attempt_usage.c, schema.placements.c, schema.attempts.c, schema.runs.c

_OF_USAGE = tuple(field.name for field in fields(AttemptUsage) if field.name != "measured")
_ROUNDING = 1e-9  # Sums may differ by this share: they were added up in another order
_is_finite = schema.measurements.c.value.between(-sys.float_info.max, sys.float_info.max)


def _largest(left: Any, right: Any) -> sa.ColumnElement[Any]:
    return sa.case((left > right, left), else_=right)


def _smallest(left: Any, right: Any) -> sa.ColumnElement[Any]:
    return sa.case((left < right, left), else_=right)


def open_usage(run_id: int, number: int, *, placement: str | None, started_s: float) -> sa.Insert:
    """The row of an attempt that has just been opened; its devices are those of its run."""
    return sa.insert(schema.attempt_usage).from_select(
        ["experiment_id", "run_id", "number", "placement", "devices", "price_usd_per_hour", "power_w",
         "started_s"],
        select(
            _r.experiment_id, _r.id, sa.literal(number), sa.literal(placement, sa.Text()), _r.devices,
            _r.price_usd_per_hour, _r.power_w, sa.literal(started_s, schema.Real),
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


def settle_attempts(experiment_id: int, attempts: Iterable[tuple[int, int]] | None = None) -> sa.Update:
    """Copies the ends of attempts, or their last signs of life, into their usage rows.

    `attempts` are by (run, number); None = those that were open so far.
    """
    chosen = _u.until_s.is_(None)
    if attempts is not None:
        chosen = sa.tuple_(_u.run_id, _u.number).in_(sorted(attempts))
    of_experiment = update(schema.attempt_usage).where(_u.experiment_id == experiment_id, chosen)
    return of_experiment.values(until_s=_charged_until)


_experiments = bindparam("experiments", expanding=True, type_=sa.BigInteger())
_now = bindparam("now", type_=schema.Real)
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
        schema.placements,
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
    / sa.cast(func.nullif(_done_steps, 0), schema.Real)
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
    .outerjoin(schema.attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
    .outerjoin(
        schema.attempt_usage,
        (_u.experiment_id == _r.experiment_id) & (_u.run_id == _r.id) & (_u.number == _r.attempt),
    )
    .where(_r.experiment_id.in_(_experiments))
    .group_by(_r.experiment_id)
)
"""What the rest of several experiments is forecast from, see `Prospect`."""


class Accounting(StorePart):
    def totals(self, experiment_id: int) -> Totals:
        """What the experiment has used so far: the sum of its ledger."""
        with self.database.read() as connection:
            pool = read_experiment(connection, experiment_id).pool
            totals = _totals(connection, [experiment_id], self.clock())[experiment_id]
        return replace(totals, co2_kg=self.settings.site(pool).co2_kg(totals.energy_kwh))

    def costs(self, experiment_ids: Collection[int]) -> dict[int, ExperimentCost]:
        """What several experiments cost so far, and will cost, in two statements for all of them."""
        if not experiment_ids:
            return {}
        now = self.clock()
        chosen = {"experiments": list(experiment_ids), "now": now}
        with self.database.read() as connection:
            totals = _totals(connection, experiment_ids, now)
            prospects = {
                row.experiment_id: Prospect(*row[1:]) for row in connection.execute(PROSPECTS, chosen)
            }
        return {
            id: ExperimentCost(total.cost_usd, prospects[id].rest_usd() if id in prospects else None)
            for id, total in totals.items()
        }

    def ledger(self, experiment_id: int) -> Ledger:
        """What every attempt at the experiment's runs is charged; open attempts count up to now."""
        with self.database.read() as connection:
            pool = read_experiment(connection, experiment_id).pool
            used = _usage(connection, schema.runs.c.experiment_id == experiment_id)
            placements = records(connection, Placement, placements_of(experiment_id))
        found = ledger(experiment_id, used, placements, now_s=self.clock())
        return replace(found, total=self._with_co2(found.total, pool))

    def account(self, run_id: int) -> Account:
        """What every attempt at a run is charged; an open one counts up to now."""
        with self.database.read() as connection:
            run = read_run(connection, run_id)
            pool = read_experiment(connection, run.experiment_id).pool
            used = _usage(connection, schema.runs.c.id == run_id)
        found = account(run.id, run.state, used, now_s=self.clock())
        return replace(found, total=self._with_co2(found.total, pool))

    def _with_co2(self, total: Sum, pool: str) -> Sum:
        energy_kwh = math.fsum(total.energy_kwh.values())
        return replace(total, co2_kg=self.settings.site(pool).co2_kg(energy_kwh))

    def experiments_with_usage(self) -> list[int]:
        """Ids of the experiments with an attempt, the newest first."""
        used = (_r.attempt > 0, _r.reused_from.is_(None), statements.VISIBLE_RUN)
        rows = self.read(select(_r.experiment_id).where(*used).distinct().order_by(_r.experiment_id.desc()))
        return [row.experiment_id for row in rows]

    def wrong_usage(self, experiment_id: int) -> list[tuple[int, int]]:
        """Attempts, by (run, number), whose running sums differ from what they sum up."""
        with self.database.read() as connection:
            used = _usage(connection, schema.runs.c.experiment_id == experiment_id)
            usage_of = select(schema.attempt_usage).where(_u.experiment_id == experiment_id)
            stored = connection.execute(usage_of).mappings().all()
        expected = {(one.run_id, one.number): _usage_row(experiment_id, one) for one in used}
        stored_rows = {(row["run_id"], row["number"]): row for row in stored}
        return sorted(
            key
            for key in expected.keys() | stored_rows.keys()
            if key not in expected or key not in stored_rows or not _same(expected[key], stored_rows[key])
        )

    @transaction
    def recount(self, connection: Connection, experiment_id: int) -> None:
        """Adds up the running sums of an experiment again from its attempts and measurements."""
        lock_experiment(connection, experiment_id)
        used = _usage(connection, schema.runs.c.experiment_id == experiment_id)
        connection.execute(sa.delete(schema.attempt_usage).where(_u.experiment_id == experiment_id))
        statements.insert_rows(
            connection, schema.attempt_usage, [_usage_row(experiment_id, one) for one in used]
        )


def _totals(connection: Connection, experiment_ids: Collection[int], now: float) -> dict[int, Totals]:
    parts: dict[int, list[Sequence[float | None]]] = {id: [(0.0,) * 4] for id in experiment_ids}
    chosen = {"experiments": list(experiment_ids), "now": now}
    for id, *figures in connection.execute(TOTALS, chosen):
        parts[id].append(figures)
    totals = {}
    for id, rows in parts.items():
        device_s, cost, energy_kwh, overhead = (
            math.fsum(value or 0.0 for value in column) for column in zip(*rows, strict=True)
        )
        # Prices are per hour, times in seconds.
        totals[id] = Totals(cost / 3600, energy_kwh, device_s / 3600, overhead / 3600)
    return totals


def _usage(connection: Connection, chosen: sa.ColumnElement[bool]) -> list[AttemptUsage]:
    """All attempts at chosen runs, with the sums of their windows."""
    windows: dict[tuple[int, int], list[Any]] = {}
    m = schema.measurements.c
    seconds = m.end_s - m.start_s
    windows_for_ledger = (
        select(
            m.run_id,
            m.attempt,
            m.name,
            m.provenance,
            m.scope,
            func.sum(seconds).label("seconds"),
            func.sum(m.value).label("total"),
            func.sum(m.value * seconds).label("weighted"),
        )
        .join(schema.attempts, (m.run_id == _a.run_id) & (m.attempt == _a.number))
        .join(schema.runs, _r.id == _a.run_id)
        .where(chosen, m.name.in_(list(WINDOWS)), _is_finite)
        .group_by(m.run_id, m.attempt, m.name, m.provenance, m.scope)
    )
    for row in connection.execute(windows_for_ledger):
        windows.setdefault((row.run_id, row.attempt), []).append(row)
    workers = func.coalesce(_a.workers, _r.workers)
    attempts_for_ledger = (
        select(
            _a.run_id,
            _a.number,
            _r.state.label("run_state"),
            _a.state,
            _a.failure_class,
            _a.started_s,
            _a.ended_s,
            _a.seen_s,
            _a.placement,
            _a.resumed_from_s,
            _a.resumed_from_step,
            _a.last_step,
            (_r.devices / _r.workers * workers).label("devices"),
            (_r.price_usd_per_hour / _r.workers * workers).label("price_usd_per_hour"),
            (_r.power_w / _r.workers * workers).label("power_w"),
        )
        .join(schema.attempts, _a.run_id == _r.id)
        .where(chosen)
    )
    return [
        AttemptUsage(
            **{name: row[name] for name in _OF_USAGE},
            measured=_measured(windows.get((row["run_id"], row["number"]), ())),
        )
        for row in connection.execute(attempts_for_ledger).mappings()
    ]


def _measured(windows: Iterable[sa.Row[Any]]) -> Measured:
    covered_s = 0.0
    energy: dict[str, float] = {}
    overhead: dict[str, float] = {}
    utilisation = how = None
    for row in windows:
        if row.name == WINDOW_ENERGY:
            covered_s += row.seconds
            energy[row.provenance] = energy.get(row.provenance, 0.0) + row.total
        elif row.name == OVERHEAD_TIME:
            if row.scope not in OVERHEAD:
                continue  # The sum over all attempts, which a run ends with.
            overhead[row.scope] = overhead.get(row.scope, 0.0) + row.total
        elif row.seconds > 0.0:
            utilisation, how = row.weighted / row.seconds, row.provenance
    return Measured(covered_s, energy, utilisation, how, overhead)


def _usage_row(experiment_id: int, used: AttemptUsage) -> dict[str, Any]:
    measured = used.measured
    same = ("run_id", "number", "placement", "devices", "price_usd_per_hour", "power_w", "started_s")
    return {
        "experiment_id": experiment_id,
        **{name: getattr(used, name) for name in same},
        "until_s": charged_until_s(used),
        "covered_s": measured.covered_s,
        "energy_kwh": math.fsum((measured.energy_kwh or {}).values()),
        "overhead_s": math.fsum(measured.overhead_s.values()),
    }


def _same(expected: dict[str, Any], stored: sa.RowMapping) -> bool:
    return all(
        math.isclose(value, stored[name], rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        if isinstance(value, float) and stored[name] is not None
        else value == stored[name]
        for name, value in expected.items()
    )


def placements_of(experiment_id: int) -> sa.Select[Any]:
    return select(schema.placements).where(_p.experiment_id == experiment_id).order_by(_p.placed_s, _p.id)
