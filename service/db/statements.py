"""Every statement that changes or reads experiments and runs, named by intent.

Those of the queue, points, reuse, ledgers and forecasts are in modules of their own next to this one. The
guards of transitions come from the tables in `service.domain.states`: an UPDATE that changes no row was
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, bindparam, func, select, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.sql.dml import Delete, Insert

from service.db.clock import DatabaseNow
from service.db.schema import (
    ACTIVE,
    DELETED,
    SUMMARY_COLUMNS,
    Real,
    attempts,
    cell_specs,
    events,
    experiment_specs,
    experiments,
    idempotency_keys,
    log_lines,
    measurements,
    metric_names,
    run_references,
    run_summaries,
    runs,
)
from service.domain.access import Visibility
from service.domain.grid import REFERENCE_CELL
from service.domain.records import Experiment, Run
from service.domain.states import (
    EXPERIMENT_TRANSITIONS,
    RUN_STATES_WITH_RESULT,
    RUN_TRANSITIONS,
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    UNFINISHED_RUN_STATES,
    ExperimentState,
    RunState,
)
from trainers.errors import FAILURES_OF_MACHINES, FailureClass

ACTIVE_EXPERIMENT_STATES = frozenset({ExperimentState.starting, ExperimentState.running})
ACTIVE_RUN_STATES = frozenset({RunState.starting, RunState.running})

_x = experiments.c
_r = runs.c
_a = attempts.c

EXPERIMENT_COLUMNS = [_x[name] for name in Experiment.__dataclass_fields__]
RUN_COLUMNS = [_r[name] for name in Run.__dataclass_fields__]


VISIBLE = _x.deleted_s.is_(None)
"""Experiments that no one has deleted."""
_owner = experiments.alias("owner_of_run")
VISIBLE_RUN = ~(
    select(sa.literal(1))
    .select_from(_owner)
    .where(_owner.c.id == _r.experiment_id, _owner.c.deleted_s.is_not(None))
    .correlate(runs)
    .exists()
)
"""Runs of such experiments. One look at the experiment of each: deleted ones may be many."""


def in_sight(visible: Visibility) -> sa.ColumnElement[bool]:
    """Experiments of the projects that a reader sees; a condition on each row, not a range of an index."""
    if visible.projects is None:
        return sa.true()
    # An expression: SQLite would read a project by its index and sort it, however large it is.
    return _x.project.concat("").in_(sorted(visible.projects))


def run_in_sight(visible: Visibility) -> sa.ColumnElement[bool]:
    """Runs of such experiments; one lookup for each run, so that a list still follows its own index."""
    if visible.projects is None:
        return sa.true()
    return select(1).where(_x.id == _r.experiment_id, in_sight(visible)).correlate(runs).exists()


def ids_in_sight(projects: Iterable[str]) -> Select[Any]:
    """Ids of the experiments of some projects."""
    return select(_x.id).where(_x.project.in_(sorted(projects)), VISIBLE)


def experiment_sources(target: ExperimentState) -> frozenset[ExperimentState]:
    """States from which an experiment may move to `target`."""
    return frozenset(state for state, targets in EXPERIMENT_TRANSITIONS.items() if target in targets)


def run_sources(target: RunState) -> frozenset[RunState]:
    """States from which a run may move to `target`."""
    return frozenset(state for state, targets in RUN_TRANSITIONS.items() if target in targets)


def insert_or_keep(connection: sa.Connection, table: sa.Table, keys: Sequence[str]) -> Insert:
    """INSERT that leaves an existing row of the same key as it is."""
    if connection.dialect.name == "sqlite":
        return sqlite_dialect.insert(table).on_conflict_do_nothing(index_elements=list(keys))
    return postgresql.insert(table).on_conflict_do_nothing(index_elements=list(keys))


def insert_or_replace(connection: sa.Connection, table: sa.Table, keys: Sequence[str]) -> Insert:
    """INSERT that overwrites an existing row of the same key."""
    others = [column.name for column in table.columns if column.name not in keys]
    if connection.dialect.name == "sqlite":
        lite = sqlite_dialect.insert(table)
        return lite.on_conflict_do_update(
            index_elements=list(keys), set_={name: lite.excluded[name] for name in others}
        )
    post = postgresql.insert(table)
    return post.on_conflict_do_update(
        index_elements=list(keys), set_={name: post.excluded[name] for name in others}
    )


def insert_rows(connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """INSERT rows with the same columns in the driver's own SQL.

    For rows that come by the thousand: SQLAlchemy works longer on each than the database.
    """
    if rows:
        sql, convert = _driver_insert(connection.dialect, table, tuple(rows[0]))
        connection.exec_driver_sql(
            sql,
            [
                tuple([row[name] if bind is None else bind(row[name]) for name, bind in convert])
                for row in rows
            ],
        )


@lru_cache(64)
def _driver_insert(
    dialect: sa.Dialect, table: sa.Table, names: tuple[str, ...]
) -> tuple[str, list[tuple[str, Callable[[Any], Any] | None]]]:
    """Returns the statement, and how the values of each column are bound."""
    quoted = dialect.identifier_preparer
    columns = ", ".join(quoted.format_column(table.c[name]) for name in names)
    marks = ", ".join(["?" if dialect.paramstyle == "qmark" else "%s"] * len(names))
    convert: list[tuple[str, Callable[[Any], Any] | None]] = [
        (name, table.c[name].type.dialect_impl(dialect).bind_processor(dialect)) for name in names
    ]
    return f"INSERT INTO {quoted.format_table(table)} ({columns}) VALUES ({marks})", convert


# -- Submission ------------------------------------------------------------------------------


def reserve_ids(connection: sa.Connection, table: sa.Table, count: int) -> range | list[int]:
    """Takes `count` fresh ids of a table; on SQLite only inside a write transaction."""
    if connection.dialect.name == "sqlite":
        last = connection.execute(
            sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name"), {"name": table.name}
        ).scalar()
        first = (last or 0) + 1
        return range(first, first + count)
    rows = connection.execute(
        sa.text("SELECT nextval(pg_get_serial_sequence(:name, 'id')) FROM generate_series(1, :count)"),
        {"name": table.name, "count": count},
    )
    return [row[0] for row in rows]


def idempotency_rows(keys: Iterable[tuple[str, str]]) -> Select[Any]:
    """Stored requests by (owner, key)."""
    c = idempotency_keys.c
    return select(c.owner, c.key, c.body_sha256, c.experiment_id).where(
        sa.tuple_(c.owner, c.key).in_(list(keys))
    )


def queued_runs(experiment_id: int, now: float) -> Select[Any]:
    """Returns what decides about the turns of an experiment's queued runs: the fields of `QueuedRun`."""
    return select(_r.id, _r.index, _r.cell, _r.not_before_s - now, _r.started_s.is_not(None)).where(
        _r.experiment_id == experiment_id, _r.state == RunState.queued
    )


def starting_runs(experiment_id: int) -> Select[Any]:
    """Ids of an experiment's runs whose attempt was opened and has not begun to train."""
    return select(_r.id).where(_r.experiment_id == experiment_id, _r.state == RunState.starting)


def runs_by_id(ids: Iterable[int]) -> Select[Any]:
    """Several runs."""
    return select(*RUN_COLUMNS).where(_r.id.in_(list(ids)))


def run_ids(experiment_id: int) -> Select[Any]:
    """(position in the grid, id) of an experiment's runs."""
    return select(_r.index, _r.id).where(_r.experiment_id == experiment_id)


# -- Reading ---------------------------------------------------------------------------------


def experiment_by_id(id: int) -> Select[Any]:
    """Returns one experiment."""
    return select(*EXPERIMENT_COLUMNS).where(_x.id == id, VISIBLE)


def experiments_by_id(ids: Iterable[int]) -> Select[Any]:
    """Several experiments."""
    return select(*EXPERIMENT_COLUMNS).where(_x.id.in_(list(ids)), VISIBLE)


def belonging_of_experiments(ids: Iterable[int]) -> Select[Any]:
    """(id, project, owner) of several experiments."""
    return select(_x.id, _x.project, _x.owner).where(_x.id.in_(list(ids)), VISIBLE)


def belonging_of_run(id: int) -> Select[Any]:
    """(id, project, owner) of a run, which are those of its experiment."""
    return (
        select(_r.id, _x.project, _x.owner)
        .join(experiments, _x.id == _r.experiment_id)
        .where(_r.id == id, VISIBLE)
    )


def spec_of_experiment(id: int) -> Select[Any]:
    """Returns the spec as submitted and in canonical form."""
    c = experiment_specs.c
    return select(c.text, c.canonical).join(experiments, _x.id == c.experiment_id).where(_x.id == id, VISIBLE)


def run_by_id(id: int) -> Select[Any]:
    """Returns one run."""
    return select(*RUN_COLUMNS).where(_r.id == id, VISIBLE_RUN)


def experiment_of_run(id: int) -> Select[Any]:
    """Returns the id of a run's experiment."""
    return select(_r.experiment_id).where(_r.id == id, VISIBLE_RUN)


def spec_of_run(id: int) -> Select[Any]:
    """Returns the resolved spec of a run, shared by the seeds of its cell."""
    c = cell_specs.c
    return (
        select(c.canonical)
        .join(runs, (_r.experiment_id == c.experiment_id) & (_r.cell == c.cell))
        .where(_r.id == id, VISIBLE_RUN)
    )


def runs_by_state(experiment_id: int) -> Select[Any]:
    """Returns how many runs of an experiment are in each state."""
    return select(_r.state, func.count()).where(_r.experiment_id == experiment_id).group_by(_r.state)


def runs_by_experiment_and_state(experiment_ids: Iterable[int]) -> Select[Any]:
    """Returns how many runs of each of these experiments are in each state."""
    return (
        select(_r.experiment_id, _r.state, func.count())
        .where(_r.experiment_id.in_(list(experiment_ids)))
        .group_by(_r.experiment_id, _r.state)
    )


COUNT_EXPERIMENTS_BY_STATE = select(_x.state, func.count()).where(VISIBLE).group_by(_x.state)
"""How many experiments are in each state."""

COUNT_RUNS_BY_STATE = select(_r.state, func.count()).group_by(_r.state)
"""How many runs are in each state, over all experiments, deleted ones included."""

COUNT_DELETED_RUNS_BY_STATE = (
    select(_r.state, func.count())
    .where(_r.experiment_id.in_(select(_x.id).where(DELETED)))
    .group_by(_r.state)
)
"""How many of these are of deleted experiments."""


def attempts_of_run(run_id: int) -> Select[Any]:
    """Returns all attempts at a run, oldest first."""
    return select(attempts).where(_a.run_id == run_id).order_by(_a.number)


def measurements_of_run(run_id: int) -> Select[Any]:
    """Returns all measurements of a run."""
    c = measurements.c
    return select(measurements).where(c.run_id == run_id).order_by(c.attempt, c.start_s, c.name, c.scope)


def summary_of_run(run_id: int) -> Select[Any]:
    """Returns the whole summary of a run."""
    c = run_summaries.c
    return select(c.summary).join(runs, _r.id == c.run_id).where(c.run_id == run_id, VISIBLE_RUN)


def log_lines_of_run(
    run_id: int,
    *,
    after: tuple[int, int],
    before: tuple[int, int] | None = None,
    attempt: int | None,
    containing: str | None = None,
    limit: int,
) -> Select[Any]:
    """Returns lines after (attempt, number), in order; with `before`, the last before it, newest first."""
    c = log_lines.c
    place = sa.tuple_(c.attempt, c.number)
    statement = select(log_lines).where(c.run_id == run_id, place > sa.tuple_(*after))
    if attempt is not None:
        statement = statement.where(c.attempt == attempt)
    if containing is not None:
        statement = statement.where(c.message.icontains(containing, autoescape=True))
    if before is None:
        return statement.order_by(c.attempt, c.number).limit(limit)
    return (
        statement.where(place < sa.tuple_(*before)).order_by(c.attempt.desc(), c.number.desc()).limit(limit)
    )


def last_log_line(run_id: int) -> Select[Any]:
    """Returns the newest log line of a run."""
    c = log_lines.c
    return select(log_lines).where(c.run_id == run_id).order_by(c.attempt.desc(), c.number.desc()).limit(1)


def references_of(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, run, state, failure) of runs that experiments start from; no state = it was deleted."""
    c = run_references.c
    return (
        select(c.experiment_id, c.run_id, _r.state, _r.failure_class, _r.failure_message)
        .outerjoin_from(run_references, runs, (_r.id == c.run_id) & VISIBLE_RUN)
        .where(c.experiment_id.in_(list(experiment_ids)))
        .order_by(c.experiment_id, c.run_id)
    )


def unfinished_dependents(experiment_id: int) -> Select[Any]:
    """Other experiments that have not ended and start from a run of this one."""
    c = run_references.c
    return (
        select(c.experiment_id, c.run_id)
        .join(runs, _r.id == c.run_id)
        .join(experiments, _x.id == c.experiment_id)
        .where(_r.experiment_id == experiment_id, _x.state.not_in(sorted(TERMINAL_EXPERIMENT_STATES)))
        .order_by(c.experiment_id, c.run_id)
        .limit(1)
    )


def newest_actor(experiment_id: int, kinds: Collection[str], run_id: int | None) -> Select[Any]:
    """Returns who caused the newest event of these kinds, of an experiment or of one of its runs."""
    c = events.c
    return (
        select(c.actor)
        .where(c.experiment_id == experiment_id, c.kind.in_(sorted(kinds)))
        .where(c.run_id.is_(None) if run_id is None else c.run_id.is_(None) | (c.run_id == run_id))
        .order_by(c.number.desc())
        .limit(1)
    )


def events_after(experiment_id: int, after: int, limit: int) -> Select[Any]:
    """Events of an experiment that follow a number, in order."""
    c = events.c
    return (
        select(events)
        .where(c.experiment_id == experiment_id, c.number > after)
        .order_by(c.number)
        .limit(limit)
    )


def changed_since(since_s: float, limit: int) -> Select[Any]:
    """(id, number of the last event) of experiments that have changed since a time, the latest first."""
    return (
        select(_x.id, _x.event_count)
        .where(_x.changed_s > sa.literal(since_s, Real))
        .order_by(_x.changed_s.desc())
        .limit(limit)
    )


def experiments_and_deleted_by_id(ids: Iterable[int]) -> Select[Any]:
    """Several experiments, those that people have deleted as well."""
    return select(*EXPERIMENT_COLUMNS, _x.deleted_s).where(_x.id.in_(list(ids)))


def active_experiments(limit: int) -> Select[Any]:
    """(id, project) of the experiments of all pools that are starting or running."""
    return select(_x.id, _x.project).where(ACTIVE).order_by(_x.id.desc()).limit(limit)


# -- Events ----------------------------------------------------------------------------------

ADVANCE_EVENTS = (
    update(experiments)
    .where(_x.id == bindparam("experiment"), VISIBLE)
    .values(
        event_count=_x.event_count + bindparam("count"),
        changed_s=sa.case((bindparam("count", type_=sa.Integer()) > 0, DatabaseNow()), else_=_x.changed_s),
    )
    .returning(
        _x.event_count,
        _x.state,
        _x.attempt,
        _x.lease_owner,
        _x.lease_until_s,
        _x.cancel_requested_s,
        _x.pause_requested_s,
        _x.project,
    )
)
"""Lock the experiment's row, take the next event numbers and say where the experiment stands."""

# -- Transitions of experiments --------------------------------------------------------------


def move_experiment(
    id: int, target: ExperimentState, *, sources: Iterable[ExperimentState] | None = None, **values: Any
) -> Update:
    """Moves an experiment to `target` from the states that allow it, and sets columns."""
    allowed = experiment_sources(target) if sources is None else experiment_sources(target) & set(sources)
    return (
        update(experiments).where(_x.id == id, _x.state.in_(sorted(allowed))).values(state=target, **values)
    )


def set_experiment(id: int, **values: Any) -> Update:
    """Sets columns without a transition."""
    return update(experiments).where(_x.id == id).values(**values)


RENEW_LEASE = (
    update(experiments)
    .where(
        _x.id == bindparam("experiment"),
        _x.attempt == bindparam("current"),
        _x.state.in_(sorted(ACTIVE_EXPERIMENT_STATES)),
        _x.lease_until_s.is_not(None),
    )
    .values(lease_until_s=bindparam("until"), lease_s=bindparam("lease"), silent_since_s=None)
    .returning(_x.cancel_requested_s, _x.pause_requested_s)
)
"""The driver's heartbeat, unless its lease was withdrawn; answers what people asked for."""

REQUESTS = select(_x.cancel_requested_s, _x.pause_requested_s).where(
    _x.id == bindparam("experiment"),
    _x.attempt == bindparam("current"),
    _x.state.in_(sorted(ACTIVE_EXPERIMENT_STATES)),
    _x.lease_until_s.is_not(None),
)
"""What people asked for, read without renewing the lease."""

ATTEMPTS_TO_CANCEL = select(_r.id, _r.attempt).where(
    _r.experiment_id == bindparam("experiment"),
    _r.cancel_requested_s.is_not(None),
    _r.state.not_in(sorted(TERMINAL_RUN_STATES)),
)
"""Attempts, as (run, number), at runs whose cancellation was asked for one by one."""


def lapsed(now: float) -> sa.ColumnElement[bool]:
    """Returns whether a lease ran out, or ends so late that the database's clock must have been set back.

    Twice its length, because it may be renewed between the moment of `now` and the reading of the row.
    """
    return (_x.lease_until_s < now) | (_x.lease_until_s > now + 2 * _x.lease_s)


def adopt_lapsed(
    id: int, attempt: int, owner: str, *, now: float, lease_s: float, driver_is_silent: bool
) -> Update:
    """Takes over a lease that ran out, unless somebody else did first."""
    return (
        update(experiments)
        .where(
            _x.id == id,
            _x.attempt == attempt,
            _x.state.in_(sorted(ACTIVE_EXPERIMENT_STATES)),
            lapsed(now),
        )
        .values(
            lease_owner=owner,
            lease_until_s=now + lease_s,
            lease_s=lease_s,
            silent_since_s=func.coalesce(_x.silent_since_s, now) if driver_is_silent else None,
        )
    )


def withdraw_lapsed(id: int, attempt: int, *, now: float) -> Update:
    """Ends a lease that lapsed again after it was adopted: its driver cannot renew it any more."""
    return (
        update(experiments)
        .where(
            _x.id == id,
            _x.attempt == attempt,
            _x.state.in_(sorted(ACTIVE_EXPERIMENT_STATES)),
            _x.silent_since_s.is_not(None),
            lapsed(now),
        )
        .values(lease_owner=None, lease_until_s=None, lease_s=None)
    )


# -- Transitions of runs ---------------------------------------------------------------------


def move_run(
    id: int,
    target: RunState,
    *,
    attempt: int | None = None,
    sources: Iterable[RunState] | None = None,
    **values: Any,
) -> Update:
    """Moves one run to `target` from the states that allow it; with `attempt`, fenced by it."""
    allowed = run_sources(target) if sources is None else run_sources(target) & set(sources)
    statement = update(runs).where(_r.id == id, _r.state.in_(sorted(allowed)))
    if attempt is not None:
        statement = statement.where(_r.attempt == attempt)
    return statement.values(state=target, **values)


def move_runs(experiment_id: int, target: RunState, *, sources: Iterable[RunState], **values: Any) -> Update:
    """Moves all runs of an experiment that are in `sources` to `target`."""
    allowed = run_sources(target) & set(sources)
    return (
        update(runs)
        .where(_r.experiment_id == experiment_id, _r.state.in_(sorted(allowed)))
        .values(state=target, **values)
    )


def results(experiment_id: int) -> Select[Any]:
    """Returns the runs of an experiment with a result, without those that only repeat the first cell."""
    return select(*RUN_COLUMNS).where(
        _r.experiment_id == experiment_id,
        _r.state.in_(sorted(RUN_STATES_WITH_RESULT)),
        _r.cell != REFERENCE_CELL,
    )


def keep_summaries(run_ids: Iterable[int]) -> Update:
    """Leaves what runs ended with at the attempts that it came from."""
    s = run_summaries.c
    ids = sorted(run_ids)
    found = select(s.summary).where(s.run_id == _a.run_id, s.attempt == _a.number)
    return update(attempts).where(_a.run_id.in_(ids), found.exists()).values(summary=found.scalar_subquery())


def forget_summaries(run_ids: Iterable[int]) -> Delete:
    """Removes what runs ended with, because they are measured again."""
    return sa.delete(run_summaries).where(run_summaries.c.run_id.in_(sorted(run_ids)))


def set_run(id: int, **values: Any) -> Update:
    """Sets columns of a run without a transition."""
    return update(runs).where(_r.id == id).values(**values)


def set_runs(experiment_id: int, indices: Iterable[int], **values: Any) -> Update:
    """Sets columns of runs by their positions; no transition."""
    return update(runs).where(_r.experiment_id == experiment_id, _r.index.in_(list(indices))).values(**values)


def active_attempts(experiment_id: int) -> Select[Any]:
    """Runs of an experiment that have an open attempt."""
    return (
        select(_r.id, _r.attempt, _r.cancel_requested_s, _a.experiment_attempt)
        .join(attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
        .where(_r.experiment_id == experiment_id, _r.state.in_(sorted(ACTIVE_RUN_STATES)))
        .order_by(_r.id)
    )


def open_attempt(run_id: int, number: int) -> Select[Any]:
    """Returns the run's newest attempt, when it has this number and is still open."""
    return (
        select(_a.experiment_attempt)
        .join(runs, (_a.run_id == _r.id) & (_a.number == _r.attempt))
        .where(_r.id == run_id, _a.number == number, _r.state == RunState.starting)
    )


def unfinished_runs(experiment_id: int) -> Select[Any]:
    """Returns how many runs of an experiment have not ended."""
    return (
        select(func.count())
        .select_from(runs)
        .where(_r.experiment_id == experiment_id, _r.state.in_(sorted(UNFINISHED_RUN_STATES)))
    )


def end_attempt(run_id: int, number: int, state: RunState, **values: Any) -> Update:
    """Closes an attempt that is still open."""
    return (
        update(attempts)
        .where(_a.run_id == run_id, _a.number == number, _a.ended_s.is_(None))
        .values(state=state, **values)
    )


def end_open_attempts(experiment_id: int, state: RunState, **values: Any) -> Update:
    """Closes all open attempts of an experiment's runs."""
    mine = select(_r.id).where(_r.experiment_id == experiment_id)
    return update(attempts).where(_a.run_id.in_(mine), _a.ended_s.is_(None)).values(state=state, **values)


def set_attempt(run_id: int, number: int, **values: Any) -> Update:
    """Sets columns of an attempt."""
    return update(attempts).where(_a.run_id == run_id, _a.number == number).values(**values)


def summary_values(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the typed columns of a summary."""
    return {name: summary[name] for name in SUMMARY_COLUMNS if name in summary}


def failure_counter(failure: FailureClass) -> dict[str, Any]:
    """Returns the counter that a failure raises; preemption raises none."""
    if failure is FailureClass.preempted:
        return {}
    if failure in FAILURES_OF_MACHINES:
        return {"infrastructure_failures": _r.infrastructure_failures + 1}
    return {"own_failures": _r.own_failures + 1}


def metric_ids(names: Iterable[str]) -> Select[Any]:
    """Ids of metric names."""
    return select(metric_names.c.name, metric_names.c.id).where(metric_names.c.name.in_(list(names)))
