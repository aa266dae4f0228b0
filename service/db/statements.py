"""Statements on experiments and runs that several modules use, and the guarded transitions.

The guards come from the tables in `service.domain.states`: an UPDATE that changes no row was refused.
Statements used by one module are in that module.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, bindparam, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert

from service.db.clock import DatabaseNow
from service.db.schema import attempts, experiments, run_references, runs
from service.domain.access import Visibility
from service.domain.records import Experiment, Run
from service.domain.states import EXPERIMENT_TRANSITIONS, RUN_TRANSITIONS, ExperimentState, RunState

ACTIVE_EXPERIMENT_STATES = frozenset({ExperimentState.starting, ExperimentState.running})
ACTIVE_RUN_STATES = frozenset({RunState.starting, RunState.running})

_x = experiments.c
_r = runs.c
_a = attempts.c

EXPERIMENT_COLUMNS = [_x[name] for name in Experiment.__dataclass_fields__]
EXPERIMENTS = select(*EXPERIMENT_COLUMNS)  # Built once: listing its columns costs more than reading a row
RUN_COLUMNS = [_r[name] for name in Run.__dataclass_fields__]

VISIBLE = _x.deleted_s.is_(None)  # Experiments that no one has deleted
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
    return select(_x.id).where(_x.project.in_(sorted(projects)), VISIBLE)


def experiment_sources(target: ExperimentState) -> frozenset[ExperimentState]:
    return frozenset(state for state, targets in EXPERIMENT_TRANSITIONS.items() if target in targets)


def run_sources(target: RunState) -> frozenset[RunState]:
    return frozenset(state for state, targets in RUN_TRANSITIONS.items() if target in targets)


def dialect_insert(connection: sa.Connection, table: sa.Table) -> Any:
    """An INSERT that can say what it does on a conflict: SQLAlchemy has one for each database."""
    return {"postgresql": postgresql, "sqlite": sqlite}[connection.dialect.name].insert(table)


def insert_or_keep(connection: sa.Connection, table: sa.Table, keys: Sequence[str]) -> Insert:
    insert: Insert = dialect_insert(connection, table).on_conflict_do_nothing(index_elements=list(keys))
    return insert


def insert_or_replace(
    connection: sa.Connection, table: sa.Table, keys: Sequence[str], *, kept: Collection[str] = ()
) -> Insert:
    """`kept` are columns of an old row that stay as they are."""
    insert = dialect_insert(connection, table)
    others = [column.name for column in table.columns if column.name not in (*keys, *kept)]
    replace: Insert = insert.on_conflict_do_update(
        index_elements=list(keys), set_={name: insert.excluded[name] for name in others}
    )
    return replace


def insert_rows(connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Inserts rows with the same columns in the driver's own SQL.

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


# -- Reading ---------------------------------------------------------------------------------


def experiment_by_id(id: int) -> Select[Any]:
    return EXPERIMENTS.where(_x.id == id, VISIBLE)


def experiments_by_id(ids: Iterable[int]) -> Select[Any]:
    return EXPERIMENTS.where(_x.id.in_(list(ids)), VISIBLE)


def run_by_id(id: int) -> Select[Any]:
    return select(*RUN_COLUMNS).where(_r.id == id, VISIBLE_RUN)


def references_of(experiment_ids: Iterable[int]) -> Select[Any]:
    """(experiment, run, state, failure) of runs that experiments start from; no state = it was deleted."""
    c = run_references.c
    return (
        select(c.experiment_id, c.run_id, _r.state, _r.failure_class, _r.failure_message)
        .outerjoin_from(run_references, runs, (_r.id == c.run_id) & VISIBLE_RUN)
        .where(c.experiment_id.in_(list(experiment_ids)))
        .order_by(c.experiment_id, c.run_id)
    )


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
    return update(experiments).where(_x.id == id).values(**values)


def lapsed(now: float | sa.BindParameter[float]) -> sa.ColumnElement[bool]:
    """Whether a lease ran out, or ends so late that the database's clock must have been set back.

    Twice its length, because it may be renewed between the moment of `now` and the reading of the row.
    """
    return (_x.lease_until_s < now) | (_x.lease_until_s > now + 2 * _x.lease_s)


def adopt_lapsed(
    id: int, attempt: int, owner: str, *, now: float, lease_s: float, driver_is_silent: bool
) -> Update:
    """Takes over a lease that ran out, unless another scheduler did first."""
    return (
        update(experiments)
        .where(
            _x.id == id, _x.attempt == attempt, _x.state.in_(sorted(ACTIVE_EXPERIMENT_STATES)), lapsed(now)
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


def set_run(id: int, **values: Any) -> Update:
    return update(runs).where(_r.id == id).values(**values)


def open_attempt(run_id: int, number: int) -> Select[Any]:
    """The run's newest attempt, when it has this number and is still open."""
    return (
        select(_a.experiment_attempt)
        .join(runs, (_a.run_id == _r.id) & (_a.number == _r.attempt))
        .where(_r.id == run_id, _a.number == number, _r.state == RunState.starting)
    )


def end_attempt(run_id: int, number: int, state: RunState, **values: Any) -> Update:
    """Closes an attempt that is still open."""
    return (
        update(attempts)
        .where(_a.run_id == run_id, _a.number == number, _a.ended_s.is_(None))
        .values(state=state, **values)
    )


def end_open_attempts(experiment_id: int, state: RunState, **values: Any) -> Update:
    mine = select(_r.id).where(_r.experiment_id == experiment_id)
    return update(attempts).where(_a.run_id.in_(mine), _a.ended_s.is_(None)).values(state=state, **values)
