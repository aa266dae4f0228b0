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
from sqlalchemy import Connection

from service.db import point_statements
from service.db.schema import BUCKET_STEPS
from service.domain.records import PointRow, SampledSeries
from service.store.base import StorePart, source_of
from service.store.reading import as_float

MOST_POINTS = 10_000
"""Points of one answer, over all its metrics."""
_FEWEST_POINTS = 4
"""Of a sampled series: both ends, least and greatest."""
_LAST = (1 << 63) - 1
_ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, slots=True)
class _Segment:
    """The part of an attempt's points that no newer attempt hides."""

    attempt: int
    low: int
    high: int


class Series(StorePart):
    def latest_points(self, run_id: int) -> list[PointRow]:
        """The latest point of each metric, by name."""
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            rows = connection.execute(point_statements.latest_of_run(source)).mappings().all()
        return [PointRow.from_row({**row, "value": as_float(row["value"])}) for row in rows]

    def points(
        self,
        run_id: int,
        names: Sequence[str] | None = None,
        *,
        min_step: int | None = None,
        max_step: int | None = None,
        max_points: int | None = None,
    ) -> dict[str, list[PointRow]]:
        """Points by name, each in the order of steps, sampled down to about `max_points` each if given."""
        with self.database.read() as connection:
            run = _Run.of(connection, run_id, min_step, max_step)
            return {
                name: (
                    run.rows(connection, name)
                    if max_points is None
                    else run.sample(connection, name, max_points).points
                )
                for name in run.chosen(names)
            }

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


@dataclass(frozen=True, slots=True)
class _Run:
    """The run, or the one that it reuses: ids of its metrics, and what is visible, newest attempt first."""

    id: int
    names: dict[str, int]
    segments: list[_Segment]

    @classmethod
    def of(cls, connection: Connection, run_id: int, min_step: int | None, max_step: int | None) -> _Run:
        low = 0 if min_step is None else max(0, min_step)
        high = _LAST if max_step is None else min(max_step, _LAST)
        source = source_of(connection, run_id)
        names = {row.name: row.id for row in connection.execute(point_statements.names_of_run(source))}
        resumed = connection.execute(point_statements.resumptions(source)).all()
        return cls(
            source, names, _segments([(row.number, row.resumed_from_step) for row in resumed], low, high)
        )

    def chosen(self, names: Sequence[str] | None) -> list[str]:
        return list(self.names if names is None else dict.fromkeys(names))

    def _keys(self, name: str, **more: Any) -> Iterator[tuple[_Segment, dict[str, Any]]]:
        if name in self.names:
            for segment in self.segments:
                key = {"run": self.id, "name": self.names[name], "number": segment.attempt}
                yield segment, {**key, "low": segment.low, "high": segment.high, **more}

    def rows(self, connection: Connection, name: str, most: int | None = None) -> list[PointRow]:
        statement = point_statements.SERIES if most is None else point_statements.SERIES_PAGE
        more: dict[str, Any] = {} if most is None else {"most": most}
        return self._merged(
            name, ((segment, connection.execute(statement, key)) for segment, key in self._keys(name, **more))
        )[:most]

    def _rows_at(self, connection: Connection, name: str, steps: list[int]) -> list[PointRow]:
        return self._merged(
            name,
            (
                (segment, connection.execute(point_statements.SERIES_AT, {**key, "steps": visible}))
                for segment, key in self._keys(name)
                if (visible := [step for step in steps if segment.low <= step <= segment.high])
            ),
        )

    def _merged(self, name: str, found: Iterator[tuple[_Segment, Any]]) -> list[PointRow]:
        merged: dict[int, PointRow] = {}
        for segment, rows in found:
            for step, at_s, value in rows:
                if step not in merged:  # Newer attempts came first.
                    merged[step] = PointRow(name, step, segment.attempt, at_s, as_float(value))
        return [merged[step] for step in sorted(merged)]

    def sample(self, connection: Connection, name: str, max_points: int) -> SampledSeries:
        """About `max_points` points of a metric: both ends, and the extremes of each bucket of steps."""
        rows = self.rows(connection, name, max_points + 1)
        if len(rows) <= max_points:
            return SampledSeries(rows, None)
        bounds = [
            connection.execute(point_statements.SERIES_BOUNDS, key).one() for _, key in self._keys(name)
        ]
        first = rows[0].step
        last = max(bound.last for bound in bounds if bound.last is not None)
        buckets = _buckets(max_points)
        # Kept extremes are taken where they give at least half of the buckets that are asked for.
        kept = last - first >= BUCKET_STEPS * max(1, buckets // 2)
        steps, values = array("q"), array("d")
        for segment, key in self._keys(name):
            for low, high in _outside_buckets(segment) if kept else ((segment.low, segment.high),):
                _add(
                    steps,
                    values,
                    connection.execute(point_statements.SERIES, {**key, "low": low, "high": high}),
                )
            if kept:
                of_buckets = {"first_bucket": -(-segment.low // BUCKET_STEPS),
                              "last_bucket": (segment.high + 1) // BUCKET_STEPS - 1}  # fmt: skip
                for row in connection.execute(point_statements.EXTREMES, {**key, **of_buckets}):
                    _add_extremes(steps, values, row)
        # The first of equal steps is that of the newest attempt.
        visible, places = np.unique(np.frombuffer(steps, dtype=np.int64), return_index=True)
        chosen = thin(visible, np.frombuffer(values)[places], max_points)
        at = sorted({first, last, *visible[chosen].tolist()})
        width = _width(first, last, buckets)
        return SampledSeries(self._rows_at(connection, name, at), max(width, BUCKET_STEPS) if kept else width)


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


def _segments(resumptions: Sequence[tuple[int, int | None]], low: int, high: int) -> list[_Segment]:
    segments: list[_Segment] = []
    ceiling = high
    for number, resumed_from_step in reversed(resumptions):
        if low <= ceiling:
            segments.append(_Segment(number, low, ceiling))
        if resumed_from_step is not None:
            ceiling = min(ceiling, resumed_from_step)
    return segments


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
    kept = {0, count - 1}
    for positions in (ascending, descending, np.flatnonzero(missing)):
        _, first_of_bucket = np.unique(bucket[positions], return_index=True)
        kept.update(positions[first_of_bucket].tolist())
    return sorted(kept)
