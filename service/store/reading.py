"""Records and lists, as people see them; lists never load series."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from service.db import reuse_statements, schema, statements
from service.db.errors import NotFound
from service.db.filters import Order, parse_filter, parse_order
from service.db.listing import EXPERIMENT_NAMES, RUN_NAMES, Listing, read_page
from service.domain.access import EVERYTHING, Visibility
from service.domain.records import (
    Attempt,
    Event,
    Experiment,
    LogLine,
    MeasurementRow,
    Page,
    Run,
)
from service.domain.states import ExperimentState, RunState
from service.specs.models import Reference
from service.specs.reuse import Equal
from service.store.base import StorePart, read_experiment, read_run, source_of, storable

MAX_PAGE_SIZE = 1000
"""Most rows of one page."""
_HASHES = 500
"""Settings that one statement asks for."""


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


class Reading(StorePart):
    def experiment(self, id: int) -> Experiment:
        with self.database.read() as connection:
            return read_experiment(connection, id)

    def experiment_spec(self, id: int) -> tuple[str, str]:
        """The spec's text as submitted, and its canonical JSON."""
        with self.database.read() as connection:
            row = connection.execute(statements.spec_of_experiment(id)).one_or_none()
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
            return {
                id: Belonging(project, owner)
                for id, project, owner in connection.execute(statements.belonging_of_experiments(ids))
            }

    def belonging_of_run(self, id: int) -> Belonging | None:
        """None when there is no such run."""
        with self.database.read() as connection:
            row = connection.execute(statements.belonging_of_run(id)).one_or_none()
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
        wanted, found = sorted(hashes), []
        with self.database.read() as connection:
            for first in range(0, len(wanted), _HASHES):
                some = wanted[first : first + _HASHES]
                rows = connection.execute(reuse_statements.equal_runs(some, visible))
                found += [Equal(*row) for row in rows]
        return found

    def reused_count(self, experiment_id: int) -> int:
        """How many runs of an experiment are reused: they were not started for it."""
        with self.database.read() as connection:
            return int(connection.execute(reuse_statements.reused_runs(experiment_id)).scalar_one())

    def references(self, experiment_id: int) -> list[Reference]:
        """The runs that an experiment starts from, and their states."""
        with self.database.read() as connection:
            rows = connection.execute(statements.references_of([experiment_id])).all()
        return [Reference(*row[1:]) for row in rows]

    def last_log_line(self, run_id: int) -> LogLine | None:
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            row = connection.execute(statements.last_log_line(source)).mappings().one_or_none()
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
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.runs(
                experiment_id=experiment_id, filter=filter, page_size=MAX_PAGE_SIZE, page_token=token
            )
            found += page.items
            if (token := page.next_page_token) is None:
                return found

    def queued_runs(self, experiment_id: int) -> list[QueuedRun]:
        with self.database.read() as connection:
            now = self.database_time(connection)
            return [*map(QueuedRun._make, connection.execute(statements.queued_runs(experiment_id, now)))]

    def starting_runs(self, experiment_id: int) -> frozenset[int]:
        """Runs of an experiment whose attempt was opened and has not begun to train."""
        with self.database.read() as connection:
            return frozenset(connection.execute(statements.starting_runs(experiment_id)).scalars())

    def runs_by_id(self, ids: Sequence[int]) -> list[Run]:
        """Several runs; those that do not exist are left out."""
        found: list[Run] = []
        with self.database.read() as connection:
            for start in range(0, len(ids), MAX_PAGE_SIZE):
                statement = statements.runs_by_id(ids[start : start + MAX_PAGE_SIZE])
                found += map(Run.from_row, connection.execute(statement).mappings())
        return found

    def run_config(self, id: int) -> str:
        """Canonical JSON of the run's spec with its axis values written in."""
        with self.database.read() as connection:
            found: str | None = connection.execute(statements.spec_of_run(id)).scalar()
        if found is None:
            raise NotFound("run", id)
        return found

    def run_counts(self, experiment_id: int) -> dict[RunState, int]:
        """How many runs are in each state; every state is a key."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            found = {row[0]: row[1] for row in connection.execute(statements.runs_by_state(experiment_id))}
        return {state: found.get(state, 0) for state in RunState}

    def run_counts_of(self, experiment_ids: Sequence[int]) -> dict[int, dict[RunState, int]]:
        """How many runs of each experiment are in each state that has any; for lists."""
        counts: dict[int, dict[RunState, int]] = {id: {} for id in experiment_ids}
        if counts:
            with self.database.read() as connection:
                for id, state, count in connection.execute(statements.runs_by_experiment_and_state(counts)):
                    counts[id][state] = count
        return counts

    def state_counts(self) -> tuple[dict[ExperimentState, int], dict[RunState, int]]:
        """How many experiments and how many runs are in each state, over everything."""
        with self.database.read() as connection:
            experiments = connection.execute(statements.COUNT_EXPERIMENTS_BY_STATE).all()
            runs = {row[0]: row[1] for row in connection.execute(statements.COUNT_RUNS_BY_STATE)}
            for state, count in connection.execute(statements.COUNT_DELETED_RUNS_BY_STATE):
                runs[state] -= count
        return {row[0]: row[1] for row in experiments}, runs

    def attempts(self, run_id: int) -> list[Attempt]:
        """All attempts at a run, or at the one that it reuses, oldest first."""
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            rows = connection.execute(statements.attempts_of_run(source)).mappings().all()
        return [Attempt.from_row(row) for row in rows]

    def measurements(self, run_id: int) -> list[MeasurementRow]:
        """All measurements of a run, of all attempts; one that is not a number is NaN."""
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            rows = connection.execute(statements.measurements_of_run(source)).mappings().all()
        return [MeasurementRow.from_row({**row, "value": as_float(row["value"])}) for row in rows]

    def summary(self, run_id: int) -> dict[str, float | int | str | None]:
        """All figures that the run ended with; empty until then."""
        with self.database.read() as connection:
            found: dict[str, Any] | None = connection.execute(statements.summary_of_run(run_id)).scalar()
            if found is None:
                read_run(connection, run_id)
        return found or {}

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
        place = (-1, -1) if after is None else divmod(after, 1 << 32)
        end = None if before is None else divmod(before, 1 << 32)
        wanted = None if containing is None else storable(containing)
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            rows = (
                connection.execute(
                    statements.log_lines_of_run(
                        source, after=place, before=end, attempt=attempt, containing=wanted, limit=limit
                    )
                )
                .mappings()
                .all()
            )
        lines = [LogLine.from_row(row) for row in rows]
        return lines if before is None else lines[::-1]

    def events(self, experiment_id: int, *, after: int = 0, limit: int = 500) -> list[Event]:
        """Events of an experiment that follow number `after`; without gaps, in commit order."""
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            rows = connection.execute(statements.events_after(experiment_id, after, limit)).mappings().all()
        return [Event.from_row(row) for row in rows]


def as_float(value: float | None) -> float:
    """A stored figure: NULL stands for NaN."""
    return float("nan") if value is None else value


def _clamped(page_size: int) -> int:
    return max(1, min(page_size, MAX_PAGE_SIZE))
