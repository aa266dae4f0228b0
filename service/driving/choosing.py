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
from service.driving.allowances import Allowances
from service.driving.budget import BudgetLimit
from service.driving.live_turns import LiveTurns
from service.driving.pruning import data_key, does_not_fit
from service.driving.queued_runs import Group, QueuedRuns
from service.driving.room import ClusterRoom, RoomLeft
from service.driving.source_models import SourceModels
from service.driving.suggestions import Suggestions
from service.driving.sweep_context import SweepContext
from service.scheduling.run_plan import Shape
from service.specs.models import NoModel
from service.store import Conflict, QueuedRun
from trainers.config import Precision
from trainers.errors import FailureClass

LIST_EVERY_S = 5.0
"""How often the list of queued runs is read again: people may have queued some of them again."""


class Wait(Enum):
    later = "later"
    """A run waits for a place, for its delay, or for others to end: ask again."""
    over = "over"
    """No run will be handed out any more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A run that may start now, in the widest shape that the cluster could hold.

    Attributes:
        models: checkpoint folders that it starts from, by `run:12`.
    """

    run: Run
    shape: Shape
    models: Mapping[str, Path]


class RunChooser:
    """Chooses among the queued runs; those that cannot run at all fail here."""

    def __init__(
        self,
        context: SweepContext,
        live: LiveTurns,
        room: ClusterRoom,
        budget: BudgetLimit,
        allowances: Allowances,
    ) -> None:
        self._context, self._live, self._room, self._budget = context, live, room, budget
        self._allowances = allowances
        self._sources = SourceModels(context)
        self._suggestions = Suggestions(
            context.store, context.experiment_id, context.attempt, context.spec, context.catalogue
        )
        self._queued = QueuedRuns(context, live, self._decides)
        self._relist = True
        self._noted: set[str] = set()

    def relist(self) -> None:
        self._relist = True

    def list_when_due(self) -> None:
        if self._relist or self._queued.age_s >= LIST_EVERY_S:
            self._list()

    def choose(self, *, suggested: bool = False) -> Choice | Wait:
        """Returns the next run and takes it off the list.

        Args:
            suggested: whether this choice has already made its one suggestion.

        Raises:
            StaleAttempt: the experiment's attempt is over.
            StoreOutage: the database is unavailable.
        """
        if not self._queued:
            self._list()
        self.list_when_due()
        if not self._queued:
            return Wait.later if self._live else Wait.over
        if self._budget.used_up():
            return Wait.over
        crowded = False
        room = self._room.left(self._live.shapes)
        for first, group in self._queued.ready():
            sample = group.sample
            if self._suggestions.pending(sample):
                # The next suggestion can wait for results while an earlier one waits for room.
                if crowded or suggested or not self._suggest(first, sample):
                    return Wait.later
                return self.choose(suggested=True)
            try:
                models = self._sources.of(sample)
            except NoModel as error:
                self._fail_ready(group, str(error))  # Trying it again would not help before its source is.
                continue
            if models is None:
                continue
            if (reason := self._infeasible(sample)) is not None:
                self._fail_ready(group, reason)
                continue
            missing = self._room.missing(sample)
            if missing is not None:
                self._cannot_run(group, missing)
                continue
            shape = next(
                (shape for shape in self._room.shapes_of(sample) if self._may(room, sample, shape)), None
            )
            if shape is None:
                crowded = True
                continue
            run = self._context.store.run(first.id)
            self._queued.remove(first.id)
            if run.state is not RunState.queued:
                self.relist()  # It was cancelled since it was listed.
                return Wait.later
            return Choice(run, shape, models)
        return Wait.later if self._queued or self._live else Wait.over

    def lacking(self) -> dict[int, str]:
        """Returns what the cluster lacks for runs that wait for nodes, by the first run of each group."""
        return {
            first.id: missing
            for first, group in self._queued.ready()
            if (missing := self._room.missing(group.sample)) is not None and self._waits(group)
        }

    def prune(self, failed: Run) -> None:
        """Fails the runs that need at least as much memory as one that ran out of it."""
        spec = self._context.spec_of(failed)
        self._list()
        reasons: dict[str, str | None] = {}
        for run, sample in self._queued:
            if run.cell not in reasons:
                reasons[run.cell] = does_not_fit(self._context.spec_of(sample), spec)
            if (reason := reasons[run.cell]) is not None:
                self._fail(run, reason, FailureClass.out_of_memory)

    def prune_data(self, failed: Run, mistake: str) -> None:
        """Fails the queued runs that would read the same data as a run whose data cannot be used."""
        key = data_key(self._context.spec_of(failed))
        self._list()
        for run, sample in self._queued:
            if not self._suggestions.pending(sample) and data_key(self._context.spec_of(sample)) == key:
                self._fail(run, mistake, FailureClass.bad_data)

    def _list(self) -> None:
        context = self._context
        starting = context.store.starting_runs(context.experiment_id)
        known = {live.run.id for live in self._live if live.assignment is not None}
        if starting - known:
            # This driver opened the attempt, and the answer was lost with the connection.
            context.store.reset_runs_without_worker(context.experiment_id, context.attempt, known)
        self._queued.read()
        self._relist = False

    def _decides(self, run: Run) -> tuple[object, ...]:
        """Everything that decides whether a run can start; equal for all runs of a group."""
        return (
            (self._suggestions.pending(run), self._suggestions.refused(run)),
            (run.student, run.teacher),
            (run.hardware, run.precision),
            self._room.demand(run),
        )

    def _suggest(self, run: QueuedRun, sample: Run) -> bool:
        """Sets the axis values of a run and its other seeds; False = others have to end first."""
        room = self._room.left(self._live.shapes)
        shapes = self._room.shapes_of(sample)
        if self._live and not any(self._may(room, sample, shape) for shape in shapes):
            return False
        self._suggestions.give(run.place_in_grid, self._context.runs())
        self._list()
        return True

    def _may(self, room: RoomLeft, sample: Run, shape: Shape) -> bool:
        return room.fits(shape) and self._allowances.fits(sample.hardware, shape)

    def _infeasible(self, run: Run) -> str | None:
        if (refused := self._suggestions.refused(run)) is not None:
            return refused
        hardware = find(run.hardware, self._context.catalogue)
        return hardware.lacks(Precision(run.precision)) if hardware is not None else None

    def _waits(self, group: Group) -> bool:
        """Whether runs that the cluster cannot hold wait for nodes instead of failing."""
        spec = self._room.spec_of(group.sample)
        waits = spec.queue.wait_for_capacity or spec.parallel.min_workers is not None
        return waits or "hardware" in group.sample.point or group.started

    def _cannot_run(self, group: Group, missing: str) -> None:
        """Notes what is missing, and fails the runs unless they wait for nodes.

        If hardware is an axis, cells whose hardware is absent wait while the others continue. An elastic run,
        and one that had room once, waits for nodes that have gone or for others.
        """
        if self._waits(group):
            if missing not in self._noted:
                self._noted.add(missing)
                self._context.note(f"runs are waiting for capacity: {missing}", EventKind.experiment_note)
            return
        self._fail_ready(group, missing)

    def _fail_ready(self, group: Group, why: str) -> None:
        for run in self._queued.ready_of(group):
            self._fail(run, why)

    def _fail(self, run: QueuedRun, why: str, kind: FailureClass = FailureClass.bad_spec) -> None:
        self._queued.remove(run.id)
        store = self._context.store
        try:
            store.refuse_run(run.id, self._context.attempt, (kind, why))
        except Conflict:
            self.relist()
