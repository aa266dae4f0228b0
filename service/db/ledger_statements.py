"""Statements that a ledger is made from: attempts, and what they told of energy and utilisation."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, func, select

from service.db.schema import attempts, measurements, runs

_r, _a = runs.c, attempts.c
_is_finite = measurements.c.value.between(-sys.float_info.max, sys.float_info.max)


def attempts_for_ledger(chosen: sa.ColumnElement[bool]) -> Select[Any]:
    """Returns all attempts at chosen runs, with what their devices cost and draw.

    The run has those of its newest attempt; another attempt may have had another number of workers.
    """
    workers = func.coalesce(_a.workers, _r.workers)
    return (
        select(
            _a.run_id, _a.number, _r.state.label("run_state"), _a.state, _a.failure_class, _a.started_s,
            _a.ended_s, _a.seen_s, _a.placement, _a.resumed_from_s, _a.resumed_from_step, _a.last_step,
            (_r.devices / _r.workers * workers).label("devices"),
            (_r.price_usd_per_hour / _r.workers * workers).label("price_usd_per_hour"),
            (_r.power_w / _r.workers * workers).label("power_w"),
        )
        .join(attempts, _a.run_id == _r.id)
        .where(chosen)
    )  # fmt: skip


def windows_for_ledger(chosen: sa.ColumnElement[bool], names: Iterable[str]) -> Select[Any]:
    """Sums over the windows that attempts at chosen runs have reported, by name, provenance and scope.

    Rows are (run, attempt, name, provenance, scope, seconds, sum, sum weighted by seconds).
    """
    m = measurements.c
    seconds = m.end_s - m.start_s
    return (
        select(
            m.run_id, m.attempt, m.name, m.provenance, m.scope, func.sum(seconds).label("seconds"),
            func.sum(m.value).label("total"), func.sum(m.value * seconds).label("weighted"),
        )
        .join(attempts, (m.run_id == _a.run_id) & (m.attempt == _a.number))
        .join(runs, _r.id == _a.run_id)
        .where(chosen, m.name.in_(list(names)), _is_finite)
        .group_by(m.run_id, m.attempt, m.name, m.provenance, m.scope)
    )  # fmt: skip
