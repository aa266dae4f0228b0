"""What people read after a pass: scores of projects and users, who waits in which order, and why.

Scores include what the pass gave out and took back. Turns continue from there: shares are filled further than
the devices reach, with one run of each experiment that waits.
"""

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, itemgetter

from service.domain.shares import ShareScore
from service.fairness.lanes import AGE, Lanes, ProjectLane, QueuedDemand, UserLane
from service.fairness.preemptions import handovers
from service.fairness.shares import Level
from service.fairness.state import (
    MOST_AHEAD,
    ROUNDING,
    Claimant,
    Demand,
    Handover,
    Lane,
    Preemption,
    Waiting,
    WaitingReason,
    lane_of,
    waits_since_s,
)

_Queues = Mapping[UserLane, list[QueuedDemand]]
_Turn = tuple[int, Lane, UserLane, int, Claimant, Demand]
"""Position, lane, user, what the priority counts as; claimant, demand."""


@dataclass(frozen=True, slots=True)
class Division:
    """What a pass decided."""

    allowances: Mapping[int, Mapping[str, float]]
    """Devices that experiments may hold, by id and hardware; those missing may hold nothing."""
    preemptions: tuple[Preemption, ...]  # Runs that stop at a checkpoint, and for whom
    lanes: Lanes  # As the pass leaves them

    def handovers(self) -> tuple[Handover, ...]:
        by_id = attrgetter("experiment_id", "hardware")
        return tuple(sorted(handovers(self.lanes, self.preemptions), key=by_id))

    def project_score(self, name: str, lane: Lane) -> ShareScore:
        state = self.lanes.states[lane]
        level = Level(
            {each: project.weight for each, project in state.projects.items()},
            {each: self.lanes.used.get((each, lane), 0.0) for each in state.projects},
            state.capacity * state.price,
        )
        return level.score(name, state.projects[name].rate)

    def share_errors(self) -> dict[str, float]:
        """Returns how far each project's part of recent use is from its entitlement; positive = above.

        Parts are of what the active projects have used in the lanes in which it is active.
        """
        excess: defaultdict[str, float] = defaultdict(float)
        totals: defaultdict[str, float] = defaultdict(float)
        for lane, state in self.lanes.states.items():
            projects = {name: project for name, project in state.projects.items() if project.weight}
            used = {name: self.lanes.used.get((name, lane), 0.0) for name in projects}
            total_usd = math.fsum(used.values())
            weights = math.fsum(project.weight for project in projects.values())
            for name, project in projects.items():
                excess[name] += used[name] - total_usd * project.weight / weights
                totals[name] += total_usd
        return {name: excess[name] / total if total else 0.0 for name, total in totals.items()}

    def user_score(self, name: str, user: str, lane: Lane) -> ShareScore:
        project = self.lanes.states[lane].projects[name]
        level = Level(
            dict.fromkeys(project.users, 1.0),
            {each: self.lanes.used_by(lane, name, each) for each in project.users},
            self.lanes.entitled(self.lanes.states[lane], project),
        )
        return level.score(user, project.users[user].rate)

    def waiting(self) -> Iterator[Waiting]:
        """Yields who waits and why, in the order of turns: the first of all lanes, then the second."""
        reclaimed = {each.for_experiment_id for each in self.preemptions}
        queues: dict[Lane, dict[int, defaultdict[UserLane, list[QueuedDemand]]]] = {}
        for claimant in self.lanes.claimants:
            for number, demand in enumerate(claimant.demands):
                lane = lane_of(claimant, demand)
                if demand.waiting > self.lanes.started[claimant.id, lane, demand.devices]:
                    project = self.lanes.states[lane].projects[claimant.project]
                    priority = self.lanes.priority(claimant)
                    entries = queues.setdefault(lane, {}).setdefault(priority, defaultdict(list))
                    entry = QueuedDemand(waits_since_s(claimant), claimant.id, number, claimant, demand)
                    entries[project.users[claimant.user]].append(entry)
                    break
        turns = heapq.merge(*(self._turns(*each) for each in sorted(queues.items())), key=itemgetter(0, 1))
        ahead: defaultdict[Lane, list[int]] = defaultdict(list)
        scores: dict[tuple[str, ...], ShareScore] = {}
        for position, lane, user, priority, claimant, demand in turns:
            project = user.project
            reason = self._reason(lane, user, priority, demand)
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
                self._detail(user, reason, demand.hardware),
            )
            if len(ahead[lane]) < MOST_AHEAD:
                ahead[lane].append(claimant.id)

    def _reason(self, lane: Lane, user: UserLane, priority: int, demand: Demand) -> WaitingReason:
        state = self.lanes.states[lane]
        reason = user.buckets[priority][demand.devices].closed
        if reason is not None and reason not in (WaitingReason.busy, WaitingReason.share):
            return reason
        reason = self.lanes.limit(user, lane.hardware, demand.devices)
        if reason is not None:
            return reason
        if demand.devices > state.capacity + ROUNDING:
            return WaitingReason.no_capacity
        return self.lanes.no_turn(state, user)

    def _detail(self, user: UserLane, reason: WaitingReason, hardware: str) -> str | None:
        terms = user.project.terms
        runs = self.lanes.runs[user.project.name, user.name]
        limits = {
            WaitingReason.budget: terms.holds,
            WaitingReason.user_cap: f"{runs} of {terms.concurrent_runs_per_user} runs",
            WaitingReason.ceiling: (
                f"{user.project.held[hardware]:g} of {terms.ceiling.get(hardware, 0.0):g} devices"
            ),
        }
        return limits.get(reason)

    def _turns(self, lane: Lane, queues: Mapping[int, _Queues]) -> Iterator[_Turn]:
        position = itertools.count(1)
        more: defaultdict[UserLane | ProjectLane, float] = defaultdict(float)

        def order(user: UserLane) -> tuple[float, str, float, str]:
            project = user.project
            return project.score(more[project]), project.name, user.score(more[user]), user.name

        for priority in sorted(queues, reverse=True):
            left = {user: deque(sorted(entries, key=AGE)) for user, entries in queues[priority].items()}
            while left:
                user = min(left, key=order)
                *_, claimant, demand = left[user].popleft()
                yield next(position), lane, user, priority, claimant, demand
                more[user] += demand.devices * self.lanes.states[lane].price
                more[user.project] += demand.devices * self.lanes.states[lane].price
                if not left[user]:
                    del left[user]
