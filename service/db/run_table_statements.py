"""Statements that read everything about the runs of some experiments at once, for the analysis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Select, func, select

from service.db.schema import attempts, cell_specs, measurements, run_summaries, runs

_r = runs.c


def summaries(experiment_ids: Iterable[int]) -> Select[Any]:
    """Returns what each run ended with, as (run id, summary)."""
    return (
        select(run_summaries.c.run_id, run_summaries.c.summary)
        .join(runs, _r.id == run_summaries.c.run_id)
        .where(_r.experiment_id.in_(list(experiment_ids)))
    )


def current_facts(experiment_ids: Iterable[int]) -> Select[Any]:
    """Returns the record of each run's current attempt, or of the run that it reuses, as (run id, facts)."""
    a = attempts.c
    source = runs.alias("source")
    return (
        select(_r.id, a.facts)
        .join(source, source.c.id == func.coalesce(_r.reused_from, _r.id))
        .join(attempts, (source.c.id == a.run_id) & (source.c.attempt == a.number))
        .where(_r.experiment_id.in_(list(experiment_ids)), a.facts.is_not(None))
        .order_by(_r.id)
    )


def kernel_measurements(experiment_ids: Iterable[int], names: Iterable[str]) -> Select[Any]:
    """Returns (run id, attempt, scope, name, value) of the first worker's kernels, by run and attempt."""
    m = measurements.c
    source = runs.alias("source")
    return (
        select(_r.id, m.attempt, m.scope, m.name, m.value)
        .join(source, source.c.id == func.coalesce(_r.reused_from, _r.id))
        .join(measurements, m.run_id == source.c.id)
        .where(
            _r.experiment_id.in_(list(experiment_ids)),
            m.name.in_(list(names)),
            m.scope.startswith("kernel:", autoescape=True),
            m.attempt >= source.c.first_attempt,
        )
        .order_by(_r.id, m.attempt)
    )


def resolved_specs(experiment_ids: Iterable[int]) -> Select[Any]:
    """Returns each cell's spec with its axis values written in, as (experiment id, cell, canonical JSON)."""
    c = cell_specs.c
    return select(c.experiment_id, c.cell, c.canonical).where(c.experiment_id.in_(list(experiment_ids)))
