"""Figures of processes that have no HTTP port, on their way to `/metrics`."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from service.db import schema, statements
from service.domain.process_metrics import MetricBuffer, MetricRow
from service.domain.states import RunState
from service.store.base import StorePart
from trainers.errors import FailureClass

_f = schema.figures.c

GAUGE_LASTS_S = 60.0  # Gauges of processes that have written none for this long are not shown


@dataclass(frozen=True, slots=True)
class QueueAge:
    """What one project has in the queue, and for how long its oldest experiment has waited."""

    project: str
    experiments: int
    oldest_s: float


class ProcessMetrics(StorePart):
    def add(self, rows: Sequence[MetricRow], *, source: str) -> None:
        """Adds sums to those of all processes, and replaces the gauges of the process `source`.

        Rows come in the order of their keys, so that two processes lock them in one order.
        """
        if rows:
            self.database.write(
                lambda connection: _add(connection, rows, self.database_time(connection), source)
            )

    def drop_gauges(self, source: str) -> None:
        statement = sa.delete(schema.figures).where(_f.source == source)
        self.database.write(lambda connection: connection.execute(statement))

    def queue_ages(self) -> list[QueueAge]:
        x = schema.experiments.c
        statement = (
            select(x.project, func.count(), func.min(x.queued_s))
            .where(schema.QUEUED, x.deleted_s.is_(None))
            .group_by(x.project)
            .order_by(x.project)
        )
        with self.database.read() as connection:
            now = self.database_time(connection)
            return [
                QueueAge(project, count, max(0.0, now - oldest_s))
                for project, count, oldest_s in connection.execute(statement)
            ]

    def checkpoint_ages(self) -> dict[str, float]:
        """Returns how much the runs in progress would lose at most, in seconds, by project."""
        a, r, x = schema.attempts.c, schema.runs.c, schema.experiments.c
        statement = (
            select(x.project, func.min(func.coalesce(a.checkpoint_s, a.started_s)))
            .join_from(schema.runs, schema.experiments, x.id == r.experiment_id)
            .join(schema.attempts, (a.run_id == r.id) & (a.number == r.attempt))
            .where(r.state == RunState.running)
            .group_by(x.project)
        )
        now = self.clock()
        return {project: max(0.0, now - since_s) for project, since_s in self.read(statement)}

    def figures(self) -> list[MetricRow]:
        """Sums, and the gauges of processes that live."""
        columns = select(_f.name, _f.labels, _f.value, (_f.source != "").label("is_gauge"))
        with self.database.read() as connection:
            lives = _f.at_s > self.database_time(connection) - GAUGE_LASTS_S
            rows = columns.where(sa.or_(_f.source == "", lives)).order_by(_f.name, _f.labels, _f.source)
            return [MetricRow(*row) for row in connection.execute(rows)]


def count_in(connection: Connection, now: float, *names: str, by: float = 1.0, **labels: str) -> None:
    """Adds to counters in the transaction of what they count."""
    buffer = MetricBuffer()
    for name in names:
        buffer.count(name, by, **labels)
    _add(connection, buffer.taken(), now, "")


def count_failures(
    connection: Connection, now: float, failure: FailureClass, *, retried: bool, by: float = 1.0
) -> None:
    """Counts attempts at runs that failed, in the transaction that ends them."""
    names = ["stillhouse_failures_total", *(["stillhouse_retries_total"] if retried else [])]
    count_in(connection, now, *names, by=by, failure_class=failure)


def _add(connection: Connection, rows: Sequence[MetricRow], now: float, source: str) -> None:
    insert = statements.dialect_insert(connection, schema.figures)
    new = insert.excluded
    for is_gauge in (False, True):
        values = [
            {"name": row.name, "labels": row.labels, "value": row.value, "at_s": now,
             "source": source if is_gauge else ""}
            for row in rows
            if row.is_gauge is is_gauge
        ]  # fmt: skip
        if values:
            upsert = insert.on_conflict_do_update(
                index_elements=[_f.name, _f.labels, _f.source],
                set_={"value": new.value if is_gauge else _f.value + new.value, "at_s": new.at_s},
            )
            connection.execute(upsert, values)
