"""Rows and files that go: of deleted experiments, and points that are not kept for ever.

Both go in transactions of a few milliseconds, so that others write in between, and both can be begun again
after a crash: what is left to do is read from the rows themselves.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select, update

from service.db import schema, statements
from service.db.errors import Conflict
from service.domain.access import EVERYTHING, LOCAL_ACTOR, Actor, Visibility
from service.domain.events import EventKind
from service.domain.records import DeletedExperiment, Experiment
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from service.specs.models import experiment_folder, stored_experiment
from service.store.audit import note_change
from service.store.base import NewEvent, StorePart, announce, lock_experiment, read_experiment, transaction
from service.store.series import BOUNDS
from trainers.data import storage

_x, _r, _p, _e = schema.experiments.c, schema.runs.c, schema.points.c, schema.point_extremes.c

ROWS_AT_A_TIME = 2_000  # Rows that one transaction removes at most
FEWEST_ROWS = 500  # Rows that one transaction removes at most at first, and where the database is slow
TRANSACTION_S = 0.01  # Time that one transaction should take, in s: others that write wait for it
STATEMENTS_AT_A_TIME = 50  # Tables of runs that one transaction looks at

_DAY_S = 86_400.0

Key = tuple[object, ...]

_OF_RUN = {
    schema.points: "run_id",
    schema.point_extremes: "run_id",
    schema.log_lines: "run_id",
    schema.measurements: "run_id",
    schema.latest_points: "run_id",
    schema.run_summaries: "run_id",
    schema.attempts: "run_id",
    schema.runs: "id",
}
"""Tables with rows of a run, each with the column that has its id; the run itself goes last."""
_OF_EXPERIMENT = {
    schema.attempt_usage: "experiment_id",
    schema.placements: "experiment_id",
    schema.run_references: "experiment_id",
    schema.cell_specs: "experiment_id",
    schema.events: "experiment_id",
    schema.experiment_specs: "experiment_id",
    schema.experiments: "id",
}
"""The same of an experiment, besides its runs."""
_series = (_p.run_id == bindparam("run"), _p.name_id == bindparam("name"), _p.attempt == bindparam("number"))
_NTH_STEP = (
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
        _e.bucket == _p.step // schema.BUCKET_STEPS,
        sa.or_(_e.low_step == _p.step, _e.high_step == _p.step, _e.nan_step == _p.step),
    )
    .exists()
)
_PRUNE = sa.delete(schema.points).where(
    *_series,
    _p.step > bindparam("after"),
    _p.step <= bindparam("until"),
    _p.step % bindparam("keep_every", type_=sa.BigInteger()) != 0,
    _p.step.not_in([bindparam("first", type_=sa.BigInteger()), bindparam("last", type_=sa.BigInteger())]),
    ~_kept_extreme,
)
"""Remove points of a series whose step is not a multiple of `keep_every`, except its ends and extremes."""


@dataclass(frozen=True, slots=True)
class OwnedRows:
    """Rows of one owner in one table."""

    table: sa.Table
    owner: str  # Column with the owner's id
    id: int

    @property
    def key(self) -> list[sa.ColumnElement[Any]]:
        """Columns of the table's key that follow its owner's."""
        return [column for column in self.table.primary_key if column.name != self.owner]

    def remove(self, connection: Connection, after: Key | None, most: int) -> tuple[int, Key | None]:
        """Removes rows that follow a key; returns how many, and the key of the last unless none is left."""
        until: Key | None = None
        rest = self.following(after)
        if self.table is schema.experiments:
            rest.append(schema.DELETED)
        elif self.key:
            nth_key = select(*self.key).where(*rest).order_by(*self.key).offset(most - 1).limit(1)
            row = connection.execute(nth_key).one_or_none()
            until = None if row is None else tuple(row)
        if until is None:
            gone = sa.delete(self.table).where(*rest)
        elif connection.dialect.name == "sqlite":
            gone = sa.delete(self.table).where(*rest, sa.tuple_(*self.key) <= self._values(until))
        else:
            gone = self.next_on_postgresql(after, most)
        return connection.execute(gone).rowcount, until

    def next_on_postgresql(self, after: Key | None, n: int) -> sa.Delete:
        """Removes the next n rows that follow a key.

        A range that is named by its last key would make PostgreSQL read the rest of a series to find its end.
        """
        place: sa.ColumnClause[Any] = sa.literal_column("ctid")
        chosen = select(place).select_from(self.table).where(*self.following(after))
        ordered = chosen.order_by(*self.key).limit(n)
        return sa.delete(self.table).where(place == sa.any_(func.array(ordered.scalar_subquery())))

    def following(self, after: Key | None) -> list[sa.ColumnElement[bool]]:
        bounds: list[sa.ColumnElement[bool]] = [self.table.c[self.owner] == self.id]
        if after is not None:
            bounds.append(sa.tuple_(*self.key) > self._values(after))
        return bounds

    def _values(self, key: Key) -> Any:
        return sa.tuple_(*(sa.literal(v, column.type) for v, column in zip(key, self.key, strict=True)))


class _Portions:
    """Sizes of transactions that take about `TRANSACTION_S` each, from what the ones before took."""

    def __init__(self) -> None:
        self.rows = min(FEWEST_ROWS, ROWS_AT_A_TIME)

    def took(self, seconds: float) -> None:
        change = min(max(TRANSACTION_S / max(seconds, 1e-6), 0.5), 1.25)
        self.rows = min(max(int(self.rows * change), FEWEST_ROWS), ROWS_AT_A_TIME)


class Removal(StorePart):
    @transaction
    def delete(
        self, connection: Connection, experiment_id: int, *, at_once: bool = False, actor: Actor = LOCAL_ACTOR
    ) -> float | None:
        """Deletes an ended experiment: no one sees it from now on.

        It can be restored for `keep_deleted_days`; then `removing` frees what it takes. Its idempotency key
        is kept, so that none takes it again. With `at_once` it cannot be restored, even if it was deleted
        before.

        Returns until when it can be restored, Unix seconds; None = it cannot.

        Raises:
            Conflict: it has not ended, or another that has not ended starts from one of its runs, or another
                reuses one.
        """
        now = self.clock()
        kept_s = 0.0 if at_once else self.settings.keep_deleted_days * _DAY_S
        if at_once and connection.execute(_deleted(experiment_id)).first() is not None:
            connection.execute(begin_removal(experiment_id, now=math.inf))
            note_change(connection, actor, "experiment.removed", experiment_id, now)
            return None
        row = lock_experiment(connection, experiment_id)
        if row.state not in TERMINAL_EXPERIMENT_STATES:
            raise Conflict(f"experiment {experiment_id} is {row.state}; cancel it before deleting it")
        c = schema.run_references.c
        unfinished_dependents = (
            select(c.experiment_id, c.run_id)
            .join(schema.runs, _r.id == c.run_id)
            .join(schema.experiments, _x.id == c.experiment_id)
            .where(_r.experiment_id == experiment_id, _x.state.not_in(sorted(TERMINAL_EXPERIMENT_STATES)))
            .order_by(c.experiment_id, c.run_id)
            .limit(1)
        )
        dependent = connection.execute(unfinished_dependents).one_or_none()
        if dependent is not None:
            raise Conflict(
                f"experiment {dependent.experiment_id} starts from run {dependent.run_id} and has not "
                f"ended; cancel it, or delete experiment {experiment_id} once it has"
            )
        source = schema.runs.alias("source")
        reusers = (
            select(_r.experiment_id, _r.id, source.c.id)
            .join(source, source.c.id == _r.reused_from)
            .where(source.c.experiment_id == experiment_id, statements.VISIBLE_RUN)
            .order_by(_r.id)
            .limit(1)
        )
        reuser = connection.execute(reusers).one_or_none()
        if reuser is not None:
            raise Conflict(
                f"experiment {reuser[0]} reuses run {reuser[2]}, as run {reuser[1]}; "
                f"delete experiment {reuser[0]} first"
            )
        announce(connection, experiment_id, [NewEvent(EventKind.experiment_deleted, "deleted")], now, actor)
        connection.execute(mark_deleted(experiment_id, at_s=now, remove_after_s=now + kept_s))
        restorable_until_s = now + kept_s if kept_s else None
        standing = {"state": row.state, "restorable_until_s": restorable_until_s}
        note_change(connection, actor, "experiment.deleted", experiment_id, now, before=standing)
        return restorable_until_s

    @transaction
    def restore(
        self, connection: Connection, experiment_id: int, *, actor: Actor = LOCAL_ACTOR
    ) -> Experiment:
        now = self.clock()
        deleted = connection.execute(_deleted(experiment_id)).one_or_none()
        if deleted is None:
            read_experiment(connection, experiment_id)
            raise Conflict(f"experiment {experiment_id} is not deleted; there is nothing to restore")
        source, owner = schema.runs.alias("source"), schema.experiments.alias("owner")
        missing_source = (
            select(_r.id, _r.reused_from, source.c.experiment_id)
            .outerjoin_from(schema.runs, source, source.c.id == _r.reused_from)
            .outerjoin(owner, owner.c.id == source.c.experiment_id)
            .where(
                _r.experiment_id == experiment_id,
                _r.reused_from.is_not(None),
                owner.c.id.is_(None) | owner.c.deleted_s.is_not(None),
            )
            .order_by(_r.id)
            .limit(1)
        )
        missing = connection.execute(missing_source).one_or_none()
        if missing is not None:
            run_id, reused, owner_id = missing
            fix = ", which has been removed; submit its spec again"
            if owner_id is not None:
                fix = f"; restore experiment {owner_id} first"
            raise Conflict(f"experiment {experiment_id}: run {run_id} shows figures of run {reused}{fix}")
        if not connection.execute(restore(experiment_id, now=now)).rowcount:
            raise Conflict(
                f"experiment {experiment_id} was deleted and is being removed; submit its spec again"
            )
        new = NewEvent(EventKind.experiment_restored, "restored")
        announce(connection, experiment_id, [new], now, actor)
        note_change(
            connection, actor, "experiment.restored", experiment_id, now,
            before={"deleted_s": deleted.deleted_s}, after={"deleted_s": None},
        )  # fmt: skip
        return read_experiment(connection, experiment_id)

    def deleted_experiment(self, experiment_id: int) -> tuple[str, str] | None:
        """Project and owner of a deleted experiment; None = it is not deleted, or is gone."""
        rows = self.read(_deleted(experiment_id))
        return (rows[0].project, rows[0].owner) if rows else None

    def restorable_experiments(
        self, *, limit: int, visible: Visibility = EVERYTHING
    ) -> list[DeletedExperiment]:
        """Deleted experiments that can be restored, those first whose time ends first."""
        seen = sa.true() if visible.projects is None else _x.project.in_(sorted(visible.projects))
        statement = (
            select(
                _x.id, _x.name, _x.owner, _x.project, _x.state, _x.run_count, _x.deleted_s, _x.remove_after_s
            )
            .where(schema.DELETED, _x.remove_after_s > sa.literal(self.clock(), schema.Real), seen)
            .order_by(_x.remove_after_s, _x.id)
            .limit(limit)
        )
        return [DeletedExperiment(*row) for row in self.read(statement)]

    def deleted_experiments(self) -> list[int]:
        """Ids of deleted experiments that can no longer be restored and are not removed yet."""
        removable = select(_x.id).where(schema.DELETED, _removable(self.clock())).order_by(_x.id)
        return [row.id for row in self.read(removable)]

    def removing(self, experiment_id: int) -> Iterator[int]:
        """Removes files and rows of a deleted experiment; yields the rows gone after each transaction.

        First it is made sure that no one restores it any more; one that was restored is left alone. Then
        files go: as long as one is left, so is the experiment, and the next call tries again.
        """
        begin = begin_removal(experiment_id, now=self.clock())
        if not self.database.write(lambda connection: connection.execute(begin).rowcount):
            return
        # Either may be gone already, and the first not be on this machine.
        storage.delete(experiment_folder(self.settings, experiment_id))
        storage.delete(stored_experiment(self.settings, experiment_id))
        runs = self._runs_of(experiment_id)
        parts = [OwnedRows(table, owner, id) for id in runs for table, owner in _OF_RUN.items()]
        parts += [OwnedRows(table, owner, experiment_id) for table, owner in _OF_EXPERIMENT.items()]
        place = 0
        after: Key | None = None
        portions = _Portions()
        begun_s = 0.0

        def body(connection: Connection) -> tuple[int, int, Key | None]:
            nonlocal begun_s
            begun_s = time.monotonic()  # It has its turn: waiting for others is not its own time.
            rows, here, key = 0, place, after
            locked: int | None = None
            for _ in range(STATEMENTS_AT_A_TIME):
                if here == len(parts) or rows >= portions.rows:
                    break
                part = parts[here]
                if part.owner == "run_id" and part.id != locked:
                    locked = part.id
                    connection.execute(select(_r.id).where(_r.id == part.id).with_for_update())
                removed, key = part.remove(connection, key, portions.rows - rows)
                rows += removed
                here += key is None
            return rows, here, key

        while place < len(parts):
            rows, place, after = self.database.write(body)
            portions.took(time.monotonic() - begun_s)
            yield rows

    def experiments_to_prune(self, *, ended_before_s: float, keep_every: int) -> list[tuple[int, float]]:
        """(id, end) of experiments whose points are to be thinned."""
        to_prune = (
            select(_x.id, _x.ended_s)
            .where(
                _x.state.in_(sorted(TERMINAL_EXPERIMENT_STATES)),
                _x.ended_s < ended_before_s,
                _x.deleted_s.is_(None),
                sa.or_(_x.pruned_s.is_(None), _x.pruned_s < _x.ended_s, _x.kept_every < keep_every),
            )
            .order_by(_x.id)
        )
        return [(row.id, row.ended_s) for row in self.read(to_prune)]

    def pruning(self, experiment_id: int, ended_s: float, keep_every: int) -> Iterator[int]:
        """Thins the points of an ended experiment; yields the points gone after each transaction.

        Of each series it keeps the steps that are multiples of `keep_every`, its first and last point, and
        the least, the greatest and the first NaN value of each `BUCKET_STEPS` steps. Samples of it look as
        before, and doing it twice changes nothing. An experiment that was queued again since `ended_s` is not
        noted as done.
        """
        for run_id in self._runs_of(experiment_id):
            yield from self._pruning_run(run_id, keep_every)
        note = note_pruned(experiment_id, ended_s=ended_s, at_s=self.clock(), keep_every=keep_every)
        self.database.write(lambda connection: connection.execute(note))

    def _runs_of(self, experiment_id: int) -> list[int]:
        rows = self.read(select(_r.id).where(_r.experiment_id == experiment_id).order_by(_r.id))
        return [row.id for row in rows]

    def _pruning_run(self, run_id: int, keep_every: int) -> Iterator[int]:
        names, numbers = schema.latest_points.c, schema.attempts.c
        series_of = (
            select(names.name_id, numbers.number)
            .join(schema.attempts, numbers.run_id == names.run_id)
            .where(names.run_id == run_id)
            .order_by(names.name_id, numbers.number)
        )
        for name_id, number in self.read(series_of):
            key = {"run": run_id, "name": name_id, "number": number}
            with self.database.read() as connection:
                first, last = connection.execute(BOUNDS, {**key, "low": 0, "high": (1 << 63) - 1}).one()
            after = first
            while after is not None and after < last:
                bounds = {**key, "first": first, "last": last, "keep_every": keep_every, "after": after}
                removed, after = self.database.write(partial(_prune, bounds=bounds))
                yield removed


def _prune(connection: Connection, bounds: dict[str, int]) -> tuple[int, int]:
    """Thins the next points of a series; returns how many went, and the last step that was looked at."""
    following = {name: bounds[name] for name in ("run", "name", "number", "after")}
    nth = connection.execute(_NTH_STEP, {**following, "n": ROWS_AT_A_TIME}).scalar()
    until: int = bounds["last"] if nth is None else nth
    return connection.execute(_PRUNE, {**bounds, "until": until}).rowcount, until


def _removable(now: float) -> sa.ColumnElement[bool]:
    return _x.remove_after_s.is_(None) | (_x.remove_after_s <= sa.literal(now, schema.Real))


def mark_deleted(experiment_id: int, *, at_s: float, remove_after_s: float) -> sa.Update:
    return (
        update(schema.experiments)
        .where(_x.id == experiment_id, _x.state.in_(sorted(TERMINAL_EXPERIMENT_STATES)))
        .values(deleted_s=at_s, remove_after_s=remove_after_s)
    )


def begin_removal(experiment_id: int, *, now: float) -> sa.Update:
    return (
        update(schema.experiments)
        .where(_x.id == experiment_id, schema.DELETED, _removable(now))
        .values(remove_after_s=None)
    )


def restore(experiment_id: int, *, now: float) -> sa.Update:
    return (
        update(schema.experiments)
        .where(_x.id == experiment_id, schema.DELETED, _x.remove_after_s > sa.literal(now, schema.Real))
        .values(deleted_s=None, remove_after_s=None)
    )


def _deleted(experiment_id: int) -> sa.Select[Any]:
    """(project, owner, until when it can be restored) of a deleted experiment."""
    return select(_x.project, _x.owner, _x.deleted_s, _x.remove_after_s).where(
        _x.id == experiment_id, schema.DELETED
    )


def note_pruned(experiment_id: int, *, ended_s: float, at_s: float, keep_every: int) -> sa.Update:
    """Note how far points are thinned, unless the experiment was queued again meanwhile."""
    return (
        update(schema.experiments)
        .where(_x.id == experiment_id, _x.ended_s == sa.literal(ended_s, schema.Real))
        .values(pruned_s=at_s, kept_every=keep_every)
    )
