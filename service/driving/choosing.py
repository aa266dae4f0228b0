"""Which run is next: the first in the order of measurement that the cluster could hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from service.config.hardware import find
from service.domain.events import EventKind
from service.domain.records import Run
from service.domain.states import RunState
from service.driving.budget import BudgetLimit
from service.driving.live_turns import LiveTurns
from service.driving.pruning import does_not_fit
from service.driving.room import ClusterRoom
from service.driving.source_models import SourceModels
from service.driving.suggestions import Suggestions
from service.driving.sweep_context import SweepContext
from service.scheduling.run_plan import Shape
from service.spec.experiment import ExperimentSpec
from service.spec.models import NoModel
from service.store import Conflict
from trainers.config import Precision
from trainers.errors import FailureClass

LIST_EVERY_S = 5.0
"""How often the list of queued runs is read again: people may have queued some of them again."""


class Wait(Enum):
    """Why no run gets a turn."""

    later = "later"
    """A run waits for a place, for its delay, or for others to end: ask again."""
    over = "over"
    """No run will be handed out any more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A run that may start now.

    Attributes:
        run: the run.
        shape: the widest that the cluster could hold.
        models: checkpoint folders that it starts from, by `run:12`.
    """

    run: Run
    shape: Shape
    models: Mapping[str, Path]


class RunChooser:
    """Chooses among the queued runs; those that cannot run at all fail here.

    Args:
        context: of the sweep.
        live: runs that have their turn.
        room: in the cluster.
        budget: of the experiment.
    """

    def __init__(
        self, context: SweepContext, live: LiveTurns, room: ClusterRoom, budget: BudgetLimit
    ) -> None:
        self._context, self._live, self._room, self._budget = context, live, room, budget
        self._clock = context.store.clock
        self._places = context.spec.places()
        self._sources = SourceModels(context)
        self._suggestions = Suggestions(
            context.store, context.experiment_id, context.attempt, context.spec, context.catalogue
        )
        self._queued: list[Run] = []
        self._listed_s = float("-inf")
        self._noted: set[str] = set()

    def relist(self) -> None:
        """Reads the list of queued runs again before the next choice."""
        self._listed_s = float("-inf")

    def list_when_due(self) -> None:
        """Reads the list of queued runs again when the last reading is old."""
        if self._clock() - self._listed_s >= LIST_EVERY_S:
            self._list()

    def choose(self, *, suggested: bool = False) -> Choice | Wait:
        """Returns the next run, which is not queued here any more.

        Args:
            suggested: whether a suggestion was made for this choice: there is one for each.

        Raises:
            StaleAttempt: the experiment's attempt is over.
            StoreOutage: the database is unavailable.
        """
        now = self._clock()
        if not self._queued:
            self._list()
        self.list_when_due()
        if not self._queued:
            return Wait.later if self._live else Wait.over
        if self._budget.used_up():
            return Wait.over
        crowded = False
        for run in list(self._queued):
            if self._suggestions.pending(run):
                # The next suggestion can wait for results while an earlier one waits for room.
                if crowded or suggested or not self._suggest(run):
                    return Wait.later
                return self.choose(suggested=True)
            if run.not_before_s > now:
                continue
            try:
                models = self._sources.of(run)
            except NoModel as error:
                self._fail(run, str(error))  # Trying it again would not help before its source is.
                continue
            if models is None:
                continue
            if (reason := self._infeasible(run)) is not None:
                self._fail(run, reason)
                continue
            shapes, spec = self._room.shapes_of(run)
            missing = self._room.missing(spec)
            if missing is not None:
                self._cannot_run(run, spec, missing)
                continue
            shape = next(filter(self._fits, shapes), None)
            if shape is None:
                crowded = True
                continue
            self._queued.remove(run)
            return Choice(run, shape, models)
        return Wait.later if self._queued or self._live else Wait.over

    def prune(self, failed: Run) -> None:
        """Fails the runs that need at least as much memory as one that ran out of it."""
        spec = self._context.spec_of(failed)
        self._list()
        for run in list(self._queued):
            if (reason := does_not_fit(self._context.spec_of(run), spec)) is not None:
                self._fail(run, reason, FailureClass.out_of_memory)

    def _list(self) -> None:
        now = self._clock()
        queued = self._queued_runs()
        self._live.keep_queued({run.id for run in queued})
        waiting = [run for run in queued if run.id not in self._live]
        self._queued = sorted(waiting, key=lambda run: self._places[run.index])
        self._listed_s = now

    def _queued_runs(self) -> list[Run]:
        runs = self._context.runs("state in ('queued', 'starting')")
        known = {live.run.id for live in self._live if live.assignment is not None}
        if any(run.state is RunState.starting and run.id not in known for run in runs):
            # This driver opened the attempt, and the answer was lost with the connection.
            context = self._context
            context.store.reset_runs_without_worker(context.experiment_id, context.attempt, known)
            runs = self._context.runs("state = 'queued'")
        return [run for run in runs if run.state is RunState.queued]

    def _suggest(self, run: Run) -> bool:
        """Gives a run, and its other seeds, their axis values; False = not before others end."""
        if self._live and not any(map(self._fits, self._room.shapes_of(run)[0])):
            return False
        self._suggestions.give(run, self._context.runs())
        self._list()
        return True

    def _fits(self, shape: Shape) -> bool:
        return self._room.fits(shape, self._live.shapes)

    def _infeasible(self, run: Run) -> str | None:
        """Returns why the run cannot be trained, whatever the cluster has."""
        if (refused := self._suggestions.refused(run)) is not None:
            return refused
        hardware = find(run.hardware, self._context.catalogue)
        return hardware.lacks(Precision(run.precision)) if hardware is not None else None

    def _cannot_run(self, run: Run, spec: ExperimentSpec, missing: str) -> None:
        """Notes it; and unless the run waits for nodes, fails it instead of waiting silently.

        Where hardware is an axis, cells whose hardware is absent wait while the others continue. An
        elastic run, and one that had room once, waits for nodes that have gone or for others.
        """
        waits = spec.queue.wait_for_capacity or spec.parallel.min_workers is not None
        if waits or "hardware" in run.point or run.started_s is not None:
            if missing not in self._noted:
                self._noted.add(missing)
                self._context.note(f"runs are waiting for capacity: {missing}", EventKind.experiment_note)
            return
        self._fail(run, missing)

    def _fail(self, run: Run, why: str, kind: FailureClass = FailureClass.bad_spec) -> None:
        self._queued.remove(run)
        store = self._context.store
        try:
            store.refuse_run(run.id, self._context.attempt, (kind, why))
        except Conflict:
            self.relist()
