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

**Handovers.** Where a run of higher priority waits that finds too few devices and may not preempt, those of
lower priority start no further runs on devices that it could use (`handovers`): it gets them as runs end.

**Large runs.** What is free goes to whoever can use it at once, so that small runs would pass a large one
forever. So a large run (of more devices than the smallest run there) whose turn it is and which has waited
for `PATIENCE_S` is not passed by others of its project, within a guarantee or beyond, whose score sinks until
it comes first in the lane.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from operator import itemgetter

from service.fairness.backlog import Backlog, Entry
from service.fairness.handovers import handovers
from service.fairness.lanes import Bucket, Lanes, LaneState, Mode, ProjectLane, UserLane
from service.fairness.preemptions import Preemptions
from service.fairness.rules import DRAINED_AFTER_S, PATIENCE_S, ROUNDING, lane_of, waits_since_s
from service.fairness.standings import Standings
from service.fairness.state import (
    Allowance,
    Claimant,
    Handover,
    Lane,
    Preemption,
    ShareScore,
    Situation,
    Waiting,
    WaitingReason,
)


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
    _standings: Standings
    _lanes: Lanes

    def handovers(self) -> tuple[Handover, ...]:
        """Returns the experiments that start no more runs, because runs of higher priority come first."""
        return tuple(handovers(self._lanes, self.preemptions))

    def project_score(self, project: str, lane: Lane | None = None) -> ShareScore:
        """Returns the score of an active project after the pass.

        Args:
            project: its name.
            lane: whose score is asked for; None = the sum over all lanes in which it is active.

        Raises:
            KeyError: it neither holds nor wants anything.
        """
        return self._standings.project_score(project, lane)

    def share_errors(self) -> dict[str, float]:
        """Returns how far each active project's part of recent use is from what its weight entitles it to.

        Parts are of what the active projects have used in the lanes in which it is active; positive = more
        than entitled.
        """
        return self._standings.share_errors()

    def user_score(self, project: str, user: str, lane: Lane | None = None) -> ShareScore:
        """Returns the score of an active user inside the project after the pass.

        Args:
            project: of the user.
            user: their name.
            lane: whose score is asked for; None = the sum over all lanes in which the user is active.

        Raises:
            KeyError: the user neither holds nor wants anything.
        """
        return self._standings.user_score(project, user, lane)

    def waiting(self, limit: int | None = None) -> Iterator[Waiting]:
        """Yields the experiments with runs that wait, in the order of their turns, each with why.

        The order is what it is now: it changes with what ends and what is submitted.

        Args:
            limit: most experiments; None = all.
        """
        return self._standings.waiting(limit)


def divide(situation: Situation, backlog: Backlog | None = None) -> Division:
    """Returns who may hold how many devices from now on.

    The result depends on who claims alone: not on the order of claimants, nor on which of them that never
    started a run are in the backlog.

    Args:
        situation: what there is, who runs, and who waits.
        backlog: further ones that wait.
    """
    return _Pass(Lanes(situation, backlog or Backlog())).run()


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

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._preemptions = Preemptions(lanes)

    def run(self) -> Division:
        """Returns what this pass decides; called once."""
        for name in sorted(self._lanes.terms):
            for hardware in sorted(self._lanes.terms[name].guaranteed):
                self._give_guaranteed(name, hardware)
        for entry, priority, user in sorted(self._lanes.recent, key=lambda each: each[0][:3]):
            self._go_on(entry, priority, user)
        priorities = {
            priority
            for state in self._lanes.states.values()
            for project in state.projects.values()
            for priority in project.sizes
        }
        for priority in sorted(priorities, reverse=True):
            for lane, state in sorted(self._lanes.states.items()):
                self._give_by_share(lane, state, priority)
        preemptions = self._preemptions.decided()
        return Division(
            {id: Allowance(devices) for id, devices in sorted(self._lanes.given.items())},
            preemptions,
            {
                lane: max(0.0, state.free) if state.reserved_for is None else 0.0
                for lane, state in self._lanes.states.items()
                if lane in self._lanes.capacity.devices
            },
            {
                lane: state.reserved_for
                for lane, state in self._lanes.states.items()
                if state.reserved_for is not None
            },
            Standings(self._lanes, preemptions),
            self._lanes,
        )

    def _give_guaranteed(self, name: str, hardware: str) -> None:
        """Gives a project the devices of a kind that it is guaranteed and has a use for."""
        places = [
            (lane, state, state.projects[name])
            for lane, state in self._lanes.states.items()
            if lane.hardware == hardware and name in state.projects
        ]
        for _, _, project in places:
            project.open()
        while True:
            found = [
                (-priority, user.score(), entry[:3], user.name, lane, state, priority, user, devices, bucket)
                for lane, state, project in places
                if not self._saves(state, project, hardware)
                for user in project.users.values()
                for priority, buckets in user.buckets.items()
                for devices, bucket in buckets.items()
                if project.held[hardware] + devices <= project.guaranteed(hardware) + ROUNDING
                and (entry := bucket.first()) is not None
            ]
            if not found:
                break
            *_, lane, state, priority, user, devices, bucket = min(found, key=lambda each: each[:4])
            self._place(lane, state, user, priority, devices, bucket, mode=Mode.guaranteed)
        for _, _, project in places:  # What is beyond the guarantee may still come by share.
            for user in project.users.values():
                for buckets in user.buckets.values():
                    for bucket in buckets.values():
                        if bucket.closed in (WaitingReason.busy, WaitingReason.share):
                            bucket.closed = None

    def _saves(self, state: LaneState, project: ProjectLane, hardware: str) -> bool:
        """Returns whether the project's turn is that of a large run beyond its guarantee, which has waited.

        Within the guarantee, smaller ones would pass it forever, and keep its project from coming first.
        """
        waiting = [
            (-priority, user.score(), entry[:3], user, devices)
            for user in project.users.values()
            for priority, buckets in user.buckets.items()
            for devices, bucket in buckets.items()
            if (entry := bucket.first()) is not None
            and devices <= state.capacity + ROUNDING
            and self._lanes.limit(user, hardware, devices) is None
        ]
        if not waiting:
            return False
        *_, (since_s, *_), _, devices = min(waiting, key=lambda each: each[:3])
        return (
            devices > state.smallest + ROUNDING
            and devices > project.guaranteed(hardware) + ROUNDING
            and self._lanes.now_s - since_s >= PATIENCE_S
        )

    def _go_on(self, entry: Entry, priority: int, user: UserLane) -> None:
        """Lets a large experiment that started a moment ago use the devices of its last run for its next one.

        Otherwise every short run of many devices would have to wait until they are free together again. It
        goes on unless a run that waits could take the devices from it.
        """
        *_, claimant, demand = entry
        lane, devices, project = lane_of(claimant, demand), demand.devices, user.project
        state = self._lanes.states[lane]
        project.open()  # Before its users are looked at one by one: that adds those of the backlog.
        least = min((min(each.sizes.values()) for each in state.projects.values() if each.sizes), default=0.0)
        more = least * state.price
        if (
            least + ROUNDING < devices <= state.free + ROUNDING
            and self._lanes.limit(user, lane.hardware, devices) is None
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

    def _start(
        self, lane: Lane, state: LaneState, user: UserLane, claimant: Claimant, devices: float
    ) -> None:
        """Gives one run devices that are free."""
        state.free -= devices
        state.smallest = min(state.smallest, devices)
        given = self._lanes.given.setdefault(claimant.id, {})
        given[lane.hardware] = given.get(lane.hardware, 0.0) + devices
        self._lanes.started[claimant.id, lane, devices] += 1
        self._lanes.change(user, state, devices, 1)

    def _give_by_share(self, lane: Lane, state: LaneState, priority: int) -> None:
        """Gives out a lane's devices at one priority, one run at a time."""
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

    def _has_hope(self, state: LaneState, project: ProjectLane, priority: int) -> bool:
        """Returns whether some run of a project may get devices; False = surely none."""
        least = project.sizes[priority]
        if least <= state.free + ROUNDING:
            return True
        if project.name in state.yielders:
            return True
        own = project.score(least * state.price)
        return any(state.may_yield(name, priority, own, Mode.share) for name in state.least)

    def _oldest(self, user: UserLane, priority: int) -> tuple[float, Bucket] | None:
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
        state: LaneState,
        user: UserLane,
        priority: int,
        devices: float,
        bucket: Bucket,
        *,
        mode: Mode = Mode.share,
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
        reason = self._lanes.limit(user, lane.hardware, devices)
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
        if not self._preemptions.reclaim(state, user, priority, claimant, devices, mode):
            waited_s = self._lanes.now_s - waits_since_s(claimant)
            is_large = devices > state.smallest + ROUNDING and waited_s >= PATIENCE_S
            first = is_large and is_first
            if not (
                first and self._preemptions.reclaim(state, user, priority, claimant, devices, Mode.large)
            ):
                if first and waited_s >= DRAINED_AFTER_S:
                    state.reserved_for = id
                bucket.closed = self._lanes.no_turn(lane, user)
                return _Outcome.saves if is_large else _Outcome.waits
        self._lanes.change(user, state, devices, 1)
        bucket.take()
        return _Outcome.starts
