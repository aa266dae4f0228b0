"""Keeps, alongside a pool's scheduler, the forecasts of when each waiting experiment will start.

Times of runs come from an experiment's own finished runs, else from the forecast of its spec; running runs
are expected to continue at their own pace. The first forecast for an experiment is compared with its start
once that has come: intervals are widened by the error from then on (`service.fairness.eta.Calibration`).
"""

import itertools
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Row, insert

from service.config.hardware import Hardware, lookup
from service.db import schema, statements
from service.domain.access import DEFAULT_POOL, Visibility
from service.domain.metrics import Span, finite
from service.domain.serialization import to_json
from service.domain.shares import PlannedStart, StartForecast, Yields
from service.domain.states import ExperimentState, RunState
from service.fairness.allowances import divide
from service.fairness.eta import (
    REMEMBERED,
    Calibration,
    RunningRun,
    reason_in_words,
    start_in_words,
    starts,
)
from service.fairness.standings import Division
from service.fairness.state import USEFUL_S, Claimant, Demand, Lane, Situation, Waiting, WaitingReason
from service.planner.forecasting import run_time_of
from service.planner.preview import planned_runs
from service.scheduling.cluster import ClusterSnapshot, NodesToCome, devices_of
from service.scheduling.queue import Queue
from service.scheduling.situation import Newcomer, Seen, SituationReader
from service.specs.experiment import ExperimentSpec
from service.store import Store
from service.store.base import until_stopped
from trainers.config import SHARERS

_x, _r, _f, _e = schema.experiments.c, schema.runs.c, schema.start_forecasts.c, schema.start_errors.c
ERRORS = sa.select(schema.start_errors).order_by(_e.id)  # The oldest first
FORECASTS_IN = sa.select(schema.start_forecasts).where(_f.pool == sa.bindparam("in_pool"))

EVERY_S = 10.0
TIMES_EVERY_S = 120.0
CONSIDERED = 100  # Waiting experiments, the first in the order of claims
FEWEST_RUNS = 3  # Finished, from which the time of the others is taken
LEAST_PROGRESS = 0.05  # Part of a run from which on the rest is forecast from its own pace
PACE = (0.7, 1.5)  # Ends of the interval for the rest of such a run, as multiples of the time at its pace
LEAST_LEFT = 0.2  # Part of its time that a run which should have ended is expected to continue
CHECKPOINT_S = 30.0  # At most, from a request to stop
UNKNOWN = Span(60.0, 1800.0, 6 * 3600.0)
_STARTED = frozenset(ExperimentState) - {
    ExperimentState.queued,
    ExperimentState.paused,
    ExperimentState.cancelled,
}
_FIRST = ("first_s", "first_reason", "first_earliest_s", "first_latest_s")
PLANNED_RUNS = 100  # From which the demand of a whole grid is estimated
_AT_ONCE = Span(0.0, 0.0, 0.0)


class StartForecasts:
    """Keeps the forecasts of one pool; several processes may do so at the same time."""

    def __init__(self, store: Store, pool: str = DEFAULT_POOL) -> None:
        self._store = store
        self._queue = Queue(store, pool)
        self._reader = SituationReader(store, pool)
        self._catalogue = store.settings.catalogue()
        self._times: dict[int, Span] = {}
        self._timed_s = float("-inf")

    def run(self, stop: threading.Event) -> None:
        until_stopped(self.run_once, EVERY_S, "forecasts of starts", stop)

    def run_once(self) -> None:
        cluster = self._queue.cluster()
        if cluster is None:
            return
        active = self._queue.active()
        seen = self._reader.read(cluster, active, CONSIDERED)
        found: dict[int, tuple[Waiting, Span]] = {}
        times: Mapping[int, Span] = {}
        if seen.waiting:
            times = self._look_up_times([claimant.id for claimant in seen.situation.claimants])
            waiting = [experiment.id for experiment in seen.waiting]
            forecast = forecast_queue(self._store, seen, times, len(active), waiting)
            reasons = forecast.waiting
            found = {id: (reasons[id], start) for id, start in forecast.starts.items() if id in reasons}
        elif not self._store.read(FORECASTS_IN.params(in_pool=self._queue.pool)):
            return  # An idle queue writes nothing.
        self._store.database.write(
            lambda connection: self._put(connection, seen.situation.now_s, times, found)
        )

    def _look_up_times(self, ids: Sequence[int]) -> Mapping[int, Span]:
        now = self._store.monotonic()
        if now - self._timed_s >= TIMES_EVERY_S:
            self._times, self._timed_s = {}, now
        new = {id: self._reader.spec_of(id) for id in ids if id not in self._times}
        if new:
            self._times |= times_of(self._store, new, self._catalogue)
        return {id: self._times[id] for id in ids}

    def _put(
        self,
        connection: Connection,
        now_s: float,
        times: Mapping[int, Span],
        found: Mapping[int, tuple[Waiting, Span]],
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
                "run_median_s": time.middle,
                "run_high_s": time.high,
                "start": None,
                **dict.fromkeys(_FIRST),
            }
            if id in found:
                waiting, start = found[id]
                row["start"] = to_json(_forecast(waiting, projects[id], start, learned, now_s))
                kept = first.get(id)
                values = (
                    (now_s, waiting.reason, finite(start.low), finite(start.high))
                    if kept is None
                    else (getattr(kept, name) for name in _FIRST)
                )
                row |= dict(zip(_FIRST, values, strict=True))
            rows.append(row)
        if rows:
            statement = statements.insert_or_replace(connection, schema.start_forecasts, ("experiment_id",))
            connection.execute(statement, rows)


def _learn(connection: Connection, ended: Mapping[int, Row[Any]], now_s: float) -> None:
    """Notes how far forecasts were from the starts that have come; cancelled experiments are left out."""
    states_of = sa.select(_x.id, _x.state, _x.started_s).where(_x.id.in_(list(ended)))
    for state in connection.execute(states_of):
        row = ended[state.id]
        if state.state not in _STARTED or row.first_earliest_s is None or row.first_latest_s is None:
            continue
        # An experiment that is tried again started long before it was forecast.
        is_first = state.started_s is not None and state.started_s >= row.first_s
        started_s = state.started_s if is_first else now_s
        forecast = Span(row.first_earliest_s, row.first_earliest_s, row.first_latest_s)
        reason = WaitingReason(row.first_reason)
        learned = Calibration().learned(reason, forecast, max(0.0, started_s - row.first_s))
        ((early, late),) = learned.errors[reason]
        connection.execute(insert(schema.start_errors), {"reason": reason, "early": early, "late": late})
        newest = (
            sa.select(_e.id).where(_e.reason == reason).order_by(_e.id.desc()).limit(REMEMBERED).subquery()
        )
        connection.execute(
            sa.delete(schema.start_errors).where(_e.reason == reason, _e.id.not_in(sa.select(newest.c.id)))
        )


def _forecast(
    waiting: Waiting, project: str, start: Span, learned: Calibration, now_s: float
) -> StartForecast:
    widened = learned.widened(waiting.reason, start)
    return StartForecast(
        at_s=now_s,
        hardware=waiting.hardware,
        devices=waiting.devices,
        place=waiting.position,
        reason=reason_in_words(waiting, project),
        ahead=list(waiting.ahead),
        earliest_s=finite(now_s + widened.low),
        median_s=finite(now_s + widened.middle),
        latest_s=finite(now_s + widened.high),
        project=waiting.project_score,
        user=waiting.user_score,
    )


@dataclass(frozen=True, slots=True)
class QueueForecast:
    """What waits: why, by experiment, and when it starts, before calibration."""

    division: Division
    waiting: Mapping[int, Waiting]
    starts: Mapping[int, Span]


def forecast_queue(
    store: Store, seen: Seen, times: Mapping[int, Span], active: int, only: Collection[int]
) -> QueueForecast:
    """Returns when what waits will start, of the experiments `only`: the last claimants.

    `active` is how many of the claimants, the first ones, run. `times` are of one run of each experiment;
    `UNKNOWN` for those that are missing.
    """
    situation = seen.situation
    division = divide(situation)
    waiting: dict[int, Waiting] = {}
    for each in division.waiting():
        waiting.setdefault(each.experiment_id, each)
    with store.database.read() as connection:
        running = (
            sa.select(_r.experiment_id, _r.hardware, _r.started_s, _r.step, _r.total_steps)
            .where(
                _r.experiment_id.in_([claimant.id for claimant in situation.claimants]),
                _r.state == RunState.running,
            )
            .order_by(_r.started_s)
        )
        at_work: Sequence[Any] = connection.execute(running).all()
    times = {each.id: times.get(each.id, UNKNOWN) for each in situation.claimants}
    found = starts(situation, _running(situation, times, at_work), times, only)
    most = store.settings.max_concurrent_experiments
    for rank, claimant, from_s in _places(situation.claimants, active, times, most):
        id = claimant.id
        if id not in found:
            continue
        if id not in waiting or from_s.middle > found[id].middle:
            waiting[id] = _waits_for_a_place(rank, claimant, division, most)
        found[id] = Span(*map(max, astuple(found[id]), astuple(from_s)))
    return QueueForecast(division, waiting, found)


def times_of(
    store: Store, specs: Mapping[int, ExperimentSpec | None], catalogue: Mapping[str, Hardware]
) -> dict[int, Span]:
    time_s = _r.total_time_s
    statement = (
        sa.select(
            _r.experiment_id,
            sa.func.count().label("ended"),
            sa.func.min(time_s).label("least"),
            sa.func.avg(time_s).label("mean"),
            sa.func.max(time_s).label("most"),
        )
        .where(
            _r.experiment_id.in_(list(specs)),
            _r.state == RunState.succeeded,
            _r.reused_from.is_(None),
            time_s > 0,
        )
        .group_by(_r.experiment_id)
    )
    with store.database.read() as connection:
        own = {
            row.experiment_id: Span(row.least, row.mean, row.most)
            for row in connection.execute(statement)
            if row.ended >= FEWEST_RUNS
        }
    return {id: own[id] if id in own else time_of(spec, store, catalogue) for id, spec in specs.items()}


def time_of(spec: ExperimentSpec | None, store: Store, catalogue: Mapping[str, Hardware]) -> Span:
    return UNKNOWN if spec is None else run_time_of(spec, store, catalogue) or UNKNOWN


def calibration(connection: Connection) -> Calibration:
    errors: defaultdict[WaitingReason, list[tuple[float, float]]] = defaultdict(list)
    for row in connection.execute(ERRORS):
        errors[WaitingReason(row.reason)].append((row.early, row.late))
    return Calibration(errors)


def _places(
    claimants: Sequence[Claimant], active: int, times: Mapping[int, Span], most: int
) -> Iterator[tuple[int, Claimant, Span]]:
    """Yields rank, claimant and time until there is a place of those without one now, in the order of claims.

    Those without a driver get that of whoever has most (`service.scheduling.fair_pass`); others wait for an
    experiment to end. Those that start then end as well, and make room for the rest: how soon is not known.
    """
    drivers = Counter((each.project, each.user) for each in claimants[:active])
    ends = sorted((_end(each, times[each.id]) for each in claimants[:active]), key=lambda end: end.middle)
    last = ends[-1] if ends else UNKNOWN
    for rank, claimant in enumerate(claimants[active:]):
        owner = claimant.project, claimant.user
        richest, count = next(iter(drivers.most_common(1)), (owner, 0))
        if rank >= most - active:
            if not drivers[owner] and count > 1:
                drivers[richest] -= 1
                from_s = Span(0.0, CHECKPOINT_S, 2 * CHECKPOINT_S)
            else:
                from_s = ends.pop(0) if ends else Span(last.low, last.middle, math.inf)
            if claimant.demands:
                yield rank, claimant, from_s
        drivers[owner] += 1


def _end(claimant: Claimant, time: Span) -> Span:
    rounds = max(
        (
            math.ceil((demand.running + demand.waiting) / max(1, demand.running))
            for demand in claimant.demands
        ),
        default=1,
    )
    return Span(LEAST_LEFT * time.low, rounds * time.middle, rounds * time.high)


def _waits_for_a_place(rank: int, claimant: Claimant, division: Division, most: int) -> Waiting:
    demand = claimant.demands[0]
    lane = Lane(claimant.pool, demand.hardware)
    return Waiting(
        claimant.id,
        demand.hardware,
        demand.devices,
        WaitingReason.places,
        rank + 1,
        division.project_score(claimant.project, lane),
        division.user_score(claimant.project, claimant.user, lane),
        (),
        f"max_concurrent_experiments is {most}",
    )


def _running(
    situation: Situation, times: Mapping[int, Span], at_work: Iterable[Row[Any]]
) -> dict[tuple[int, str], list[RunningRun]]:
    """Returns the runs that hold devices, by experiment and hardware; the oldest yield first."""
    rows: defaultdict[tuple[int, str], list[Row[Any]]] = defaultdict(list)
    for each in at_work:
        rows[each.experiment_id, each.hardware].append(each)
    running: dict[tuple[int, str], list[RunningRun]] = {}
    for claimant in situation.claimants:
        for demand in claimant.demands:
            key = claimant.id, demand.hardware
            runs = running[key] = []
            for number in range(demand.running):
                row = rows[key][number] if number < len(rows[key]) else None
                worked_s = 0.0 if row is None or row.started_s is None else situation.now_s - row.started_s
                is_useful = demand.yieldable is None or number < demand.yieldable
                yields_s = 0.0 if is_useful else max(0.0, USEFUL_S - worked_s)
                remaining = _left(times[claimant.id], max(0.0, worked_s), row)
                runs.append(RunningRun(remaining, yields_s, CHECKPOINT_S))
    return running


def _left(time: Span, worked_s: float, row: Row[Any] | None) -> Span:
    done = row.step / row.total_steps if row is not None and row.total_steps else 0.0
    if LEAST_PROGRESS <= done <= 1.0 and worked_s:
        rest = worked_s * (1.0 - done) / done
        return Span(PACE[0] * rest, rest, PACE[1] * rest)
    low, median, high = (max(end - worked_s, LEAST_LEFT * end) for end in (time.low, time.middle, time.high))
    return Span(low, median, high)


def planned_start(
    spec: ExperimentSpec, store: Store, cluster: ClusterSnapshot, *, owner: str, visible: Visibility
) -> PlannedStart | None:
    """Returns when a spec would start if it were submitted now; None where the cluster could never run it."""
    catalogue = store.settings.catalogue()
    active = Queue(store, spec.pool).active()
    demand = _demand(spec, catalogue)
    newcomer = Newcomer(spec, spec.project, owner, spec.queue.priority, demand, store.clock())
    seen = SituationReader(store, spec.pool).read(cluster, active, CONSIDERED, newcomer)
    demands = seen.situation.claimants[-1].demands
    if not demands:
        return None
    with store.database.read() as connection:
        rows = connection.execute(FORECASTS_IN, {"in_pool": spec.pool})
        times = {row.experiment_id: Span(row.run_low_s, row.run_median_s, row.run_high_s) for row in rows}
        learned = calibration(connection)
    times[newcomer.id] = time_of(spec, store, catalogue)
    forecast = forecast_queue(store, seen, times, len(active), [newcomer.id])
    start = forecast.starts.get(newcomer.id, _AT_ONCE)
    waiting = forecast.waiting.get(newcomer.id)
    if waiting is None or start == _AT_ONCE:
        hardware, devices = demands[0].hardware, demands[0].devices
        node = _node_to_start(seen.situation, demands[0], lookup(hardware, catalogue), cluster)
        after_s, why = (0.0, None) if node is None else (node.start_s, node.words)
        return PlannedStart(hardware, devices, *(after_s,) * 3, why, 0, 0, [], why or "starts at once")
    start = learned.widened(waiting.reason, start)
    reason, ahead = reason_in_words(waiting, spec.project), waiting.position - 1
    behind = sum(
        each.hardware == waiting.hardware and each.position > waiting.position
        for each in forecast.waiting.values()
    )
    whose = {each.id: (each.project, each.owner) for each in active}
    yields = _yields(forecast, newcomer.id, whose, visible)
    return PlannedStart(
        hardware=waiting.hardware,
        devices=waiting.devices,
        earliest_s=finite(start.low),
        median_s=finite(start.middle),
        latest_s=finite(start.high),
        reason=reason,
        ahead=ahead,
        behind=behind,
        yields=yields,
        words=_words(start, reason, ahead, behind, yields),
    )


def _node_to_start(
    situation: Situation, first: Demand, hardware: Hardware, cluster: ClusterSnapshot
) -> NodesToCome | None:
    """Returns which nodes start for a run that may have its devices; None = there are free ones."""
    demands = (demand for claimant in situation.claimants for demand in claimant.demands)
    held = sum(each.running * each.devices for each in demands if each.hardware == first.hardware)
    if devices_of(hardware, cluster.nodes) - held >= first.devices:
        return None
    return next((each for each in cluster.to_come if devices_of(hardware, each.nodes)), None)


def _demand(spec: ExperimentSpec, catalogue: Mapping[str, Hardware]) -> dict[str, tuple[float, float]]:
    """Returns (devices of all runs, of the largest) by hardware, by the first runs of the grid."""
    together: defaultdict[str, float] = defaultdict(float)
    largest: defaultdict[str, float] = defaultdict(float)
    looked_at, sharers = 0, SHARERS if spec.queue.share_device else 1
    for run in itertools.islice(planned_runs(spec, catalogue, None), PLANNED_RUNS):
        looked_at += 1
        if run.feasible:
            in_cpus = lookup(run.hardware, catalogue).kind.counted_in_cpus
            devices = (run.cpus if in_cpus else run.accelerators) / sharers
            together[run.hardware] += devices
            largest[run.hardware] = max(largest[run.hardware], devices)
    scale = spec.run_count() / max(1, looked_at)
    return {name: (scale * devices, largest[name]) for name, devices in together.items()}


def _yields(
    forecast: QueueForecast, id: int, whose: Mapping[int, tuple[str, str]], visible: Visibility
) -> list[Yields]:
    """Returns whose runs would stop; those of hidden projects are summed up, last."""
    found: list[Yields] = []
    hidden = 0
    for each in forecast.division.preemptions:
        if each.for_experiment_id != id:
            continue
        project, owner = whose[each.experiment_id]
        if visible.includes(project):
            found.append(Yields(each.experiment_id, owner, each.runs))
        else:
            hidden += each.runs
    return [*found, Yields(None, None, hidden)] if hidden else found


def _words(start: Span, reason: str, ahead: int, behind: int, yields: list[Yields]) -> str:
    parts = [start_in_words(start), reason, f"{ahead} ahead of it" if ahead else "next in line"]
    if behind:
        parts.append(f"{behind} that wait{'s' * (behind == 1)} would come after it")
    for each in yields:
        whose = "others" if each.experiment_id is None else f"experiment {each.experiment_id} of {each.owner}"
        runs = f"{each.runs} run{'s' * (each.runs != 1)}"
        parts.append(f"{runs} of {whose} would stop for it at the next checkpoint")
    return "; ".join(parts)
