"""What the stream of all changes sends: experiments, what they cost, and that the queue has changed.

Everyone follows one feed, whoever sees what: frames are kept by the project that they are about, and each
follower is sent those of the projects that it sees.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from api.feeds import FeedSnapshot, frame
from service.domain.access import Visibility
from service.domain.records import DeletedId, ExperimentCost, ListedExperiment, ManyChanges
from service.domain.serialization import adapter, to_json
from service.domain.states import TERMINAL_EXPERIMENT_STATES
from service.scheduling.queue import Queue
from service.store import Store
from service.store.experiments import Followed

MOST_CHANGES: Final = 200
"""Most experiments that are sent at a time; when more have changed, followers read their lists again."""
MOST_ACTIVE: Final = 1000  # Experiments at work whose costs are sent; those of others are read from lists
SLOWLY_S: Final = 5.0  # Between two looks at what changes all the time: costs, and what the clusters have
_WINDOW: Final = 1000  # Most recently changed experiments to remember, so that a new change can be recognised


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames in their order, each with the project whose readers may see it; None = everyone may."""

    parts: tuple[tuple[str | None, bytes], ...] = ()

    def __len__(self) -> int:
        return sum(len(data) for _, data in self.parts)

    def seen_by(self, visible: Visibility) -> bytes:
        return b"".join(data for project, data in self.parts if project is None or visible.includes(project))


@dataclass(frozen=True, slots=True)
class ChangesSnapshot(FeedSnapshot[float]):
    """All experiments after a poll; its place is the time of the database."""

    numbers: Mapping[int, int]  # Last event of experiments that changed of late
    turns: Mapping[int, tuple[Any, ...]]
    """What the queue page shows of experiments that have not ended, as far as they changed while followed."""
    looked_s: float
    costs: Mapping[int, ExperimentCost]
    clusters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChangesSource:
    store: Store
    queue: Queue

    def poll(self, last: ChangesSnapshot | None) -> tuple[ChangesSnapshot, Frames]:
        now_s, changes = self.store.experiments.changes(None if last is None else last.place, limit=_WINDOW)
        numbers = dict(changes)
        if last is None:
            return ChangesSnapshot(now_s, None, numbers, {}, now_s, {}, self._clusters()), Frames()
        changed = [id for id, number in changes if last.numbers.get(id) != number]
        parts: list[tuple[str | None, bytes]] = []
        turns, looked_s, costs, clusters = last.turns, last.looked_s, last.costs, last.clusters
        queue_changed = False
        if len(changed) > MOST_CHANGES:
            parts.append(_many(now_s))
            turns, queue_changed = {}, True
        elif changed:
            found = self.store.experiments.followed(changed)
            parts += map(_part, found)
            turns = _turns(last.turns, found)
            queue_changed = turns != last.turns
        if now_s - looked_s >= SLOWLY_S or now_s < looked_s:
            looked_s, clusters = now_s, self._clusters()
            queue_changed |= clusters != last.clusters
            active = self.store.experiments.active_costs(MOST_ACTIVE)
            costs = {id: cost for id, _, cost in active}
            parts += _cost_parts([one for one in active if last.costs.get(one[0]) != one[2]])
        if queue_changed:
            parts.append(self._queue_part())
        if parts:
            parts.append(_place_part(now_s))
        return ChangesSnapshot(now_s, None, numbers, turns, looked_s, costs, clusters), Frames(tuple(parts))

    def catch_up(self, place: float | None, snapshot: ChangesSnapshot) -> Iterator[Frames]:
        """Yields what has changed since a follower's place, or shortly before it began to follow.

        What changed shortly before may have changed the queue after the follower read it, too.
        """
        _, changes = self.store.experiments.changes(
            snapshot.place if place is None else place, limit=MOST_CHANGES + 1
        )
        changed = [id for id, _ in changes]
        parts: list[tuple[str | None, bytes]] = []
        if len(changed) > MOST_CHANGES:
            parts.append(_many(snapshot.place))
        else:
            parts += map(_part, self.store.experiments.followed(changed))
        if place is not None or changed:
            parts.append(self._queue_part())
        yield Frames((*parts, _place_part(snapshot.place)))

    def _clusters(self) -> dict[str, Any]:
        return {pool: (one.reachable, one.nodes) for pool, one in self.queue.clusters().items()}

    def _queue_part(self) -> tuple[None, bytes]:
        return None, frame("queue", to_json(self.store.experiments.queue_counts()))


def _part(found: Followed) -> tuple[str, bytes]:
    if found.experiment is None:
        return found.project, frame("deleted", to_json(DeletedId(found.id)))
    return found.project, frame("experiment", to_json(found.experiment))


def _cost_parts(active: Collection[tuple[int, str, ExperimentCost]]) -> Iterator[tuple[str, bytes]]:
    by_project: dict[str, dict[int, ExperimentCost]] = {}
    for id, project, cost in active:
        by_project.setdefault(project, {})[id] = cost
    for project, costs in by_project.items():
        yield project, frame("costs", adapter(dict[int, ExperimentCost]).dump_json(costs).decode())


def _many(place_s: float) -> tuple[None, bytes]:
    return None, frame("many", to_json(ManyChanges(place_s)))


def _place_part(place_s: float) -> tuple[None, bytes]:
    """Returns the id of all that came before: without data, it is not an event."""
    return None, f"id: {int(1000 * place_s)}\n\n".encode()


def _turns(before: Mapping[int, tuple[Any, ...]], found: Collection[Followed]) -> dict[int, tuple[Any, ...]]:
    turns = dict(before)
    for id, _, experiment in found:
        if experiment is None or experiment.state in TERMINAL_EXPERIMENT_STATES:
            turns.pop(id, None)
        else:
            turns[id] = _turn(experiment)
    return turns


def _turn(one: ListedExperiment) -> tuple[Any, ...]:
    asked = one.cancel_requested_s, one.pause_requested_s
    return one.state, one.priority, one.queued_s, one.not_before_s, one.attempt, *asked
