"""Records and lists, as people see them; lists never load series."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import func, select

from service.db import schema, statements
from service.db.clock import database_time
from service.db.errors import NotFound
from service.db.filters import Order, parse_filter, parse_order
from service.db.listing import EXPERIMENT_NAMES, RUN_NAMES, Listing, read_page
from service.domain.access import EVERYTHING, Visibility
from service.domain.records import (
    Attempt,
    Event,
    Experiment,
    ExperimentCost,
    ListedExperiment,
    LogLine,
    MeasurementRow,
    Page,
    QueueCounts,
    Run,
)
from service.domain.states import ExperimentState, RunState
from service.specs.models import Reference
from service.specs.reuse import Equal
from service.store.accounting import Accounting
from service.store.base import read_experiment, read_run, source_of, storable

_x, _r, _a = schema.experiments.c, schema.runs.c, schema.attempts.c

MAX_PAGE_SIZE = 1000
"""Most rows of one page."""
_HASHES = 500
"""Settings that one statement asks for."""
COMMIT_S = 10.0
"""Longest time, in s, from noting in a transaction that an experiment changes to the commit."""


class Belonging(NamedTuple):
    project: str
    owner: str


class QueuedRun(NamedTuple):
    """What decides about the turn of a queued run; a tuple, because there may be thousands."""

    id: int
    place_in_grid: int
    cell: str
    delay_s: float
    """How long it waits before it is tried again; negative = it may start."""
    started: bool
    """Whether it ever had an attempt that trained."""


class Change(NamedTuple):
    id: int
    number: int
    """Of its last event."""


class Followed(NamedTuple):
    id: int
    project: str
    experiment: ListedExperiment | None
    """None = it was deleted."""


class Reading(Accounting):
    def experiment(self, id: int) -> Experiment:
        with self.database.read() as connection:
            return read_experiment(connection, id)

    def experiment_spec(self, id: int) -> tuple[str, str]:
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

    def experiments(
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
            rows, token = read_page(connection, listing, _clamped(page_size), page_token)
        return Page([Experiment.from_row(row) for row in rows], token)

    def run(self, id: int) -> Run:
        with self.database.read() as connection:
            return read_run(connection, id)

    def belonging_of_experiments(self, ids: Collection[int]) -> dict[int, Belonging]:
        """Whose several experiments are, by id; those that do not exist are left out."""
        with self.database.read() as connection:
            belonging_of_experiments = select(_x.id, _x.project, _x.owner).where(
                _x.id.in_(list(ids)), statements.VISIBLE
            )
            return {
                id: Belonging(project, owner)
                for id, project, owner in connection.execute(belonging_of_experiments)
            }

    def belonging_of_run(self, id: int) -> Belonging | None:
        """None when there is no such run."""
        with self.database.read() as connection:
            belonging_of_run = (
                select(_r.id, _x.project, _x.owner)
                .join(schema.experiments, _x.id == _r.experiment_id)
                .where(_r.id == id, statements.VISIBLE)
            )
            row = connection.execute(belonging_of_run).one_or_none()
        return None if row is None else Belonging(row.project, row.owner)

    def find_run(self, id: int, visible: Visibility = EVERYTHING) -> Run | None:
        """None when there is no run with this id that the reader sees."""
        with self.database.read() as connection:
            statement = statements.run_by_id(id).where(statements.run_in_sight(visible))
            row = connection.execute(statement).mappings().one_or_none()
        return None if row is None else Run.from_row(row)

    def source_of(self, run: Run) -> Run:
        """The run whose checkpoints and figures a run has: the one that it reuses, or itself."""
        return run if run.reused_from is None else self.run(run.reused_from)

    def equal_runs(self, hashes: Collection[str], visible: Visibility = EVERYTHING) -> list[Equal]:
        """Runs in sight that have succeeded with any of these `config_sha256`, the newest first."""
        wanted, equal = sorted(hashes), []
        with self.database.read() as connection:
            for first in range(0, len(wanted), _HASHES):
                some = wanted[first : first + _HASHES]
                equal_runs = (
                    select(_r.id, _r.config_sha256, _r.seed, _a.facts)
                    .outerjoin_from(
                        schema.runs, schema.attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt)
                    )
                    .where(
                        _r.config_sha256.in_(list(some)),
                        _r.state == sa.literal_column(f"'{RunState.succeeded}'"),
                        _r.reused_from.is_(None),
                        statements.VISIBLE_RUN,
                        statements.run_in_sight(visible),
                    )
                    .order_by(_r.id.desc())
                )
                rows = connection.execute(equal_runs)
                equal += [Equal(*row) for row in rows]
        return equal

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

    def last_log_line(self, run_id: int) -> LogLine | None:
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            last_log_line = (
                select(schema.log_lines)
                .where(schema.log_lines.c.run_id == source)
                .order_by(schema.log_lines.c.attempt.desc(), schema.log_lines.c.number.desc())
                .limit(1)
            )
            row = connection.execute(last_log_line).mappings().one_or_none()
        return None if row is None else LogLine.from_row(row)

    def runs(
        self,
        *,
        experiment_id: int | None = None,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 100,
        page_token: str | None = None,
        visible: Visibility = EVERYTHING,
    ) -> Page[Run]:
        """A page of runs: of one experiment in grid order, or of all, newest first.

        The filter is over the fields of `Run` and `axis.<name>`; for the other arguments see `experiments`.
        """
        default = Order("id", descending=True) if experiment_id is None else Order("index", descending=False)
        listing = Listing(
            schema.runs,
            statements.RUN_COLUMNS,
            {} if experiment_id is None else {"experiment_id": experiment_id},
            parse_filter(filter or "", RUN_NAMES),
            parse_order(order_by, RUN_NAMES, default=default),
            visible,
        )
        with self.database.read() as connection:
            if experiment_id is not None:
                read_experiment(connection, experiment_id)
            rows, token = read_page(connection, listing, _clamped(page_size), page_token)
        return Page([Run.from_row(row) for row in rows], token)

    def all_runs(self, experiment_id: int, filter: str | None = None) -> list[Run]:
        """Every run of an experiment, in grid order."""
        runs: list[Run] = []
        token: str | None = None
        while True:
            page = self.runs(
                experiment_id=experiment_id, filter=filter, page_size=MAX_PAGE_SIZE, page_token=token
            )
            runs += page.items
            if (token := page.next_page_token) is None:
                return runs

    def queued_runs(self, experiment_id: int) -> list[QueuedRun]:
        with self.database.read() as connection:
            now = self.database_time(connection)
            queued_runs = select(
                _r.id, _r.index, _r.cell, _r.not_before_s - now, _r.started_s.is_not(None)
            ).where(_r.experiment_id == experiment_id, _r.state == RunState.queued)
            return [*map(QueuedRun._make, connection.execute(queued_runs))]

    def starting_runs(self, experiment_id: int) -> frozenset[int]:
        """Runs of an experiment whose attempt was opened and has not begun to train."""
        with self.database.read() as connection:
            starting_runs = select(_r.id).where(
                _r.experiment_id == experiment_id, _r.state == RunState.starting
            )
            return frozenset(connection.execute(starting_runs).scalars())

    def runs_by_id(self, ids: Sequence[int]) -> list[Run]:
        """Several runs; those that do not exist are left out."""
        runs: list[Run] = []
        with self.database.read() as connection:
            for start in range(0, len(ids), MAX_PAGE_SIZE):
                statement = select(*statements.RUN_COLUMNS).where(
                    _r.id.in_(list(ids[start : start + MAX_PAGE_SIZE]))
                )
                runs += map(Run.from_row, connection.execute(statement).mappings())
        return runs

    def run_config(self, id: int) -> str:
        """Canonical JSON of the run's spec with its axis values written in."""
        with self.database.read() as connection:
            spec_of_run = (
                select(schema.cell_specs.c.canonical)
                .join(
                    schema.runs,
                    (_r.experiment_id == schema.cell_specs.c.experiment_id)
                    & (_r.cell == schema.cell_specs.c.cell),
                )
                .where(_r.id == id, statements.VISIBLE_RUN)
            )
            canonical: str | None = connection.execute(spec_of_run).scalar()
        if canonical is None:
            raise NotFound("run", id)
        return canonical

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

    def attempts(self, run_id: int) -> list[Attempt]:
        """All attempts at a run, or at the one that it reuses, oldest first."""
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            attempts_of_run = select(schema.attempts).where(_a.run_id == source).order_by(_a.number)
            rows = connection.execute(attempts_of_run).mappings().all()
        return [Attempt.from_row(row) for row in rows]

    def measurements(self, run_id: int) -> list[MeasurementRow]:
        """All measurements of a run, of all attempts; one that is not a number is NaN."""
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            c = schema.measurements.c
            measurements_of_run = (
                select(schema.measurements)
                .where(c.run_id == source)
                .order_by(c.attempt, c.start_s, c.name, c.scope)
            )
            rows = connection.execute(measurements_of_run).mappings().all()
        return [MeasurementRow.from_row({**row, "value": as_float(row["value"])}) for row in rows]

    def summary(self, run_id: int) -> dict[str, float | int | str | None]:
        """All figures that the run ended with; empty until then."""
        with self.database.read() as connection:
            summary_of_run = (
                select(schema.run_summaries.c.summary)
                .join(schema.runs, _r.id == schema.run_summaries.c.run_id)
                .where(schema.run_summaries.c.run_id == run_id, statements.VISIBLE_RUN)
            )
            figures: dict[str, Any] | None = connection.execute(summary_of_run).scalar()
            if figures is None:
                read_run(connection, run_id)
        return figures or {}

    def logs(
        self,
        run_id: int,
        *,
        after: int | None = None,
        before: int | None = None,
        limit: int = 1000,
        attempt: int | None = None,
        containing: str | None = None,
    ) -> list[LogLine]:
        """Log lines of a run in order.

        Args:
            after: `LogLine.cursor` of the last line that the caller has; None = from the first.
            before: cursor of a line; the last lines before it, instead of the first after `after`.
            containing: only lines with this text, in upper or lower case.
        """
        c = schema.log_lines.c
        place = sa.tuple_(c.attempt, c.number)
        first = (-1, -1) if after is None else divmod(after, 1 << 32)
        statement = select(schema.log_lines).where(place > sa.tuple_(*first))
        if attempt is not None:
            statement = statement.where(c.attempt == attempt)
        if containing is not None:
            statement = statement.where(c.message.icontains(storable(containing), autoescape=True))
        if before is None:
            statement = statement.order_by(c.attempt, c.number)
        else:
            statement = statement.where(place < sa.tuple_(*divmod(before, 1 << 32)))
            statement = statement.order_by(c.attempt.desc(), c.number.desc())
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            rows = connection.execute(statement.where(c.run_id == source).limit(limit)).mappings().all()
        lines = [LogLine.from_row(row) for row in rows]
        return lines if before is None else lines[::-1]

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

    def followed_experiments(self, ids: Collection[int]) -> list[Followed]:
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
        states, of_costs = self.run_counts_of(ids), self.experiment_costs(ids if costs else [])
        return [ListedExperiment.of(one, states[one.id], cost=of_costs.get(one.id)) for one in experiments]

    def active_costs(self, limit: int) -> list[tuple[int, str, ExperimentCost]]:
        """(id, project, cost) of the newest experiments that are starting or running."""
        with self.database.read() as connection:
            active_experiments = (
                select(_x.id, _x.project).where(schema.ACTIVE).order_by(_x.id.desc()).limit(limit)
            )
            projects = {row.id: row.project for row in connection.execute(active_experiments)}
        costs = self.experiment_costs(projects)
        return [(id, project, costs[id]) for id, project in projects.items()]

    def queue_counts(self) -> QueueCounts:
        """How many experiments wait and how many are at work, in all pools."""
        with self.database.read() as connection:
            count_waiting_and_active = select(
                select(func.count()).select_from(schema.experiments).where(schema.QUEUED).scalar_subquery(),
                select(func.count()).select_from(schema.experiments).where(schema.ACTIVE).scalar_subquery(),
            )
            return QueueCounts(*connection.execute(count_waiting_and_active).one())


def as_float(value: float | None) -> float:
    """A stored figure: NULL stands for NaN."""
    return float("nan") if value is None else value


def _clamped(page_size: int) -> int:
    return max(1, min(page_size, MAX_PAGE_SIZE))
