"""Rows and files that go: of deleted experiments, and points that are not kept for ever.

Both go in transactions of a few milliseconds, so that others write in between, and both can be begun again
after a crash: what is left to do is read from the rows themselves.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import sqlalchemy as sa
from sqlalchemy import Connection

from service.db import point_statements, removal_statements, reuse_statements, schema, statements
from service.db.errors import Conflict
from service.domain.access import EVERYTHING, LOCAL_ACTOR, Actor, Visibility
from service.domain.events import EventKind
from service.domain.records import DeletedExperiment, Experiment
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from service.specs.models import experiment_folder
from service.store.audit import note_change
from service.store.base import NewEvent, StorePart, announce, lock_experiment, read_experiment

logger = logging.getLogger(__name__)

ROWS_AT_A_TIME = 2_000
"""Rows that one transaction removes at most."""
FEWEST_ROWS = 500
"""Rows that one transaction removes at most at first, and where the database is slow."""
TRANSACTION_S = 0.01
"""Time that one transaction should take, in s: others that write wait for it."""
STATEMENTS_AT_A_TIME = 50
"""Tables of runs that one transaction looks at."""

_DAY_S = 86_400.0

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one owner in one table."""

    table: sa.Table
    owner: str
    """Column with the owner's id."""
    id: int

    def remove(self, connection: Connection, after: Key | None, most: int) -> tuple[int, Key | None]:
        """Removes rows that follow a key; returns how many, and the key of the last unless none is left."""
        if self.table in (schema.runs, schema.experiments):
            gone = (
                removal_statements.remove_run(self.id)
                if self.table is schema.runs
                else removal_statements.remove_experiment(self.id)
            )
            return connection.execute(gone).rowcount, None
        until: Key | None = None
        if removal_statements.key_of(self.table, self.owner):
            row = connection.execute(
                removal_statements.nth_key(self.table, self.owner, self.id, after, most)
            ).one_or_none()
            until = None if row is None else tuple(row)
        if until is None or connection.dialect.name == "sqlite":
            gone = removal_statements.remove_rows(self.table, self.owner, self.id, after, until)
        else:
            gone = removal_statements.remove_next(self.table, self.owner, self.id, after, most)
        return connection.execute(gone).rowcount, until


class _Portions:
    """Sizes of transactions that take about `TRANSACTION_S` each, from what the ones before took."""

    def __init__(self) -> None:
        self.rows = min(FEWEST_ROWS, ROWS_AT_A_TIME)

    def took(self, seconds: float) -> None:
        change = min(max(TRANSACTION_S / max(seconds, 1e-6), 0.5), 1.25)
        self.rows = min(max(int(self.rows * change), FEWEST_ROWS), ROWS_AT_A_TIME)


class Removal(StorePart):
    def delete(
        self, experiment_id: int, *, at_once: bool = False, actor: Actor = LOCAL_ACTOR
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

        def body(connection: Connection) -> None:
            before = connection.execute(removal_statements.deleted_experiment(experiment_id)).one_or_none()
            if at_once and before is not None:
                connection.execute(removal_statements.remove_now(experiment_id))
                note_change(connection, actor, "experiment.removed", experiment_id, now)
                return
            row = lock_experiment(connection, experiment_id)
            if row.state not in TERMINAL_EXPERIMENT_STATES:
                raise Conflict(f"experiment {experiment_id} is {row.state}; cancel it before deleting it")
            dependent = connection.execute(statements.unfinished_dependents(experiment_id)).one_or_none()
            if dependent is not None:
                raise Conflict(
                    f"experiment {dependent.experiment_id} starts from run {dependent.run_id} and has not "
                    f"ended; cancel it, or delete experiment {experiment_id} once it has"
                )
            reuser = connection.execute(reuse_statements.reusers(experiment_id)).one_or_none()
            if reuser is not None:
                raise Conflict(
                    f"experiment {reuser[0]} reuses run {reuser[2]}, as run {reuser[1]}; "
                    f"delete experiment {reuser[0]} first"
                )
            announce(
                connection, experiment_id, [NewEvent(EventKind.experiment_deleted, "deleted")], now, actor
            )
            connection.execute(
                removal_statements.mark_deleted(experiment_id, at_s=now, remove_after_s=now + kept_s)
            )
            found = {"state": row.state, "restorable_until_s": now + kept_s if kept_s else None}
            note_change(connection, actor, "experiment.deleted", experiment_id, now, before=found)

        self.database.write(body)
        return now + kept_s if kept_s else None

    def restore(self, experiment_id: int, *, actor: Actor = LOCAL_ACTOR) -> Experiment:
        """Shows a deleted experiment to everyone again, as it was."""
        now = self.clock()

        def body(connection: Connection) -> Experiment:
            deleted = connection.execute(removal_statements.deleted_experiment(experiment_id)).one_or_none()
            if deleted is None:
                read_experiment(connection, experiment_id)
                raise Conflict(f"experiment {experiment_id} is not deleted; there is nothing to restore")
            missing = connection.execute(removal_statements.missing_source(experiment_id)).one_or_none()
            if missing is not None:
                raise Conflict(f"experiment {experiment_id}: {_missing_words(*missing)}")
            if not connection.execute(removal_statements.restore(experiment_id, now=now)).rowcount:
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

        return self.database.write(body)

    def deleted_experiment(self, experiment_id: int) -> tuple[str, str] | None:
        """Project and owner of a deleted experiment; None = it is not deleted, or is gone."""
        with self.database.read() as connection:
            row = connection.execute(removal_statements.deleted_experiment(experiment_id)).one_or_none()
            return None if row is None else (row.project, row.owner)

    def restorable_experiments(
        self, *, limit: int, visible: Visibility = EVERYTHING
    ) -> list[DeletedExperiment]:
        """Deleted experiments that can be restored, those first whose time ends first."""
        found = removal_statements.restorable_experiments(self.clock(), visible.projects, limit)
        with self.database.read() as connection:
            return [DeletedExperiment(*row) for row in connection.execute(found)]

    def deleted_experiments(self) -> list[int]:
        """Ids of deleted experiments that can no longer be restored and are not removed yet."""
        with self.database.read() as connection:
            return list(connection.execute(removal_statements.removable_experiments(self.clock())).scalars())

    def removing(self, experiment_id: int) -> Iterator[int]:
        """Removes files and rows of a deleted experiment; yields the rows gone after each transaction.

        First it is made sure that no one restores it any more; one that was restored is left alone. Then
        files go: as long as one is left, so is the experiment, and the next call tries again.
        """
        begin = removal_statements.begin_removal(experiment_id, now=self.clock())
        if not self.database.write(lambda connection: connection.execute(begin).rowcount):
            return
        folder = experiment_folder(self.settings, experiment_id)
        if folder.exists():  # Not on this machine, or gone already.
            shutil.rmtree(folder)
        with self.database.read() as connection:
            run_ids = list(connection.execute(removal_statements.runs_of(experiment_id)).scalars())
        parts = [
            part
            for run_id in run_ids
            for part in (
                *(_Part(table, "run_id", run_id) for table in removal_statements.OF_RUN),
                _Part(schema.runs, "id", run_id),
            )
        ]
        parts += [_Part(table, "experiment_id", experiment_id) for table in removal_statements.OF_EXPERIMENT]
        parts.append(_Part(schema.experiments, "id", experiment_id))
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
                    connection.execute(removal_statements.lock_run(part.id))
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
        with self.database.read() as connection:
            found = connection.execute(
                removal_statements.to_prune(ended_before_s=ended_before_s, keep_every=keep_every)
            )
            return [(row.id, row.ended_s) for row in found]

    def pruning(self, experiment_id: int, ended_s: float, keep_every: int) -> Iterator[int]:
        """Thins the points of an ended experiment; yields the points gone after each transaction.

        Of each series it keeps the steps that are multiples of `keep_every`, its first and last point, and
        the least, the greatest and the first NaN value of each `BUCKET_STEPS` steps. Samples of it look as
        before, and doing it twice changes nothing. An experiment that was queued again since `ended_s` is not
        noted as done.
        """
        with self.database.read() as connection:
            run_ids = list(connection.execute(removal_statements.runs_of(experiment_id)).scalars())
        for run_id in run_ids:
            yield from self._pruning_run(run_id, keep_every)
        note = removal_statements.note_pruned(
            experiment_id, ended_s=ended_s, at_s=self.clock(), keep_every=keep_every
        )
        self.database.write(lambda connection: connection.execute(note))

    def _pruning_run(self, run_id: int, keep_every: int) -> Iterator[int]:
        with self.database.read() as connection:
            series = connection.execute(removal_statements.series_of(run_id)).all()
        for name_id, number in series:
            key = {"run": run_id, "name": name_id, "number": number}
            with self.database.read() as connection:
                first, last = connection.execute(
                    point_statements.SERIES_BOUNDS, {**key, "low": 0, "high": (1 << 63) - 1}
                ).one()
            after = first
            while after is not None and after < last:
                bounds = {**key, "first": first, "last": last, "keep_every": keep_every, "after": after}
                removed, after = self.database.write(partial(_prune, bounds=bounds))
                yield removed


def _missing_words(run_id: int, reused: int, experiment_id: int | None) -> str:
    if experiment_id is None:
        return f"run {run_id} shows figures of run {reused}, which has been removed; submit its spec again"
    return f"run {run_id} shows figures of run {reused}; restore experiment {experiment_id} first"


def _prune(connection: Connection, bounds: dict[str, int]) -> tuple[int, int]:
    """Thins the next points of a series; returns how many went, and the last step that was looked at."""
    following = {name: bounds[name] for name in ("run", "name", "number", "after")}
    found = connection.execute(removal_statements.NTH_STEP, {**following, "n": ROWS_AT_A_TIME}).scalar()
    until: int = bounds["last"] if found is None else found
    return connection.execute(removal_statements.PRUNE, {**bounds, "until": until}).rowcount, until
