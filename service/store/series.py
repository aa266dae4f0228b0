"""Series of points as people see them: one value per name and step, thinned where asked.

An attempt that resumed from step S hides what older attempts reported beyond S; where two
attempts report the same step, the newer one counts. Of a reused run they are those of the run that it
reuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection

from service.db import point_statements
from service.domain.records import PointRow
from service.store.base import StorePart, source_of
from service.store.reading import as_float

THINNED_HERE = 50_000
"""Series with a longer range of steps are thinned by the database, others in memory."""
_LAST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Segment:
    """The part of an attempt's points that no newer attempt hides."""

    attempt: int
    low: int
    high: int


class Series(StorePart):
    """The part of the store that reads points."""

    def latest_points(self, run_id: int) -> list[PointRow]:
        """The latest point of each metric, by name.

        Raises:
            NotFound: there is no such run.
        """
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
        """Points by name, each in the order of steps.

        Args:
            run_id: the run.
            names: metrics; None = all. A name without points gives an empty list.
            min_step: first step, included.
            max_step: last step, included.
            max_points: thin each series to about this many points (at least 4), keeping the
                least, the greatest and the first NaN value of each bucket of steps, and both ends.

        Raises:
            NotFound: there is no such run.
        """
        low = 0 if min_step is None else max(0, min_step)
        high = _LAST if max_step is None else min(max_step, _LAST)
        result: dict[str, list[PointRow]] = {}
        with self.database.read() as connection:
            source = source_of(connection, run_id)
            known = self._name_ids_of(connection, source)
            rows = connection.execute(point_statements.resumptions(source)).all()
            segments = _segments([(row.number, row.resumed_from_step) for row in rows], low, high)
            for name in known if names is None else dict.fromkeys(names):
                if name not in known:
                    result[name] = []
                    continue
                found = _read_series(connection, source, known[name], segments, max_points)
                result[name] = [PointRow(name, *row) for row in found]
        return result

    def _name_ids_of(self, connection: Connection, run_id: int) -> dict[str, int]:
        return {row.name: row.id for row in connection.execute(point_statements.names_of_run(run_id))}


def _segments(resumptions: Sequence[tuple[int, int | None]], low: int, high: int) -> list[_Segment]:
    """What is visible of each attempt, newest first."""
    segments: list[_Segment] = []
    ceiling = high
    for number, resumed_from_step in reversed(resumptions):
        if low <= ceiling:
            segments.append(_Segment(number, low, ceiling))
        if resumed_from_step is not None:
            ceiling = min(ceiling, resumed_from_step)
    return segments


def _read_series(
    connection: Connection, run_id: int, name_id: int, segments: Sequence[_Segment], max_points: int | None
) -> list[tuple[int, int, float, float]]:
    """(step, attempt, at_s, value) of one metric, in the order of steps."""
    merged: dict[int, tuple[int, int, float, float]] = {}
    for segment in segments:
        key = {"run": run_id, "name": name_id, "number": segment.attempt}
        for row in _read_segment(connection, key, segment, max_points):
            if row.step not in merged:  # Newer attempts came first.
                merged[row.step] = (row.step, segment.attempt, row.at_s, as_float(row.value))
    series = [merged[step] for step in sorted(merged)]
    if max_points is None or len(series) <= max(4, max_points):
        return series
    kept = thin(np.array([row[0] for row in series]), np.array([row[3] for row in series]), max_points)
    return [series[position] for position in kept]


def _read_segment(
    connection: Connection, key: dict[str, int], segment: _Segment, max_points: int | None
) -> Sequence[Any]:
    between = {**key, "low": segment.low, "high": segment.high}
    if max_points is not None:
        first, last = connection.execute(point_statements.SERIES_BOUNDS, between).one()
        if first is None:
            return []
        if last - first >= THINNED_HERE:
            return _thin_in_database(connection, key, first, last, max_points)
    return connection.execute(point_statements.SERIES, between).all()


def _thin_in_database(
    connection: Connection, key: dict[str, int], first: int, last: int, max_points: int
) -> Sequence[Any]:
    buckets = max(1, (max_points - 2) // 2)
    width = -(-(last - first + 1) // buckets)
    rows = connection.execute(
        point_statements.SERIES_EXTREMES,
        {**key, "first": first, "last": last, "width": width, "buckets": buckets},
    )
    steps = {first, last, *(step for row in rows for step in row if step is not None)}
    return connection.execute(point_statements.series_at(sorted(steps)), key).all()


def thin(steps: np.ndarray[Any, Any], values: np.ndarray[Any, Any], max_points: int) -> list[int]:
    """Positions to keep of a series: both ends, and least, greatest and first NaN of each bucket.

    Args:
        steps: (N,) ascending.
        values: (N,) figures; NaN and infinities allowed.
        max_points: about how many to keep, at least 4; buckets with NaN keep one more.
    """
    count = len(steps)
    if count <= max(4, max_points):
        return list(range(count))
    buckets = max(1, (max_points - 2) // 2)
    width = -(-(int(steps[-1]) - int(steps[0]) + 1) // buckets)
    starts = np.flatnonzero(np.diff((steps - steps[0]) // width, prepend=-1))
    kept = {0, count - 1}
    for start, end in zip(starts, [*starts[1:], count], strict=True):
        part = values[start:end]
        missing = np.isnan(part)
        if missing.any():
            kept.add(int(start + np.argmax(missing)))
        if not missing.all():
            kept.add(int(start + np.nanargmin(part)))
            kept.add(int(start + np.nanargmax(part)))
    return sorted(kept)
