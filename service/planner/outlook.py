"""A pool's near future: the scheduler's pass played forward with what runs will take (`fairness.eta`).

Times of runs come from an experiment's own finished runs, else from the forecast of its spec; what runs is
expected to go on at its own pace.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Row

from service.config.hardware import Hardware
from service.db import schema
from service.domain.states import RunState
from service.fairness.allowances import Division, divide
from service.fairness.eta import Calibration, Holder, Outlook, Seconds, Start, Waiter, starts
from service.fairness.rules import USEFUL_S
from service.fairness.state import Claimant, Demand, Lane, Situation, Waiting, WaitingReason
from service.planner.forecasting import run_time_of
from service.scheduling.situation import Seen
from service.specs.experiment import ExperimentSpec
from service.store import Store

_r, _e, _f = schema.runs.c, schema.start_errors.c, schema.start_forecasts.c

CONSIDERED = 100
"""Waiting experiments whose start is forecast, the first in the order of claims."""
FEWEST_RUNS = 3
"""Finished runs of an experiment from which on they tell the time of the others."""
LEAST_PROGRESS = 0.05
"""Part of a run from which on its own pace tells how long the rest takes."""
PACE = (0.7, 1.5)
"""The rest of such a run, in times of what its pace makes it: ends of the interval."""
LEAST_LEFT = 0.2
"""Part of its time that a run is expected to go on which should have ended."""
CHECKPOINT_S = 30.0
"""Time until a run that is asked to stop has written its checkpoint, at most."""
UNKNOWN = Seconds(60.0, 1800.0, 6 * 3600.0)
"""Time of a run of which nothing is known."""


ERRORS = sa.select(schema.start_errors).order_by(_e.id)
"""How far forecasts were off, the oldest first."""
FORECASTS_IN = sa.select(schema.start_forecasts).where(_f.pool == sa.bindparam("in_pool"))
"""All forecasts of a pool."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What one look into the future found.

    Attributes:
        division: who may hold what now.
        waiting: why experiments wait, by id: for those devices for which each of them is next.
        starts: when they start, by id, before calibration.
    """

    division: Division
    waiting: Mapping[int, Waiting]
    starts: Mapping[int, Start]


def foresee(
    store: Store, seen: Seen, times: Mapping[int, Seconds], active: int, only: Collection[int]
) -> Foreseen:
    """Returns when what waits will start.

    Args:
        store: Store with the runs at work.
        seen: what there is, who runs, and who waits.
        times: of one run of each experiment; `UNKNOWN` for those that are missing.
        active: how many of the claimants, the first ones, run.
        only: experiments to forecast; the last claimants, in the order of claims.
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
    found = starts(_outlook(situation, division, times, at_work), only)
    most = store.settings.max_concurrent_experiments
    for place in _places(situation.claimants, active, times, most):
        id = place.claimant.id
        if id not in found:
            continue
        start, from_s = found[id], place.from_s
        found[id] = Start(
            max(start.earliest, from_s.low),
            max(start.median, from_s.median),
            max(start.latest, from_s.high),
        )
        if id not in waiting or from_s.median > start.median:
            waiting[id] = _waits_for_a_place(place, division, most)
    return Foreseen(division, waiting, found)


def times_of(
    store: Store, specs: Mapping[int, ExperimentSpec | None], catalogue: Mapping[str, Hardware]
) -> dict[int, Seconds]:
    """Returns how long one run of each experiment takes, whichever it is.

    Args:
        store: Store with finished runs.
        specs: by experiment; None = cannot be read.
        catalogue: known hardware.
    """
    with store.database.read() as connection:
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
        own = {
            row.experiment_id: Seconds(row.least, row.mean, row.most)
            for row in connection.execute(statement)
            if row.ended >= FEWEST_RUNS
        }
    return {id: own[id] if id in own else time_of(spec, store, catalogue) for id, spec in specs.items()}


def time_of(spec: ExperimentSpec | None, store: Store, catalogue: Mapping[str, Hardware]) -> Seconds:
    """Returns how long one run of a spec takes, by the forecast of it."""
    found = None if spec is None else run_time_of(spec, store, catalogue)
    return UNKNOWN if found is None else Seconds(found.low, found.middle, found.high)


def calibration(connection: Connection) -> Calibration:
    """Returns what past starts have taught."""
    early: defaultdict[WaitingReason, list[float]] = defaultdict(list)
    late: defaultdict[WaitingReason, list[float]] = defaultdict(list)
    for row in connection.execute(ERRORS):
        early[WaitingReason(row.reason)].append(row.early)
        late[WaitingReason(row.reason)].append(row.late)
    return Calibration(
        {reason: tuple(values) for reason, values in early.items()},
        {reason: tuple(values) for reason, values in late.items()},
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """When a waiting experiment may have a driver, in seconds from now."""

    claimant: Claimant
    rank: int
    from_s: Seconds


def _places(
    claimants: Sequence[Claimant], active: int, times: Mapping[int, Seconds], most: int
) -> Iterator[_Place]:
    """Yields the places of those for which there is none now, in the order of claims.

    Who has no driver gets that of whoever has most (`service.scheduling.fair_pass`); others wait for an
    experiment to end. Those that start then end as well, and make room for the rest: how soon is not known.
    """
    drivers = Counter((each.project, each.user) for each in claimants[:active])
    ends = sorted(
        (_end(each, times.get(each.id, UNKNOWN)) for each in claimants[:active]),
        key=lambda end: end.median,
    )
    last = ends[-1] if ends else UNKNOWN
    for rank, claimant in enumerate(claimants[active:]):
        owner = claimant.project, claimant.user
        richest, count = next(iter(drivers.most_common(1)), (owner, 0))
        if rank >= most - active:
            if not drivers[owner] and count > 1:
                drivers[richest] -= 1
                from_s = Seconds(0.0, CHECKPOINT_S, 2 * CHECKPOINT_S)
            else:
                from_s = ends.pop(0) if ends else Seconds(last.low, last.median, math.inf)
            if claimant.demands:
                yield _Place(claimant, rank, from_s)
        drivers[owner] += 1


def _end(claimant: Claimant, time: Seconds) -> Seconds:
    """Returns when an experiment that runs will have ended."""
    rounds = max(
        (
            math.ceil((demand.running + demand.waiting) / max(1, demand.running))
            for demand in claimant.demands
        ),
        default=1,
    )
    return Seconds(LEAST_LEFT * time.low, rounds * time.median, rounds * time.high)


def _waits_for_a_place(place: _Place, division: Division, most: int) -> Waiting:
    claimant, demand = place.claimant, place.claimant.demands[0]
    lane = Lane(claimant.pool, demand.hardware)
    return Waiting(
        claimant.id,
        demand.hardware,
        demand.devices,
        WaitingReason.places,
        place.rank + 1,
        division.project_score(claimant.project, lane),
        division.user_score(claimant.project, claimant.user, lane),
        (),
        division.free.get(lane, 0.0),
        f"max_concurrent_experiments is {most}",
    )


def _outlook(
    situation: Situation, division: Division, times: Mapping[int, Seconds], at_work: Iterable[Row[Any]]
) -> Outlook:
    running: defaultdict[tuple[int, str], list[Row[Any]]] = defaultdict(list)
    for row in at_work:
        running[row.experiment_id, row.hardware].append(row)
    stopping: defaultdict[tuple[int, str], int] = defaultdict(int)
    reclaimed: dict[int, float] = {}
    for each in division.preemptions:
        stopping[each.experiment_id, each.hardware] += each.runs
        by_s = CHECKPOINT_S if each.by_s is None else each.by_s - situation.now_s
        reclaimed[each.for_experiment_id] = max(by_s, reclaimed.get(each.for_experiment_id, 0.0))
    holders: list[Holder] = []
    waiters: list[Waiter] = []
    for claimant in situation.claimants:
        time = times.get(claimant.id, UNKNOWN)
        for demand in claimant.demands:
            key = claimant.id, demand.hardware
            holders += _holders(claimant, demand, time, running[key], stopping[key], situation.now_s)
            if demand.waiting:
                waiters.append(_waiter(claimant, demand, time, reclaimed.get(claimant.id)))
    return Outlook(situation.now_s, situation.capacity, holders, waiters, situation.terms, situation.usage)


def _holders(
    claimant: Claimant, demand: Demand, time: Seconds, rows: Sequence[Row[Any]], stopping: int, now_s: float
) -> Iterable[Holder]:
    """Yields the runs that go on; those that stop for others are the ones that have worked longest."""
    may_stop = demand.running if demand.yieldable is None else demand.yieldable
    for number in range(stopping, demand.running):
        row = rows[number] if number < len(rows) else None
        worked_s = 0.0 if row is None or row.started_s is None else max(0.0, now_s - row.started_s)
        yields_s = None
        if claimant.preemptible:
            yields_s = CHECKPOINT_S if number < may_stop else max(CHECKPOINT_S, USEFUL_S - worked_s)
        yield Holder(
            claimant.project,
            claimant.user,
            Lane(claimant.pool, demand.hardware),
            demand.devices,
            _left(time, worked_s, row),
            claimant.priority,
            yields_s,
        )


def _left(time: Seconds, worked_s: float, row: Row[Any] | None) -> Seconds:
    """Returns how much longer a run takes."""
    done = row.step / row.total_steps if row is not None and row.total_steps else 0.0
    if LEAST_PROGRESS <= done <= 1.0 and worked_s:
        rest = worked_s * (1.0 - done) / done
        return Seconds(PACE[0] * rest, rest, PACE[1] * rest)
    low, median, high = (max(end - worked_s, LEAST_LEFT * end) for end in (time.low, time.median, time.high))
    return Seconds(low, median, high)


def _waiter(claimant: Claimant, demand: Demand, time: Seconds, by_s: float | None) -> Waiter:
    since_s = claimant.queued_s if claimant.served_s is None else claimant.served_s
    return Waiter(
        claimant.id,
        claimant.project,
        claimant.user,
        claimant.priority,
        since_s,
        Lane(claimant.pool, demand.hardware),
        demand.devices,
        demand.waiting,
        time,
        by_s,
        USEFUL_S + CHECKPOINT_S / 2 if claimant.preemptible else None,
    )


def finite(seconds: float) -> float | None:
    """Returns a time, or None for one that is not in sight."""
    return seconds if math.isfinite(seconds) else None
