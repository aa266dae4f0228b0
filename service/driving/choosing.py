"""Which run is next: the first in the order of measurement that the cluster could hold."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from service.config.document import SpecError
from service.domain.events import EventKind
from service.domain.formats import point_text
from service.domain.grid import varied_fields
from service.domain.records import Run
from service.domain.states import TERMINAL_RUN_STATES, RunState
from service.driving.limits import Allowances, BudgetLimit, ClusterRoom, RoomLeft
from service.driving.pruning import data_key, does_not_fit
from service.driving.sweep_context import LiveTurns, SweepContext
from service.scheduling.run_plan import Shape
from service.search.protocol import Outcome, Suggestion
from service.specs.experiment import InfeasibleCell, Refusal
from service.specs.models import ModelOutOfReach, NoModel, Reference, checkpoint_of, reference
from service.store import Conflict, NotFound, QueuedRun
from trainers.checkpoints.manifest import verify
from trainers.data.storage import Place
from trainers.errors import FailureClass

logger = logging.getLogger(__name__)

_BAD = frozenset({FailureClass.out_of_memory, FailureClass.not_finite, FailureClass.bad_spec})
"""Failures caused by the configuration."""
LIST_EVERY_S = 5.0  # How often the list of queued runs is read again: people may have queued some again
NODES_RETURN_S = 600.0  # How long nodes may take to come back after a driver was lost, perhaps with its head


@dataclass(slots=True)
class RunGroup:
    """Queued runs of which either all could start now, or none; by id, in the order of measurement.

    `sample` is one of them when its cell was first read: use only what is constant in a cell. `started`: they
    had attempts that trained.
    """

    sample: Run
    started: bool
    runs: dict[int, QueuedRun] = field(default_factory=dict)


class QueuedRuns:
    """Queued runs without a turn, as of the last `read`; runs of cells that `decides` equates are a group."""

    def __init__(
        self, context: SweepContext, live: LiveTurns, decides: Callable[[Run], tuple[object, ...]]
    ) -> None:
        self._context, self._live, self._decides = context, live, decides
        self._monotonic = context.store.monotonic
        self._listed_s = float("-inf")
        self._places = context.spec.places()
        self._cells: dict[str, tuple[Run, tuple[object, ...]]] = {}
        self._refusals: dict[str, str] = {}
        self._groups: list[RunGroup] = []

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
        queued = self._context.store.runs.queued(self._context.experiment_id)
        self._live.keep_queued({run.id for run in queued})
        waiting = [run for run in queued if run.id not in self._live]
        unknown = {run.cell: run.id for run in waiting if run.cell not in self._cells}
        for first in self._context.store.runs.by_id(list(unknown.values())):
            self._cells[first.cell] = first, self._decides(first)  # The axis values of a cell never change.
        if unknown:
            self._refusals = self._context.store.runs.refusals(self._context.experiment_id)
        waiting.sort(key=lambda run: self._places[run.place_in_grid])
        groups: dict[tuple[object, ...], RunGroup] = {}
        for run in waiting:
            sample, decides = self._cells[run.cell]
            sources = (reference(text, run.seed) for text in (sample.student, sample.teacher))
            key = (run.started, decides, *sources)
            if key not in groups:
                groups[key] = RunGroup(sample, run.started)
            groups[key].runs[run.id] = run
        self._groups, self._listed_s = list(groups.values()), listed_s

    def refused(self) -> list[tuple[QueuedRun, str]]:
        """Returns the runs of cells that cannot be trained, with the reason."""
        return [
            (run, self._refusals[run.cell])
            for group in self._groups
            for run in group.runs.values()
            if run.cell in self._refusals
        ]

    def ready(self) -> list[tuple[QueuedRun, RunGroup]]:
        """Returns the first run of each group whose delay is over, in the order of measurement."""
        firsts = ((next(self.ready_of(group), None), group) for group in self._groups)
        ready = [(run, group) for run, group in firsts if run is not None]
        return sorted(ready, key=lambda pair: self._places[pair[0].place_in_grid])

    def remove(self, run_id: int) -> None:
        for group in self._groups:
            group.runs.pop(run_id, None)

    def ready_of(self, group: RunGroup) -> Iterator[QueuedRun]:
        """Yields the runs of a group whose delay is over, in the order of measurement."""
        age_s = self.age_s
        return (run for run in group.runs.values() if run.delay_s <= age_s)


class SourceModels:
    """Finds checkpoints of runs that others start from; each is verified once."""

    def __init__(self, context: SweepContext) -> None:
        self._context = context
        self._paths: dict[int, Place] = {}  # Checkpoint folder by run
        self._out_of_reach_until_s = 0.0

    def of(self, sample: Run, seed: int) -> dict[str, Place] | None:
        """Returns the checkpoints that a run of a cell starts from; None = to be asked again.

        Sources had ended when the experiment was claimed, but may train again, or be out of reach for a time.
        """
        models: dict[str, Place] = {}
        for text in (sample.student, sample.teacher):
            number = reference(text, seed)
            if number is None or text is None:
                continue
            path = self._paths.get(number) or self._find(number)
            if path is None:
                return None
            models[text] = self._paths[number] = path
        return models

    def _find(self, number: int) -> Place | None:
        """Returns the best checkpoint of a run; None = there may be one later.

        Where there is none, `NoModel` is not for good: people can retry the source, and then this run.
        """
        runs = self._context.store.runs
        try:
            source = runs.get(number)
        except NotFound:
            raise NoModel(Reference(number, None, None, None).hopeless) from None
        standing = Reference(number, source.state, source.failure_class, source.failure_message)
        if standing.pending:
            return None
        if standing.hopeless is not None:
            raise NoModel(standing.hopeless)
        if time.monotonic() < self._out_of_reach_until_s:
            return None
        try:
            path = checkpoint_of(self._context.settings, runs.source_of(source), "best")
        except ModelOutOfReach as error:
            logger.warning("trying again: %s", error)
            self._out_of_reach_until_s = time.monotonic() + LIST_EVERY_S
            return None
        # What is in a store is verified on the node that copies it.
        if isinstance(path, Path) and (problem := verify(path)):
            raise NoModel(f"run {number}: its checkpoint {path} is damaged ({problem})")
        return path


class Suggestions:
    """Sets the axis values of runs whose search suggests them; those of one suggestion are of one cell.

    They are stored without values, which are suggested from stored results when a run is about to start.
    """

    def __init__(self, context: SweepContext) -> None:
        self._context, self._store, self._spec = context, context.store, context.spec
        self._values: dict[tuple[int, int], float | None] = {}

    def pending(self, run: Run) -> bool:
        return self._spec.search.info.suggests and not run.point

    def give(self, index: int, runs: Sequence[Run]) -> None:
        """Suggests and stores the axis values of the run at `index` of the grid, and of its cell's others."""
        each = self._spec.runs_per_cell
        number = index // each
        better = self._spec.metric_better
        assert better is not None  # the spec's validation has seen to it
        groups: dict[int, list[Run]] = {}
        for one in runs:
            if one.point:
                groups.setdefault(one.index // each, []).append(one)
        earlier = [self._outcome(group) for _, group in sorted(groups.items())]
        point = self._spec.search.suggest(earlier, better)
        refusal = None
        try:
            spec = self._spec.at(point, self._context.catalogue)
        except SpecError as error:
            infeasible = error if isinstance(error, InfeasibleCell) else None
            refusal = infeasible.refusal if infeasible else Refusal(str(error), {})
            valid = infeasible.spec if infeasible else None
            spec = valid or self._context.spec_of(next(run for run in runs if run.index == index))
        self._store.submissions.set_point(
            self._context.experiment_id,
            self._context.attempt,
            range(number * each, (number + 1) * each),
            point,
            spec,
            f"suggestion {number + 1}: {point_text(point)}",
            refusal,
        )

    def _outcome(self, group: Sequence[Run]) -> Suggestion:
        point = group[0].point
        if any(run.state not in TERMINAL_RUN_STATES for run in group):
            return Suggestion(point, Outcome.running)
        if any(run.failure_class in _BAD or run.state is RunState.stopped for run in group):
            return Suggestion(point, Outcome.bad)
        succeeded = [self._value(run) for run in group if run.state is RunState.succeeded]
        values = [value for value in succeeded if value is not None]
        if not values:
            return Suggestion(point, Outcome.unknown)
        mean = math.fsum(values) / len(values)
        if not math.isfinite(mean):
            return Suggestion(point, Outcome.bad)
        return Suggestion(point, Outcome.valued, mean)

    def _value(self, run: Run) -> float | None:
        """Returns the metric at the run's end; read once."""
        key = (run.id, run.attempt)
        if key not in self._values:
            metric = self._spec.search.metric
            value = self._store.runs.summary(run.id).get(metric)
            if not isinstance(value, int | float):
                latest = {point.name: point.value for point in self._store.series.latest_points(run.id)}
                value = latest.get(metric)
            self._values[key] = None if value is None else float(value)
        return self._values[key]


class Wait(Enum):
    later = "later"  # A run waits for a place, for its delay, or for others to end: ask again
    over = "over"  # No run will be handed out any more


@dataclass(frozen=True, slots=True)
class Choice:
    """A run that may start now, in its widest shape, with the checkpoints it starts from by `run:12`."""

    run: Run
    shape: Shape
    models: Mapping[str, Place]


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
        self._suggestions = Suggestions(context)
        self._queued = QueuedRuns(context, live, self._decides)
        self._relist = True
        self._noted: set[str] = set()
        self._patient_until_s = context.store.monotonic() + (NODES_RETURN_S if context.attempt > 1 else 0.0)

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    def relist(self) -> None:
        self._relist = True

    def list_when_due(self) -> None:
        if self._relist or self._queued.age_s >= LIST_EVERY_S:
            self._list()

    def choose(self, *, suggested: bool = False) -> Choice | Wait:
        """Returns the next run and takes it off the list; a choice makes one suggestion at most."""
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
                models = self._sources.of(sample, first.seed)
            except NoModel as error:
                self._fail_ready(group, str(error))  # Trying it again would not help before its source is.
                continue
            if models is None:
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
            run = self._context.store.runs.get(first.id)
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
        starting = context.store.runs.starting(context.experiment_id)
        known = {live.run.id for live in self._live if live.assignment is not None}
        if starting - known:
            # This driver opened the attempt, and the answer was lost with the connection.
            context.store.attempts.reset_runs_without_worker(context.experiment_id, context.attempt, known)
        self._queued.read()
        refused = self._queued.refused()
        for run, why in refused:
            self._fail(run, why)
        self._relist = bool(refused)

    def _decides(self, run: Run) -> tuple[object, ...]:
        """Everything that decides whether a run can start; equal for all runs of a group."""
        return (
            self._suggestions.pending(run),
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

    def _waits(self, group: RunGroup) -> bool:
        """Whether runs that the cluster cannot hold wait for nodes instead of failing."""
        spec = self._room.spec_of(group.sample)
        waits = spec.queue.wait_for_capacity or spec.parallel.min_workers is not None
        nodes_return = self._context.store.monotonic() < self._patient_until_s
        return waits or nodes_return or "hardware" in varied_fields(group.sample.point) or group.started

    def _cannot_run(self, group: RunGroup, missing: str) -> None:
        """Notes what is missing, and fails the runs unless they wait for nodes.

        If hardware is an axis, cells whose hardware is absent wait while the others continue. An elastic run,
        and one that had room once, waits for nodes that have gone or for others; after a lost driver, all do
        for a while.
        """
        if self._waits(group):
            if missing not in self._noted:
                self._noted.add(missing)
                self._context.note(f"runs are waiting for capacity: {missing}", EventKind.experiment_note)
            return
        self._fail_ready(group, missing)

    def _fail_ready(self, group: RunGroup, why: str) -> None:
        for run in tuple(self._queued.ready_of(group)):
            self._fail(run, why)

    def _fail(self, run: QueuedRun, why: str, kind: FailureClass = FailureClass.bad_spec) -> None:
        self._queued.remove(run.id)
        store = self._context.store
        try:
            store.attempts.refuse_run(run.id, self._context.attempt, (kind, why))
        except Conflict:
            self.relist()
