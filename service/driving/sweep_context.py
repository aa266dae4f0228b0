"""What the parts of a sweep share: the attempt at an experiment, and its runs that have their turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from service.config.hardware import Hardware
from service.config.settings import Settings
from service.domain.events import EventKind
from service.domain.records import Run
from service.recording.mailbox import Assignment, Turn
from service.scheduling.cluster import ClusterNode
from service.scheduling.run_plan import Shape
from service.specs.experiment import ExperimentSpec, read_stored
from service.store import Store


@dataclass(slots=True)
class LiveTurn:
    """A run, as it was when its turn came, and its attempt once its workers are ready."""

    turn: Turn
    run: Run
    since_s: float
    assignment: Assignment | None = None
    nodes: tuple[str | None, ...] = ()  # Ray's ids of those that its workers are on, once they are ready


class LiveTurns:
    """Live turns by run; other threads may iterate while the sweep changes it."""

    def __init__(self) -> None:
        self._by_run: dict[int, LiveTurn] = {}
        self.leaving: Mapping[str | None, ClusterNode] = {}  # Nodes that are gone or about to go, by id

    def __len__(self) -> int:
        return len(self._by_run)

    def __iter__(self) -> Iterator[LiveTurn]:
        return iter(tuple(self._by_run.values()))

    def __contains__(self, run_id: int) -> bool:
        return run_id in self._by_run

    @property
    def shapes(self) -> list[Shape]:
        """Returns what the turns hold, or wait for, on nodes that stay."""
        return [live.turn.shape for live in self if self.leaving_node(live.nodes) is None]

    def leaving_node(self, nodes: Iterable[str | None]) -> ClusterNode | None:
        """Returns one of the nodes that is gone or about to go; None = all of them stay."""
        leaving = self.leaving
        return next((leaving[id] for id in nodes if id in leaving), None)

    def add(self, live: LiveTurn) -> None:
        self._by_run[live.turn.run_id] = live

    def remove(self, turn: Turn) -> None:
        del self._by_run[turn.run_id]

    def clear(self) -> None:
        self._by_run.clear()

    def of(self, turn: Turn) -> LiveTurn | None:
        """Returns the live run of a turn; None if the turn is over, even if its run has another by now."""
        live = self._by_run.get(turn.run_id)
        return live if live is not None and live.turn.number == turn.number else None

    def keep_queued(self, queued: Collection[int]) -> None:
        """Removes runs without an attempt that are no longer queued; their trials are then stopped."""
        for live in self:
            if live.assignment is None and live.run.id not in queued:
                self.remove(live.turn)

    def without_room(self, starting: Iterable[Shape]) -> list[LiveTurn]:
        """Returns the runs that the cluster has not placed; `starting` are placed but not ready."""
        placed = Counter(starting)
        waiting = []
        for live in self:
            if live.assignment is not None:
                continue
            if placed[live.turn.shape]:
                placed[live.turn.shape] -= 1
            else:
                waiting.append(live)
        return waiting


@dataclass(frozen=True, slots=True)
class SweepContext:
    """One attempt at one experiment, which fences all writes, shared by the parts of a sweep."""

    store: Store
    settings: Settings
    experiment_id: int
    attempt: int
    spec: ExperimentSpec
    catalogue: Mapping[str, Hardware]
    note: Callable[[str, EventKind], None] = lambda message, kind: None

    def runs(self, filter: str | None = None) -> list[Run]:
        return self.store.runs.all_of(self.experiment_id, filter)

    def spec_of(self, run: Run) -> ExperimentSpec:
        """Returns a run's resolved spec, without axes."""
        return read_stored(self.store.runs.config(run.id))
