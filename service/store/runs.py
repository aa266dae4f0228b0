"""Runs as people see them: records and lists, which never load series, attempts, measurements and logs."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import func, select

from service.db import schema, statements
from service.db.errors import NotFound
from service.db.filters import Kind, Order, parse_order
from service.db.listing import (
    BESIDE_COLUMNS,
    RUN_NAMES,
    Listing,
    condition_sql,
    count_rows,
    parse_run_filter,
    read_groups,
    read_page,
)
from service.domain.access import EVERYTHING, Visibility
from service.domain.records import Attempt, GroupOfRuns, LogLine, MeasurementRow, Page, Run
from service.domain.states import RunState
from service.specs.reuse import Equal
from service.store.base import StorePart, read_experiment, read_run, record, records, source_of, storable
from service.store.experiments import MAX_PAGE_SIZE, Belonging, clamped

_x, _r, _a = schema.experiments.c, schema.runs.c, schema.attempts.c

_HASHES = 500  # Settings that one statement asks for


class QueuedRun(NamedTuple):
    """What decides about the turn of a queued run; a tuple, because there may be thousands."""

    id: int
    place_in_grid: int
    cell: str
    seed: int
    delay_s: float  # How long it waits before it is tried again; negative = it may start
    started: bool  # Whether it ever had an attempt that trained


class Runs(StorePart):
    def get(self, id: int) -> Run:
        with self.database.read() as connection:
            return read_run(connection, id)

    def belonging(self, id: int) -> Belonging | None:
        columns = select(_x.project, _x.owner).join(schema.runs, _x.id == _r.experiment_id)
        rows = self.read(columns.where(_r.id == id, statements.VISIBLE))
        return Belonging(*rows[0]) if rows else None

    def find(self, id: int, visible: Visibility = EVERYTHING) -> Run | None:
        """None when there is no run with this id that the reader sees."""
        return self.read_record(Run, statements.run_by_id(id).where(statements.run_in_sight(visible)))

    def source_of(self, run: Run) -> Run:
        """The run whose checkpoints and figures a run has: the one that it reuses, or itself."""
        return run if run.reused_from is None else self.get(run.reused_from)

    def equal(self, hashes: Collection[str], visible: Visibility = EVERYTHING) -> list[Equal]:
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
                        _r.repeat == 0,
                        statements.VISIBLE_RUN,
                        statements.run_in_sight(visible),
                    )
                    .order_by(_r.id.desc())
                )
                equal += [Equal(*row) for row in connection.execute(equal_runs)]
        return equal

    def last_log_line(self, run_id: int) -> LogLine | None:
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            c = schema.log_lines.c
            newest_first = select(schema.log_lines).order_by(c.attempt.desc(), c.number.desc())
            return record(connection, LogLine, newest_first.where(c.run_id == source).limit(1))

    def page(
        self,
        *,
        experiment_id: int | None = None,
        filter: str | None = None,
        order_by: str | None = None,
        page_size: int = 100,
        page_token: str | None = None,
        offset: int | None = None,
        visible: Visibility = EVERYTHING,
    ) -> Page[Run]:
        """A page of runs: of one experiment in grid order, or of all, newest first.

        The filter is over the fields of `Run` and of the spec, figures and `axis.<name>`; for the other
        arguments see `experiments`.
        """
        default = Order("id", descending=True) if experiment_id is None else Order("index", descending=False)
        listing = Listing(
            schema.runs,
            statements.RUN_COLUMNS,
            {} if experiment_id is None else {"experiment_id": experiment_id},
            parse_run_filter(filter),
            parse_order(order_by, RUN_NAMES, default=default, beside=BESIDE_COLUMNS),
            visible,
        )
        with self.database.read() as connection:
            if experiment_id is not None:
                read_experiment(connection, experiment_id)
            rows, token = read_page(connection, listing, clamped(page_size), page_token, offset or 0)
            total = None if offset is None else count_rows(connection, listing)
        return Page([Run.from_row(row) for row in rows], token, total)

    def groups(
        self, experiment_id: int, by: str, *, filter: str | None = None, figures: Sequence[str] = ()
    ) -> list[GroupOfRuns]:
        """The runs of an experiment that have the same values of what `by` names, as `order_by` would.

        In a list ordered by `by`, and then by anything, each group's runs are next to each other.
        """
        default = Order("cell", descending=False)
        order = parse_order(by, RUN_NAMES, default=default, beside=BESIDE_COLUMNS, parameter="by")
        of_experiment = {"experiment_id": experiment_id}
        listing = Listing(schema.runs, [_r.id], of_experiment, parse_run_filter(filter), order)
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            return read_groups(connection, listing, figures)

    def all_of(self, experiment_id: int, filter: str | None = None) -> list[Run]:
        """Every run of an experiment, in grid order."""
        runs: list[Run] = []
        token: str | None = None
        while True:
            page = self.page(
                experiment_id=experiment_id, filter=filter, page_size=MAX_PAGE_SIZE, page_token=token
            )
            runs += page.items
            if (token := page.next_page_token) is None:
                return runs

    def queued(self, experiment_id: int) -> list[QueuedRun]:
        with self.database.read() as connection:
            now = self.database_time(connection)
            queued_runs = select(
                _r.id, _r.index, _r.cell, _r.seed, _r.not_before_s - now, _r.started_s.is_not(None)
            ).where(_r.experiment_id == experiment_id, _r.state == RunState.queued)
            return [*map(QueuedRun._make, connection.execute(queued_runs))]

    def starting(self, experiment_id: int) -> frozenset[int]:
        """Runs of an experiment whose attempt was opened and has not begun to train."""
        of_experiment = _r.experiment_id == experiment_id
        rows = self.read(select(_r.id).where(of_experiment, _r.state == RunState.starting))
        return frozenset(row.id for row in rows)

    def by_id(self, ids: Sequence[int]) -> list[Run]:
        """Several runs; those that do not exist are left out."""
        runs: list[Run] = []
        with self.database.read() as connection:
            for start in range(0, len(ids), MAX_PAGE_SIZE):
                some = _r.id.in_(list(ids[start : start + MAX_PAGE_SIZE]))
                runs += records(connection, Run, select(*statements.RUN_COLUMNS).where(some))
        return runs

    def config(self, id: int) -> str:
        """Canonical JSON of the run's spec with its axis values written in."""
        c = schema.cell_specs.c
        of_run = (_r.experiment_id == c.experiment_id) & (_r.cell == c.cell)
        spec_of_run = select(c.canonical).join(schema.runs, of_run)
        rows = self.read(spec_of_run.where(_r.id == id, statements.VISIBLE_RUN))
        if not rows:
            raise NotFound("run", id)
        return str(rows[0].canonical)

    def refusals(self, experiment_id: int) -> dict[str, str]:
        """Returns why cells cannot be trained, by cell."""
        c = schema.cell_specs.c
        refused = select(c.cell, c.refusal).where(c.experiment_id == experiment_id, c.refusal.is_not(None))
        return {row.cell: row.refusal for row in self.read(refused)}

    def attempts(self, run_id: int) -> list[Attempt]:
        """All attempts at a run, or at the one that it reuses, oldest first."""
        with self.database.read() as connection:
            of_run = _a.run_id == source_of(connection, run_id)
            return records(connection, Attempt, select(schema.attempts).where(of_run).order_by(_a.number))

    def lives(self, run_id: int, first: int, until: int) -> tuple[tuple[float, float], ...]:
        """When attempts from `first` to before `until` began and were last known to be alive, Unix times."""
        with self.database.read() as connection:
            chosen = (_a.run_id == run_id) & (_a.number >= first) & (_a.number < until)
            lives = select(_a.started_s, func.coalesce(_a.seen_s, _a.started_s)).where(chosen)
            return tuple((float(began_s), float(seen_s)) for began_s, seen_s in connection.execute(lives))

    def measurements(self, run_id: int) -> list[MeasurementRow]:
        """All measurements of a run, of all attempts; one that is not a number is NaN."""
        with self.database.read() as connection:
            c = schema.measurements.c
            in_order = select(schema.measurements).order_by(c.attempt, c.start_s, c.name, c.scope)
            of_run = in_order.where(c.run_id == source_of(connection, run_id))
            rows = connection.execute(of_run).mappings()
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

    def figure_names(
        self, experiment_id: int | None, filter: str | None = None, visible: Visibility = EVERYTHING
    ) -> list[str]:
        """Declared figures that any of these runs ended with, besides the columns of runs."""
        condition = parse_run_filter(filter)
        text = sa.type_coerce(schema.run_summaries.c.summary, sa.Text())
        with self.database.read() as connection:
            of_runs = schema.runs.join(schema.run_summaries, _r.id == schema.run_summaries.c.run_id)
            if connection.dialect.name == "sqlite":
                each = sa.func.json_each(text).table_valued("key", joins_implicitly=True)
                names = select(each.c.key).select_from(of_runs, each)
            else:
                names = select(sa.func.json_object_keys(sa.cast(text, sa.JSON))).select_from(of_runs)
            names = names.where(statements.VISIBLE_RUN, statements.run_in_sight(visible)).distinct()
            if experiment_id is not None:
                names = names.where(_r.experiment_id == experiment_id)
            if condition is not None:
                names = names.where(condition_sql(condition, schema.runs, connection.dialect.name))
            found = set(connection.execute(names).scalars())
        return [name for name, one in BESIDE_COLUMNS.items() if one.kind is Kind.figure and name in found]

    def summaries(self, run_ids: Collection[int]) -> dict[int, dict[str, Any]]:
        """All figures of at most a page of runs, by id; those of runs that ended with some."""
        c = schema.run_summaries.c
        rows = self.read(select(c.run_id, c.summary).where(c.run_id.in_(run_ids)))
        return {row.run_id: row.summary for row in rows}

    def logs(
        self,
        run_id: int,
        *,
        after: int | None = None,
        before: int | None = None,
        limit: int = 1000,
        attempt: int | None = None,
        containing: str | None = None,
        stream: str | None = None,
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
        if stream is not None:
            statement = statement.where(c.stream == stream)
        if containing is not None:
            statement = statement.where(c.message.icontains(storable(containing), autoescape=True))
        if before is None:
            statement = statement.order_by(c.attempt, c.number)
        else:
            statement = statement.where(place < sa.tuple_(*divmod(before, 1 << 32)))
            statement = statement.order_by(c.attempt.desc(), c.number.desc())
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            lines = records(connection, LogLine, statement.where(c.run_id == source).limit(limit))
        return lines if before is None else lines[::-1]


def as_float(value: float | None) -> float:
    """A stored figure: NULL stands for NaN."""
    return float("nan") if value is None else value
