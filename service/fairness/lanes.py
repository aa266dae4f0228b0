"""Who holds what in each lane while a pass is made, who waits there, and who may stop.

A lane has projects, a project has users, and a user has buckets of waiting runs; yielders are running runs
that may stop for others. `Lanes` counts what is given out and taken back; `allowances` and `preemptions`
choose.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import itemgetter
from typing import NamedTuple

from service.fairness.shares import by_project, decayed, excesses, score_of
from service.fairness.state import (
    OVERDUE_AFTER_S,
    PROMOTED_AFTER_S,
    PROMOTED_TO,
    ROUNDING,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    WaitingReason,
    lane_of,
    permitted,
    waits_since_s,
)


class QueuedDemand(NamedTuple):
    """A demand of an experiment in a queue; sorts by age."""

    since_s: float
    id: int
    number: int
    claimant: Claimant
    demand: Demand


Queues = dict[tuple[int, float], list[QueuedDemand]]  # A user's waiting runs by age, by priority and size
AGE = itemgetter(0, 1, 2)


class Backlog:
    """Experiments that have never started a run, kept in order between passes.

    A pass reads only the heads of the queues whose turn comes, so its time does not grow with them.
    """

    def __init__(self) -> None:
        self._claimants: dict[int, Claimant] = {}
        self._lanes: dict[Lane, dict[str, dict[str, Queues]]] = {}
        self._sizes: dict[tuple[Lane, str], Counter[tuple[int, float]]] = {}

    def __len__(self) -> int:
        return len(self._claimants)

    def __iter__(self) -> Iterator[Claimant]:
        return iter(self._claimants.values())

    def put(self, claimant: Claimant) -> None:
        """Adds or replaces an experiment; ValueError if one of its runs has started."""
        if claimant.served_s is not None or any(demand.running for demand in claimant.demands):
            raise ValueError(f"experiment {claimant.id} has started; pass it among the claimants")
        self.remove(claimant.id)
        self._claimants[claimant.id] = claimant
        for number, demand in enumerate(claimant.demands):
            if demand.waiting:
                lane, key = lane_of(claimant, demand), (claimant.priority, demand.devices)
                users = self._lanes.setdefault(lane, {}).setdefault(claimant.project, {})
                queue = users.setdefault(claimant.user, {}).setdefault(key, [])
                insort(queue, QueuedDemand(claimant.queued_s, claimant.id, number, claimant, demand), key=AGE)
                self._sizes.setdefault((lane, claimant.project), Counter())[key] += 1

    def remove(self, experiment_id: int) -> None:
        claimant = self._claimants.pop(experiment_id, None)
        if claimant is None:
            return
        for number, demand in enumerate(claimant.demands):
            if demand.waiting:
                lane, key = lane_of(claimant, demand), (claimant.priority, demand.devices)
                users = self._lanes[lane][claimant.project]
                queue = users[claimant.user][key]
                del queue[bisect_left(queue, (claimant.queued_s, claimant.id, number), key=AGE)]
                sizes = self._sizes[lane, claimant.project]
                sizes[key] -= 1
                if not sizes[key]:
                    del sizes[key]
                if not queue:
                    del users[claimant.user][key]
                if not users[claimant.user]:
                    del users[claimant.user]
                if not users:
                    del self._lanes[lane][claimant.project], self._sizes[lane, claimant.project]

    def projects(self) -> Iterator[tuple[Lane, str, Collection[tuple[int, float]]]]:
        """Yields (lane, project, which priorities and sizes its runs have)."""
        for (lane, project), sizes in self._sizes.items():
            yield lane, project, sizes.keys()

    def users(self, lane: Lane, project: str) -> Mapping[str, Queues]:
        return self._lanes.get(lane, {}).get(project, {})


_DEFAULT = ProjectTerms()


@dataclass(slots=True, eq=False)
class UserLane:
    project: ProjectLane
    name: str
    rate: float = 0.0
    held: float = 0.0
    excess: float = 0.0
    buckets: dict[int, dict[float, RunBucket]] = field(default_factory=dict)
    """Waiting runs by what their priority counts as, and by the devices of one."""

    def score(self, more: float = 0.0) -> float:
        self.project.open()
        return score_of(self.rate + more, self.excess, 1.0)

    def bucket(self, priority: int, devices: float) -> RunBucket:
        buckets = self.buckets.setdefault(priority, {})
        if devices not in buckets:
            buckets[devices] = RunBucket(self, priority, devices)
        return buckets[devices]

    def waiting(self) -> Iterator[tuple[RunBucket, QueuedDemand]]:
        """Yields each bucket with the oldest experiment in it that may start a run."""
        for buckets in self.buckets.values():
            for bucket in buckets.values():
                if (entry := bucket.first()) is not None:
                    yield bucket, entry


@dataclass(slots=True, eq=False)
class ProjectLane:
    name: str
    terms: ProjectTerms
    held: defaultdict[str, float]  # Devices in all pools, by hardware
    opened: Callable[[ProjectLane], None] | None
    rate: float = 0.0
    excess: float = 0.0
    users: dict[str, UserLane] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)
    """Fewest devices of a run that waits, by what its priority counts as."""

    def open(self) -> None:
        """Adds its users in the backlog, and what all of them have used."""
        if self.opened is not None:
            opened, self.opened = self.opened, None
            opened(self)

    @property
    def weight(self) -> float:
        """Returns 0 where it starts nothing more: what it has left is for the others."""
        return self.terms.weight if self.terms.holds is None else 0.0

    def score(self, more: float = 0.0) -> float:
        return score_of(self.rate + more, self.excess, self.terms.weight)

    def guaranteed(self, hardware: str) -> float:
        return self.terms.guaranteed.get(hardware, 0.0)

    def waits(self, priority: int, devices: float) -> None:
        self.sizes[priority] = min(devices, self.sizes.get(priority, devices))

    def heads(self) -> Iterator[tuple[tuple[float, ...], RunBucket, QueuedDemand]]:
        for user in self.users.values():
            for bucket, entry in user.waiting():
                yield (-bucket.priority, user.score(), *AGE(entry)), bucket, entry


class RunBucket:
    """Waiting runs of one user, priority, lane and size; the oldest first."""

    __slots__ = ("_at", "_new", "_old", "_stop", "_taken", "closed", "devices", "priority", "user")

    def __init__(self, user: UserLane, priority: int, devices: float) -> None:
        self.user, self.priority, self.devices = user, priority, devices
        self._new: list[QueuedDemand] = []  # From the situation, as a heap once the first is asked for
        self._old: list[QueuedDemand] = []  # From the backlog, in order; those in [_at, _stop) remain
        self._at = self._stop = -1
        self._taken = 0
        self.closed: WaitingReason | None = None

    def add(self, entry: QueuedDemand) -> None:
        heapq.heappush(self._new, entry)

    def set_backlog(self, queue: list[QueuedDemand], start: int, stop: int) -> None:
        """Adds a part of a queue of the backlog, which is not changed."""
        if self._old:
            for entry in queue[start:stop]:
                self.add(entry)
        else:
            self._old, self._at, self._stop = queue, start, stop

    def first(self) -> QueuedDemand | None:
        """Returns the oldest experiment with a run that may start; None = there is none."""
        if self.closed is not None:
            return None
        old = self._old[self._at] if self._at < self._stop else None
        if not self._new:
            return old
        return self._new[0] if old is None or AGE(self._new[0]) < AGE(old) else old

    def take(self) -> None:
        entry = self.first()
        assert entry is not None
        self._taken += 1
        if self._taken >= entry.demand.startable:
            self.drop()

    def drop(self) -> None:
        if self._new and self.first() is self._new[0]:
            heapq.heappop(self._new)
        else:
            self._at += 1
        self._taken = 0


class Yielder:
    """Running runs of an experiment that may stop: `left` have worked for a useful time, `early` have not."""

    __slots__ = ("claimant", "demand", "early", "left", "priority", "rate", "user")

    def __init__(self, claimant: Claimant, demand: Demand, user: UserLane, rate: float) -> None:
        self.claimant, self.demand, self.user, self.rate = claimant, demand, user, rate
        self.left = demand.running if demand.yieldable is None else min(demand.running, demand.yieldable)
        self.early = demand.running - self.left
        self.priority = permitted(claimant.priority, user.project.terms)

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts by who stops first: low priority, of useful work, high score, young."""
        return (
            self.priority,
            not self.left,
            -self.user.project.score(),
            -self.user.score(),
            -self.claimant.queued_s,
            -self.claimant.id,
        )


@dataclass(slots=True)
class LaneState:
    lane: Lane
    capacity: float
    price: float
    free: float
    pending: float = 0.0  # Devices that become free at a checkpoint, beyond those that a run stopped for
    weight: float = 0.0  # Of all projects
    smallest: float = math.inf  # Fewest devices that a run holds
    reserved_for: int | None = None
    projects: dict[str, ProjectLane] = field(default_factory=dict)
    yielders: dict[str, list[Yielder]] = field(default_factory=dict)  # Running runs that may stop, by project
    least: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The lowest priority of those, and the lowest price per hour, by project."""

    def add(self, yielder: Yielder) -> None:
        name = yielder.user.project.name
        self.yielders.setdefault(name, []).append(yielder)
        priority, rate = self.least.get(name, (yielder.priority, yielder.rate))
        self.least[name] = min(priority, yielder.priority), min(rate, yielder.rate)

    def may_yield(self, name: str, base: int, own: float, mode: Mode) -> bool:
        """Whether it may have runs to give; `base` is the asker's priority, `own` its score among equals."""
        priority, rate = self.least[name]
        return mode is Mode.guaranteed or priority < base or self.projects[name].score(-rate) >= own


class Mode(Enum):
    """By which rule a run takes devices of others."""

    guaranteed = auto()  # Its project is guaranteed them
    share = auto()  # With them, its score is at most theirs without them
    large = auto()
    """It would still come first after they stop, and needs those of several; equal scores go by name."""


class Lanes:
    def __init__(self, situation: Situation, backlog: Backlog) -> None:
        self.now_s = situation.now_s
        self.terms = situation.terms
        self.capacity = situation.capacity
        self.states: dict[Lane, LaneState] = {}
        for lane, devices in sorted(self.capacity.devices.items()):
            self._add(lane, devices)
        self._usage = situation.usage
        self.used = by_project(situation.usage, situation.now_s)  # USD used lately, by (project, lane)
        self._held: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Devices of projects, by hardware."""
        self.runs: Counter[tuple[str, str]] = Counter()  # Runs that hold devices, by (project, user)
        self.given: dict[int, dict[str, float]] = {}  # Devices that experiments hold, by id and hardware
        self.started: Counter[tuple[int, Lane, float]] = Counter()
        """Runs that the pass has started on free devices, by experiment, lane and devices of one."""
        self.claimants, self.backlog = situation.claimants, backlog
        holders: list[tuple[int, int, Claimant, Demand, UserLane]] = []
        for claimant in situation.claimants:
            for number, demand in enumerate(claimant.demands):
                if not (demand.running or demand.waiting):
                    continue  # Not active: its project and user take no part unless they have others.
                user = self._user(lane_of(claimant, demand), claimant.project, claimant.user)
                if demand.running:
                    holders.append((claimant.id, number, claimant, demand, user))
                if demand.waiting:
                    priority = self.priority(claimant, user.project.terms)
                    user.project.waits(priority, demand.devices)
                    user.bucket(priority, demand.devices).add(
                        QueuedDemand(waits_since_s(claimant), claimant.id, number, claimant, demand)
                    )
        for lane, name, sizes in backlog.projects():
            project = self._project(lane, name)
            for priority, devices in sizes:
                for counts_as in (priority, PROMOTED_TO) if priority < PROMOTED_TO else (priority,):
                    project.waits(permitted(counts_as, project.terms), devices)
        # Sums of floating-point numbers depend on their order, and nothing may depend on the claimants'.
        for *_, claimant, demand, user in sorted(holders, key=lambda each: each[:2]):
            self._hold(claimant, demand, user)
        for lane, state in self.states.items():
            state.projects = dict(sorted(state.projects.items()))
            used = {name: self.used.get((name, lane), 0.0) for name in state.projects}
            weights = {name: project.weight for name, project in state.projects.items()}
            state.weight = math.fsum(weights.values())
            found = excesses(weights, used, state.capacity * state.price)
            for name, project in state.projects.items():
                project.excess = found.get(name, 0.0)

    def _add(self, lane: Lane, devices: float) -> LaneState:
        self.states[lane] = LaneState(lane, devices, self.capacity.price(lane.hardware), devices)
        return self.states[lane]

    def _project(self, lane: Lane, name: str) -> ProjectLane:
        # Devices that do not exist are a lane as well: those who ask for them are told so.
        projects = (self.states.get(lane) or self._add(lane, 0.0)).projects
        if name not in projects:
            terms = self.terms.get(name, _DEFAULT)
            projects[name] = ProjectLane(
                name, terms, self._held[name], lambda project: self._open(lane, project)
            )
        return projects[name]

    def _user(self, lane: Lane, project_name: str, name: str) -> UserLane:
        project = self._project(lane, project_name)
        if name not in project.users:
            project.users[name] = UserLane(project, name)
        return project.users[name]

    def _open(self, lane: Lane, project: ProjectLane) -> None:
        """Adds a project's users in the backlog; the old part of each queue counts with a higher priority."""
        for name, queues in self.backlog.users(lane, project.name).items():
            user = self._user(lane, project.name, name)
            for (priority, devices), queue in queues.items():
                bounds = [len(queue)]
                if priority < PROMOTED_TO:
                    bounds.insert(0, bisect_right(queue, self.now_s - PROMOTED_AFTER_S, key=itemgetter(0)))
                start = 0
                for end in bounds:
                    if end > start:
                        counts_as = self.priority(queue[start].claimant, project.terms)
                        user.bucket(counts_as, devices).set_backlog(queue, start, end)
                        start = end
        project.users = dict(sorted(project.users.items()))
        used = {name: self.used_by(lane, project.name, name) for name in project.users}
        found = excesses(dict.fromkeys(used, 1.0), used, self.entitled(self.states[lane], project))
        for name, user in project.users.items():
            user.excess = found[name]
            if self._is_overdue(lane, user):
                user.excess = min(found.values())

    def _is_overdue(self, lane: Lane, user: UserLane) -> bool:
        usage = self._usage.get((user.project.name, user.name, lane))
        since_s = min((entry.since_s for _, entry in user.waiting()), default=math.inf)
        since_s = max(since_s, usage.at_s if usage is not None else since_s)
        return user.held <= ROUNDING and self.now_s - since_s >= OVERDUE_AFTER_S

    def used_by(self, lane: Lane, project: str, user: str) -> float:
        usage = self._usage.get((project, user, lane))
        return 0.0 if usage is None else decayed(usage, self.now_s)

    def entitled(self, state: LaneState, project: ProjectLane) -> float:
        return state.capacity * state.price * project.weight / (state.weight or 1.0)

    def priority(self, claimant: Claimant, terms: ProjectTerms) -> int:
        """Returns what its priority counts as for its turn."""
        is_old = self.now_s - waits_since_s(claimant) >= PROMOTED_AFTER_S
        return permitted(max(claimant.priority, PROMOTED_TO) if is_old else claimant.priority, terms)

    def _hold(self, claimant: Claimant, demand: Demand, user: UserLane) -> None:
        state = self.states[lane_of(claimant, demand)]
        devices = demand.running * demand.devices
        self.change(user, state, devices, demand.running)
        given = self.given.setdefault(claimant.id, {})
        given[demand.hardware] = given.get(demand.hardware, 0.0) + devices
        state.free -= devices
        state.smallest = min(state.smallest, demand.devices)
        if claimant.preemptible and demand.devices > 0:
            state.add(Yielder(claimant, demand, user, demand.devices * state.price))

    def change(self, user: UserLane, state: LaneState, devices: float, runs: int) -> None:
        """Counts devices as held by a user, or (negative) as given back."""
        user.held += devices
        user.rate += devices * state.price
        user.project.rate += devices * state.price
        user.project.held[state.lane.hardware] += devices
        self.runs[user.project.name, user.name] += runs

    def no_turn(self, state: LaneState, user: UserLane) -> WaitingReason:
        project = user.project
        if state.reserved_for is not None:
            return WaitingReason.reserved
        entitled = self.entitled(state, project)
        project.open()
        over = project.rate > entitled or user.rate > entitled / len(project.users)
        return WaitingReason.share if over else WaitingReason.busy

    def limit(self, user: UserLane, hardware: str, devices: float) -> WaitingReason | None:
        terms = user.project.terms
        if terms.holds is not None:
            return WaitingReason.budget
        cap, ceiling = terms.concurrent_runs_per_user, terms.ceiling.get(hardware)
        if cap is not None and self.runs[user.project.name, user.name] >= cap:
            return WaitingReason.user_cap
        if ceiling is not None and user.project.held[hardware] + devices > ceiling + ROUNDING:
            return WaitingReason.ceiling
        return None
