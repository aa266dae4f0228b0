"""Which experiments start no more runs, because runs of higher priority come first as theirs end.

Between passes, an experiment's next run takes over the devices of its last one. Where a run of higher
priority waits that could use them, none does: they become free when the run ends, for the next pass to give
out. Nothing is stopped for that, so it needs neither a useful time nor a preemptible run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from service.fairness.lanes import Lanes, UserLane
from service.fairness.rules import ROUNDING, lane_of, permitted
from service.fairness.state import Claimant, Demand, Handover, Lane, Preemption, WaitingReason

_LIMITED = frozenset({WaitingReason.user_cap, WaitingReason.ceiling})
"""Limits that a run of the same user, or project, makes room within when it ends."""


@dataclass(frozen=True, slots=True)
class _Next:
    """Runs of one experiment that wait for devices.

    Attributes:
        claimant, demand: whose they are, and what each needs.
        user: their user in the lane.
        priority: theirs, as far as the project may use it.
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
    """Yields the experiments that start no more runs within all they hold, after a pass.

    Args:
        lanes: as the pass left them.
        preemptions: what it decided.
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
                left = max(0.0, held - sum(each.devices for each in first))
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
