"""Which runs stop for a run that finds too few free devices, and which start no more as theirs end."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from service.fairness.lanes import Lanes, LaneState, Mode, RunBucket, UserLane, Yielder
from service.fairness.state import (
    ROUNDING,
    Claimant,
    Demand,
    Handover,
    Lane,
    Preemption,
    WaitingReason,
    lane_of,
)

_LIMITED = frozenset({WaitingReason.user_cap, WaitingReason.ceiling})
"""Limits that a run of the same user, or project, makes room within when it ends."""


class Preemptions:
    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._taken: defaultdict[tuple[int, str, int], list[Yielder]] = defaultdict(list)

    def reclaim(self, state: LaneState, bucket: RunBucket, claimant: Claimant, mode: Mode) -> bool:
        """Takes devices of preemptible runs for the first run of a bucket; False = it may not take enough."""
        user, devices = bucket.user, bucket.devices
        rate = 0.0 if mode is Mode.large else devices * state.price
        own, own_user = user.project.score(rate), user.score(rate)
        base = bucket.priority
        if mode is not Mode.large:
            base = min(base, claimant.priority)
        # Newcomers and guarantees wait for one checkpoint, not for the end of a useful time.
        at_once = mode is Mode.guaranteed or (mode is Mode.share and user.held <= ROUNDING)

        def able() -> Iterator[Yielder]:
            for name, yielders in state.yielders.items():
                same = name == user.project.name
                if not same and not state.may_yield(name, base, own, mode):
                    continue
                for each in yielders:
                    smaller = mode is Mode.large and each.demand.devices < devices
                    is_able = each.left > 0 or (each.early > 0 and (at_once or smaller))
                    score = own_user if same else own
                    if is_able and _yields(each, user, base, score, mode, state.lane.hardware):
                        yield each

        usable = max(0.0, state.free)
        freed = usable + state.pending
        taken: list[tuple[Yielder, bool]] = []
        while freed + ROUNDING < devices:
            first = min(able(), key=lambda each: each.order, default=None)
            if first is None:
                for each, is_early in taken:
                    self._move(state, each, +1, is_early)
                return False
            taken.append((first, not first.left))
            self._move(state, first, -1, not first.left)
            freed += first.demand.devices
        for each, _ in taken:
            self._taken[each.claimant.id, state.lane.hardware, claimant.id].append(each)
        # What is free is kept for this run as well; what is not free yet can be promised, but not given.
        state.free -= usable
        state.pending = freed - devices
        return True

    def _move(self, state: LaneState, each: Yielder, runs: int, is_early: bool) -> None:
        """Counts a run as taken (-1), or as held again (+1)."""
        if is_early:
            each.early += runs
        else:
            each.left += runs
        self._lanes.change(each.user, state, runs * each.demand.devices, runs)
        self._lanes.given[each.claimant.id][state.lane.hardware] += runs * each.demand.devices

    def decided(self) -> tuple[Preemption, ...]:
        return tuple(
            Preemption(id, hardware, len(runs), sum(each.demand.devices for each in runs), for_id)
            for (id, hardware, for_id), runs in sorted(self._taken.items(), key=itemgetter(0))
        )


def _yields(each: Yielder, user: UserLane, base: int, own: float, mode: Mode, hardware: str) -> bool:
    """Returns whether a run stops for one of a user, whose score, or that of its project, is `own`."""
    other = each.user.project
    same = other is user.project
    if not same and other.held[hardware] - each.demand.devices < other.guaranteed(hardware) - ROUNDING:
        return False
    priority = each.claimant.priority
    if priority < base or (mode is Mode.guaranteed and not same):
        return True
    if priority > base or mode is Mode.guaranteed or each.user is user:
        return False
    theirs, ours = (each.user, user) if same else (other, user.project)
    left = theirs.score(-each.rate)
    return left > own or (left == own and (mode is Mode.share or theirs.name > ours.name))


class _Next(NamedTuple):
    """Runs of one experiment that wait for devices, and the limit that keeps them waiting, if one does."""

    claimant: Claimant
    demand: Demand
    user: UserLane
    devices: float
    limit: WaitingReason | None


def handovers(lanes: Lanes, preemptions: Sequence[Preemption]) -> Iterator[Handover]:
    """Yields the experiments that start no more runs, because runs of higher priority could use the devices.

    Between passes, an experiment's next run takes over the devices of its last one; here they become free for
    the next pass. Nothing is stopped for that, so it needs neither a useful time nor a preemptible run.
    """
    waiting: defaultdict[Lane, list[_Next]] = defaultdict(list)
    capped: defaultdict[tuple[str, str], list[_Next]] = defaultdict(list)
    for each in _waiting(lanes, preemptions):
        waiting[lane_of(each.claimant, each.demand)].append(each)
        if each.limit is WaitingReason.user_cap:
            capped[each.claimant.project, each.claimant.user].append(each)
    for claimant in lanes.claimants:
        for demand in claimant.demands:
            if not (demand.running and demand.waiting):
                continue
            lane = lane_of(claimant, demand)
            wanted = [
                (each.claimant.id, each.devices)
                for each in waiting[lane]
                if _comes_first(each, claimant, demand, lanes)
            ]
            for each in capped[claimant.project, claimant.user]:
                other = lane_of(each.claimant, each.demand)
                runs = math.floor(
                    min(each.devices, lanes.states[other].free) / each.demand.devices + ROUNDING
                )
                if other != lane and each.claimant.priority > claimant.priority and runs > 0:
                    wanted.append((each.claimant.id, runs * demand.devices))
            if wanted:
                held = lanes.given[claimant.id][demand.hardware]
                left = max(0.0, held - math.fsum(devices for _, devices in wanted))
                for_ids = sorted({id for id, _ in wanted})
                yield Handover(claimant.id, demand.hardware, left, tuple(for_ids))


def _waiting(lanes: Lanes, preemptions: Sequence[Preemption]) -> Iterator[_Next]:
    reclaimed: defaultdict[tuple[int, str], float] = defaultdict(float)
    for each in preemptions:
        reclaimed[each.for_experiment_id, each.hardware] += each.devices
    for claimant in lanes.claimants:
        for demand in claimant.demands:
            lane = lane_of(claimant, demand)
            started = lanes.started[claimant.id, lane, demand.devices]
            devices = (demand.waiting - started) * demand.devices - reclaimed[claimant.id, demand.hardware]
            if devices <= ROUNDING:
                continue
            user = lanes.states[lane].projects[claimant.project].users[claimant.user]
            limit = lanes.limit(user, demand.hardware, demand.devices)
            if limit is None or limit in _LIMITED:
                yield _Next(claimant, demand, user, devices, limit)


def _comes_first(following: _Next, claimant: Claimant, demand: Demand, lanes: Lanes) -> bool:
    """Returns whether waiting runs come before the next one of an experiment when one of its runs ends."""
    state = lanes.states[lane_of(claimant, demand)]
    project = state.projects[claimant.project]
    same_project = following.user.project is project
    if following.claimant.priority <= claimant.priority:
        return False
    if following.demand.devices > demand.devices + max(0.0, state.free) + ROUNDING:
        return False  # It needs those of several runs, and may preempt them later; smaller ones pass it.
    if not same_project and project.held[demand.hardware] <= project.guaranteed(demand.hardware) + ROUNDING:
        other = following.user.project
        held = other.held[demand.hardware] + following.demand.devices
        if held > other.guaranteed(demand.hardware) + ROUNDING or other.name > project.name:
            return False  # Guarantees come before priority, and are given in the order of names.
    if following.limit is WaitingReason.user_cap:
        return same_project and following.user.name == claimant.user
    return following.limit is None or same_project
