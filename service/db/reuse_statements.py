"""Statements about runs that take over the figures of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Insert, Select, Update, bindparam, func, select, update

from service.db.schema import (
    NEIGHBOUR_COLUMNS,
    SUMMARY_COLUMNS,
    attempts,
    experiments,
    run_summaries,
    runs,
)
from service.db.statements import VISIBLE, VISIBLE_RUN, run_in_sight
from service.domain.access import Visibility
from service.domain.states import RunState

_r, _a = runs.c, attempts.c

REUSED_COLUMNS = (
    "implementation", "step", "total_steps", "checkpoint", "checkpoint_step", *SUMMARY_COLUMNS,
    *NEIGHBOUR_COLUMNS,
)  # fmt: skip
"""Columns of `runs` that a reused run takes over."""


def equal_runs(hashes: Iterable[str], visible: Visibility) -> Select[Any]:
    """(run, settings, seed, facts) of runs in sight that have succeeded by themselves, the newest first."""
    return (
        select(_r.id, _r.config_sha256, _r.seed, _a.facts)
        .outerjoin_from(runs, attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
        .where(
            _r.config_sha256.in_(list(hashes)),
            _r.state == sa.literal_column(f"'{RunState.succeeded}'"),
            _r.reused_from.is_(None),
            VISIBLE_RUN,
            run_in_sight(visible),
        )
        .order_by(_r.id.desc())
    )


def reusable_runs(ids: Iterable[int]) -> Select[Any]:
    """Locks runs that have succeeded and their experiments, and reads what a reused run takes over."""
    return (
        select(_r.id, _r.experiment_id, *(_r[name] for name in REUSED_COLUMNS))
        .join(experiments, experiments.c.id == _r.experiment_id)
        .where(_r.id.in_(sorted(set(ids))), _r.state == RunState.succeeded, VISIBLE)
        .with_for_update(read=True)  # Left out on SQLite.
    )


def reuse_run(experiment_id: int, *, ended_s: float) -> Update:
    """Ends a run that has just been inserted with the figures of another."""
    return (
        update(runs)
        .where(_r.experiment_id == experiment_id, _r.index == bindparam("position"))
        .values(
            state=RunState.succeeded,
            reused_from=bindparam("source"),
            ended_s=ended_s,
            **{name: bindparam(f"new_{name}") for name in REUSED_COLUMNS},
        )
    )


def copy_summaries(experiment_id: int) -> Insert:
    """Gives each reused run of an experiment the summary of the run that it reuses."""
    c = run_summaries.c
    found = (
        select(_r.id, sa.literal(0), c.summary)
        .join(run_summaries, c.run_id == _r.reused_from)
        .where(_r.experiment_id == experiment_id)
    )
    return sa.insert(run_summaries).from_select(["run_id", "attempt", "summary"], found)


def source_of_run(id: int) -> Select[Any]:
    """Returns the run whose figures a run shows: another that it reuses, or itself."""
    return select(func.coalesce(_r.reused_from, _r.id)).where(_r.id == id, VISIBLE_RUN)


def reused_runs(experiment_id: int) -> Select[Any]:
    """Returns how many runs of an experiment are reused."""
    return select(func.count()).where(_r.experiment_id == experiment_id, _r.reused_from.is_not(None))


def reusers(experiment_id: int) -> Select[Any]:
    """(experiment, run, reused run) of another experiment that shows figures of this one's."""
    source = runs.alias("source")
    return (
        select(_r.experiment_id, _r.id, source.c.id)
        .join(source, source.c.id == _r.reused_from)
        .where(source.c.experiment_id == experiment_id, VISIBLE_RUN)
        .order_by(_r.id)
        .limit(1)
    )


def reused_among(ids: Iterable[int]) -> Select[Any]:
    """(reused run, a run that reuses it) for those of these runs whose figures others show."""
    return (
        select(_r.reused_from, func.min(_r.id).label("user"))
        .where(_r.reused_from.in_(sorted(ids)), VISIBLE_RUN)
        .group_by(_r.reused_from)
    )
