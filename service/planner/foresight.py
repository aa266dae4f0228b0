"""Keeps, beside a pool's scheduler, the forecasts of when each waiting experiment will start.

What was forecast for an experiment first is compared with its start once that has come: by so much intervals
are widened from then on (`service.fairness.eta.Calibration`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Row, insert

from service.db import schema, statements
from service.db.errors import StoreError
from service.domain.access import DEFAULT_POOL
from service.domain.outlook import Standing, StartForecast
from service.domain.serialization import to_json
from service.domain.states import ExperimentState
from service.fairness.eta import REMEMBERED, Calibration, Seconds, Start
from service.fairness.explanations import reason_in_words
from service.fairness.state import Waiting, WaitingReason
from service.planner.outlook import CONSIDERED, FORECASTS_IN, calibration, finite, foresee, times_of
from service.scheduling.queue import Queue
from service.scheduling.situation import Lookout
from service.store import Store

_x, _f, _e = schema.experiments.c, schema.start_forecasts.c, schema.start_errors.c

logger = logging.getLogger(__name__)

EVERY_S = 10.0
"""Time between two forecasts."""
TIMES_EVERY_S = 120.0
"""How often the times of runs are forecast again."""
_STARTED = frozenset(
    {ExperimentState.starting, ExperimentState.running, ExperimentState.succeeded, ExperimentState.failed}
)
_FIRST = ("first_s", "first_reason", "first_earliest_s", "first_latest_s")


class Foresight:
    """Keeps the forecasts of one pool; several processes may do so at the same time.

    Args:
        store: the database.
        pool: whose queue.
    """

    def __init__(self, store: Store, pool: str = DEFAULT_POOL) -> None:
        self._store = store
        self._queue = Queue(store, pool)
        self._lookout = Lookout(store, pool)
        self._catalogue = store.settings.catalogue()
        self._times: dict[int, Seconds] = {}
        self._timed_s = float("-inf")

    def run(self, stop: threading.Event) -> None:
        """Forecasts again and again until `stop` is set."""
        while not stop.wait(EVERY_S):
            try:
                self.run_once()
            except StoreError as error:
                logger.warning("forecasts of starts wait for the database: %s", error)
            except Exception:
                # A queue that cannot be forecast must not end the forecasts of all later ones.
                logger.exception("forecasting starts failed; trying again")

    def run_once(self) -> None:
        """Stores when what waits now will start.

        Raises:
            StoreError: the database is unavailable.
        """
        cluster = self._queue.cluster()
        if cluster is None:
            return
        active = self._queue.active()
        seen = self._lookout.look(cluster, active, CONSIDERED)
        found: dict[int, tuple[Waiting, Start]] = {}
        times: Mapping[int, Seconds] = {}
        if not seen.waiting and not self._has_forecasts():
            return  # An idle queue writes nothing.
        if seen.waiting:
            times = self._look_up_times([claimant.id for claimant in seen.situation.claimants])
            waiting = [experiment.id for experiment in seen.waiting]
            foreseen = foresee(self._store, seen, times, len(active), waiting)
            found = {
                id: (foreseen.waiting[id], foreseen.starts[id])
                for id in waiting
                if id in foreseen.waiting and id in foreseen.starts
            }
        self._store.database.write(
            lambda connection: self._put(connection, seen.situation.now_s, times, found)
        )

    def _has_forecasts(self) -> bool:
        """Returns whether there are forecasts to learn from and to remove."""
        own = {"in_pool": self._queue.pool}
        with self._store.database.read() as connection:
            return connection.execute(FORECASTS_IN, own).first() is not None

    def _look_up_times(self, ids: Sequence[int]) -> Mapping[int, Seconds]:
        """Returns how long a run of each experiment takes; asked for again now and then."""
        now = self._store.monotonic()
        if now - self._timed_s >= TIMES_EVERY_S:
            self._times, self._timed_s = {}, now
        new = {id: self._lookout.spec_of(id) for id in ids if id not in self._times}
        if new:
            self._times |= times_of(self._store, new, self._catalogue)
        return {id: self._times[id] for id in ids}

    def _put(
        self,
        connection: Connection,
        now_s: float,
        times: Mapping[int, Seconds],
        found: Mapping[int, tuple[Waiting, Start]],
    ) -> None:
        """Replaces the pool's forecasts, and learns from those whose experiments have started."""
        own = {"in_pool": self._queue.pool}
        before = {row.experiment_id: row for row in connection.execute(FORECASTS_IN, own)}
        first = {id: row for id, row in before.items() if row.first_s is not None}
        _learn(connection, {id: row for id, row in first.items() if id not in found}, now_s)
        learned = calibration(connection)
        projects = {
            row.id: row.project
            for row in connection.execute(sa.select(_x.id, _x.project).where(_x.id.in_(list(found))))
        }
        connection.execute(
            sa.delete(schema.start_forecasts).where(
                _f.pool == self._queue.pool, _f.experiment_id.not_in(list(times))
            )
        )
        rows = []
        for id, time in times.items():
            row: dict[str, Any] = {
                "experiment_id": id,
                "pool": self._queue.pool,
                "at_s": now_s,
                "run_low_s": time.low,
                "run_median_s": time.median,
                "run_high_s": time.high,
                "start": None,
                **dict.fromkeys(_FIRST),
            }
            if id in found:
                waiting, start = found[id]
                row["start"] = to_json(_forecast(waiting, projects[id], start, learned, now_s))
                row |= _first(waiting, start, now_s) if id not in first else _kept(first[id])
            rows.append(row)
        if rows:
            statement = statements.insert_or_replace(connection, schema.start_forecasts, ("experiment_id",))
            connection.execute(statement, rows)


def _first(waiting: Waiting, start: Start, now_s: float) -> dict[str, Any]:
    """Returns what is remembered of an experiment's first forecast."""
    return {
        "first_s": now_s,
        "first_reason": waiting.reason,
        "first_earliest_s": finite(start.earliest),
        "first_latest_s": finite(start.latest),
    }


def _kept(row: Row[Any]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _FIRST}


def _learn(connection: Connection, ended: Mapping[int, Row[Any]], now_s: float) -> None:
    """Notes how far forecasts were from the starts that have come; what was cancelled teaches nothing."""
    states_of = sa.select(_x.id, _x.state, _x.started_s).where(_x.id.in_(list(ended)))
    for state in connection.execute(states_of):
        row = ended[state.id]
        if state.state not in _STARTED or row.first_earliest_s is None or row.first_latest_s is None:
            continue
        # An experiment that is tried again started long before it was forecast.
        is_first = state.started_s is not None and state.started_s >= row.first_s
        started_s = state.started_s if is_first else now_s
        forecast = Start(row.first_earliest_s, row.first_earliest_s, row.first_latest_s)
        reason = WaitingReason(row.first_reason)
        error = Calibration().learned(reason, forecast, max(0.0, started_s - row.first_s))
        connection.execute(
            insert(schema.start_errors),
            {"reason": reason, "early": error.early[reason][0], "late": error.late[reason][0]},
        )
        newest = (
            sa.select(_e.id).where(_e.reason == reason).order_by(_e.id.desc()).limit(REMEMBERED).subquery()
        )
        connection.execute(
            sa.delete(schema.start_errors).where(_e.reason == reason, _e.id.not_in(sa.select(newest.c.id)))
        )


def _forecast(
    waiting: Waiting, project: str, start: Start, learned: Calibration, now_s: float
) -> StartForecast:
    widened = learned.widened(waiting.reason, start)
    earliest_s, median_s, latest_s = (
        finite(now_s + seconds) for seconds in (widened.earliest, widened.median, widened.latest)
    )
    return StartForecast(
        at_s=now_s,
        hardware=waiting.hardware,
        devices=waiting.devices,
        place=waiting.position,
        reason=reason_in_words(waiting, project),
        ahead=list(waiting.ahead),
        earliest_s=earliest_s,
        median_s=median_s,
        latest_s=latest_s,
        project=Standing(**asdict(waiting.project_score)),
        user=Standing(**asdict(waiting.user_score)),
    )
