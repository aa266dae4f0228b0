"""A pass over the devices: who may hold how many now, and who gives some back for whom.

Every pass starts from what is held, so that nothing moves without a reason, and gives out the free devices
one run at a time; a run gets all its devices at once or none. The next run is chosen

1. for projects that hold fewer devices than they are guaranteed, up to the guarantee,
2. then by priority,
3. then by share: the project with the lowest score, in it the user with the lowest score (`tree`),
4. then by age: which of the user's experiments has waited longest since it last got devices, or since it was
   submitted. So a grid of 1,000 runs does not hold up the user's own small experiments.

**Preemption.** A run that finds too few free devices takes those of preemptible runs, which stop at their
next checkpoint; until then both count as gone, so that the next passes decide the same. It may take those of

- runs that hold lent guarantees, where its project is guaranteed the devices;
- runs of lower priority;
- runs of another project (or another user of its own) whose score is no lower without the run than its own is
  with it. Who has as much is therefore never preempted, and no pair of runs can preempt each other in turn.

A project is not preempted below what it is guaranteed. `may_yield` gives every run a useful time between two
preemptions.

**Large runs.** What is free goes to whoever can use it at once. Where the next run has waited for
`PATIENCE_S` and needs more devices than are free, those that are free are kept for it, once in each lane.

**Old runs.** An experiment of which nothing has started for `PROMOTED_AFTER_S` counts with at least the
priority `PROMOTED_TO` for its turn, though not for preempting others: low priority waits longer, not forever.

A pass costs O(n) in the waiting experiments, which a `Backlog` saves, and O(log n) for each run that starts.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
from service.fairness.tree import ASSURED, Level, score_of
from service.fairness.usage import by_project, decayed

PATIENCE_S = 1800.0
"""Time after which free devices are kept for a run that needs more than are free."""
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
    """A user of one project, while a pass is made."""

    __slots__ = ("buckets", "name", "project", "rate", "runs", "used")

    def __init__(self, project: _Project, name: str, used: float) -> None:
        self.project, self.name, self.used = project, name, used
        self.rate = 0.0
        self.runs = 0
        self.buckets: dict[int, dict[_Size, _Bucket]] = {}

    def score(self, more: float = 0.0) -> float:
        return score_of(self.rate + more, self.used, 1.0, self.project.assured_user)

    def bucket(self, priority: int, size: _Size) -> _Bucket:
        buckets = self.buckets.get(priority)
        if buckets is None:
            buckets = self.buckets[priority] = {}
        bucket = buckets.get(size)
        if bucket is None:
            bucket = buckets[size] = _Bucket()
        return bucket


class _Project:
    """A project, while a pass is made."""

    __slots__ = ("assured", "assured_user", "held", "name", "rate", "terms", "used", "users", "waits")

    def __init__(self, name: str, terms: ProjectTerms, used: float) -> None:
        self.name, self.terms, self.used = name, terms, used
        self.rate = self.assured = self.assured_user = 0.0
        self.held: defaultdict[str, float] = defaultdict(float)
        self.users: dict[str, _User] = {}
        self.waits = False

    def score(self, more: float = 0.0) -> float:
        return score_of(self.rate + more, self.used, self.terms.weight, self.assured)

    def guaranteed(self, hardware: str) -> float:
        return self.terms.guaranteed.get(hardware, 0.0)


_Size = tuple[Lane, float]
_Entry = tuple[float, int, int, Claimant, Demand]
"""Age, id, number of the demand; claimant, demand."""
_AGE = itemgetter(0, 1, 2)


class Backlog:
    """Experiments that have never started a run, kept in order between passes.

    A pass costs nothing for those whose turn does not come, so that its time does not grow with them.
    """

    def __init__(self) -> None:
        self._claimants: dict[int, Claimant] = {}
        self._queues: dict[tuple[str, str], dict[tuple[int, _Size], list[_Entry]]] = {}

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
        queues = self._queues.setdefault((claimant.project, claimant.user), {})
        for number, demand in enumerate(claimant.demands):
            if demand.waiting:
                queue = queues.setdefault((claimant.priority, _size(claimant, demand)), [])
                insort(queue, (claimant.queued_s, claimant.id, number, claimant, demand), key=_AGE)

    def remove(self, experiment_id: int) -> None:
        """Removes an experiment, if it is there."""
        claimant = self._claimants.pop(experiment_id, None)
        if claimant is None:
            return
        owner = claimant.project, claimant.user
        queues = self._queues[owner]
        for number, demand in enumerate(claimant.demands):
            if demand.waiting:
                key = claimant.priority, _size(claimant, demand)
                queue = queues[key]
                del queue[bisect_left(queue, (claimant.queued_s, claimant.id, number), key=_AGE)]
                if not queue:
                    del queues[key]
        if not queues:
            del self._queues[owner]

    def queues(self) -> Iterator[tuple[str, str, int, _Size, list[_Entry]]]:
        """Yields (project, user, priority, size, waiting runs by age)."""
        for (project, user), queues in self._queues.items():
            for (priority, size), queue in queues.items():
                yield project, user, priority, size, queue


def _size(claimant: Claimant, demand: Demand) -> _Size:
    return Lane(claimant.pool, demand.hardware), demand.devices


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
    """Running runs that may stop for others."""

    __slots__ = ("claimant", "demand", "left", "priority", "rate", "user")

    def __init__(self, claimant: Claimant, demand: Demand, left: int, user: _User, rate: float) -> None:
        self.claimant, self.demand, self.left, self.user, self.rate = claimant, demand, left, user, rate
        self.priority = _permitted(claimant, user.project.terms)

    @property
    def order(self) -> tuple[float, ...]:
        """Sorts by who stops first: low priority, high score, young."""
        return (
            self.priority,
            -self.user.project.score(),
            -self.user.score(),
            -self.claimant.queued_s,
            -self.claimant.id,
        )


class _LaneState:
    """The devices of one lane, while a pass is made."""

    __slots__ = ("capacity", "free", "lowest", "pending", "price", "reserved_for", "yielders")

    def __init__(self, capacity: float, price: float) -> None:
        self.capacity = self.free = capacity
        self.price = price
        self.pending = 0.0
        """Devices that become free at a checkpoint, beyond those that a run stopped for."""
        self.reserved_for: int | None = None
        self.yielders: dict[str, list[_Yielder]] = {}
        """Running runs that may stop, by project."""
        self.lowest: dict[str, tuple[int, float]] = {}
        """The lowest priority of those, and the lowest price per hour, by project."""

    def add(self, yielder: _Yielder) -> None:
        """Adds running runs that may stop."""
        name = yielder.user.project.name
        self.yielders.setdefault(name, []).append(yielder)
        priority, rate = self.lowest.get(name, (yielder.priority, yielder.rate))
        self.lowest[name] = min(priority, yielder.priority), min(rate, yielder.rate)

    def remove(self, yielder: _Yielder) -> None:
        """Removes runs of which none is left to stop."""
        name = yielder.user.project.name
        left = self.yielders[name]
        left.remove(yielder)
        if left:
            self.lowest[name] = min(each.priority for each in left), min(each.rate for each in left)
        else:
            del self.yielders[name], self.lowest[name]


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

    def project_score(self, project: str) -> ShareScore:
        """Returns the score of an active project after the pass.

        Raises:
            KeyError: it neither holds nor wants anything.
        """
        return self._pass.project_score(project)

    def user_score(self, project: str, user: str) -> ShareScore:
        """Returns the score of an active user inside the project after the pass.

        Raises:
            KeyError: the user neither holds nor wants anything.
        """
        return self._pass.user_score(project, user)

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


class _Pass:
    """One pass while it is made."""

    def __init__(self, situation: Situation, backlog: Backlog) -> None:
        self._now_s = situation.now_s
        self._prices = situation.capacity
        self._terms = situation.terms
        self._lanes = {
            lane: _LaneState(devices, situation.capacity.price(lane.hardware))
            for lane, devices in situation.capacity.devices.items()
        }
        self._total = sum(lane.capacity * lane.price for lane in self._lanes.values())
        self._usage = situation.usage
        self._used = by_project(situation.usage, situation.now_s)
        self._projects: dict[str, _Project] = {}
        self._given: dict[int, dict[str, float]] = {}
        self._started: dict[tuple[int, _Size], int] = {}
        self._claimants, self._backlog = situation.claimants, backlog
        self._preempted: dict[tuple[int, str, int], Preemption] = {}
        self._blocked: set[tuple[str, int, _Size]] = set()
        """(project, priority, size) for which no other project gives devices back."""
        self._hopeless: set[tuple[str, int, _Size]] = set()
        """The same where none are free either, and the project's own runs do not stop."""
        holders: list[tuple[int, int, Claimant, Demand, _User]] = []
        for claimant in situation.claimants:
            self._enter(claimant, holders)
        self._enter_backlog()
        # Sums of floating-point numbers depend on their order, and nothing may depend on the claimants'.
        for *_, claimant, demand, user in sorted(holders, key=lambda each: each[:2]):
            self._hold(claimant, demand, user)
        self._projects = dict(sorted(self._projects.items()))
        weights = sum(each.terms.weight for each in self._projects.values())
        for project in self._projects.values():
            project.users = dict(sorted(project.users.items()))
            project.assured = ASSURED * self._total / weights
            project.assured_user = project.assured * project.terms.weight / len(project.users)

    def _enter(self, claimant: Claimant, holders: list[tuple[int, int, Claimant, Demand, _User]]) -> None:
        """Adds an experiment to its user's queues, and to the holders."""
        if not any(demand.running or demand.waiting for demand in claimant.demands):
            return  # Not active: its project and user take no part unless they have others.
        user = self._user(claimant.project, claimant.user)
        terms = user.project.terms
        for number, demand in enumerate(claimant.demands):
            if demand.running:
                holders.append((claimant.id, number, claimant, demand, user))
            if demand.waiting:
                bucket = user.bucket(self._priority(claimant, terms), _size(claimant, demand))
                bucket.add((waits_since_s(claimant), claimant.id, number, claimant, demand))

    def _enter_backlog(self) -> None:
        """Adds the backlog's queues; the old part of each counts with a higher priority."""
        for project, name, priority, size, queue in self._backlog.queues():
            user = self._user(project, name)
            stop = len(queue)
            bounds = []
            if priority < PROMOTED_TO:
                bounds.append(bisect_right(queue, self._now_s - PROMOTED_AFTER_S, key=itemgetter(0)))
            start = 0
            for end in [*bounds, stop]:
                if end > start:
                    counts_as = self._priority(queue[start][3], user.project.terms)
                    user.bucket(counts_as, size).set_backlog(queue, start, end)
                    start = end

    def _user(self, project_name: str, name: str) -> _User:
        project = self._projects.get(project_name)
        if project is None:
            project = self._projects[project_name] = _Project(
                project_name, self._terms.get(project_name, _DEFAULT), self._used.get(project_name, 0.0)
            )
        user = project.users.get(name)
        if user is None:
            usage = self._usage.by_user.get((project_name, name))
            used = 0.0 if usage is None else decayed(usage, self._now_s)
            user = project.users[name] = _User(project, name, used)
        return user

    def _priority(self, claimant: Claimant, terms: ProjectTerms) -> int:
        """Returns what its priority counts as for its turn."""
        priority = _permitted(claimant, terms)
        if priority < PROMOTED_TO and self._now_s - waits_since_s(claimant) >= PROMOTED_AFTER_S:
            priority = PROMOTED_TO if terms.most_priority is None else min(PROMOTED_TO, terms.most_priority)
        return priority

    def _hold(self, claimant: Claimant, demand: Demand, user: _User) -> None:
        devices = demand.running * demand.devices
        price = self._prices.price(demand.hardware)
        user.project.held[demand.hardware] += devices
        user.project.rate += devices * price
        user.rate += devices * price
        user.runs += demand.running
        given = self._given.setdefault(claimant.id, {})
        given[demand.hardware] = given.get(demand.hardware, 0.0) + devices
        lane = self._lanes.get(Lane(claimant.pool, demand.hardware))
        if lane is None:
            return
        lane.free -= devices
        if claimant.preemptible and demand.devices > 0:
            left = demand.running if demand.yieldable is None else min(demand.running, demand.yieldable)
            if left > 0:
                yielder = _Yielder(claimant, demand, left, user, demand.devices * price)
                lane.add(yielder)

    def run(self) -> Division:
        """Returns what this pass decides; called once."""
        for project in self._projects.values():
            self._give_guaranteed(project)
        priorities = {key for each in self._users() for key in each.buckets}
        for priority in sorted(priorities, reverse=True):
            self._give_by_share(priority)
        return Division(
            {id: Allowance(devices) for id, devices in sorted(self._given.items())},
            tuple(self._preempted[key] for key in sorted(self._preempted)),
            {
                lane: max(0.0, state.free) if state.reserved_for is None else 0.0
                for lane, state in self._lanes.items()
            },
            {
                lane: state.reserved_for
                for lane, state in self._lanes.items()
                if state.reserved_for is not None
            },
            self,
        )

    def _users(self) -> Iterator[_User]:
        for project in self._projects.values():
            yield from project.users.values()

    def _give_guaranteed(self, project: _Project) -> None:
        """Gives a project the devices that it is guaranteed and has a use for."""
        for hardware in sorted(project.terms.guaranteed):
            while True:
                found = [
                    (-priority, user.score(), entry[:3], user.name, priority, user, size, bucket)
                    for user in project.users.values()
                    for priority, buckets in user.buckets.items()
                    for size, bucket in buckets.items()
                    if size[0].hardware == hardware
                    and project.held[hardware] + size[1] <= project.guaranteed(hardware) + ROUNDING
                    and (entry := bucket.first()) is not None
                ]
                if not found:
                    break
                *_, priority, user, size, bucket = min(found, key=lambda each: each[:4])
                self._place(user, priority, size, bucket, is_guaranteed=True)
        for user in project.users.values():  # What is beyond the guarantee may still come by share.
            for buckets in user.buckets.values():
                for bucket in buckets.values():
                    if bucket.closed in (WaitingReason.busy, WaitingReason.share):
                        bucket.closed = None

    def _give_by_share(self, priority: int) -> None:
        """Gives out devices at one priority, one run at a time."""
        projects: list[tuple[float, str, _Project, list[tuple[float, str, _User]]]] = []
        for name, project in self._projects.items():
            users = [
                (user.score(), user.name, user) for user in project.users.values() if priority in user.buckets
            ]
            if users:
                heapq.heapify(users)
                projects.append((project.score(), name, project, users))
        heapq.heapify(projects)
        while projects:
            score, name, project, users = projects[0]
            if score != project.score():
                heapq.heapreplace(projects, (project.score(), name, project, users))
                continue
            if not users:
                heapq.heappop(projects)
                continue
            score, user_name, user = users[0]
            if score != user.score():
                heapq.heapreplace(users, (user.score(), user_name, user))
                continue
            oldest = self._oldest(project, user, priority)
            if oldest is None:
                heapq.heappop(users)
                continue
            self._place(user, priority, *oldest)

    def _oldest(self, project: _Project, user: _User, priority: int) -> tuple[_Size, _Bucket] | None:
        """Returns the queue of a user's oldest run that may have devices; None = there is none."""
        first: _Entry | None = None
        found: tuple[_Size, _Bucket] | None = None
        for size, bucket in user.buckets[priority].items():
            entry = bucket.first()
            if entry is None:
                continue
            if (project.name, min(priority, entry[3].priority), size) in self._hopeless:
                bucket.closed = WaitingReason.busy
            elif first is None or entry[:3] < first[:3]:
                first, found = entry, (size, bucket)
        return found

    def _place(
        self, user: _User, priority: int, size: _Size, bucket: _Bucket, *, is_guaranteed: bool = False
    ) -> None:
        """Gives the first run of a bucket its devices, or closes the bucket with the reason."""
        entry = bucket.first()
        assert entry is not None
        (lane, devices), (_, id, _, claimant, demand) = size, entry
        project, state = user.project, self._lanes.get(lane)
        reason = self._limit(user, lane.hardware, devices)
        if reason is None and (state is None or devices > state.capacity + ROUNDING):
            reason = WaitingReason.no_capacity
        if reason is not None:
            bucket.closed = reason
            return
        assert state is not None
        if demand.room is not None and demand.room <= 0:
            bucket.drop()  # Its shape fits nowhere now; the next one's may.
            return
        reserved = state.reserved_for is not None
        if devices <= state.free + ROUNDING and not reserved:
            state.free -= devices
            given = self._given.setdefault(id, {})
            given[lane.hardware] = given.get(lane.hardware, 0.0) + devices
            self._started[id, size] = self._started.get((id, size), 0) + 1
        elif not self._reclaim(user, priority, claimant, devices, lane, is_guaranteed=is_guaranteed):
            waited_s = self._now_s - waits_since_s(claimant)
            if not reserved and state.free > ROUNDING and waited_s >= PATIENCE_S and not is_guaranteed:
                state.reserved_for = id
            over = max(
                project.rate / (project.terms.weight * project.assured), user.rate / project.assured_user
            )
            bucket.closed = WaitingReason.share if over * ASSURED > 1.0 else WaitingReason.busy
            if reserved:
                bucket.closed = WaitingReason.reserved
            elif state.free <= ROUNDING and project.name not in state.yielders and not is_guaranteed:
                self._hopeless.add((project.name, min(priority, claimant.priority), size))
            return
        project.held[lane.hardware] += devices
        project.rate += devices * state.price
        user.rate += devices * state.price
        user.runs += 1
        bucket.take()

    def _limit(self, user: _User, hardware: str, devices: float) -> WaitingReason | None:
        terms = user.project.terms
        if terms.holds is not None:
            return WaitingReason.budget
        cap, ceiling = terms.concurrent_runs_per_user, terms.ceiling.get(hardware)
        if cap is not None and user.runs >= cap:
            return WaitingReason.user_cap
        if ceiling is not None and user.project.held[hardware] + devices > ceiling + ROUNDING:
            return WaitingReason.ceiling
        return None

    def _reclaim(
        self,
        user: _User,
        priority: int,
        claimant: Claimant,
        devices: float,
        lane: Lane,
        *,
        is_guaranteed: bool,
    ) -> bool:
        """Takes devices of preemptible runs for one run; False = it may not take enough."""
        state, project = self._lanes[lane], user.project
        usable = 0.0 if state.reserved_for is not None else max(0.0, state.free)
        rate = devices * state.price
        own, own_user = project.score(rate), user.score(rate)
        base = min(priority, _permitted(claimant, project.terms))
        taken: list[_Yielder] = []
        freed = usable + state.pending
        while freed + ROUNDING < devices:
            best = min(
                (
                    each
                    for each in self._yielders(state, project, base, own, (lane, devices), is_guaranteed)
                    if self._yields(each, user, base, own, own_user, lane.hardware, is_guaranteed)
                ),
                key=lambda each: each.order,
                default=None,
            )
            if best is None:
                for each in taken:
                    if not each.left:
                        state.add(each)
                    self._move(each, lane.hardware, +1)
                return False
            self._move(best, lane.hardware, -1)
            if not best.left:
                state.remove(best)
            taken.append(best)
            freed += best.demand.devices
        for each in taken:
            self._note(each, lane.hardware, claimant.id)
        # What is free is kept for this run as well; what is not free yet can be promised, but not given.
        state.free -= usable
        state.pending = freed - devices
        return True

    def _yielders(
        self, state: _LaneState, project: _Project, base: int, own: float, size: _Size, is_guaranteed: bool
    ) -> Iterator[_Yielder]:
        """Yields running runs that may be taken, as far as that is known without looking at each."""
        mine = state.yielders.get(project.name)
        if mine and (is_guaranteed or len(project.users) > 1 or state.lowest[project.name][0] < base):
            yield from mine
        key = (project.name, base, size)
        if not is_guaranteed and key in self._blocked:
            return
        found = False
        for name, yielders in state.yielders.items():
            priority, rate = state.lowest[name]
            if name != project.name and (
                is_guaranteed or priority < base or self._projects[name].score(-rate) >= own
            ):
                found = True
                yield from yielders
        if not found:
            self._blocked.add(key)

    def _yields(
        self,
        each: _Yielder,
        user: _User,
        base: int,
        own: float,
        own_user: float,
        hardware: str,
        is_guaranteed: bool,
    ) -> bool:
        """Returns whether one more run of the yielder may be taken for a run of the user."""
        if not each.left:
            return False
        other = each.user.project
        lower = each.priority < base
        if other is user.project:
            return lower or (
                each.user is not user and each.priority == base and each.user.score(-each.rate) >= own_user
            )
        if other.held[hardware] - each.demand.devices < other.guaranteed(hardware) - ROUNDING:
            return False
        if is_guaranteed or lower:
            return True
        return each.priority == base and other.score(-each.rate) >= own

    def _move(self, each: _Yielder, hardware: str, runs: int) -> None:
        """Counts a run as taken (-1), or as held again (+1)."""
        each.left += runs
        each.user.runs += runs
        each.user.rate += runs * each.rate
        each.user.project.rate += runs * each.rate
        each.user.project.held[hardware] += runs * each.demand.devices
        self._given[each.claimant.id][hardware] += runs * each.demand.devices

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

    def project_score(self, project: str) -> ShareScore:
        """Returns the score of an active project."""
        weights = {name: each.terms.weight for name, each in self._projects.items()}
        return Level(weights, self._used, self._total).score(project, self._projects[project].rate)

    def user_score(self, project: str, user: str) -> ShareScore:
        """Returns the score of an active user inside the project."""
        found = self._projects[project]
        total = sum(each.terms.weight for each in self._projects.values())
        level = Level(
            dict.fromkeys(found.users, 1.0),
            {name: each.used for name, each in found.users.items()},
            self._total * found.terms.weight / total,
        )
        return level.score(user, found.users[user].rate)

    def waiting(self, limit: int | None) -> Iterator[Waiting]:
        """Yields who waits, in the order of turns."""
        reclaimed = {each.for_experiment_id for each in self._preempted.values()}
        ahead: list[int] = []
        for position, (user, priority, claimant, demand) in enumerate(self._turns(), 1):
            if limit is not None and position > limit:
                return
            size = _size(claimant, demand)
            state = self._lanes.get(size[0])
            reason = user.buckets[priority][size].closed
            if reason is None:
                started = self._started.get((claimant.id, size), 0)
                at_room = demand.room is not None and started >= demand.room
                reason = WaitingReason.shape if at_room else WaitingReason.busy
            if claimant.id in reclaimed:
                reason = WaitingReason.reclaiming
            yield Waiting(
                claimant.id,
                demand.hardware,
                demand.devices,
                reason,
                position,
                self.project_score(claimant.project),
                self.user_score(claimant.project, claimant.user),
                tuple(ahead),
                0.0 if state is None else max(0.0, state.free),
                self._detail(user, reason, demand.hardware),
            )
            if len(ahead) < MOST_AHEAD:
                ahead.append(claimant.id)

    def _detail(self, user: _User, reason: WaitingReason, hardware: str) -> str | None:
        terms = user.project.terms
        limits = {
            WaitingReason.budget: terms.holds,
            WaitingReason.user_cap: f"{user.runs} of {terms.concurrent_runs_per_user} runs",
            WaitingReason.ceiling: (
                f"{user.project.held[hardware]:g} of {terms.ceiling.get(hardware, 0.0):g} devices"
            ),
        }
        return limits.get(reason)

    def _turns(self) -> Iterator[tuple[_User, int, Claimant, Demand]]:
        """Yields who waits: shares are filled further, with one run of each experiment."""
        queues: dict[int, dict[_Project, dict[_User, list[tuple[float, int, Claimant, Demand]]]]] = {}
        for claimant in chain(self._claimants, self._backlog):
            project = self._projects.get(claimant.project)
            if project is None:
                continue
            priority = self._priority(claimant, project.terms)
            for demand in claimant.demands:
                size = _size(claimant, demand)
                if demand.waiting > self._started.get((claimant.id, size), 0):
                    of_user = queues.setdefault(priority, {}).setdefault(project, {})
                    entries = of_user.setdefault(project.users[claimant.user], [])
                    entries.append((waits_since_s(claimant), claimant.id, claimant, demand))
                    break
        more: defaultdict[_User | _Project, float] = defaultdict(float)
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
                yield user, priority, claimant, demand
                rate = demand.devices * self._prices.price(demand.hardware)
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
