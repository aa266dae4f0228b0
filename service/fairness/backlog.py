"""The backlog: queues of experiments that have never started a run, which outlast a pass.

Most of a long queue waits for its first devices. It is put in order once, not in every pass, and a pass reads
only the heads of the queues whose turn comes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from operator import itemgetter

from service.fairness.rules import lane_of
from service.fairness.state import Claimant, Demand, Lane

Entry = tuple[float, int, int, Claimant, Demand]
"""Age, id, number of the demand; claimant, demand."""
Queues = dict[tuple[int, float], list[Entry]]
"""Waiting runs of a user in a lane by age, by priority and devices of one."""
_AGE = itemgetter(0, 1, 2)


class Backlog:
    """Experiments that have never started a run, kept in order between passes.

    A pass costs nothing for those whose turn does not come, so that its time does not grow with them.
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
                lane, key = lane_of(claimant, demand), (claimant.priority, demand.devices)
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
                lane, key = lane_of(claimant, demand), (claimant.priority, demand.devices)
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

    def users(self, lane: Lane, project: str) -> Mapping[str, Queues]:
        """Returns what a project's users have in a lane."""
        return self._lanes.get(lane, {}).get(project, {})
