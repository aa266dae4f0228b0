"""Experiments as people see them: records, lists, events and what has changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import func, select

from service.config.settings import Settings
from service.db import schema, statements
from service.db.clock import database_time
from service.db.engine import Database
from service.db.errors import NotFound
from service.db.filters import Order, parse_filter, parse_order
from service.db.listing import EXPERIMENT_NAMES, Listing, read_page
from service.domain.access import EVERYTHING, Visibility
from service.domain.records import (
    Event,
    Experiment,
    ExperimentCost,
    ListedExperiment,
    Page,
    QueueCounts,
)
from service.domain.states import ExperimentState, RunState
from service.specs.models import Reference
from service.store.accounting import Accounting
from service.store.base import Clocks, StorePart, read_experiment

_x, _r, _a = schema.experiments.c, schema.runs.c, schema.attempts.c

MAX_PAGE_SIZE = 1000
"""Most rows of one page."""
COMMIT_S = 10.0
"""Longest time, in s, from noting in a transaction that an experiment changes to the commit."""


class Belonging(NamedTuple):
    project: str
    owner: str


class Change(NamedTuple):
    id: int
    number: int
    """Of its last event."""


class Followed(NamedTuple):
    id: int
    project: str
    experiment: ListedExperiment | None
    """None = it was deleted."""


class Experiments(StorePart):
    def __init__(
        self, database: Database, settings: Settings, clocks: Clocks, accounting: Accounting
    ) -> None:
        super().__init__(database, settings, clocks)
        self._accounting = accounting

    def get(self, id: int) -> Experiment:
        with self.database.read() as connection:
            return read_experiment(connection, id)

    def spec(self, id: int) -> tuple[str, str]:
        """The spec's text as submitted, and its canonical JSON."""
        with self.database.read() as connection:
            spec_of_experiment = (
                select(schema.experiment_specs.c.text, schema.experiment_specs.c.canonical)
                .join(schema.experiments, _x.id == schema.experiment_specs.c.experiment_id)
                .where(_x.id == id, statements.VISIBLE)
            )
            row = connection.execute(spec_of_experiment).one_or_none()
        if row is None:
            raise NotFound("experiment", id)
        return row.text, row.canonical

    def page(
        self,
        *,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 50,
        page_token: str | None = None,
        visible: Visibility = EVERYTHING,
    ) -> Page[Experiment]:
        """A page of experiments, newest first unless `order_by` says otherwise.

        Args:
            filter: grammar of `service.db.filters`, over the fields of `Experiment`.
            order_by: fields separated by commas, each with `asc` or `desc` or neither; no value = last.
            page_size: 1 to 1000.
            page_token: `next_page_token` of the page before; BadPageToken when it is not of this list.
        """
        listing = Listing(
            schema.experiments,
            statements.EXPERIMENT_COLUMNS,
            {},
            parse_filter(filter or "", EXPERIMENT_NAMES, axes=False),
            parse_order(order_by, EXPERIMENT_NAMES, default=Order("id", descending=True)),
            visible,
        )
        with self.database.read() as connection:
            rows, token = read_page(connection, listing, clamped(page_size), page_token)
        return Page([Experiment.from_row(row) for row in rows], token)

    def belonging(self, ids: Collection[int]) -> dict[int, Belonging]:
        """Whose several experiments are, by id; those that do not exist are left out."""
        with self.database.read() as connection:
            belonging_of_experiments = select(_x.id, _x.project, _x.owner).where(
                _x.id.in_(list(ids)), statements.VISIBLE
            )
            return {
                id: Belonging(project, owner)
                for id, project, owner in connection.execute(belonging_of_experiments)
            }

    def reused_count(self, experiment_id: int) -> int:
        """How many runs of an experiment are reused: they were not started for it."""
        with self.database.read() as connection:
            reused_runs = select(func.count()).where(
                _r.experiment_id == experiment_id, _r.reused_from.is_not(None)
            )
            return int(connection.execute(reused_runs).scalar_one())

    def references(self, experiment_id: int) -> list[Reference]:
        """The runs that an experiment starts from, and their states."""
        with self.database.read() as connection:
            rows = connection.execute(statements.references_of([experiment_id])).all()
        return [Reference(*row[1:]) for row in rows]

    def run_counts(self, experiment_id: int) -> dict[RunState, int]:
        """How many runs are in each state; every state is a key."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            runs_by_state = (
                select(_r.state, func.count()).where(_r.experiment_id == experiment_id).group_by(_r.state)
            )
            counts = {row[0]: row[1] for row in connection.execute(runs_by_state)}
        return {state: counts.get(state, 0) for state in RunState}

    def run_counts_of(self, experiment_ids: Sequence[int]) -> dict[int, dict[RunState, int]]:
        """How many runs of each experiment are in each state that has any; for lists."""
        counts: dict[int, dict[RunState, int]] = {id: {} for id in experiment_ids}
        if counts:
            with self.database.read() as connection:
                runs_by_experiment_and_state = (
                    select(_r.experiment_id, _r.state, func.count())
                    .where(_r.experiment_id.in_(list(counts)))
                    .group_by(_r.experiment_id, _r.state)
                )
                for id, state, count in connection.execute(runs_by_experiment_and_state):
                    counts[id][state] = count
        return counts

    def state_counts(self) -> tuple[dict[ExperimentState, int], dict[RunState, int]]:
        """How many experiments and how many runs are in each state, over everything."""
        with self.database.read() as connection:
            count_experiments_by_state = (
                select(_x.state, func.count()).where(statements.VISIBLE).group_by(_x.state)
            )
            experiments = connection.execute(count_experiments_by_state).all()
            runs = {
                row[0]: row[1]
                for row in connection.execute(select(_r.state, func.count()).group_by(_r.state))
            }
            count_deleted_runs_by_state = (
                select(_r.state, func.count())
                .where(_r.experiment_id.in_(select(_x.id).where(schema.DELETED)))
                .group_by(_r.state)
            )
            for state, count in connection.execute(count_deleted_runs_by_state):
                runs[state] -= count
        return {row[0]: row[1] for row in experiments}, runs

    def events(self, experiment_id: int, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Events of an experiment that follow number `after`; without gaps, in commit order."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            events_after = (
                select(schema.events)
                .where(schema.events.c.experiment_id == experiment_id, schema.events.c.number > after)
                .order_by(schema.events.c.number)
                .limit(limit)
            )
            rows = connection.execute(events_after).mappings().all()
        return [Event.from_row(row) for row in rows]

    def changes(self, since_s: float | None, *, limit: int) -> tuple[float, list[Change]]:
        """The database's time, and what has changed since an earlier such time, the latest first.

        `since_s` None = now. Changes of the last `COMMIT_S` before it are returned again, as one of them may
        only now have been committed.
        """
        with self.database.read() as connection:
            # Not the clock of a simulation: changes are dated in SQL.
            now_s = database_time(connection)
            begin_s = (now_s if since_s is None else min(since_s, now_s)) - COMMIT_S
            changed_since = (
                select(_x.id, _x.event_count)
                .where(_x.changed_s > sa.literal(begin_s, schema.Real))
                .order_by(_x.changed_s.desc())
                .limit(limit)
            )
            rows = connection.execute(changed_since)
            return now_s, [Change(*row) for row in rows]

    def followed(self, ids: Collection[int]) -> list[Followed]:
        """Several experiments as they are now; those whose rows are gone are left out."""
        if not ids:
            return []
        with self.database.read() as connection:
            experiments_and_deleted_by_id = select(*statements.EXPERIMENT_COLUMNS, _x.deleted_s).where(
                _x.id.in_(list(ids))
            )
            rows = connection.execute(experiments_and_deleted_by_id).mappings().all()
        experiments = [Experiment.from_row(row) for row in rows if row["deleted_s"] is None]
        listed = {one.id: one for one in self.listed(experiments, costs=True)}
        return [Followed(row["id"], row["project"], listed.get(row["id"])) for row in rows]

    def listed(self, experiments: Collection[Experiment], *, costs: bool) -> list[ListedExperiment]:
        """Experiments with the states of their runs, and on request with their costs."""
        ids = [one.id for one in experiments]
        states, of_costs = self.run_counts_of(ids), self._accounting.costs(ids if costs else [])
        return [ListedExperiment.of(one, states[one.id], cost=of_costs.get(one.id)) for one in experiments]

    def active_costs(self, limit: int) -> list[tuple[int, str, ExperimentCost]]:
        """(id, project, cost) of the newest experiments that are starting or running."""
        with self.database.read() as connection:
            active_experiments = (
                select(_x.id, _x.project).where(schema.ACTIVE).order_by(_x.id.desc()).limit(limit)
            )
            projects = {row.id: row.project for row in connection.execute(active_experiments)}
        costs = self._accounting.costs(projects)
        return [(id, project, costs[id]) for id, project in projects.items()]

    def queue_counts(self) -> QueueCounts:
        """How many experiments wait and how many are at work, in all pools."""
        with self.database.read() as connection:
            count_waiting_and_active = select(
                select(func.count()).select_from(schema.experiments).where(schema.QUEUED).scalar_subquery(),
                select(func.count()).select_from(schema.experiments).where(schema.ACTIVE).scalar_subquery(),
            )
            return QueueCounts(*connection.execute(count_waiting_and_active).one())


def clamped(page_size: int) -> int:
    return max(1, min(page_size, MAX_PAGE_SIZE))
