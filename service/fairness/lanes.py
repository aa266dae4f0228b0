"""Who holds what in each lane while a pass is made, who waits there, and who may stop.

A lane has projects, a project has users, and a user has buckets of waiting runs; yielders are running runs
that may stop for others. `Lanes` counts what is given out and taken back; `allowances` and `preemptions`
choose.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
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
    waits_since_s,
)


class QueuedDemand(NamedTuple):
    """A demand of an experiment in a queue; sorts by age."""

    since_s: float
    id: int
    number: int
    claimant: Claimant
    demand: Demand


AGE = itemgetter(0, 1, 2)

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
    rate: float = 0.0
    excess: float = 0.0
    users: dict[str, UserLane] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)
    """Fewest devices of a run that waits, by what its priority counts as."""

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


@dataclass(slots=True, eq=False)
class RunBucket:
    """Waiting runs of one user, priority, lane and size; the oldest first."""

    user: UserLane
    priority: int
    devices: float
    closed: WaitingReason | None = None  # Why none of them starts in this pass
    entries: list[QueuedDemand] = field(default_factory=list)  # As a heap
    taken: int = 0  # Runs that the first of them has started

    def first(self) -> QueuedDemand | None:
        """Returns the oldest experiment with a run that may start; None = there is none."""
        return self.entries[0] if self.entries and self.closed is None else None

    def take(self) -> None:
        self.taken += 1
        if self.taken >= self.entries[0].demand.waiting:
            heapq.heappop(self.entries)
            self.taken = 0


class Yielder:
    """Running runs of an experiment that may stop: `left` have worked for a useful time, `early` have not."""

    __slots__ = ("claimant", "demand", "early", "left", "rate", "user")

    def __init__(self, claimant: Claimant, demand: Demand, user: UserLane, rate: float) -> None:
        self.claimant, self.demand, self.user, self.rate = claimant, demand, user, rate
        self.left = demand.running if demand.yieldable is None else min(demand.running, demand.yieldable)
        self.early = demand.running - self.left

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts by who stops first: low priority, of useful work, high score, young."""
        return (
            self.claimant.priority,
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
        own = yielder.claimant.priority
        priority, rate = self.least.get(name, (own, yielder.rate))
        self.least[name] = min(priority, own), min(rate, yielder.rate)

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
    def __init__(self, situation: Situation) -> None:
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
        self.given: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        """Devices that experiments hold, by id and hardware."""
        self.started: Counter[tuple[int, Lane, float]] = Counter()
        """Runs that the pass has started on free devices, by experiment, lane and devices of one."""
        self.claimants = situation.claimants
        holders: list[tuple[int, int, Claimant, Demand, UserLane]] = []
        for claimant in situation.claimants:
            for number, demand in enumerate(claimant.demands):
                if not (demand.running or demand.waiting):
                    continue  # Not active: its project and user take no part unless they have others.
                user = self._user(lane_of(claimant, demand), claimant.project, claimant.user)
                if demand.running:
                    holders.append((claimant.id, number, claimant, demand, user))
                if demand.waiting:
                    priority = self.priority(claimant)
                    user.project.waits(priority, demand.devices)
                    entry = QueuedDemand(waits_since_s(claimant), claimant.id, number, claimant, demand)
                    heapq.heappush(user.bucket(priority, demand.devices).entries, entry)
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
                self._add_use_of_users(lane, project)

    def _add(self, lane: Lane, devices: float) -> LaneState:
        self.states[lane] = LaneState(lane, devices, self.capacity.price(lane.hardware), devices)
        return self.states[lane]

    def _project(self, lane: Lane, name: str) -> ProjectLane:
        # Devices that do not exist are a lane as well: those who ask for them are told so.
        projects = (self.states.get(lane) or self._add(lane, 0.0)).projects
        if name not in projects:
            terms = self.terms.get(name, _DEFAULT)
            projects[name] = ProjectLane(name, terms, self._held[name])
        return projects[name]

    def _user(self, lane: Lane, project_name: str, name: str) -> UserLane:
        project = self._project(lane, project_name)
        if name not in project.users:
            project.users[name] = UserLane(project, name)
        return project.users[name]

    def _add_use_of_users(self, lane: Lane, project: ProjectLane) -> None:
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

    def priority(self, claimant: Claimant) -> int:
        """Returns what its priority counts as for its turn."""
        is_old = self.now_s - waits_since_s(claimant) >= PROMOTED_AFTER_S
        return max(claimant.priority, PROMOTED_TO) if is_old else claimant.priority

    def _hold(self, claimant: Claimant, demand: Demand, user: UserLane) -> None:
        state = self.states[lane_of(claimant, demand)]
        devices = demand.running * demand.devices
        self.change(user, state, devices, demand.running)
        self.given[claimant.id][demand.hardware] += devices
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
