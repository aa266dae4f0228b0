"""Statements that read finished runs, for the forecast of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Select, select

from service.db.schema import cell_specs, run_summaries, runs
from service.domain.states import RunState

LOOKED_THROUGH = 20_000
"""Finished runs, the newest, among which like ones are looked for."""

_r = runs.c


def finished_like(
    tasks: Iterable[str], students: Iterable[str], hardware: Iterable[str], *, limit: int
) -> Select[Any]:
    """(spec, steps, time, energy, summary) of the newest finished runs of such tasks, students, hardware."""
    newest = (
        select(_r.id)
        .where(_r.state == RunState.succeeded, _r.reused_from.is_(None))
        .order_by(_r.id.desc())
        .limit(LOOKED_THROUGH)
        .subquery()
    )
    c = cell_specs.c
    return (
        select(c.canonical, _r.total_steps, _r.total_time_s, _r.energy_kwh, run_summaries.c.summary)
        .join(newest, newest.c.id == _r.id)
        .join(cell_specs, (c.experiment_id == _r.experiment_id) & (c.cell == _r.cell))
        .outerjoin(run_summaries, run_summaries.c.run_id == _r.id)
        .where(
            _r.task.in_(list(tasks)),
            _r.student.in_(list(students)),
            _r.hardware.in_(list(hardware)),
            _r.total_time_s.is_not(None),
            _r.total_steps.is_not(None),
        )
        .order_by(_r.id.desc())
        .limit(limit)
    )
