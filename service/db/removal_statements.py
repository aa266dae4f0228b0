"""Statements that remove rows bit by bit: of deleted experiments, and points that are not kept for ever.

Large tables are walked along their key, so that no statement looks at rows that are gone already.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Delete, Select, Update, bindparam, select, update

from service.db.schema import (
    BUCKET_STEPS,
    DELETED,
    Real,
    attempt_usage,
    attempts,
    cell_specs,
    events,
    experiment_specs,
    experiments,
    latest_points,
    log_lines,
    measurements,
    placements,
    point_extremes,
    points,
    run_references,
    run_summaries,
    runs,
)
from service.domain.states import TERMINAL_EXPERIMENT_STATES

_x, _r, _p, _e = experiments.c, runs.c, points.c, point_extremes.c

OF_RUN = (
    points, point_extremes, log_lines, measurements, latest_points, run_summaries, attempts,
)  # fmt: skip
"""Tables with rows of a run."""
OF_EXPERIMENT = (attempt_usage, placements, run_references, cell_specs, events, experiment_specs)
"""Tables with rows of an experiment, besides its runs."""


def _removable(now: float) -> sa.ColumnElement[bool]:
    """Whether a deleted experiment can no longer be restored."""
    return _x.remove_after_s.is_(None) | (_x.remove_after_s <= sa.literal(now, Real))


def removable_experiments(now: float) -> Select[Any]:
    """Ids of experiments whose rows are to be removed."""
    return select(_x.id).where(DELETED, _removable(now)).order_by(_x.id)


def mark_deleted(experiment_id: int, *, at_s: float, remove_after_s: float) -> Update:
    """Hide an ended experiment from everyone."""
    return (
        update(experiments)
        .where(_x.id == experiment_id, _x.state.in_(sorted(TERMINAL_EXPERIMENT_STATES)))
        .values(deleted_s=at_s, remove_after_s=remove_after_s)
    )


def begin_removal(experiment_id: int, *, now: float) -> Update:
    """Withdraws the time until which an experiment can be restored, once that is over."""
    return (
        update(experiments)
        .where(_x.id == experiment_id, DELETED, _removable(now))
        .values(remove_after_s=None)
    )


def remove_now(experiment_id: int) -> Update:
    """Ends the time in which a deleted experiment can be restored."""
    return update(experiments).where(_x.id == experiment_id, DELETED).values(remove_after_s=None)


def restore(experiment_id: int, *, now: float) -> Update:
    """Shows a deleted experiment to everyone again, while that is possible."""
    return (
        update(experiments)
        .where(_x.id == experiment_id, DELETED, _x.remove_after_s > sa.literal(now, Real))
        .values(deleted_s=None, remove_after_s=None)
    )


def deleted_experiment(experiment_id: int) -> Select[Any]:
    """(project, owner, until when it can be restored) of a deleted experiment."""
    return select(_x.project, _x.owner, _x.deleted_s, _x.remove_after_s).where(
        _x.id == experiment_id, DELETED
    )


def restorable_experiments(now: float, projects: Collection[str] | None, limit: int) -> Select[Any]:
    """Deleted experiments that can be restored, those first whose time ends first; None = of all projects."""
    columns = (
        _x.id, _x.name, _x.owner, _x.project, _x.state, _x.run_count, _x.deleted_s, _x.remove_after_s,
    )  # fmt: skip
    found = (
        select(*columns)
        .where(DELETED, _x.remove_after_s > sa.literal(now, Real))
        .order_by(_x.remove_after_s, _x.id)
        .limit(limit)
    )
    return found if projects is None else found.where(_x.project.in_(sorted(projects)))


def missing_source(experiment_id: int) -> Select[Any]:
    """(run, the run that it reuses, that run's experiment) of runs whose figures are of a run no one sees.

    No experiment = the reused run has been removed.
    """
    source, owner = runs.alias("source"), experiments.alias("owner")
    return (
        select(_r.id, _r.reused_from, source.c.experiment_id)
        .outerjoin_from(runs, source, source.c.id == _r.reused_from)
        .outerjoin(owner, owner.c.id == source.c.experiment_id)
        .where(
            _r.experiment_id == experiment_id,
            _r.reused_from.is_not(None),
            owner.c.id.is_(None) | owner.c.deleted_s.is_not(None),
        )
        .order_by(_r.id)
        .limit(1)
    )


def runs_of(experiment_id: int) -> Select[Any]:
    """Ids of an experiment's runs, in order."""
    return select(_r.id).where(_r.experiment_id == experiment_id).order_by(_r.id)


def lock_run(run_id: int) -> Select[Any]:
    """Locks a run against recorders that began before its experiment was deleted."""
    return select(_r.id).where(_r.id == run_id).with_for_update()  # Left out on SQLite.


def key_of(table: sa.Table, owner: str) -> list[sa.ColumnElement[Any]]:
    """Returns the columns of a table's key that follow its owner's."""
    return [column for column in table.primary_key if column.name != owner]


def nth_key(table: sa.Table, owner: str, id: int, after: tuple[Any, ...] | None, n: int) -> Select[Any]:
    """Returns the n-th key of an owner's rows that follow a key; no row when there are fewer."""
    key = key_of(table, owner)
    return select(*key).where(*_following(table, owner, id, after)).order_by(*key).offset(n - 1).limit(1)


def remove_rows(
    table: sa.Table, owner: str, id: int, after: tuple[Any, ...] | None, until: tuple[Any, ...] | None
) -> Delete:
    """Removes an owner's rows that follow one key, up to another; None = to the last."""
    bounds = _following(table, owner, id, after)
    if until is not None:
        bounds.append(_tuple(table, owner) <= _values(table, owner, until))
    return sa.delete(table).where(*bounds)


def remove_next(table: sa.Table, owner: str, id: int, after: tuple[Any, ...] | None, n: int) -> Delete:
    """Removes the next n of an owner's rows that follow a key, on PostgreSQL.

    It reads the rest of a series to find the end of a range that `remove_rows` names by its last key.
    """
    place: sa.ColumnClause[Any] = sa.literal_column("ctid")
    chosen = select(place).select_from(table).where(*_following(table, owner, id, after))
    ordered = chosen.order_by(*key_of(table, owner)).limit(n)
    return sa.delete(table).where(place == sa.any_(sa.func.array(ordered.scalar_subquery())))


def _following(
    table: sa.Table, owner: str, id: int, after: tuple[Any, ...] | None
) -> list[sa.ColumnElement[bool]]:
    bounds: list[sa.ColumnElement[bool]] = [table.c[owner] == id]
    if after is not None:
        bounds.append(_tuple(table, owner) > _values(table, owner, after))
    return bounds


def _tuple(table: sa.Table, owner: str) -> Any:
    return sa.tuple_(*key_of(table, owner))


def _values(table: sa.Table, owner: str, values: tuple[Any, ...]) -> Any:
    columns = key_of(table, owner)
    return sa.tuple_(*(sa.literal(v, column.type) for v, column in zip(values, columns, strict=True)))


def remove_run(run_id: int) -> Delete:
    """Removes a run whose other rows are gone."""
    return sa.delete(runs).where(_r.id == run_id)


def remove_experiment(experiment_id: int) -> Delete:
    """Removes a deleted experiment whose other rows are gone."""
    return sa.delete(experiments).where(_x.id == experiment_id, DELETED)


# -- Points that are not kept for ever ---------------------------------------------------------


def to_prune(*, ended_before_s: float, keep_every: int) -> Select[Any]:
    """(id, end) of ended experiments whose points have not been thinned this far since."""
    return (
        select(_x.id, _x.ended_s)
        .where(
            _x.state.in_(sorted(TERMINAL_EXPERIMENT_STATES)),
            _x.ended_s < ended_before_s,
            _x.deleted_s.is_(None),
            sa.or_(_x.pruned_s.is_(None), _x.pruned_s < _x.ended_s, _x.kept_every < keep_every),
        )
        .order_by(_x.id)
    )


def series_of(run_id: int) -> Select[Any]:
    """(name, attempt) of all series of a run."""
    names, numbers = latest_points.c, attempts.c
    return (
        select(names.name_id, numbers.number)
        .join(attempts, numbers.run_id == names.run_id)
        .where(names.run_id == run_id)
        .order_by(names.name_id, numbers.number)
    )


_series = (_p.run_id == bindparam("run"), _p.name_id == bindparam("name"), _p.attempt == bindparam("number"))
NTH_STEP = (
    select(_p.step)
    .where(*_series, _p.step > bindparam("after"))
    .order_by(_p.step)
    .offset(bindparam("n", type_=sa.Integer()) - 1)
    .limit(1)
)
"""The n-th step of a series that follows a step; no row when there are fewer."""

_kept_extreme = (
    select(_e.bucket)
    .where(
        _e.run_id == _p.run_id,
        _e.name_id == _p.name_id,
        _e.attempt == _p.attempt,
        _e.bucket == _p.step // BUCKET_STEPS,
        sa.or_(_e.low_step == _p.step, _e.high_step == _p.step, _e.nan_step == _p.step),
    )
    .exists()
)
PRUNE = sa.delete(points).where(
    *_series,
    _p.step > bindparam("after"),
    _p.step <= bindparam("until"),
    _p.step % bindparam("keep_every", type_=sa.BigInteger()) != 0,
    _p.step.not_in([bindparam("first", type_=sa.BigInteger()), bindparam("last", type_=sa.BigInteger())]),
    ~_kept_extreme,
)
"""Remove points of a series whose step is not a multiple of `keep_every`, except its ends and extremes."""


def note_pruned(experiment_id: int, *, ended_s: float, at_s: float, keep_every: int) -> Update:
    """Note how far points are thinned, unless the experiment was queued again meanwhile."""
    return (
        update(experiments)
        .where(_x.id == experiment_id, _x.ended_s == sa.literal(ended_s, Real))
        .values(pruned_s=at_s, kept_every=keep_every)
    )
