"""A pass over the devices: who may hold how many now. docs/scheduling.md has the rules and their reasons.

Each pass starts from what is held and gives out free devices one run at a time, so that nothing moves without
a reason. It costs O(1) for each project in each lane, and O(log n) for each run that starts.
"""

import heapq
import itertools
from enum import Enum, auto
from operator import itemgetter

from service.fairness.lanes import AGE, Lanes, LaneState, Mode, ProjectLane, RunBucket, UserLane
from service.fairness.preemptions import Preemptions
from service.fairness.standings import Division
from service.fairness.state import (
    DRAINED_AFTER_S,
    PATIENCE_S,
    ROUNDING,
    Situation,
    WaitingReason,
    waits_since_s,
)


def divide(situation: Situation) -> Division:
    """Returns who may hold how many devices from now on, whatever the order of the claimants."""
    return _Pass(Lanes(situation)).run()


class _Outcome(Enum):
    starts = auto()  # It has its devices, or will have them at others' checkpoints
    waits = auto()  # It finds too few
    saves = auto()  # It is large and has waited: its project takes no others, until it comes first there
    passed_over = auto()  # It may not start


class _Pass:
    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._preemptions = Preemptions(lanes)

    def run(self) -> Division:
        for name in sorted(self._lanes.terms):
            for hardware in sorted(self._lanes.terms[name].guaranteed):
                self._give_guaranteed(name, hardware)
        states = self._lanes.states
        projects = itertools.chain.from_iterable(state.projects.values() for state in states.values())
        for priority in sorted({size for project in projects for size in project.sizes}, reverse=True):
            for lane in sorted(states):
                self._give_by_share(states[lane], priority)
        return Division(
            dict(sorted(self._lanes.given.items())),
            self._preemptions.decided(),
            self._lanes,
        )

    def _give_guaranteed(self, name: str, hardware: str) -> None:
        places = [
            (state, state.projects[name])
            for lane, state in self._lanes.states.items()
            if lane.hardware == hardware and name in state.projects
        ]
        while True:
            heads = [
                (order, state, bucket)
                for state, project in places
                if not self._saves(state, project)
                for order, bucket, _ in project.heads()
                if project.held[hardware] + bucket.devices <= project.guaranteed(hardware) + ROUNDING
            ]
            if not heads:
                break
            _, state, bucket = min(heads, key=itemgetter(0))
            self._place(state, bucket, mode=Mode.guaranteed)
        for _, project in places:  # What is beyond the guarantee may still come by share.
            for user in project.users.values():
                for bucket in itertools.chain.from_iterable(each.values() for each in user.buckets.values()):
                    if bucket.closed in (WaitingReason.busy, WaitingReason.share):
                        bucket.closed = None

    def _saves(self, state: LaneState, project: ProjectLane) -> bool:
        """Whether the project's next run is a large one beyond its guarantee, which has waited `PATIENCE_S`.

        Smaller runs within the guarantee would pass it forever, and keep its project from coming first.
        """
        hardware = state.lane.hardware
        heads = [
            (order, bucket.devices, entry)
            for order, bucket, entry in project.heads()
            if bucket.devices <= state.capacity + ROUNDING
            and self._lanes.limit(bucket.user, hardware, bucket.devices) is None
        ]
        if not heads:
            return False
        _, devices, entry = min(heads, key=itemgetter(0))
        return (
            devices > state.smallest + ROUNDING
            and devices > project.guaranteed(hardware) + ROUNDING
            and self._lanes.now_s - entry.since_s >= PATIENCE_S
        )

    def _give_by_share(self, state: LaneState, priority: int) -> None:
        projects = [
            (project.score(), name, project)
            for name, project in state.projects.items()
            if priority in project.sizes
        ]
        heapq.heapify(projects)
        users: dict[str, list[tuple[float, str, UserLane]]] = {}
        is_first = may_save = True
        saving: list[tuple[float, str, ProjectLane]] = []
        while state.reserved_for is None:
            if not projects:
                if not saving or state.free <= ROUNDING:
                    break
                # No other project can use what is free: it is not left idle.
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
            oldest = [
                (AGE(entry), bucket)
                for bucket in user.buckets[priority].values()
                if (entry := bucket.first()) is not None
            ]
            if not oldest:
                heapq.heappop(users[name])
                continue
            outcome = self._place(state, min(oldest, key=itemgetter(0))[1], is_first=is_first)
            is_first = is_first and outcome is _Outcome.passed_over
            if outcome is _Outcome.saves and may_save:
                saving.append(heapq.heappop(projects))

    def _has_hope(self, state: LaneState, project: ProjectLane, priority: int) -> bool:
        """Returns whether some run of a project may get devices; False = surely none."""
        least = project.sizes[priority]
        if least <= state.free + ROUNDING or project.name in state.yielders:
            return True
        own = project.score(least * state.price)
        return any(state.may_yield(name, priority, own, Mode.share) for name in state.least)

    def _place(
        self, state: LaneState, bucket: RunBucket, *, mode: Mode = Mode.share, is_first: bool = False
    ) -> _Outcome:
        """Gives the first run of a bucket its devices, or closes the bucket with the reason.

        `is_first`: it comes first of all that wait in the lane and may have devices.
        """
        user, devices, entry = bucket.user, bucket.devices, bucket.first()
        assert entry is not None
        claimant = entry.claimant
        reason = self._lanes.limit(user, state.lane.hardware, devices)
        if reason is None and devices > state.capacity + ROUNDING:
            reason = WaitingReason.no_capacity
        if reason is not None:
            bucket.closed = reason
            return _Outcome.passed_over
        if devices <= state.free + ROUNDING:
            state.free -= devices
            state.smallest = min(state.smallest, devices)
            self._lanes.given[claimant.id][state.lane.hardware] += devices
            self._lanes.started[claimant.id, state.lane, devices] += 1
        elif not self._preemptions.reclaim(state, bucket, claimant, mode):
            waited_s = self._lanes.now_s - waits_since_s(claimant)
            is_large = devices > state.smallest + ROUNDING and waited_s >= PATIENCE_S
            first = is_large and is_first
            if not (first and self._preemptions.reclaim(state, bucket, claimant, Mode.large)):
                if first and waited_s >= DRAINED_AFTER_S:
                    state.reserved_for = claimant.id
                bucket.closed = self._lanes.no_turn(state, user)
                return _Outcome.saves if is_large else _Outcome.waits
        self._lanes.change(user, state, devices, 1)
        bucket.take()
        return _Outcome.starts
