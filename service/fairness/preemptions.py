"""Which runs stop for a run that finds too few free devices, and which start no more as theirs end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from service.fairness.lanes import Lanes, LaneState, Mode, UserLane, Yielder
from service.fairness.state import (
    ROUNDING,
    Claimant,
    Demand,
    Handover,
    Lane,
    Preemption,
    WaitingReason,
    lane_of,
    permitted,
)

_LIMITED = frozenset({WaitingReason.user_cap, WaitingReason.ceiling})
"""Limits that a run of the same user, or project, makes room within when it ends."""


class Preemptions:
    """The preemptions of one pass."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._noted: dict[tuple[int, str, int], Preemption] = {}

    def reclaim(
        self, state: LaneState, user: UserLane, priority: int, claimant: Claimant, devices: float, mode: Mode
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
        state: LaneState,
        user: UserLane,
        priority: int,
        claimant: Claimant,
        devices: float,
        mode: Mode,
    ) -> list[tuple[Yielder, bool]]:
        """Returns the runs taken, one by one until there are enough devices, and whether each was useful."""
        rate = devices * state.price
        own, own_user = user.project.score(rate), user.score(rate)
        if mode is Mode.large:
            own, own_user = user.project.score(), user.score()
        base = priority
        if mode is not Mode.large:
            base = min(priority, permitted(claimant.priority, user.project.terms))
        # Newcomers and guarantees wait for one checkpoint, not for the end of a useful time.
        at_once = mode is Mode.guaranteed or (mode is Mode.share and user.held <= ROUNDING)

        def is_able(each: Yielder) -> bool:
            smaller = mode is Mode.large and each.demand.devices < devices
            return each.left > 0 or (each.early > 0 and (at_once or smaller))

        taken: list[tuple[Yielder, bool]] = []
        freed = max(0.0, state.free) + state.pending
        while freed + ROUNDING < devices:
            best: Yielder | None = None
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

    def _put_back(self, state: LaneState, taken: Sequence[tuple[Yielder, bool]]) -> None:
        for each, was_useful in taken:
            self._move(state, each, +1, is_early=not was_useful)

    @staticmethod
    def _user_yields(each: Yielder, user: UserLane, base: int, own: float, mode: Mode) -> bool:
        if each.priority != base or mode is Mode.guaranteed:
            return each.priority < base
        if each.user is user:
            return False
        left = each.user.score(-each.rate)
        return left > own or (left == own and (mode is Mode.share or each.user.name > user.name))

    @staticmethod
    def _project_yields(
        each: Yielder, user: UserLane, base: int, own: float, mode: Mode, hardware: str
    ) -> bool:
        other = each.user.project
        if other.held[hardware] - each.demand.devices < other.guaranteed(hardware) - ROUNDING:
            return False
        if mode is Mode.guaranteed or each.priority < base:
            return True
        if each.priority != base:
            return False
        left = other.score(-each.rate)
        return left > own or (left == own and (mode is Mode.share or other.name > user.project.name))

    def _move(self, state: LaneState, each: Yielder, runs: int, *, is_early: bool) -> None:
        """Counts a run as taken (-1), or as held again (+1)."""
        if is_early:
            each.early += runs
        else:
            each.left += runs
        self._lanes.change(each.user, state, runs * each.demand.devices, runs)
        self._lanes.given[each.claimant.id][state.hardware] += runs * each.demand.devices

    def _note(self, each: Yielder, hardware: str, for_id: int) -> None:
        key = (each.claimant.id, hardware, for_id)
        before = self._noted.get(key)
        self._noted[key] = Preemption(
            each.claimant.id,
            hardware,
            1 + (before.runs if before else 0),
            each.demand.devices + (before.devices if before else 0.0),
            each.demand.next_checkpoint_s,
            for_id,
        )

    def decided(self) -> tuple[Preemption, ...]:
        return tuple(self._noted[key] for key in sorted(self._noted))


@dataclass(frozen=True, slots=True)
class _Next:
    """Runs of one experiment that wait for devices.

    Attributes:
        devices: that all of them need.
        limit: which limit keeps them waiting even with free devices; None = none does.
    """

    claimant: Claimant
    demand: Demand
    user: UserLane
    priority: int
    devices: float
    limit: WaitingReason | None


def handovers(lanes: Lanes, preemptions: Sequence[Preemption]) -> Iterator[Handover]:
    """Yields the experiments that start no more runs, because runs of higher priority could use the devices.

    Between passes, an experiment's next run takes over the devices of its last one; here they become free for
    the next pass. Nothing is stopped for that, so it needs neither a useful time nor a preemptible run.
    """
    waiting: dict[Lane, list[_Next]] = {}
    for each in _waiting(lanes, preemptions):
        waiting.setdefault(lane_of(each.claimant, each.demand), []).append(each)
    for claimant in lanes.claimants:
        for demand in claimant.demands:
            lane = lane_of(claimant, demand)
            if not (demand.running and demand.waiting and lane in waiting):
                continue
            first = [each for each in waiting[lane] if _comes_first(each, claimant, demand, lanes)]
            if first:
                held = lanes.given[claimant.id][demand.hardware]
                left = max(0.0, held - math.fsum(each.devices for each in first))
                for_ids = sorted({each.claimant.id for each in first})
                yield Handover(claimant.id, demand.hardware, left, tuple(for_ids))


def _waiting(lanes: Lanes, preemptions: Sequence[Preemption]) -> Iterator[_Next]:
    reclaimed: defaultdict[tuple[int, str], float] = defaultdict(float)
    for each in preemptions:
        reclaimed[each.for_experiment_id, each.hardware] += each.devices
    for claimant in chain(lanes.claimants, lanes.backlog):
        for demand in claimant.demands:
            lane = lane_of(claimant, demand)
            started = lanes.started[claimant.id, lane, demand.devices]
            runs = demand.waiting if demand.room is None else min(demand.waiting, demand.room)
            devices = (runs - started) * demand.devices - reclaimed[claimant.id, demand.hardware]
            if devices <= ROUNDING:
                continue
            project = lanes.states[lane].projects[claimant.project]
            project.open()
            user = project.users[claimant.user]
            limit = lanes.limit(user, demand.hardware, demand.devices)
            if limit is None or limit in _LIMITED:
                priority = permitted(claimant.priority, project.terms)
                yield _Next(claimant, demand, user, priority, devices, limit)


def _comes_first(following: _Next, claimant: Claimant, demand: Demand, lanes: Lanes) -> bool:
    """Returns whether waiting runs come before the next one of an experiment when one of its runs ends."""
    state = lanes.states[lane_of(claimant, demand)]
    project = state.projects[claimant.project]
    same_project = following.user.project is project
    if following.priority <= permitted(claimant.priority, project.terms):
        return False
    if following.demand.devices > demand.devices + max(0.0, state.free) + ROUNDING:
        return False  # It needs those of several runs, and may preempt them later; smaller ones pass it.
    left = project.held[demand.hardware] - demand.devices
    if not same_project and left < project.guaranteed(demand.hardware) - ROUNDING:
        return False
    if following.limit is WaitingReason.user_cap:
        return same_project and following.user.name == claimant.user
    return following.limit is None or same_project
