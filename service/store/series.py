"""Series of points as people see them: one value per name and step, sampled where asked.

An attempt that resumed from step S hides what older attempts reported beyond S; where two attempts report the
same step, the newer one counts. A reused run shows those of the run that it reuses.

A sample never reads a long series: the extremes of each `BUCKET_STEPS` steps are kept as points come in.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select

from service.db import schema
from service.db.listing import condition_sql, parse_run_filter
from service.db.schema import BUCKET_STEPS, runs
from service.domain.grid import REFERENCE_CELL
from service.domain.metrics import finite
from service.domain.records import PointRow, SampledSeries
from service.domain.states import RunState
from service.store.base import StorePart, read_experiment, source_of
from service.store.runs import as_float

_p, _e, _r, _n = schema.points.c, schema.point_extremes.c, schema.runs.c, schema.metric_names.c

MOST_POINTS = 10_000  # Points of one answer, over all its metrics
_FEWEST_POINTS = 4  # Of a sampled series: both ends, least and greatest
_LAST = (1 << 63) - 1
_ROWS_AT_A_TIME = 4096
_series = (_p.run_id == bindparam("run"), _p.name_id == bindparam("name"), _p.attempt == bindparam("number"))
_between = _p.step.between(bindparam("low"), bindparam("high"))
_SERIES = select(_p.step, _p.at_s, _p.value).where(*_series, _between).order_by(_p.step)
"""Points of one name and attempt in a range of steps."""
BOUNDS = select(
    select(func.min(_p.step)).where(*_series, _between).scalar_subquery().label("first"),
    select(func.max(_p.step)).where(*_series, _between).scalar_subquery().label("last"),
)
"""First and last step of a series in a range."""
_AT = select(_p.step, _p.at_s, _p.value).where(*_series, _p.step.in_(bindparam("steps", expanding=True)))
"""Points of one name and attempt at given steps.

Without a range of steps, which SQLite would scan in place of looking each step up.
"""
_EXTREMES = select(_e.low_step, _e.low, _e.high_step, _e.high, _e.nan_step).where(
    _e.run_id == bindparam("run"),
    _e.name_id == bindparam("name"),
    _e.attempt == bindparam("number"),
    _e.bucket.between(bindparam("first_bucket"), bindparam("last_bucket")),
)
"""Least, greatest and first NaN value of the buckets of one name and attempt."""
_EXACT_BUCKETS = 2  # Kept buckets that a bucket must span for the extremes to stand for the points
_SUMMARIES = 20


@dataclass(frozen=True, slots=True)
class _Segment:
    """The part of an attempt's points that no newer attempt hides."""

    attempt: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class BegunRun:
    """A run that can have points."""

    id: int
    cell: str
    state: RunState


@dataclass(frozen=True, slots=True)
class RunRates:
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


class Series(StorePart):
    def latest_points(self, run_id: int) -> list[PointRow]:
        c = schema.latest_points.c
        latest = select(_n.name, c.step, c.attempt, c.at_s, c.value).join(
            schema.metric_names, _n.id == c.name_id
        )
        with self.database.read() as connection:
            of_run = latest.where(c.run_id == source_of(connection, run_id)).order_by(_n.name)
            rows = connection.execute(of_run).mappings()
            return [PointRow.from_row({**row, "value": as_float(row["value"])}) for row in rows]

    def points(
        self, run_id: int, names: Sequence[str] | None = None, *, max_points: int | None = None
    ) -> dict[str, list[PointRow]]:
        """Points by name, each in the order of steps, sampled down to about `max_points` each if given."""
        with self.database.read() as connection:
            run = _Run.of(connection, run_id)
            if max_points is None:
                return {name: run.rows(connection, name) for name in run.chosen(names)}
            return {name: run.sample(connection, name, max_points).points for name in run.chosen(names)}

    def sampled_points(
        self,
        run_id: int,
        names: Sequence[str] | None = None,
        *,
        min_step: int | None = None,
        max_step: int | None = None,
        max_points: int = 1000,
    ) -> dict[str, SampledSeries]:
        """Points by name: every one of a short series, of a long one the extremes of buckets of steps.

        `max_points` is about how many of each series, at least 4: the least, the greatest and the first NaN
        value of each bucket, and both ends. Fewer where there are so many series that the answer would hold
        more than `MOST_POINTS`. A name without points gives an empty series.
        """
        with self.database.read() as connection:
            run = _Run.of(connection, run_id, min_step, max_step)
            chosen = run.chosen(names)
            each = max(_FEWEST_POINTS, min(max_points, MOST_POINTS // max(1, len(chosen))))
            return {name: run.sample(connection, name, each) for name in chosen}

    def points_page(
        self,
        run_id: int,
        name: str,
        *,
        min_step: int | None = None,
        max_step: int | None = None,
        limit: int = 1000,
    ) -> tuple[list[PointRow], int | None]:
        """The first points of a metric from `min_step` on, and the step at which the next page begins."""
        with self.database.read() as connection:
            run = _Run.of(connection, run_id, min_step, max_step)
            rows = run.rows(connection, name, limit + 1)
        return rows[:limit], rows[limit].step if len(rows) > limit else None

    def begun_runs(self, experiment_id: int, filter: str | None = None) -> list[BegunRun]:
        """Runs of an experiment that have begun, in grid order, without reference runs."""
        condition = parse_run_filter(filter)
        with self.database.read() as connection:
            read_experiment(connection, experiment_id)
            begun = (
                select(_r.id, _r.cell, _r.state)
                .where(
                    _r.experiment_id == experiment_id,
                    _r.cell != REFERENCE_CELL,
                    sa.or_(_r.attempt > 0, _r.reused_from.is_not(None)),
                )
                .order_by(_r.index)
            )
            if condition is not None:
                begun = begun.where(condition_sql(condition, runs, connection.dialect.name))
            return [BegunRun(*row) for row in connection.execute(begun)]

    def buckets(self, run_ids: Sequence[int], name: str, most: int) -> Buckets:
        """A metric of runs that have points themselves (reuse none) in at most `most` buckets of steps."""
        ids = sorted(set(run_ids))
        with self.database.read() as connection:
            known = connection.execute(select(_n.id).where(_n.name == name)).scalar()
            last_step = select(func.max(schema.latest_points.c.step)).where(
                schema.latest_points.c.run_id.in_(list(ids)), schema.latest_points.c.name_id == known
            )
            last = known and connection.execute(last_step).scalar()
            if known is None or last is None:
                return Buckets({}, 1, True)
            width = -(-(last + 1) // most)
            exact = width < _EXACT_BUCKETS * BUCKET_STEPS
            read = _averages if exact else _middles
            if not exact:
                width = -(-width // BUCKET_STEPS) * BUCKET_STEPS
            rows = connection.execute(read(ids, known, width)).all()
            clocks = _clocks(connection, ids)
        of_runs: dict[int, dict[int, tuple[int, Bucket]]] = {}
        for run, number, attempt, count, step, at_s, mean, low, high in rows:
            began_s, before_s = clocks[run, attempt]
            active_s = None if at_s is None else before_s + max(0.0, at_s - began_s)
            bucket = Bucket(number, count, float(step), active_s, mean, low, high)
            of_run = of_runs.setdefault(run, {})
            if (other := of_run.get(number)) is not None:
                # Of one step, the newer attempt counts.
                newer = bucket if attempt > other[0] else other[1]
                bucket = newer if width == 1 else _merged(bucket, other[1])
            of_run[number] = (attempt, bucket)
        return Buckets(
            {run: [of[number][1] for number in sorted(of)] for run, of in of_runs.items()}, width, exact
        )

    def rates(self, run_ids: Sequence[int]) -> dict[int, RunRates]:
        rates = select(_r.id, _r.price_usd_per_hour, _r.power_w).where(_r.id.in_(list(run_ids)))
        return {id: RunRates(price, power) for id, price, power in self.read(rates)}

    def point_names(self, experiment_ids: Sequence[int]) -> list[str]:
        c = schema.latest_points.c
        ids = (
            select(c.name_id)
            .join(schema.runs, func.coalesce(_r.reused_from, _r.id) == c.run_id)
            .where(_r.experiment_id.in_(list(experiment_ids)))
        )
        return [row.name for row in self.read(select(_n.name).where(_n.id.in_(ids)).order_by(_n.name))]

    def figure_names(self, experiment_ids: Sequence[int]) -> list[str]:
        """Numeric figures that the newest finished runs of experiments ended with."""
        some_summaries = (
            select(schema.run_summaries.c.summary)
            .join(schema.runs, _r.id == schema.run_summaries.c.run_id)
            .where(_r.experiment_id.in_(list(experiment_ids)))
            .order_by(_r.id.desc())
            .limit(_SUMMARIES)
        )
        figures = (figure for row in self.read(some_summaries) for figure in row.summary.items())
        return sorted({name for name, value in figures if finite(value) is not None})


@dataclass(frozen=True, slots=True)
class _Run:
    """The run, or the one that it reuses: ids of its metrics, and what is visible, newest attempt first."""

    id: int
    names: dict[str, int]
    segments: list[_Segment]

    @classmethod
    def of(
        cls, connection: Connection, run_id: int, min_step: int | None = None, max_step: int | None = None
    ) -> _Run:
        low = 0 if min_step is None else max(0, min_step)
        high = _LAST if max_step is None else min(max_step, _LAST)
        source = source_of(connection, run_id)
        names_of_run = (
            select(_n.name, _n.id)
            .join(schema.latest_points, schema.latest_points.c.name_id == _n.id)
            .where(schema.latest_points.c.run_id == source)
            .order_by(_n.name)
        )
        names = {row.name: row.id for row in connection.execute(names_of_run)}
        c = schema.attempts.c
        newest_first = select(c.number, c.resumed_from_step).order_by(c.number.desc())
        segments: list[_Segment] = []
        ceiling = high
        for number, resumed_from_step in connection.execute(newest_first.where(c.run_id == source)):
            if low <= ceiling:
                segments.append(_Segment(number, low, ceiling))
            if resumed_from_step is not None:
                ceiling = min(ceiling, resumed_from_step)
        return cls(source, names, segments)

    def chosen(self, names: Sequence[str] | None) -> list[str]:
        return list(self.names if names is None else dict.fromkeys(names))

    def _keys(self, name: str) -> Iterator[tuple[_Segment, dict[str, Any]]]:
        if name in self.names:
            for segment in self.segments:
                key = {"run": self.id, "name": self.names[name], "number": segment.attempt}
                yield segment, {**key, "low": segment.low, "high": segment.high}

    def rows(self, connection: Connection, name: str, most: int | None = None) -> list[PointRow]:
        statement = _SERIES.limit(most)
        parts = ((segment, connection.execute(statement, key)) for segment, key in self._keys(name))
        return self._merged(name, parts)[:most]

    def _rows_at(self, connection: Connection, name: str, steps: list[int]) -> list[PointRow]:
        return self._merged(
            name,
            (
                (segment, connection.execute(_AT, {**key, "steps": visible}))
                for segment, key in self._keys(name)
                if (visible := [step for step in steps if segment.low <= step <= segment.high])
            ),
        )

    def _merged(self, name: str, parts: Iterator[tuple[_Segment, Any]]) -> list[PointRow]:
        merged: dict[int, PointRow] = {}
        for segment, rows in parts:
            for step, at_s, value in rows:
                if step not in merged:  # Newer attempts came first.
                    merged[step] = PointRow(name, step, segment.attempt, at_s, as_float(value))
        return [merged[step] for step in sorted(merged)]

    def sample(self, connection: Connection, name: str, max_points: int) -> SampledSeries:
        """About `max_points` points of a metric: both ends, and the extremes of each bucket of steps."""
        rows = self.rows(connection, name, max_points + 1)
        if len(rows) <= max_points:
            return SampledSeries(rows, None)
        bounds = [connection.execute(BOUNDS, key).one() for _, key in self._keys(name)]
        first = rows[0].step
        last = max(bound.last for bound in bounds if bound.last is not None)
        buckets = _buckets(max_points)
        # Kept extremes are taken where they give at least half of the buckets that are asked for.
        by_extremes = last - first >= BUCKET_STEPS * max(1, buckets // 2)
        steps, values = array("q"), array("d")
        for segment, key in self._keys(name):
            for low, high in _outside_buckets(segment) if by_extremes else ((segment.low, segment.high),):
                _add(steps, values, connection.execute(_SERIES, {**key, "low": low, "high": high}))
            if by_extremes:
                of_buckets = {"first_bucket": -(-segment.low // BUCKET_STEPS),
                              "last_bucket": (segment.high + 1) // BUCKET_STEPS - 1}  # fmt: skip
                for row in connection.execute(_EXTREMES, {**key, **of_buckets}):
                    _add_extremes(steps, values, row)
        # The first of equal steps is that of the newest attempt.
        visible, places = np.unique(np.frombuffer(steps, dtype=np.int64), return_index=True)
        chosen = thin(visible, np.frombuffer(values)[places], max_points)
        at = sorted({first, last, *visible[chosen].tolist()})
        width = _width(first, last, buckets)
        return SampledSeries(
            self._rows_at(connection, name, at), max(width, BUCKET_STEPS) if by_extremes else width
        )


def _add(steps: array[int], values: array[float], rows: Any) -> None:
    for part in rows.partitions(_ROWS_AT_A_TIME):
        steps.extend([row[0] for row in part])
        values.extend([as_float(row[2]) for row in part])


def _add_extremes(steps: array[int], values: array[float], row: Any) -> None:
    low_step, low, high_step, high, nan_step = row
    if low_step is not None:
        steps.extend((low_step, high_step))
        values.extend((low, high))
    if nan_step is not None:
        steps.append(nan_step)
        values.append(float("nan"))


def _outside_buckets(segment: _Segment) -> Iterator[tuple[int, int]]:
    """Ranges of steps of a segment that are in no whole bucket."""
    begin = -(-segment.low // BUCKET_STEPS) * BUCKET_STEPS
    end = (segment.high + 1) // BUCKET_STEPS * BUCKET_STEPS
    if begin >= end:
        yield segment.low, segment.high
        return
    if segment.low < begin:
        yield segment.low, begin - 1
    if end <= segment.high:
        yield end, segment.high


def _buckets(max_points: int) -> int:
    return max(1, (max_points - 2) // 2)


def _width(first: int, last: int, buckets: int) -> int:
    return -(-(last - first + 1) // buckets)


def thin(steps: np.ndarray[Any, Any], values: np.ndarray[Any, Any], max_points: int) -> list[int]:
    """Positions to keep of a series: both ends, and least, greatest and first NaN of each bucket.

    Args:
        steps: (N,) ascending.
        values: (N,) figures; NaN and infinities allowed.
        max_points: about how many to keep, at least 4; buckets with NaN keep one more.
    """
    count = len(steps)
    if count <= max(_FEWEST_POINTS, max_points):
        return list(range(count))
    bucket = (steps - steps[0]) // _width(int(steps[0]), int(steps[-1]), _buckets(max_points))
    missing = np.isnan(values)
    present = np.flatnonzero(~missing)
    ascending = present[np.argsort(values[present], kind="stable")]
    descending = present[np.argsort(-values[present], kind="stable")]
    places = {0, count - 1}
    for positions in (ascending, descending, np.flatnonzero(missing)):
        _, first_of_bucket = np.unique(bucket[positions], return_index=True)
        places.update(positions[first_of_bucket].tolist())
    return sorted(places)


def _clocks(connection: Connection, run_ids: Sequence[int]) -> dict[tuple[int, int], tuple[float, float]]:
    """When each attempt began, and how long the attempts before it had lasted."""
    clocks: dict[tuple[int, int], tuple[float, float]] = {}
    lasted_s: dict[int, float] = {}
    a = schema.attempts.c
    attempts_of = (
        select(a.run_id, a.number, a.started_s, func.coalesce(a.ended_s, a.seen_s).label("until_s"))
        .where(a.run_id.in_(list(run_ids)))
        .order_by(a.run_id, a.number)
    )
    for run, number, started_s, until_s in connection.execute(attempts_of):
        clocks[run, number] = (started_s, lasted_s.get(run, 0.0))
        lasted_s[run] = lasted_s.get(run, 0.0) + max(0.0, (until_s or started_s) - started_s)
    return clocks


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


def _visible(run_ids: Sequence[int]) -> sa.CTE:
    """Attempts with the last step of each that no newer attempt does again; NULL = all are visible."""
    a = schema.attempts.c
    ceiling = func.min(a.resumed_from_step).over(partition_by=a.run_id, order_by=a.number, rows=(1, None))
    return (
        select(a.run_id, a.number, ceiling.label("ceiling")).where(a.run_id.in_(list(run_ids))).cte("visible")
    )


def _averages(run_ids: Sequence[int], name_id: int, width: int) -> sa.Select[Any]:
    """Rows are (run, bucket, attempt, count, mean step, mean time, mean, least, greatest)."""
    visible = _visible(run_ids)
    bucket = (_p.step // width).label("bucket")
    return (
        select(
            _p.run_id, bucket, _p.attempt, func.count(_p.value), func.avg(_p.step), func.avg(_p.at_s),
            func.avg(_p.value), func.min(_p.value), func.max(_p.value),
        )
        .select_from(visible)
        .join(
            schema.points,
            (_p.run_id == visible.c.run_id)
            & (_p.name_id == name_id)
            & (_p.attempt == visible.c.number)
            & sa.or_(visible.c.ceiling.is_(None), _p.step <= visible.c.ceiling),
        )
        .group_by(_p.run_id, bucket, _p.attempt)
    )  # fmt: skip


def _middles(run_ids: Sequence[int], name_id: int, width: int) -> sa.Select[Any]:
    """As `_averages`, for long series, from their kept extremes; `width` is a multiple of `BUCKET_STEPS`.

    The mean is that of least and greatest values.
    """
    visible = _visible(run_ids)
    bucket = (_e.bucket // (width // schema.BUCKET_STEPS)).label("wide_bucket")
    return (
        select(
            _e.run_id, bucket, _e.attempt, func.count(_e.low), func.avg(_e.low_step), func.avg(_p.at_s),
            func.avg((_e.low + _e.high) / 2.0), func.min(_e.low), func.max(_e.high),
        )
        .select_from(visible)
        .join(
            schema.point_extremes,
            (_e.run_id == visible.c.run_id)
            & (_e.name_id == name_id)
            & (_e.attempt == visible.c.number)
            & sa.or_(visible.c.ceiling.is_(None), (_e.bucket + 1) * BUCKET_STEPS <= visible.c.ceiling + 1),
        )
        .join(
            schema.points,
            (_p.run_id == _e.run_id)
            & (_p.name_id == _e.name_id)
            & (_p.attempt == _e.attempt)
            & (_p.step == _e.low_step),
        )
        .group_by(_e.run_id, bucket, _e.attempt)
    )  # fmt: skip
