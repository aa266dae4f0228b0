"""The queued runs of an experiment, grouped so that a choice looks at each kind of run once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from service.domain.records import Run
from service.driving.live_turns import LiveTurns
from service.driving.sweep_context import SweepContext
from service.store import QueuedRun


@dataclass(slots=True)
class Group:
    """Queued runs of which either all could start now, or none.

    Attributes:
        sample: a run of the group when its cell was first read; use only what is constant in a cell.
        started: whether they had attempts that trained.
        runs: by id, in the order of measurement.
    """

    sample: Run
    started: bool
    runs: dict[int, QueuedRun] = field(default_factory=dict)


class QueuedRuns:
    """Queued runs without a turn, as of the last `read`.

    Args:
        decides: returns everything that decides whether the runs of a cell can start.
    """

    def __init__(
        self, context: SweepContext, live: LiveTurns, decides: Callable[[Run], tuple[object, ...]]
    ) -> None:
        self._context, self._live, self._decides = context, live, decides
        self._monotonic = context.store.monotonic
        self._listed_s = float("-inf")
        self._places = context.spec.places()
        self._cells: dict[str, tuple[Run, tuple[object, ...]]] = {}
        self._groups: list[Group] = []

    def __bool__(self) -> bool:
        return any(group.runs for group in self._groups)

    def __iter__(self) -> Iterator[tuple[QueuedRun, Run]]:
        """Iterates over all runs, each with a sample of its cell."""
        for group in self._groups:
            for run in tuple(group.runs.values()):
                yield run, self._cells[run.cell][0]

    @property
    def age_s(self) -> float:
        return self._monotonic() - self._listed_s

    def read(self) -> None:
        listed_s = self._monotonic()
        queued = self._context.store.queued_runs(self._context.experiment_id)
        self._live.keep_queued({run.id for run in queued})
        waiting = [run for run in queued if run.id not in self._live]
        self._read_cells({run.cell: run.id for run in waiting})
        waiting.sort(key=lambda run: self._places[run.place_in_grid])
        groups: dict[tuple[object, ...], Group] = {}
        for run in waiting:
            sample, decides = self._cells[run.cell]
            key = (run.started, decides)
            if key not in groups:
                groups[key] = Group(sample, run.started)
            groups[key].runs[run.id] = run
        self._groups, self._listed_s = list(groups.values()), listed_s

    def ready(self) -> list[tuple[QueuedRun, Group]]:
        """Returns the first run of each group whose delay is over, in the order of measurement."""
        first = ((next(self._ready(group), None), group) for group in self._groups)
        found = [(run, group) for run, group in first if run is not None]
        return sorted(found, key=lambda pair: self._places[pair[0].place_in_grid])

    def ready_of(self, group: Group) -> tuple[QueuedRun, ...]:
        """Returns all runs of a group whose delay is over, in the order of measurement."""
        return tuple(self._ready(group))

    def remove(self, run_id: int) -> None:
        for group in self._groups:
            group.runs.pop(run_id, None)

    def _ready(self, group: Group) -> Iterator[QueuedRun]:
        age_s = self.age_s
        return (run for run in group.runs.values() if run.delay_s <= age_s)

    def _read_cells(self, ids: dict[str, int]) -> None:
        """Reads a run of each unknown cell; its axis values never change."""
        unknown = [id for cell, id in ids.items() if cell not in self._cells]
        for run in self._context.store.runs_by_id(unknown):
            self._cells[run.cell] = run, self._decides(run)
