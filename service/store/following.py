"""What has changed of all experiments, for those who follow them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from service.db import queue_statements, statements
from service.db.clock import database_time
from service.domain.records import Experiment, ExperimentCost, ListedExperiment, QueueCounts
from service.store.accounting import Accounting
from service.store.reading import Reading

COMMIT_S = 10.0
"""Longest time, in s, from noting in a transaction that an experiment changes to the commit."""


class Change(NamedTuple):
    id: int
    number: int
    """Of its last event."""


class Followed(NamedTuple):
    id: int
    project: str
    experiment: ListedExperiment | None
    """None = it was deleted."""


class Following(Reading, Accounting):
    def changes(self, since_s: float | None, *, limit: int) -> tuple[float, list[Change]]:
        """The database's time, and what has changed since an earlier such time, the latest first.

        `since_s` None = now. Changes of the last `COMMIT_S` before it are returned again, as one of them may
        only now have been committed.
        """
        with self.database.read() as connection:
            # Not the clock of a simulation: changes are dated in SQL.
            now_s = database_time(connection)
            begin_s = (now_s if since_s is None else min(since_s, now_s)) - COMMIT_S
            rows = connection.execute(statements.changed_since(begin_s, limit))
            return now_s, [Change(*row) for row in rows]

    def followed_experiments(self, ids: Collection[int]) -> list[Followed]:
        """Several experiments as they are now; those whose rows are gone are left out."""
        if not ids:
            return []
        with self.database.read() as connection:
            rows = connection.execute(statements.experiments_and_deleted_by_id(ids)).mappings().all()
        kept = [Experiment.from_row(row) for row in rows if row["deleted_s"] is None]
        listed = {one.id: one for one in self.listed(kept, costs=True)}
        return [Followed(row["id"], row["project"], listed.get(row["id"])) for row in rows]

    def listed(self, experiments: Collection[Experiment], *, costs: bool) -> list[ListedExperiment]:
        """Experiments with the states of their runs, and on request with their costs."""
        ids = [one.id for one in experiments]
        states, found = self.run_counts_of(ids), self.experiment_costs(ids if costs else [])
        return [ListedExperiment.of(one, states[one.id], cost=found.get(one.id)) for one in experiments]

    def active_costs(self, limit: int) -> list[tuple[int, str, ExperimentCost]]:
        """(id, project, cost) of the newest experiments that are starting or running."""
        with self.database.read() as connection:
            projects = {
                row.id: row.project for row in connection.execute(statements.active_experiments(limit))
            }
        costs = self.experiment_costs(projects)
        return [(id, project, costs[id]) for id, project in projects.items()]

    def queue_counts(self) -> QueueCounts:
        """How many experiments wait and how many are at work, in all pools."""
        with self.database.read() as connection:
            return QueueCounts(*connection.execute(queue_statements.COUNT_WAITING_AND_ACTIVE).one())
