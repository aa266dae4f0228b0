"""When the runs that wait will start: an interval, from forecasts of what runs and of what is ahead.

`starts` plays the queue forward three times, with low, median and high durations, in the order of turns
that a pass gives (`Division.waiting`). What it cannot know (who submits next, whose share that changes)
widens the interval: `Calibration` learns from past starts by how much. It is conformalised quantile
regression (Romano, Patterson and Candes 2019) on the logarithms of waits, so that, as long as the future is
like the past, as many starts fall into their intervals as it asks for, whatever the forecasts are worth.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from service.fairness.rules import PATIENCE_S, PROMOTED_AFTER_S, PROMOTED_TO, ROUNDING
from service.fairness.state import Capacity, Lane, ProjectTerms, Usage, UsageTree, WaitingReason
from service.fairness.tree import LAG_H, excesses, score_of
from service.fairness.usage import by_project, decayed

COVERAGE = 0.9
"""Part of the starts that are to fall into their interval."""
REMEMBERED = 500
"""Latest starts that the calibration rests on."""
FEWEST = 50
"""Starts that a calibration needs; `UNCALIBRATED` is used until then."""
UNCALIBRATED = 4.0
"""Factor by which an interval is widened either way before there is a calibration."""
GRAIN_S = 60.0
"""Waits shorter than this count as equally short."""
MOST_EVENTS = 1500
"""Events that are played; what has not started by then is not forecast."""
MOST_ASKED = 3
"""Runs in line for which others are looked for that yield, at each event."""
_DEFAULT = ProjectTerms()


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration that is forecast.

    Attributes:
        low, median, high: Ends of its interval and its middle, in seconds.
    """

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Holder:
    """A run that holds devices; without those that stop for others.

    Attributes:
        project, user: whose run it is.
        lane: devices that it holds.
        devices: number of them.
        remaining: time until it ends.
        priority: higher yields later.
        yields_s: seconds until it may stop for others, at a checkpoint; None = it does not.
    """

    project: str
    user: str
    lane: Lane
    devices: float
    remaining: Seconds
    priority: int
    yields_s: float | None = None


@dataclass(frozen=True, slots=True)
class Waiter:
    """The runs of an experiment that wait for devices of one kind.

    Attributes:
        experiment_id: of the experiment.
        project, user: whose runs they are.
        priority: higher goes first.
        since_s: when it last got devices, or joined the queue; Unix seconds.
        lane: devices that they wait for.
        devices: number of them, for one run.
        runs: how many wait.
        duration: time that one of them will take.
        by_s: seconds until devices are reclaimed for the first of them; None = none are.
        yields_s: seconds after its start until one of them may stop for others; None = they do not.
    """

    experiment_id: int
    project: str
    user: str
    priority: int
    since_s: float
    lane: Lane
    devices: float
    runs: int
    duration: Seconds
    by_s: float | None = None
    yields_s: float | None = None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the queue is played forward from.

    Attributes:
        now_s: Unix seconds.
        capacity: what there is.
        holders: what runs.
        waiters: what waits.
        terms: by project.
        usage: what was used lately.
    """

    now_s: float
    capacity: Capacity
    holders: Sequence[Holder]
    waiters: Sequence[Waiter]
    terms: Mapping[str, ProjectTerms] = field(default_factory=dict)
    usage: UsageTree = field(default_factory=UsageTree)


@dataclass(frozen=True, slots=True)
class Start:
    """When a run will start, in seconds from now; infinite = not before something changes.

    Attributes:
        earliest, median, latest: Ends of the interval and its middle.
    """

    earliest: float
    median: float
    latest: float


def starts(outlook: Outlook, only: Collection[int] | None = None) -> dict[int, Start]:
    """Returns when the next run of each waiting experiment starts, by experiment, before calibration.

    Shares, priorities, guarantees and ceilings hold as in a pass, and runs yield as they do there, but only
    to the first few in line, and without protection by guarantees. Lanes in which none of the experiments
    waits stay as they are.

    Args:
        outlook: what runs and waits.
        only: experiments to forecast; None = all. The fewer and the nearer, the less is played.
    """
    wanted = {waiter.experiment_id for waiter in outlook.waiters}
    if only is not None:
        wanted &= set(only)
    low, median, high = (
        _Play(outlook, end).run(wanted)
        for end in (
            lambda seconds: seconds.low,
            lambda seconds: seconds.median,
            lambda seconds: seconds.high,
        )
    )
    return {id: Start(*sorted(played.get(id, math.inf) for played in (low, median, high))) for id in wanted}


class _Node:
    """A project or a user in one lane while the queue is played.

    Its excess grows with what it holds beyond its share: all devices of the lane count as in use.
    """

    __slots__ = ("_at_s", "_excess", "_known", "_share", "rate", "weight")

    def __init__(self, weight: float, excess_usd: float, share_usd_per_hour: float) -> None:
        self.weight, self._excess, self._share = weight, excess_usd, share_usd_per_hour
        self.rate = self._at_s = 0.0
        self._known: tuple[float, float] | None = None
        """The last score, and for when."""

    def now(self, now_s: float) -> float:
        """Returns the score of what it holds."""
        if self._known is None or self._known[0] != now_s:
            self._known = now_s, self.score(now_s)
        return self._known[1]

    def score(self, now_s: float, more: float = 0.0) -> float:
        return score_of(self.rate + more, self._excess_at(now_s), self.weight)

    def _excess_at(self, now_s: float) -> float:
        excess = self._excess + (self.rate - self._share) * (now_s - self._at_s) / 3600.0
        return max(-LAG_H * self._share, excess)

    def change(self, now_s: float, usd_per_hour: float) -> None:
        self._excess = self._excess_at(now_s)
        self._at_s = now_s
        self.rate = max(0.0, self.rate + usd_per_hour)
        self._known = None


_Queued = tuple[float, int, Waiter, int]
"""Since when it waits, id, experiment, runs."""


class _Turn:
    """A run that holds devices while the queue is played."""

    __slots__ = ("claim", "end_s", "is_over", "yields_s")

    def __init__(self, claim: Holder | Waiter, end_s: float, yields_s: float) -> None:
        self.claim, self.end_s, self.yields_s = claim, end_s, yields_s
        self.is_over = False


class _Play:
    """The queue played forward once, with one end of all durations."""

    def __init__(self, outlook: Outlook, seconds: Callable[[Seconds], float]) -> None:
        self._outlook, self._seconds = outlook, seconds
        self._free = dict(outlook.capacity.devices)
        self._events: list[tuple[float, int, _Turn]] = []
        """When a run ends, or may first stop for others."""
        self._number = 0
        self._turns: defaultdict[Lane, list[_Turn]] = defaultdict(list)
        self._held: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._queues: defaultdict[Lane, dict[tuple[str, str, int], list[_Queued]]] = defaultdict(dict)
        """Waiting runs as heaps by age, of a project, user and priority each."""
        self._projects: dict[tuple[str, Lane], _Node] = {}
        self._users: dict[tuple[str, str, Lane], _Node] = {}
        self._set_nodes()

    def _terms(self, project: str) -> ProjectTerms:
        return self._outlook.terms.get(project, _DEFAULT)

    def _set_nodes(self) -> None:
        """Makes the tree of shares of each lane."""
        outlook = self._outlook
        claims: list[Holder | Waiter] = [*outlook.holders, *outlook.waiters]
        active: dict[Lane, dict[str, set[str]]] = {}
        for each in claims:
            active.setdefault(each.lane, {}).setdefault(each.project, set()).add(each.user)
        used = by_project(outlook.usage, outlook.now_s)
        for lane, projects in active.items():
            there = outlook.capacity.devices.get(lane, 0.0) * outlook.capacity.price(lane.hardware)
            weights = {name: self._terms(name).weight for name in projects}
            of_projects = excesses(weights, {name: used.get((name, lane), 0.0) for name in projects}, there)
            for name, users in projects.items():
                share = there * weights[name] / math.fsum(weights.values())
                self._projects[name, lane] = _Node(weights[name], of_projects[name], share)
                usages = {user: outlook.usage.by_user.get((name, user, lane), Usage()) for user in users}
                amounts = {user: decayed(usage, outlook.now_s) for user, usage in usages.items()}
                of_users = excesses(dict.fromkeys(amounts, 1.0), amounts, share)
                for user, excess in of_users.items():
                    self._users[name, user, lane] = _Node(1.0, excess, share / len(users))

    def _nodes(self, claim: Holder | Waiter) -> tuple[_Node, _Node]:
        """Returns the project and the user of a run."""
        return self._projects[claim.project, claim.lane], self._users[claim.project, claim.user, claim.lane]

    def run(self, wanted: Set[int]) -> dict[int, float]:
        """Returns the seconds until the next run of experiments starts; without those that never do."""
        found: dict[int, float] = {}
        lanes = {waiter.lane for waiter in self._outlook.waiters if waiter.experiment_id in wanted}
        for holder in self._outlook.holders:
            end_s = self._seconds(holder.remaining) if holder.lane in lanes else math.inf
            self._hold(holder, 0.0, end_s, holder.yields_s)
        for waiter in self._outlook.waiters:
            if waiter.lane not in lanes:
                continue
            runs = waiter.runs
            if waiter.by_s is not None:
                begin_s = found[waiter.experiment_id] = max(0.0, waiter.by_s)
                self._hold(waiter, 0.0, begin_s + self._seconds(waiter.duration), None)
                runs -= 1
            self._wait(waiter, waiter.since_s, runs)
        for lane in list(self._queues):
            self._fill(lane, 0.0, found)
        missing = wanted - found.keys()
        for _ in range(MOST_EVENTS):
            if not self._events or not missing:
                break
            at_s, _, turn = heapq.heappop(self._events)
            if turn.is_over:
                continue
            if at_s >= turn.end_s:
                self._end(turn, at_s)
            self._fill(turn.claim.lane, at_s, found)
            missing -= found.keys()
        return found

    def _hold(self, claim: Holder | Waiter, at_s: float, end_s: float, yields_s: float | None) -> None:
        turn = _Turn(claim, end_s, math.inf if yields_s is None else yields_s)
        self._turns[claim.lane].append(turn)
        for event_s in () if end_s == math.inf else {end_s, min(end_s, turn.yields_s)}:
            self._number += 1
            heapq.heappush(self._events, (event_s, self._number, turn))
        self._change(claim, at_s, +1)

    def _end(self, turn: _Turn, at_s: float) -> None:
        turn.is_over = True
        self._turns[turn.claim.lane].remove(turn)
        self._change(turn.claim, at_s, -1)

    def _change(self, claim: Holder | Waiter, at_s: float, sign: int) -> None:
        devices, hardware = sign * claim.devices, claim.lane.hardware
        rate = devices * self._outlook.capacity.price(hardware)
        self._free[claim.lane] = self._free.get(claim.lane, 0.0) - devices
        self._held[claim.project, hardware] += devices
        for node in self._nodes(claim):
            node.change(at_s, rate)

    def _fill(self, lane: Lane, at_s: float, found: dict[int, float]) -> None:
        """Starts runs on what is free in a lane, in their order."""
        queues = self._queues[lane]
        passed: set[tuple[str, str, int]] = set()
        asked = 0
        while True:
            heads = [
                (self._order(queue[0], at_s), owner)
                for owner, queue in queues.items()
                if queue and owner not in passed and self._may_start(queue[0][2])
            ]
            if not heads:
                return
            _, owner = min(heads)
            since_s, _, waiter, runs = queues[owner][0]
            fits = waiter.devices <= self._free.get(lane, 0.0) + ROUNDING
            if not fits and asked < MOST_ASKED:
                asked += 1
                fits = self._reclaim(waiter, at_s)
            if not fits:
                if asked >= MOST_ASKED and self._free.get(lane, 0.0) <= ROUNDING:
                    return
                if self._outlook.now_s + at_s - since_s >= PATIENCE_S:
                    return  # What is free is kept for it.
                passed.add(owner)
                continue
            heapq.heappop(queues[owner])
            found.setdefault(waiter.experiment_id, at_s)
            yields_s = None if waiter.yields_s is None else at_s + waiter.yields_s
            self._hold(waiter, at_s, at_s + self._seconds(waiter.duration), yields_s)
            self._wait(waiter, self._outlook.now_s + at_s, runs - 1)

    def _wait(self, waiter: Waiter, since_s: float, runs: int) -> None:
        if runs > 0:
            owner = waiter.project, waiter.user, waiter.priority
            queue = self._queues[waiter.lane].setdefault(owner, [])
            heapq.heappush(queue, (since_s, waiter.experiment_id, waiter, runs))

    def _reclaim(self, waiter: Waiter, at_s: float) -> bool:
        """Stops runs that may yield for one that waits; False = they are too few."""
        rate = waiter.devices * self._outlook.capacity.price(waiter.lane.hardware)
        project, user = self._nodes(waiter)
        own, own_user = project.score(at_s, rate), user.score(at_s, rate)
        able = [turn for turn in self._turns[waiter.lane] if turn.yields_s <= at_s]
        taken: list[_Turn] = []
        needed = waiter.devices - self._free.get(waiter.lane, 0.0)
        more: defaultdict[_Node, float] = defaultdict(float)
        for turn in sorted(able, key=lambda turn: self._yielding(turn, at_s)):
            if needed <= ROUNDING:
                break
            claim = turn.claim
            if claim.priority > waiter.priority:
                continue
            lost = claim.devices * self._outlook.capacity.price(claim.lane.hardware)
            same = claim.project == waiter.project
            node = self._nodes(claim)[same]
            if claim.priority == waiter.priority and (
                node is user or node.score(at_s, more[node] - lost) < (own_user if same else own)
            ):
                continue
            more[node] -= lost
            needed -= claim.devices
            taken.append(turn)
        if needed > ROUNDING:
            return False
        for turn in taken:
            self._end(turn, at_s)
            claim = turn.claim
            if isinstance(claim, Waiter):  # Its experiment has one more run that waits.
                self._wait(claim, self._outlook.now_s + at_s, 1)
        return True

    def _yielding(self, turn: _Turn, at_s: float) -> tuple[float, ...]:
        """Sorts by who stops first."""
        claim = turn.claim
        project, user = self._nodes(claim)
        return claim.priority, -project.now(at_s), -user.now(at_s), -turn.end_s

    def _order(self, queued: _Queued, at_s: float) -> tuple[float, ...]:
        since_s, id, waiter, _ = queued
        guaranteed = self._terms(waiter.project).guaranteed.get(waiter.lane.hardware, 0.0)
        held = self._held[waiter.project, waiter.lane.hardware]
        is_old = self._outlook.now_s + at_s - since_s >= PROMOTED_AFTER_S
        return (
            held + waiter.devices > guaranteed + ROUNDING,
            -max(waiter.priority, PROMOTED_TO) if is_old else -waiter.priority,
            *(node.now(at_s) for node in self._nodes(waiter)),
            since_s,
            id,
        )

    def _may_start(self, waiter: Waiter) -> bool:
        terms, hardware = self._terms(waiter.project), waiter.lane.hardware
        ceiling = terms.ceiling.get(hardware, math.inf)
        held = self._held[waiter.project, hardware]
        return terms.holds is None and held + waiter.devices <= ceiling + ROUNDING


@dataclass(frozen=True, slots=True)
class Calibration:
    """By how much intervals were too narrow, by the reason of the wait.

    Attributes:
        early, late: logarithms of real waits over forecast earliest and latest ones, the newest last.
    """

    early: Mapping[WaitingReason, tuple[float, ...]] = field(default_factory=dict)
    late: Mapping[WaitingReason, tuple[float, ...]] = field(default_factory=dict)

    def learned(self, reason: WaitingReason, forecast: Start, waited_s: float) -> Calibration:
        """Returns the calibration with one more start.

        Args:
            reason: why the run waited when its start was forecast.
            forecast: what was forecast, before calibration.
            waited_s: seconds from the forecast to the start.
        """
        if not math.isfinite(forecast.latest):
            return self
        early = (*self.early.get(reason, ()), _log_ratio(waited_s, forecast.earliest))
        late = (*self.late.get(reason, ()), _log_ratio(waited_s, forecast.latest))
        return Calibration(
            {**self.early, reason: early[-REMEMBERED:]}, {**self.late, reason: late[-REMEMBERED:]}
        )

    def widened(self, reason: WaitingReason, forecast: Start) -> Start:
        """Returns the interval into which `COVERAGE` of the starts fall."""
        if len(self.early.get(reason, ())) < FEWEST:
            early, late = -math.log(UNCALIBRATED), math.log(UNCALIBRATED)
        else:
            tail = (1.0 - COVERAGE) / 2.0
            early, late = _quantile(self.early[reason], tail), _quantile(self.late[reason], 1.0 - tail)
        earliest = max(0.0, (forecast.earliest + GRAIN_S) * math.exp(early) - GRAIN_S)
        latest = max(earliest, (forecast.latest + GRAIN_S) * math.exp(late) - GRAIN_S)
        return Start(earliest, min(max(forecast.median, earliest), latest), latest)


def _log_ratio(waited_s: float, forecast_s: float) -> float:
    return math.log((waited_s + GRAIN_S) / (forecast_s + GRAIN_S))


def _quantile(values: Sequence[float], part: float) -> float:
    """Returns the quantile with the correction for a finite sample, outwards."""
    ordered, count = sorted(values), len(values)
    rank = math.ceil((count + 1) * part) if part > 0.5 else math.floor((count + 1) * part)
    return ordered[min(count, max(1, rank)) - 1]
