"""What experiments and runs have used: totals from running sums, ledgers from every measurement."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from service.db import ledger_statements, placement_statements, schema, statements, usage_statements
from service.domain.ledger import (
    OVERHEAD_TIME,
    WINDOW_ENERGY,
    WINDOWS,
    Account,
    AttemptUsage,
    Ledger,
    Measured,
    Prospect,
    account,
    charged_until_s,
    ledger,
)
from service.domain.records import ExperimentCost, Placement, Totals
from service.store.base import StorePart, lock_experiment, read_experiment, read_run
from trainers.telemetry.timeline import OVERHEAD

_OF_USAGE = tuple(field.name for field in fields(AttemptUsage) if field.name != "measured")
_ROUNDING = 1e-9
"""Sums may differ by this share: they were added up in another order."""


class Accounting(StorePart):
    def experiment_totals(self, experiment_id: int) -> Totals:
        """What the experiment has used so far: the sum of its ledger."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            return _totals(connection, [experiment_id], self.clock())[experiment_id]

    def experiment_costs(self, experiment_ids: Collection[int]) -> dict[int, ExperimentCost]:
        """What several experiments cost so far, and will cost, in two statements for all of them."""
        if not experiment_ids:
            return {}
        now = self.clock()
        chosen = {"experiments": list(experiment_ids), "now": now}
        with self.database.read() as connection:
            totals = _totals(connection, experiment_ids, now)
            prospects = {
                row.experiment_id: Prospect(*row[1:])
                for row in connection.execute(usage_statements.PROSPECTS, chosen)
            }
        return {
            id: ExperimentCost(total.cost_usd, prospects[id].rest_usd() if id in prospects else None)
            for id, total in totals.items()
        }

    def ledger(self, experiment_id: int) -> Ledger:
        """What every attempt at the experiment's runs is charged; open attempts count up to now."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            used = _usage(connection, schema.runs.c.experiment_id == experiment_id)
            held = connection.execute(placement_statements.placements_of(experiment_id)).mappings().all()
        placements = [Placement.from_row(row) for row in held]
        return ledger(experiment_id, used, placements, now_s=self.clock())

    def account(self, run_id: int) -> Account:
        """What every attempt at a run is charged; an open one counts up to now."""
        with self.database.read() as connection:
            run = read_run(connection, run_id)
            used = _usage(connection, schema.runs.c.id == run_id)
        return account(run.id, run.state, used, now_s=self.clock())

    def experiments_with_usage(self) -> list[int]:
        """Ids of the experiments with an attempt, the newest first."""
        with self.database.read() as connection:
            return list(connection.execute(usage_statements.experiments_with_usage()).scalars())

    def wrong_usage(self, experiment_id: int) -> list[tuple[int, int]]:
        """Attempts, by (run, number), whose running sums differ from what they sum up."""
        with self.database.read() as connection:
            used = _usage(connection, schema.runs.c.experiment_id == experiment_id)
            stored = connection.execute(usage_statements.usage_of(experiment_id)).mappings().all()
        expected = {(one.run_id, one.number): _usage_row(experiment_id, one) for one in used}
        found = {(row["run_id"], row["number"]): row for row in stored}
        return sorted(
            key
            for key in expected.keys() | found.keys()
            if key not in expected or key not in found or not _same(expected[key], found[key])
        )

    def recount(self, experiment_id: int) -> None:
        """Adds up the running sums of an experiment again from its attempts and measurements."""

        def body(connection: Connection) -> None:
            lock_experiment(connection, experiment_id)
            used = _usage(connection, schema.runs.c.experiment_id == experiment_id)
            connection.execute(usage_statements.forget_usage(experiment_id))
            statements.insert_rows(
                connection, schema.attempt_usage, [_usage_row(experiment_id, one) for one in used]
            )

        self.database.write(body)


def _totals(connection: Connection, experiment_ids: Collection[int], now: float) -> dict[int, Totals]:
    parts: dict[int, list[Sequence[float | None]]] = {id: [(0.0,) * 4] for id in experiment_ids}
    chosen = {"experiments": list(experiment_ids), "now": now}
    for id, *figures in connection.execute(usage_statements.TOTALS, chosen):
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
    told: dict[tuple[int, int], list[sa.Row[Any]]] = {}
    for row in connection.execute(ledger_statements.windows_for_ledger(chosen, WINDOWS)):
        told.setdefault((row.run_id, row.attempt), []).append(row)
    return [
        AttemptUsage(
            **{name: row[name] for name in _OF_USAGE},
            measured=_measured(told.get((row["run_id"], row["number"]), ())),
        )
        for row in connection.execute(ledger_statements.attempts_for_ledger(chosen)).mappings()
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
    """The row of `attempt_usage` that an attempt should have."""
    measured = used.measured
    return {
        "experiment_id": experiment_id,
        "run_id": used.run_id,
        "number": used.number,
        "placement": used.placement,
        "devices": used.devices,
        "price_usd_per_hour": used.price_usd_per_hour,
        "power_w": used.power_w,
        "started_s": used.started_s,
        "until_s": charged_until_s(used),
        "covered_s": measured.covered_s,
        "energy_kwh": math.fsum((measured.energy_kwh or {}).values()),
        "overhead_s": math.fsum(measured.overhead_s.values()),
    }


def _same(expected: dict[str, Any], found: sa.RowMapping) -> bool:
    return all(
        math.isclose(value, found[name], rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        if isinstance(value, float) and found[name] is not None
        else value == found[name]
        for name, value in expected.items()
    )
