"""A pass over the devices: who may hold how many now, and who gives some back for whom.

Every pass starts from what is held, so that nothing moves without a reason, and gives out the free devices of
each lane one run at a time; a run gets all its devices at once or none. The next run is chosen

1. for projects that hold fewer devices than they are guaranteed, up to the guarantee,
2. then by priority,
3. then by share: the project with the lowest score in the lane, in it the user with the lowest (`tree`),
4. then by age: which of the user's experiments has waited longest since it last got devices, or since it was
   submitted. So a grid of 1,000 runs does not hold up the user's own small experiments.

**Preemption.** A run that finds too few free devices takes those of preemptible runs, which stop at their
next checkpoint; until then both count as gone, so that the next passes decide the same. It may take those of

- runs that hold lent guarantees, where its project is guaranteed the devices;
- runs of lower priority;
- runs of another project (or another user of its own) whose score is no lower without the run than its own is
  with it. Who has as much is therefore never preempted, and no pair of runs can preempt each other in turn.

A project is not preempted below what it is guaranteed. Only runs that have worked for a useful time since
they last started yield (`may_yield`), except to a newcomer, whose user holds nothing of the lane, and to a
guarantee: those start within one checkpoint interval.

**Large runs.** What is free goes to whoever can use it at once, so that small runs would pass a large one
forever. So a large run (of more devices than the smallest run there) whose turn it is and which has waited
for `PATIENCE_S` is not passed by others of its project, whose score sinks until it comes first in the lane.
Then the run may take the devices of all whose score is higher even without them than its own, also of
smaller runs that have just started: those come after it once they have stopped, and do not start again in
its place. Where others' runs are in its way that do not yield, whoever fits
passes, until it has waited for `DRAINED_AFTER_S`: from then on devices that become free are kept for it. When
a large run ends early, the next one of its experiment goes on with its devices, unless a run that waits could
take them from it.

**Old runs.** An experiment of which nothing has started for `PROMOTED_AFTER_S` counts with at least the
priority `PROMOTED_TO` for its turn, though not for preempting others, except as a large run: low priority
waits longer, not forever.

A pass costs O(1) for each project in each lane, and O(log n) for each run that starts; a `Backlog` saves the
rest.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from operator import itemgetter

from service.fairness.state import (
    MOST_AHEAD,
    Allowance,
    Claimant,
    Demand,
    Lane,
    Preemption,
    ProjectTerms,
    ShareScore,
    Situation,
    Waiting,
    WaitingReason,
)
from service.fairness.tree import Level, excesses, score_of
from service.fairness.usage import by_project, decayed

PATIENCE_S = 1800.0
"""Time after which a large run that comes first stops others for its devices."""
DRAINED_AFTER_S = 43_200.0
"""Time after which free devices are kept for it also where others' runs end when they end."""
PROMOTED_AFTER_S = 86_400.0
"""Time without a start after which low priority counts as normal."""
PROMOTED_TO = 50
"""Class `normal`."""
USEFUL_S = 1800.0
"""Least time that a run has worked since it last started before it is preempted."""
USEFUL_RESTARTS = 50.0
"""The same, in times of what a restart costs: at most 2% of a run is lost to preemption."""
ROUNDING = 1e-6
"""Parts of devices need not add up exactly."""
_DEFAULT = ProjectTerms()


def may_yield(now_s: float, started_s: float, restart_s: float) -> bool:
    """Returns whether a run may be preempted: whether it has worked long enough since it last started.

    Args:
        now_s: Unix seconds.
        started_s: when its present attempt started.
        restart_s: what stopping and starting again costs it.
    """
    return now_s - started_s >= max(USEFUL_S, USEFUL_RESTARTS * restart_s)


def _permitted(claimant: Claimant, terms: ProjectTerms) -> int:
    """Returns an experiment's priority, or the highest that its project may use where that is lower."""
    most = terms.most_priority
    return claimant.priority if most is None or claimant.priority < most else most


def waits_since_s(claimant: Claimant) -> float:
    """Returns when an experiment last got devices, or joined the queue; Unix seconds."""
    return claimant.queued_s if claimant.served_s is None else max(claimant.queued_s, claimant.served_s)


class _User:
    """A user of one project in one lane, while a pass is made."""

    __slots__ = ("buckets", "excess", "held", "name", "project", "rate", "runs")

    def __init__(self, project: _Project, name: str, runs: Counter[tuple[str, str]]) -> None:
        self.project, self.name = project, name
        self.runs = runs
        """Runs of all users in all lanes, by (project, user)."""
        self.rate = self.held = self.excess = 0.0
        self.buckets: dict[int, dict[float, _Bucket]] = {}
        """Waiting runs by what their priority counts as, and by the devices of one."""

    def score(self, more: float = 0.0) -> float:
        self.project.open()
        return score_of(self.rate + more, self.excess, 1.0)

    def bucket(self, priority: int, devices: float) -> _Bucket:
        return self.buckets.setdefault(priority, {}).setdefault(devices, _Bucket())


class _Project:
    """A project in one lane, while a pass is made."""

    __slots__ = ("_open", "excess", "held", "name", "rate", "sizes", "terms", "users")

    def __init__(
        self,
        name: str,
        terms: ProjectTerms,
        held: defaultdict[str, float],
        opened: Callable[[_Project], None],
    ) -> None:
        self.name, self.terms = name, terms
        self.held = held
        """Devices in all pools, by hardware."""
        self.rate = self.excess = 0.0
        self.users: dict[str, _User] = {}
        self.sizes: dict[int, float] = {}
        """Fewest devices of a run that waits, by what its priority counts as."""
        self._open: Callable[[_Project], None] | None = opened

    def open(self) -> None:
        """Adds its users in the backlog, and what all of them have used."""
        if self._open is not None:
            opened, self._open = self._open, None
            opened(self)

    def score(self, more: float = 0.0) -> float:
        return score_of(self.rate + more, self.excess, self.terms.weight)

    def guaranteed(self, hardware: str) -> float:
        return self.terms.guaranteed.get(hardware, 0.0)

    def waits(self, priority: int, devices: float) -> None:
        """Notes that a run waits."""
        self.sizes[priority] = min(devices, self.sizes.get(priority, devices))


_Entry = tuple[float, int, int, Claimant, Demand]
"""Age, id, number of the demand; claimant, demand."""
_Queues = dict[tuple[int, float], list[_Entry]]
"""Waiting runs of a user in a lane by age, by priority and devices of one."""
_AGE = itemgetter(0, 1, 2)


class Backlog:
    """Experiments that have never started a run, kept in order between passes.

    A pass costs nothing for those whose turn does not come, so that its time does not grow with them.
    """

    def __init__(self) -> None:
        self._claimants: dict[int, Claimant] = {}
        self._lanes: dict[Lane, dict[str, dict[str, _Queues]]] = {}
        self._sizes: dict[tuple[Lane, str], Counter[tuple[int, float]]] = {}

    def __len__(self) -> int:
        return len(self._claimants)

    def __iter__(self) -> Iterator[Claimant]:
        return iter(self._claimants.values())

    def put(self, claimant: Claimant) -> None:
        """Adds an experiment, or replaces it.

        Raises:
            ValueError: one of its runs has started; it belongs to the situation's claimants.
        """
        if claimant.served_s is not None or any(demand.running for demand in claimant.demands):
            raise ValueError(f"experiment {claimant.id} has started; pass it among the claimants")
        self.remove(claimant.id)
        self._claimants[claimant.id] = claimant
        for number, demand in enumerate(claimant.demands):
            if demand.waiting:
                lane, key = _lane(claimant, demand), (claimant.priority, demand.devices)
                users = self._lanes.setdefault(lane, {}).setdefault(claimant.project, {})
                queue = users.setdefault(claimant.user, {}).setdefault(key, [])
                insort(queue, (claimant.queued_s, claimant.id, number, claimant, demand), key=_AGE)
                self._sizes.setdefault((lane, claimant.project), Counter())[key] += 1

    def remove(self, experiment_id: int) -> None:
        """Removes an experiment, if it is there."""
        claimant = self._claimants.pop(experiment_id, None)
        if claimant is None:
            return
        for number, demand in enumerate(claimant.demands):
            if demand.waiting:
                lane, key = _lane(claimant, demand), (claimant.priority, demand.devices)
                users = self._lanes[lane][claimant.project]
                queue = users[claimant.user][key]
                del queue[bisect_left(queue, (claimant.queued_s, claimant.id, number), key=_AGE)]
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

    def users(self, lane: Lane, project: str) -> Mapping[str, _Queues]:
        """Returns what a project's users have in a lane."""
        return self._lanes.get(lane, {}).get(project, {})


def _lane(claimant: Claimant, demand: Demand) -> Lane:
    return Lane(claimant.pool, demand.hardware)


class _Bucket:
    """Waiting runs of one user, priority, lane and size; the oldest first."""

    __slots__ = ("_at", "_new", "_old", "_stop", "_taken", "closed")

    def __init__(self) -> None:
        self._new: list[_Entry] = []
        """From the situation, as a heap once the first is asked for."""
        self._old: list[_Entry] = []
        """From the backlog, in order; those in [_at, _stop) are left."""
        self._at = self._stop = -1
        self._taken = 0
        self.closed: WaitingReason | None = None

    def add(self, entry: _Entry) -> None:
        """Adds an experiment of the situation."""
        heapq.heappush(self._new, entry)

    def set_backlog(self, queue: list[_Entry], start: int, stop: int) -> None:
        """Adds a part of a queue of the backlog, which is not changed."""
        if self._old:
            for entry in queue[start:stop]:
                self.add(entry)
        else:
            self._old, self._at, self._stop = queue, start, stop

    def first(self) -> _Entry | None:
        """Returns the oldest experiment with a run that may start; None = there is none."""
        if self.closed is not None:
            return None
        old = self._old[self._at] if self._at < self._stop else None
        if not self._new:
            return old
        return self._new[0] if old is None or self._new[0][:3] < old[:3] else old

    def take(self) -> None:
        """Counts one run of the first experiment as started."""
        entry = self.first()
        assert entry is not None
        demand = entry[4]
        self._taken += 1
        if self._taken >= (demand.waiting if demand.room is None else min(demand.waiting, demand.room)):
            self.drop()

    def drop(self) -> None:
        """Leaves the first experiment out."""
        if self._new and self.first() is self._new[0]:
            heapq.heappop(self._new)
        else:
            self._at += 1
        self._taken = 0


class _Yielder:
    """Running runs of an experiment that may stop for others."""

    __slots__ = ("claimant", "demand", "early", "left", "priority", "rate", "user")

    def __init__(self, claimant: Claimant, demand: Demand, user: _User, rate: float) -> None:
        self.claimant, self.demand, self.user, self.rate = claimant, demand, user, rate
        self.left = demand.running if demand.yieldable is None else min(demand.running, demand.yieldable)
        """Those that have worked for a useful time."""
        self.early = demand.running - self.left
        """The others."""
        self.priority = _permitted(claimant, user.project.terms)

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


class _Lane:
    """The devices of one lane, while a pass is made."""

    __slots__ = (
        "capacity", "free", "hardware", "least", "pending", "price", "projects", "reserved_for", "smallest",
        "weight", "yielders",
    )  # fmt: skip

    def __init__(self, hardware: str, capacity: float, price: float) -> None:
        self.hardware = hardware
        self.capacity = self.free = capacity
        self.price = price
        self.pending = 0.0
        """Devices that become free at a checkpoint, beyond those that a run stopped for."""
        self.weight = 0.0
        """Of all projects."""
        self.smallest = math.inf
        """Fewest devices that a run holds."""
        self.reserved_for: int | None = None
        self.projects: dict[str, _Project] = {}
        self.yielders: dict[str, list[_Yielder]] = {}
        """Running runs that may stop, by project."""
        self.least: dict[str, tuple[int, float]] = {}
        """The lowest priority of those, and the lowest price per hour, by project."""

    def add(self, yielder: _Yielder) -> None:
        """Adds running runs that may stop."""
        name = yielder.user.project.name
        self.yielders.setdefault(name, []).append(yielder)
        priority, rate = self.least.get(name, (yielder.priority, yielder.rate))
        self.least[name] = min(priority, yielder.priority), min(rate, yielder.rate)

    def may_yield(self, name: str, base: int, own: float, mode: _Mode) -> bool:
        """Returns whether a project may have runs to give; False = surely none.

        Args:
            name: of the project.
            base: priority of the run that asks.
            own: score of its project, with it where shares decide.
            mode: by which rule it asks.
        """
        priority, rate = self.least[name]
        if mode is _Mode.guaranteed or priority < base:
            return True
        return self.projects[name].score(-rate) >= own


class _Mode(Enum):
    """By which rule a run takes devices of others."""

    guaranteed = auto()
    """Its project is guaranteed them."""
    share = auto()
    """Its score with them is no higher than theirs without."""
    large = auto()
    """It comes first, also once they have stopped, and needs those of several; equal scores go by name."""


@dataclass(frozen=True, slots=True)
class Division:
    """What a pass decided.

    Attributes:
        allowances: what experiments may hold, by id; who is missing may hold nothing.
        preemptions: runs that stop at a checkpoint, and for whom.
        free: devices that stay free, by lane; those kept for a large run are not among them.
        reserved_for: experiments for which free devices are kept, by lane.
    """

    allowances: Mapping[int, Allowance]
    preemptions: tuple[Preemption, ...]
    free: Mapping[Lane, float]
    reserved_for: Mapping[Lane, int]
    _pass: _Pass

    def project_score(self, project: str, lane: Lane | None = None) -> ShareScore:
        """Returns the score of an active project after the pass.

        Args:
            project: its name.
            lane: whose score is asked for; None = the sum over all lanes in which it is active.

        Raises:
            KeyError: it neither holds nor wants anything.
        """
        return self._pass.project_score(project, lane)

    def share_errors(self) -> dict[str, float]:
        """Returns how far each active project's part of recent use is from what its weight entitles it to.

        Parts are of what the active projects have used in the lanes in which it is active; positive = more
        than entitled.
        """
        return self._pass.share_errors()

    def user_score(self, project: str, user: str, lane: Lane | None = None) -> ShareScore:
        """Returns the score of an active user inside the project after the pass.

        Args:
            project: of the user.
            user: their name.
            lane: whose score is asked for; None = the sum over all lanes in which the user is active.

        Raises:
            KeyError: the user neither holds nor wants anything.
        """
        return self._pass.user_score(project, user, lane)

    def waiting(self, limit: int | None = None) -> Iterator[Waiting]:
        """Yields the experiments with runs that wait, in the order of their turns, each with why.

        The order is what it is now: it changes with what ends and what is submitted.

        Args:
            limit: most experiments; None = all.
        """
        return self._pass.waiting(limit)


def divide(situation: Situation, backlog: Backlog | None = None) -> Division:
    """Returns who may hold how many devices from now on.

    The result depends on who claims alone: not on the order of claimants, nor on which of them that never
    started a run are in the backlog.

    Args:
        situation: what there is, who runs, and who waits.
        backlog: further ones that wait.
    """
    return _Pass(situation, backlog or Backlog()).run()


class _Outcome(Enum):
    """What became of a run whose turn it was."""

    starts = auto()
    """It has its devices, or will have them at others' checkpoints."""
    waits = auto()
    """It finds too few."""
    saves = auto()
    """It is large and has waited: its project takes no others, until it comes first in the lane."""
    passed_over = auto()
    """It may not start."""


class _Pass:
    """One pass while it is made."""

    def __init__(self, situation: Situation, backlog: Backlog) -> None:
        self._now_s = situation.now_s
        self._terms = situation.terms
        capacity = situation.capacity
        self._lanes = {
            lane: _Lane(lane.hardware, devices, capacity.price(lane.hardware))
            for lane, devices in sorted(capacity.devices.items())
        }
        self._capacity = capacity
        self._usage = situation.usage
        self._used = by_project(situation.usage, situation.now_s)
        self._held: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._runs: Counter[tuple[str, str]] = Counter()
        self._given: dict[int, dict[str, float]] = {}
        self._started: Counter[tuple[int, Lane, float]] = Counter()
        self._claimants, self._backlog = situation.claimants, backlog
        self._preempted: dict[tuple[int, str, int], Preemption] = {}
        self._recent: list[tuple[_Entry, int, _User]] = []
        """Those of which a run started a moment ago, with what their priority counts as."""
        holders: list[tuple[int, int, Claimant, Demand, _User]] = []
        for claimant in situation.claimants:
            self._enter(claimant, holders)
        for lane, name, sizes in backlog.projects():
            project = self._project(lane, name)
            for priority, devices in sizes:
                for counts_as in (priority, PROMOTED_TO) if priority < PROMOTED_TO else (priority,):
                    project.waits(self._at_most(counts_as, project.terms), devices)
        # Sums of floating-point numbers depend on their order, and nothing may depend on the claimants'.
        for *_, claimant, demand, user in sorted(holders, key=lambda each: each[:2]):
            self._hold(claimant, demand, user)
        for lane, state in self._lanes.items():
            state.projects = dict(sorted(state.projects.items()))
            used = {name: self._used.get((name, lane), 0.0) for name in state.projects}
            weights = {name: project.terms.weight for name, project in state.projects.items()}
            state.weight = math.fsum(weights.values())
            found = excesses(weights, used, state.capacity * state.price)
            for name, project in state.projects.items():
                project.excess = found[name]

    def _enter(self, claimant: Claimant, holders: list[tuple[int, int, Claimant, Demand, _User]]) -> None:
        """Adds an experiment to its user's queues, and to the holders."""
        for number, demand in enumerate(claimant.demands):
            if not (demand.running or demand.waiting):
                continue  # Not active: its project and user take no part unless they have others.
            user = self._user(_lane(claimant, demand), claimant.project, claimant.user)
            if demand.running:
                holders.append((claimant.id, number, claimant, demand, user))
            if demand.waiting:
                priority = self._priority(claimant, user.project.terms)
                entry = waits_since_s(claimant), claimant.id, number, claimant, demand
                user.bucket(priority, demand.devices)
                user.project.waits(priority, demand.devices)
                is_recent = claimant.served_s is not None and self._now_s - claimant.served_s < USEFUL_S
                if is_recent and not user.project.guaranteed(demand.hardware):
                    self._recent.append((entry, priority, user))
                else:
                    user.bucket(priority, demand.devices).add(entry)

    def _project(self, lane: Lane, name: str) -> _Project:
        state = self._lanes.get(lane)
        if state is None:  # Nobody has such devices; who asks for them is told so.
            state = self._lanes[lane] = _Lane(lane.hardware, 0.0, self._capacity.price(lane.hardware))
        project = state.projects.get(name)
        if project is None:
            terms = self._terms.get(name, _DEFAULT)
            project = _Project(name, terms, self._held[name], lambda project: self._open(lane, project))
            state.projects[name] = project
        return project

    def _user(self, lane: Lane, project_name: str, name: str) -> _User:
        project = self._project(lane, project_name)
        user = project.users.get(name)
        if user is None:
            user = project.users[name] = _User(project, name, self._runs)
        return user

    def _open(self, lane: Lane, project: _Project) -> None:
        """Adds a project's users in the backlog; the old part of each queue counts with a higher priority."""
        for name, queues in self._backlog.users(lane, project.name).items():
            user = self._user(lane, project.name, name)
            for (priority, devices), queue in queues.items():
                bounds = [len(queue)]
                if priority < PROMOTED_TO:
                    bounds.insert(0, bisect_right(queue, self._now_s - PROMOTED_AFTER_S, key=itemgetter(0)))
                start = 0
                for end in bounds:
                    if end > start:
                        counts_as = self._priority(queue[start][3], project.terms)
                        user.bucket(counts_as, devices).set_backlog(queue, start, end)
                        start = end
        project.users = dict(sorted(project.users.items()))
        used = {name: self._used_by(lane, project.name, name) for name in project.users}
        found = excesses(dict.fromkeys(used, 1.0), used, self._entitled(lane, project))
        for name, user in project.users.items():
            user.excess = found[name]

    def _used_by(self, lane: Lane, project: str, user: str) -> float:
        usage = self._usage.by_user.get((project, user, lane))
        return 0.0 if usage is None else decayed(usage, self._now_s)

    def _entitled(self, lane: Lane, project: _Project) -> float:
        """Returns the price per hour of the devices that a project's weight entitles it to."""
        state = self._lanes[lane]
        return state.capacity * state.price * project.terms.weight / state.weight

    def _priority(self, claimant: Claimant, terms: ProjectTerms) -> int:
        """Returns what its priority counts as for its turn."""
        priority = claimant.priority
        if priority < PROMOTED_TO and self._now_s - waits_since_s(claimant) >= PROMOTED_AFTER_S:
            priority = PROMOTED_TO
        return self._at_most(priority, terms)

    @staticmethod
    def _at_most(priority: int, terms: ProjectTerms) -> int:
        return priority if terms.most_priority is None else min(priority, terms.most_priority)

    def _hold(self, claimant: Claimant, demand: Demand, user: _User) -> None:
        state = self._lanes[_lane(claimant, demand)]
        devices = demand.running * demand.devices
        self._change(user, state, devices, demand.running)
        given = self._given.setdefault(claimant.id, {})
        given[demand.hardware] = given.get(demand.hardware, 0.0) + devices
        state.free -= devices
        state.smallest = min(state.smallest, demand.devices)
        if claimant.preemptible and demand.devices > 0:
            yielder = _Yielder(claimant, demand, user, demand.devices * state.price)
            state.add(yielder)

    def _change(self, user: _User, state: _Lane, devices: float, runs: int) -> None:
        """Counts devices as held by a user, or (negative) as given back."""
        user.held += devices
        user.rate += devices * state.price
        user.project.rate += devices * state.price
        user.project.held[state.hardware] += devices
        self._runs[user.project.name, user.name] += runs

    def run(self) -> Division:
        """Returns what this pass decides; called once."""
        for name in sorted(self._terms):
            for hardware in sorted(self._terms[name].guaranteed):
                self._give_guaranteed(name, hardware)
        for entry, priority, user in sorted(self._recent, key=lambda each: each[0][:3]):
            self._go_on(entry, priority, user)
        priorities = {
            priority
            for state in self._lanes.values()
            for project in state.projects.values()
            for priority in project.sizes
        }
        for priority in sorted(priorities, reverse=True):
            for lane, state in sorted(self._lanes.items()):
                self._give_by_share(lane, state, priority)
        return Division(
            {id: Allowance(devices) for id, devices in sorted(self._given.items())},
            tuple(self._preempted[key] for key in sorted(self._preempted)),
            {
                lane: max(0.0, state.free) if state.reserved_for is None else 0.0
                for lane, state in self._lanes.items()
                if lane in self._capacity.devices
            },
            {
                lane: state.reserved_for
                for lane, state in self._lanes.items()
                if state.reserved_for is not None
            },
            self,
        )

    def _give_guaranteed(self, name: str, hardware: str) -> None:
        """Gives a project the devices of a kind that it is guaranteed and has a use for."""
        places = [
            (lane, state, state.projects[name])
            for lane, state in self._lanes.items()
            if lane.hardware == hardware and name in state.projects
        ]
        for _, _, project in places:
            project.open()
        while True:
            found = [
                (-priority, user.score(), entry[:3], user.name, lane, state, priority, user, devices, bucket)
                for lane, state, project in places
                for user in project.users.values()
                for priority, buckets in user.buckets.items()
                for devices, bucket in buckets.items()
                if project.held[hardware] + devices <= project.guaranteed(hardware) + ROUNDING
                and (entry := bucket.first()) is not None
            ]
            if not found:
                break
            *_, lane, state, priority, user, devices, bucket = min(found, key=lambda each: each[:4])
            self._place(lane, state, user, priority, devices, bucket, mode=_Mode.guaranteed)
        for _, _, project in places:  # What is beyond the guarantee may still come by share.
            for user in project.users.values():
                for buckets in user.buckets.values():
                    for bucket in buckets.values():
                        if bucket.closed in (WaitingReason.busy, WaitingReason.share):
                            bucket.closed = None

    def _go_on(self, entry: _Entry, priority: int, user: _User) -> None:
        """Lets a large experiment that started a moment ago use the devices of its last run for its next one.

        Otherwise every short run of many devices would have to wait until they are free together again. It
        goes on unless a run that waits could take the devices from it.
        """
        *_, claimant, demand = entry
        lane, devices, project = _lane(claimant, demand), demand.devices, user.project
        state = self._lanes[lane]
        least = min((min(each.sizes.values()) for each in state.projects.values() if each.sizes), default=0.0)
        more = least * state.price
        if (
            least + ROUNDING < devices <= state.free + ROUNDING
            and self._limit(user, lane.hardware, devices) is None
            and (demand.room is None or demand.room > 0)
            and not any(
                max(each.sizes) > priority or (each is not project and each.score(more) <= project.score())
                for each in state.projects.values()
                if each.sizes
            )
            and not any(
                each is not user and each.buckets and each.score(more) <= user.score()
                for each in project.users.values()
            )
        ):
            self._start(lane, state, user, claimant, devices)
            left = None if demand.room is None else demand.room - 1
            demand = replace(demand, waiting=demand.waiting - 1, room=left)
        if demand.waiting:
            user.bucket(priority, devices).add((*entry[:4], demand))

    def _start(self, lane: Lane, state: _Lane, user: _User, claimant: Claimant, devices: float) -> None:
        """Gives one run devices that are free."""
        state.free -= devices
        given = self._given.setdefault(claimant.id, {})
        given[lane.hardware] = given.get(lane.hardware, 0.0) + devices
        self._started[claimant.id, lane, devices] += 1
        self._change(user, state, devices, 1)

    def _give_by_share(self, lane: Lane, state: _Lane, priority: int) -> None:
        """Gives out a lane's devices at one priority, one run at a time."""
        projects = [
            (project.score(), name, project)
            for name, project in state.projects.items()
            if priority in project.sizes
        ]
        heapq.heapify(projects)
        users: dict[str, list[tuple[float, str, _User]]] = {}
        is_first = may_save = True
        saving: list[tuple[float, str, _Project]] = []
        while state.reserved_for is None:
            if not projects:
                if not saving or state.free <= ROUNDING:
                    break
                # Nobody else has a use for what is free: it is not left idle.
                projects, saving, may_save = saving, [], False
                heapq.heapify(projects)
            score, name, project = projects[0]
            if score != project.score():
                heapq.heapreplace(projects, (project.score(), name, project))
                continue
            if not is_first and not self._has_hope(state, project, priority):
                heapq.heappop(projects)
                continue
            if name not in users:
                project.open()
                users[name] = [
                    (user.score(), user.name, user)
                    for user in project.users.values()
                    if priority in user.buckets
                ]
                heapq.heapify(users[name])
            if not users[name]:
                heapq.heappop(projects)
                continue
            score, user_name, user = users[name][0]
            if score != user.score():
                heapq.heapreplace(users[name], (user.score(), user_name, user))
                continue
            oldest = self._oldest(user, priority)
            if oldest is None:
                heapq.heappop(users[name])
                continue
            outcome = self._place(lane, state, user, priority, *oldest, is_first=is_first)
            is_first = is_first and outcome is _Outcome.passed_over
            if outcome is _Outcome.saves and may_save:
                saving.append(heapq.heappop(projects))

    def _has_hope(self, state: _Lane, project: _Project, priority: int) -> bool:
        """Returns whether some run of a project may get devices; False = surely none."""
        least = project.sizes[priority]
        if least <= state.free + ROUNDING:
            return True
        if project.name in state.yielders:
            return True
        own = project.score(least * state.price)
        return any(state.may_yield(name, priority, own, _Mode.share) for name in state.least)

    def _oldest(self, user: _User, priority: int) -> tuple[float, _Bucket] | None:
        """Returns the queue of a user's oldest run that may have devices; None = there is none."""
        found = [
            (entry[:3], devices, bucket)
            for devices, bucket in user.buckets[priority].items()
            if (entry := bucket.first()) is not None
        ]
        return min(found, key=itemgetter(0))[1:] if found else None

    def _place(
        self,
        lane: Lane,
        state: _Lane,
        user: _User,
        priority: int,
        devices: float,
        bucket: _Bucket,
        *,
        mode: _Mode = _Mode.share,
        is_first: bool = False,
    ) -> _Outcome:
        """Gives the first run of a bucket its devices, or closes the bucket with the reason.

        Args:
            lane, state: where.
            user: whose run it is.
            priority: what its priority counts as.
            devices: that it needs.
            bucket: where it waits.
            mode: by which rule it takes devices of others.
            is_first: it comes first of all that wait in the lane and may have devices.
        """
        entry = bucket.first()
        assert entry is not None
        _, id, _, claimant, demand = entry
        reason = self._limit(user, lane.hardware, devices)
        if reason is None and devices > state.capacity + ROUNDING:
            reason = WaitingReason.no_capacity
        if reason is not None:
            bucket.closed = reason
            return _Outcome.passed_over
        if demand.room is not None and demand.room <= 0:
            bucket.drop()  # Its shape fits nowhere now; the next one's may.
            return _Outcome.passed_over
        if devices <= state.free + ROUNDING:
            self._start(lane, state, user, claimant, devices)
            bucket.take()
            return _Outcome.starts
        if not self._reclaim(state, user, priority, claimant, devices, mode):
            waited_s = self._now_s - waits_since_s(claimant)
            is_large = devices > state.smallest + ROUNDING and waited_s >= PATIENCE_S
            first = is_large and is_first
            if not (first and self._reclaim(state, user, priority, claimant, devices, _Mode.large)):
                if first and waited_s >= DRAINED_AFTER_S:
                    state.reserved_for = id
                bucket.closed = self._no_turn(lane, user)
                return _Outcome.saves if is_large else _Outcome.waits
        self._change(user, state, devices, 1)
        bucket.take()
        return _Outcome.starts

    def _no_turn(self, lane: Lane, user: _User) -> WaitingReason:
        """Returns why a run that is not limited by itself has no devices."""
        state, project = self._lanes[lane], user.project
        if state.reserved_for is not None:
            return WaitingReason.reserved
        entitled = self._entitled(lane, project)
        project.open()
        over = project.rate > entitled or user.rate > entitled / len(project.users)
        return WaitingReason.share if over else WaitingReason.busy

    def _limit(self, user: _User, hardware: str, devices: float) -> WaitingReason | None:
        terms = user.project.terms
        if terms.holds is not None:
            return WaitingReason.budget
        cap, ceiling = terms.concurrent_runs_per_user, terms.ceiling.get(hardware)
        if cap is not None and self._runs[user.project.name, user.name] >= cap:
            return WaitingReason.user_cap
        if ceiling is not None and user.project.held[hardware] + devices > ceiling + ROUNDING:
            return WaitingReason.ceiling
        return None

    def _reclaim(
        self, state: _Lane, user: _User, priority: int, claimant: Claimant, devices: float, mode: _Mode
    ) -> bool:
        """Takes devices of preemptible runs for one run; False = it may not take enough."""
        usable = max(0.0, state.free)
        taken = self._take(state, user, priority, claimant, devices, mode)
        freed = usable + state.pending + sum(each.demand.devices for each, _ in taken)
        if freed + ROUNDING < devices:
            self._put_back(state, taken)
            return False
        for each, _ in taken:
            self._note(each, state.hardware, claimant.id)
        # What is free is kept for this run as well; what is not free yet can be promised, but not given.
        state.free -= usable
        state.pending = freed - devices
        return True

    def _take(
        self,
        state: _Lane,
        user: _User,
        priority: int,
        claimant: Claimant,
        devices: float,
        mode: _Mode,
    ) -> list[tuple[_Yielder, bool]]:
        """Takes runs one by one until there are enough devices, or none is left that it may take.

        Returns:
            Whose runs, and whether each had worked for a useful time.
        """
        rate = devices * state.price
        own, own_user = user.project.score(rate), user.score(rate)
        if mode is _Mode.large:
            own, own_user = user.project.score(), user.score()
        base = priority
        if mode is not _Mode.large:
            base = min(priority, _permitted(claimant, user.project.terms))
        # Newcomers and guarantees wait for one checkpoint, not for the end of a useful time.
        at_once = mode is _Mode.guaranteed or (mode is _Mode.share and user.held <= ROUNDING)

        def is_able(each: _Yielder) -> bool:
            smaller = mode is _Mode.large and each.demand.devices < devices
            return each.left > 0 or (each.early > 0 and (at_once or smaller))

        taken: list[tuple[_Yielder, bool]] = []
        freed = max(0.0, state.free) + state.pending
        while freed + ROUNDING < devices:
            best: _Yielder | None = None
            least: tuple[float, ...] = ()
            for name, yielders in state.yielders.items():
                if name == user.project.name:
                    able = [
                        each
                        for each in yielders
                        if is_able(each) and self._user_yields(each, user, base, own_user, mode)
                    ]
                elif state.may_yield(name, base, own, mode):
                    able = [
                        each
                        for each in yielders
                        if is_able(each) and self._project_yields(each, user, base, own, mode, state.hardware)
                    ]
                else:
                    continue
                for each in able:
                    order = each.order
                    if best is None or order < least:
                        best, least = each, order
            if best is None:
                break
            taken.append((best, best.left > 0))
            self._move(state, best, -1, is_early=not best.left)
            freed += best.demand.devices
        return taken

    def _put_back(self, state: _Lane, taken: Sequence[tuple[_Yielder, bool]]) -> None:
        for each, was_useful in taken:
            self._move(state, each, +1, is_early=not was_useful)

    @staticmethod
    def _user_yields(each: _Yielder, user: _User, base: int, own: float, mode: _Mode) -> bool:
        """Returns whether a run of the same project may be taken for a user's."""
        if each.priority != base or mode is _Mode.guaranteed:
            return each.priority < base
        if each.user is user:
            return False
        left = each.user.score(-each.rate)
        return left > own or (left == own and (mode is _Mode.share or each.user.name > user.name))

    @staticmethod
    def _project_yields(
        each: _Yielder, user: _User, base: int, own: float, mode: _Mode, hardware: str
    ) -> bool:
        """Returns whether a run of another project may be taken."""
        other = each.user.project
        if other.held[hardware] - each.demand.devices < other.guaranteed(hardware) - ROUNDING:
            return False
        if mode is _Mode.guaranteed or each.priority < base:
            return True
        if each.priority != base:
            return False
        left = other.score(-each.rate)
        return left > own or (left == own and (mode is _Mode.share or other.name > user.project.name))

    def _move(self, state: _Lane, each: _Yielder, runs: int, *, is_early: bool) -> None:
        """Counts a run as taken (-1), or as held again (+1)."""
        if is_early:
            each.early += runs
        else:
            each.left += runs
        self._change(each.user, state, runs * each.demand.devices, runs)
        self._given[each.claimant.id][state.hardware] += runs * each.demand.devices

    def _note(self, each: _Yielder, hardware: str, for_id: int) -> None:
        key = (each.claimant.id, hardware, for_id)
        before = self._preempted.get(key)
        self._preempted[key] = Preemption(
            each.claimant.id,
            hardware,
            1 + (before.runs if before else 0),
            each.demand.devices + (before.devices if before else 0.0),
            each.demand.next_checkpoint_s,
            for_id,
        )

    def project_score(self, name: str, lane: Lane | None) -> ShareScore:
        """Returns the score of an active project."""
        if lane is None:
            return _summed(
                [
                    self.project_score(name, each)
                    for each, state in self._lanes.items()
                    if name in state.projects
                ],
                name,
            )
        state = self._lanes[lane]
        level = Level(
            {each: project.terms.weight for each, project in state.projects.items()},
            {each: self._used.get((each, lane), 0.0) for each in state.projects},
            state.capacity * state.price,
        )
        return level.score(name, state.projects[name].rate)

    def share_errors(self) -> dict[str, float]:
        """Returns how far each active project's part of recent use is from what it is entitled to."""
        excess: defaultdict[str, float] = defaultdict(float)
        totals: defaultdict[str, float] = defaultdict(float)
        for lane, state in self._lanes.items():
            used = {name: self._used.get((name, lane), 0.0) for name in state.projects}
            total_usd = math.fsum(used.values())
            weights = math.fsum(project.terms.weight for project in state.projects.values())
            for name, project in state.projects.items():
                excess[name] += used[name] - total_usd * project.terms.weight / weights
                totals[name] += total_usd
        return {name: excess[name] / total if total else 0.0 for name, total in totals.items()}

    def user_score(self, name: str, user: str, lane: Lane | None) -> ShareScore:
        """Returns the score of an active user inside the project."""
        for state in self._lanes.values():
            if name in state.projects:
                state.projects[name].open()
        if lane is None:
            return _summed(
                [
                    self.user_score(name, user, each)
                    for each, state in self._lanes.items()
                    if name in state.projects and user in state.projects[name].users
                ],
                user,
            )
        project = self._lanes[lane].projects[name]
        level = Level(
            dict.fromkeys(project.users, 1.0),
            {each: self._used_by(lane, name, each) for each in project.users},
            self._entitled(lane, project),
        )
        return level.score(user, project.users[user].rate)

    def waiting(self, limit: int | None) -> Iterator[Waiting]:
        """Yields who waits: the first of all lanes, then the second ones."""
        reclaimed = {each.for_experiment_id for each in self._preempted.values()}
        turns = heapq.merge(*self._turns().values(), key=itemgetter(0, 1))
        ahead: defaultdict[Lane, list[int]] = defaultdict(list)
        scores: dict[tuple[str, ...], ShareScore] = {}
        for number, (position, lane, user, priority, claimant, demand) in enumerate(turns):
            if limit is not None and number >= limit:
                return
            state, project = self._lanes[lane], user.project
            reason = self._reason(lane, user, priority, claimant, demand)
            if claimant.id in reclaimed:
                reason = WaitingReason.reclaiming
            of_project, of_user = (*lane, project.name), (*lane, project.name, user.name)
            if of_project not in scores:
                scores[of_project] = self.project_score(project.name, lane)
            if of_user not in scores:
                scores[of_user] = self.user_score(project.name, user.name, lane)
            yield Waiting(
                claimant.id,
                demand.hardware,
                demand.devices,
                reason,
                position,
                scores[of_project],
                scores[of_user],
                tuple(ahead[lane]),
                max(0.0, state.free),
                self._detail(user, reason, demand.hardware),
            )
            if len(ahead[lane]) < MOST_AHEAD:
                ahead[lane].append(claimant.id)

    def _reason(
        self, lane: Lane, user: _User, priority: int, claimant: Claimant, demand: Demand
    ) -> WaitingReason:
        state, project = self._lanes[lane], user.project
        project.open()
        reason = user.buckets[priority][demand.devices].closed
        if reason is not None and reason not in (WaitingReason.busy, WaitingReason.share):
            return reason
        reason = self._limit(user, lane.hardware, demand.devices)
        if reason is not None:
            return reason
        if demand.devices > state.capacity + ROUNDING:
            return WaitingReason.no_capacity
        started = self._started[claimant.id, lane, demand.devices]
        if demand.room is not None and started >= demand.room:
            return WaitingReason.shape
        return self._no_turn(lane, user)

    def _detail(self, user: _User, reason: WaitingReason, hardware: str) -> str | None:
        terms = user.project.terms
        runs = self._runs[user.project.name, user.name]
        limits = {
            WaitingReason.budget: terms.holds,
            WaitingReason.user_cap: f"{runs} of {terms.concurrent_runs_per_user} runs",
            WaitingReason.ceiling: (
                f"{user.project.held[hardware]:g} of {terms.ceiling.get(hardware, 0.0):g} devices"
            ),
        }
        return limits.get(reason)

    def _turns(self) -> dict[Lane, Iterator[_Turn]]:
        """Returns who waits in each lane: shares are filled further, with one run of each experiment."""
        lanes: dict[Lane, dict[int, dict[_Project, dict[_User, list[_Queued]]]]] = {}
        for claimant in chain(self._claimants, self._backlog):
            for demand in claimant.demands:
                lane = _lane(claimant, demand)
                if demand.waiting > self._started[claimant.id, lane, demand.devices]:
                    project = self._lanes[lane].projects[claimant.project]
                    project.open()
                    priority = self._priority(claimant, project.terms)
                    of_user = lanes.setdefault(lane, {}).setdefault(priority, {}).setdefault(project, {})
                    entries = of_user.setdefault(project.users[claimant.user], [])
                    entries.append((waits_since_s(claimant), claimant.id, claimant, demand))
                    break
        return {lane: self._turns_of(lane, queues) for lane, queues in sorted(lanes.items())}

    def _turns_of(
        self, lane: Lane, queues: Mapping[int, Mapping[_Project, Mapping[_User, list[_Queued]]]]
    ) -> Iterator[_Turn]:
        more: defaultdict[_User | _Project, float] = defaultdict(float)
        position = 0
        for priority in sorted(queues, reverse=True):
            projects = []
            for project, of_user in queues[priority].items():
                users = []
                for user, entries in of_user.items():
                    entries.sort(key=lambda each: each[:2], reverse=True)
                    users.append((user.score(more[user]), user.name, user, entries))
                heapq.heapify(users)
                projects.append((project.score(more[project]), project.name, project, users))
            heapq.heapify(projects)
            while projects:
                _, name, project, users = projects[0]
                _, user_name, user, entries = users[0]
                _, _, claimant, demand = entries.pop()
                position += 1
                yield position, lane, user, priority, claimant, demand
                rate = demand.devices * self._lanes[lane].price
                more[project] += rate
                more[user] += rate
                if entries:
                    heapq.heapreplace(users, (user.score(more[user]), user_name, user, entries))
                else:
                    heapq.heappop(users)
                if users:
                    heapq.heapreplace(projects, (project.score(more[project]), name, project, users))
                else:
                    heapq.heappop(projects)


_Queued = tuple[float, int, Claimant, Demand]
"""Age, id; claimant, demand."""
_Turn = tuple[int, Lane, _User, int, Claimant, Demand]
"""Position, lane, user, what the priority counts as; claimant, demand."""


def _summed(scores: Sequence[ShareScore], name: str) -> ShareScore:
    """Returns the score over several lanes.

    Raises:
        KeyError: there is none.
    """
    if not scores:
        raise KeyError(name)
    totals = {
        each: math.fsum(getattr(score, each) for score in scores)
        for each in ("score", "held_usd_per_hour", "used_usd", "entitled_usd_per_hour", "excess_usd")
    }
    there = math.fsum(score.entitled_usd_per_hour / score.entitled_part for score in scores)
    used = math.fsum(score.used_usd / score.used_part for score in scores if score.used_part)
    return ShareScore(
        weight=scores[0].weight,
        entitled_part=totals["entitled_usd_per_hour"] / there if there else 0.0,
        used_part=totals["used_usd"] / used if used else 0.0,
        **totals,
    )
