"""Curves of many runs at once, for figures: means over buckets of steps, in one statement per metric.

What a newer attempt does again is hidden, as in `service.store.series`. A short series comes as it is: its
buckets are single steps. Of a series of very many steps the middle of the kept extremes stands for the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection

from service.db import curve_statements
from service.db.filters import parse_filter
from service.db.listing import RUN_NAMES, condition_sql
from service.db.schema import BUCKET_STEPS, runs
from service.domain.metrics import finite
from service.domain.states import RunState
from service.store.base import StorePart, read_experiment

_EXACT_BUCKETS = 2
"""Kept buckets that a bucket must span for the extremes to stand for the points."""
_SUMMARIES = 20


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A run that can have points."""

    id: int
    cell: str
    state: RunState


@dataclass(frozen=True, slots=True)
class Rates:
    """Price and rated power of all devices of a run."""

    price_usd_per_hour: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Points of one run in a range of steps; buckets of one number cover the same range in every run.

    `active_s` is the mean of the time that the run's attempts had lasted by then; None = not known. `mean`,
    `low` and `high` are None when no value is a number.
    """

    number: int
    count: int
    step: float
    active_s: float | None
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Buckets:
    """A metric of several runs, by run id in the order of steps; runs without points are left out.

    `exact`: the means are means of all points; else of least and greatest values of `BUCKET_STEPS` steps.
    """

    of_runs: dict[int, list[Bucket]]
    width: int
    exact: bool


class Curves(StorePart):
    def begun_runs(self, experiment_id: int, filter: str | None = None) -> list[BegunRun]:
        """Runs of an experiment that have begun, in grid order, without reference runs."""
        condition = parse_filter(filter or "", RUN_NAMES)
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            dialect = connection.dialect.name
            where = None if condition is None else condition_sql(condition, runs, dialect)
            rows = connection.execute(curve_statements.begun_runs(experiment_id, where))
            return [BegunRun(*row) for row in rows]

    def buckets(self, run_ids: Sequence[int], name: str, most: int) -> Buckets:
        """A metric of runs that have points themselves (reuse none) in at most `most` buckets of steps."""
        ids = sorted(set(run_ids))
        with self.database.read() as connection:
            known = connection.execute(curve_statements.name_id(name)).scalar()
            last = known and connection.execute(curve_statements.last_step(ids, known)).scalar()
            if known is None or last is None:
                return Buckets({}, 1, True)
            width = -(-(last + 1) // most)
            exact = width < _EXACT_BUCKETS * BUCKET_STEPS
            read = curve_statements.averages if exact else curve_statements.middles
            if not exact:
                width = -(-width // BUCKET_STEPS) * BUCKET_STEPS
            rows = connection.execute(read(ids, known, width)).all()
            clocks = _clocks(connection, ids)
        found: dict[int, dict[int, tuple[int, Bucket]]] = {}
        for run, number, attempt, count, step, at_s, mean, low, high in rows:
            began_s, before_s = clocks[run, attempt]
            active_s = None if at_s is None else before_s + max(0.0, at_s - began_s)
            bucket = Bucket(number, count, float(step), active_s, mean, low, high)
            of_run = found.setdefault(run, {})
            if (other := of_run.get(number)) is not None:
                bucket = _newer(attempt, bucket, *other) if width == 1 else _merged(bucket, other[1])
            of_run[number] = (attempt, bucket)
        return Buckets(
            {run: [of[number][1] for number in sorted(of)] for run, of in found.items()}, width, exact
        )

    def rates(self, run_ids: Sequence[int]) -> dict[int, Rates]:
        with self.database.read() as connection:
            rows = connection.execute(curve_statements.rates(run_ids))
            return {id: Rates(price, power) for id, price, power in rows}

    def point_names(self, experiment_ids: Sequence[int]) -> list[str]:
        with self.database.read() as connection:
            return list(connection.execute(curve_statements.point_names(experiment_ids)).scalars())

    def figure_names(self, experiment_ids: Sequence[int]) -> list[str]:
        """Numeric figures that the newest finished runs of experiments ended with."""
        with self.database.read() as connection:
            summaries = connection.execute(
                curve_statements.some_summaries(experiment_ids, _SUMMARIES)
            ).scalars()
            return sorted(
                {
                    name
                    for summary in summaries
                    for name, value in summary.items()
                    if finite(value) is not None
                }
            )


def _clocks(connection: Connection, run_ids: Sequence[int]) -> dict[tuple[int, int], tuple[float, float]]:
    """When each attempt began, and how long the attempts before it had lasted."""
    found: dict[tuple[int, int], tuple[float, float]] = {}
    lasted_s: dict[int, float] = {}
    for run, number, started_s, until_s in connection.execute(curve_statements.attempts_of(run_ids)):
        found[run, number] = (started_s, lasted_s.get(run, 0.0))
        lasted_s[run] = lasted_s.get(run, 0.0) + max(0.0, (until_s or started_s) - started_s)
    return found


def _newer(attempt: int, bucket: Bucket, other_attempt: int, other: Bucket) -> Bucket:
    return bucket if attempt > other_attempt else other


def _merged(one: Bucket, other: Bucket) -> Bucket:
    """The bucket in which one attempt ended and another continued."""
    if not one.count or not other.count:
        return one if one.count else other
    assert one.mean is not None and other.mean is not None
    assert one.low is not None and other.low is not None
    assert one.high is not None and other.high is not None
    share = one.count / (one.count + other.count)
    return Bucket(
        one.number,
        one.count + other.count,
        share * one.step + (1 - share) * other.step,
        None
        if one.active_s is None or other.active_s is None
        else share * one.active_s + (1 - share) * other.active_s,
        share * one.mean + (1 - share) * other.mean,
        min(one.low, other.low),
        max(one.high, other.high),
    )
