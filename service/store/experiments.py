"""Experiments as people see them: records, lists, events and what has changed."""

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
from service.db.listing import EXPERIMENT_NAMES, TAGS, Listing, read_page
from service.domain.access import EVERYTHING, Visibility
from service.domain.records import Event, Experiment, ExperimentCost, ListedExperiment, Page, QueueCounts
from service.domain.states import ExperimentState, RunState
from service.specs.models import Reference
from service.store.accounting import Accounting
from service.store.base import Clocks, StorePart, read_experiment, records

_x, _r, _a = schema.experiments.c, schema.runs.c, schema.attempts.c

MAX_PAGE_SIZE = 1000  # Most rows of one page
COMMIT_S = 10.0  # Longest time, in s, from noting in a transaction that an experiment changes to the commit


class Belonging(NamedTuple):
    project: str
    owner: str


class Change(NamedTuple):
    id: int
    number: int  # Of its last event


class Followed(NamedTuple):
    id: int
    project: str
    experiment: ListedExperiment | None  # None = it was deleted


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
        specs = schema.experiment_specs.c
        columns = select(specs.text, specs.canonical).join(schema.experiments, _x.id == specs.experiment_id)
        rows = self.read(columns.where(_x.id == id, statements.VISIBLE))
        if not rows:
            raise NotFound("experiment", id)
        return rows[0].text, rows[0].canonical

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
            parse_filter(filter or "", EXPERIMENT_NAMES, axes=False, beside=TAGS),
            parse_order(order_by, EXPERIMENT_NAMES, default=Order("id", descending=True)),
            visible,
        )
        with self.database.read() as connection:
            rows, token = read_page(connection, listing, clamped(page_size), page_token)
        return Page([Experiment.from_row(row) for row in rows], token)

    def belonging(self, ids: Collection[int]) -> dict[int, Belonging]:
        """Whose several experiments are, by id; those that do not exist are left out."""
        columns = select(_x.id, _x.project, _x.owner)
        rows = self.read(columns.where(_x.id.in_(list(ids)), statements.VISIBLE))
        return {id: Belonging(project, owner) for id, project, owner in rows}

    def reused_count(self, experiment_id: int) -> int:
        reused = _r.reused_from.is_not(None)
        ((count,),) = self.read(select(func.count()).where(_r.experiment_id == experiment_id, reused))
        return int(count)

    def references(self, experiment_id: int) -> list[Reference]:
        return [Reference(*row[1:]) for row in self.read(statements.references_of([experiment_id]))]

    def run_counts(self, experiment_id: int) -> dict[RunState, int]:
        """How many runs are in each state; every state is a key."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            runs_by_state = select(_r.state, func.count()).group_by(_r.state)
            rows = connection.execute(runs_by_state.where(_r.experiment_id == experiment_id))
            return dict.fromkeys(RunState, 0) | {row[0]: row[1] for row in rows}

    def run_counts_of(self, experiment_ids: Sequence[int]) -> dict[int, dict[RunState, int]]:
        counts: dict[int, dict[RunState, int]] = {id: {} for id in experiment_ids}
        if counts:
            for id, state, count in self.read(
                select(_r.experiment_id, _r.state, func.count())
                .where(_r.experiment_id.in_(list(counts)))
                .group_by(_r.experiment_id, _r.state)
            ):
                counts[id][state] = count
        return counts

    def state_counts(self) -> tuple[dict[ExperimentState, int], dict[RunState, int]]:
        """How many experiments and how many runs are in each state, over everything."""
        of_experiments = select(_x.state, func.count()).where(statements.VISIBLE).group_by(_x.state)
        of_runs = select(_r.state, func.count()).group_by(_r.state)
        deleted = select(_x.id).where(schema.DELETED)
        with self.database.read() as connection:
            experiments = {row[0]: row[1] for row in connection.execute(of_experiments)}
            runs = {row[0]: row[1] for row in connection.execute(of_runs)}
            for state, count in connection.execute(of_runs.where(_r.experiment_id.in_(deleted))):
                runs[state] -= count
        return experiments, runs

    def events(self, experiment_id: int, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Events of an experiment that follow number `after`; without gaps, in commit order."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            c = schema.events.c
            following = select(schema.events).where(c.experiment_id == experiment_id, c.number > after)
            return records(connection, Event, following.order_by(c.number).limit(limit))

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
            return now_s, [Change(*row) for row in connection.execute(changed_since)]

    def followed(self, ids: Collection[int]) -> list[Followed]:
        """Several experiments as they are now; those whose rows are gone are left out."""
        if not ids:
            return []
        columns = select(*statements.EXPERIMENT_COLUMNS, _x.deleted_s)
        rows = self.read(columns.where(_x.id.in_(list(ids))))
        experiments = [Experiment.from_row(row._mapping) for row in rows if row.deleted_s is None]
        listed = {one.id: one for one in self.listed(experiments, costs=True)}
        return [Followed(row.id, row.project, listed.get(row.id)) for row in rows]

    def listed(self, experiments: Collection[Experiment], *, costs: bool) -> list[ListedExperiment]:
        ids = [one.id for one in experiments]
        states, of_costs = self.run_counts_of(ids), self._accounting.costs(ids if costs else [])
        return [ListedExperiment.of(one, states[one.id], cost=of_costs.get(one.id)) for one in experiments]

    def active_costs(self, limit: int) -> list[tuple[int, str, ExperimentCost]]:
        """(id, project, cost) of the newest experiments that are starting or running."""
        active = select(_x.id, _x.project).where(schema.ACTIVE)
        rows = self.read(active.order_by(_x.id.desc()).limit(limit))
        costs = self._accounting.costs([row.id for row in rows])
        return [(row.id, row.project, costs[row.id]) for row in rows]

    def queue_counts(self) -> QueueCounts:
        """How many experiments wait and how many are at work, in all pools."""
        count = select(func.count()).select_from(schema.experiments)
        (row,) = self.read(
            select(*(count.where(part).scalar_subquery() for part in (schema.QUEUED, schema.ACTIVE)))
        )
        return QueueCounts(*row)


def clamped(page_size: int) -> int:
    return max(1, min(page_size, MAX_PAGE_SIZE))
