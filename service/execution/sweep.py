"""Which run is next, and what follows from the ending of one: the sweep of one experiment.

Knows the store and no Ray. `next_turn` gives a turn to the first queued run that the cluster could hold;
placing it may take as long as others hold the devices. `open` opens its attempt once its workers are ready,
and `ended` turns an ending into the run's next state through `service.failures.decide_retry`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from service.cluster import NODE_ID, ClusterSnapshot, fits, in_words, unsatisfiable
from service.events import EventKind
from service.execution.assignment import Assignment, Ending, Ready, Turn
from service.execution.outages import RETRY_S, wait_out
from service.execution.run_plan import Shape, run_config, shapes_of
from service.execution.suggestions import Suggestions
from service.failures import FailureCounts, decide_retry
from service.hardware import Hardware, find
from service.models import NoModel, Reference, checkpoint_of, reference
from service.records import Run
from service.search.pruning import does_not_fit
from service.settings import Settings
from service.spec import Budget, ExperimentSpec
from service.states import RUN_STATES_WITH_RESULT, ExperimentState, RunState
from service.store import Conflict, Held, NotFound, Store, StoreOutage
from trainers.checkpoints.manifest import verify
from trainers.config import Precision, Rates
from trainers.errors import FAILURES_OF_MACHINES, FailureClass
from trainers.reporting import Clock, StopReason

logger = logging.getLogger(__name__)

LIST_EVERY_S = 5.0
"""How often the list of queued runs is read again: people may have queued some of them anew."""
CAPACITY_EVERY_S = 2.0
"""How often the cluster is looked at while runs wait for it."""
_SHAPING = ("hardware", "resources.", "parallel.", "batch.", "measure")
"""Axes that decide about how many workers a run may have, and what each takes."""
ROOM_S = 2.0
"""A run that is not placed after this time waits for room, and says so."""
_START_RECORDED_LOOKS = 300
"""How often, every `RETRY_S`, the end of a run is tried whose start is not recorded yet: a minute."""


class Wait(Enum):
    """Why no run gets a turn."""

    later = "later"
    """A run waits for a place, for its delay, or for others to end: ask again."""
    over = "over"
    """No run will be handed out any more."""


@dataclass(slots=True)
class _Live:
    """A run that has its turn, from before it is placed until it has ended."""

    turn: Turn
    run: Run
    since_s: float
    assignment: Assignment | None = None


class Sweep:
    """The runs of one experiment under one attempt at it.

    Args:
        store: the database.
        settings: folders for the runs' configurations.
        experiment_id: the experiment.
        attempt: the experiment's attempt; the fence of all that is written here.
        spec: of the experiment.
        catalogue: known hardware.
        capacity: looks at the cluster.
        note: adds an event to the experiment.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        experiment_id: int,
        attempt: int,
        spec: ExperimentSpec,
        catalogue: Mapping[str, Hardware],
        *,
        capacity: Callable[[], ClusterSnapshot],
        note: Callable[[str, EventKind], None] = lambda message, kind: None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._experiment_id = experiment_id
        self._attempt = attempt
        self._spec = spec
        self._catalogue = catalogue
        self._look = capacity
        self._note = note
        self._clock = store.clock
        self._submitted_s = store.experiment(experiment_id).queued_s
        self._places = spec.places()
        self._suggestions = Suggestions(store, experiment_id, attempt, spec, catalogue)
        self._allowance = 1 + _holds(store, experiment_id) if spec.budget.when_reached == "hold" else 1
        """How many times over the budget may be used: each resume after a hold grants it once more."""
        self._rates: dict[Shape, Rates] = {}
        self._queued: list[Run] = []
        self._listed_s = float("-inf")
        self._snapshot: ClusterSnapshot | None = None
        self._snapshot_s = float("-inf")
        self._live: dict[int, _Live] = {}
        self._turns = 0
        self._waiting: dict[int, str] = {}
        """What is stored of runs that wait for room."""
        self._shapes: dict[object, tuple[tuple[Shape, ...], ExperimentSpec]] = {}
        self._noted: set[str] = set()
        self._sources: dict[str, Path | str] = {}
        """Checkpoint folder by `run:12`, or why there is none."""
        self.stopping: StopReason | None = None
        """Set when the whole experiment is asked to stop: nothing is handed out any more."""
        self.budget_reached: str | None = None
        """Which limit was reached, in words."""

    @property
    def live(self) -> tuple[Assignment, ...]:
        """Assignments that have not ended."""
        found = (live.assignment for live in tuple(self._live.values()))
        return tuple(assignment for assignment in found if assignment is not None)

    @property
    def rates(self) -> tuple[tuple[Shape, Rates], ...]:
        """What the devices of a worker cost and draw, for each shape that had a turn."""
        return tuple(self._rates.items())

    @property
    def _closed(self) -> bool:
        """Whether no further run may begin."""
        return self.stopping is not None or self.budget_reached is not None

    def next_turn(self) -> Turn | Wait:
        """Give the next run that the cluster could hold a turn.

        Raises:
            StaleAttempt: the experiment's attempt is over.
        """
        if self._closed:
            return Wait.over
        limit = self._spec.queue.max_concurrent_runs
        if limit is not None and len(self._live) >= limit:
            return Wait.later
        try:
            return self._next()
        except StoreOutage as error:
            logger.warning("the database is unavailable; no run is started: %s", error)
            return Wait.later

    def open(self, turn: Turn, ready: Ready) -> Assignment | None:
        """Open the attempt of a run whose workers are ready; waits for the database when it is unavailable.

        Args:
            turn: of the run.
            ready: its workers' report.

        Returns:
            None when the run is not wanted any more: it was cancelled, everything stops, or a budget was used
            up while it waited for room.

        Raises:
            StaleAttempt: the experiment's attempt is over.
        """
        return wait_out(lambda: self._open(turn, ready), "a run's attempt")

    def wanted(self, turn: Turn) -> bool:
        """Whether a run that is not placed yet is still to run, where its turn says."""
        live = self._live_of(turn)
        return not self._closed and live is not None and not self._misplaced(live)

    def _live_of(self, turn: Turn) -> _Live | None:
        """The live run of a turn; None when the turn is over, even if its run has another one by now."""
        live = self._live.get(turn.run_id)
        return live if live is not None and live.turn.number == turn.number else None

    def _misplaced(self, live: _Live) -> bool:
        """Whether a run waits for a whole node that is gone, or that is busy while another is idle."""
        turn = live.turn
        if not turn.shape.exclusive or self._clock() - live.since_s < ROOM_S:
            return False
        labels = dict(turn.shape.labels)
        nodes = [node for node in self._capacity(self._clock()).nodes if node.has(labels)]
        if not nodes:
            return True
        if NODE_ID not in labels or nodes[0].idle:
            return False
        first = next(iter(self._shapes_of(live.run)[0]), turn.shape)
        return first.workers == turn.shape.workers and any(
            node.idle and node.has(dict(first.labels)) for node in self._capacity(self._clock()).nodes
        )

    def drop(self, turn: Turn) -> None:
        """Take a turn back that has led to no attempt; the run stays as it is."""
        live = self._live_of(turn)
        if live is not None and live.assignment is None:
            del self._live[turn.run_id]
            self._listed_s = float("-inf")

    def tell_waiting(self, starting: Iterable[Shape]) -> None:
        """Store what runs without room wait for, and behind whom; called from time to time.

        Args:
            starting: shapes of workers that are placed and not ready yet: their runs have room.

        Raises:
            StaleAttempt: the experiment's attempt is over.
        """
        now = self._clock()
        placed = Counter(starting)
        waiting = []
        for live in self._live.values():
            if live.assignment is not None:
                continue
            if placed[live.turn.shape]:
                placed[live.turn.shape] -= 1
            elif now - live.since_s >= ROOM_S:
                waiting.append(live)
        try:
            if waiting and now - self._listed_s >= LIST_EVERY_S:
                self._list(now)
            others = self._store.held_by_others(self._experiment_id) if waiting else []
            reasons = {live.run.id: waits_for(live.turn.shape, others) for live in waiting}
            changed: dict[int, str | None] = {
                id: text for id, text in reasons.items() if self._waiting.get(id) != text
            }
            changed |= dict.fromkeys(self._waiting.keys() - reasons.keys())
            self._store.set_waiting(self._experiment_id, self._attempt, changed)
        except StoreOutage as error:
            logger.warning("the database is unavailable; what runs wait for is not stored: %s", error)
            return
        self._waiting = reasons

    def _next(self, *, suggested: bool = False) -> Turn | Wait:
        now = self._clock()
        if not self._queued or now - self._listed_s >= LIST_EVERY_S:
            self._list(now)
        if not self._queued:
            return Wait.later if self._live else Wait.over
        if self._budget_used():
            return Wait.over
        crowded = False
        for run in list(self._queued):
            if self._suggestions.pending(run):
                # The next suggestion can wait for results while an earlier one waits for room.
                if crowded or suggested or not self._suggest(run):
                    return Wait.later
                return self._next(suggested=True)
            if run.not_before_s > now:
                continue
            models = self._models(run)
            if models is None:
                continue
            if (reason := self._infeasible(run)) is not None:
                self._fail(run, reason)
                continue
            shapes, spec = self._shapes_of(run)
            missing = unsatisfiable(spec, self._capacity(now), self._catalogue)
            if missing is not None:
                self._cannot_run(run, spec, missing)
                continue
            shape = next(filter(self._fits, shapes), None)
            if shape is None:
                crowded = True
                continue
            return self._give_turn(run, shape, models)
        return Wait.later if self._queued or self._live else Wait.over

    def _budget_used(self) -> bool:
        """Look at the budget; the first time that it is used up, say so."""
        if self.budget_reached is None:
            self.budget_reached = self._over_budget()
            if self.budget_reached is not None:
                message = f"{self.budget_reached}; no further run is started"
                if self._spec.budget.when_reached == "hold":
                    self._note(f"held: {message}", EventKind.experiment_held)
                else:
                    self._note(message, EventKind.experiment_note)
        return self.budget_reached is not None

    def ended(self, turn: Turn, ending: Ending) -> None:
        """Write what became of a turn; waits for the database when it is unavailable.

        Workers that fail before they are ready get an attempt that ends at once: failures are counted there.

        Raises:
            StaleAttempt: the experiment's attempt is over.
        """
        live = self._live_of(turn)
        if live is None:
            return  # Already ended: this report is a duplicate.
        if live.assignment is None and self.open(turn, Ready(None, self._clock())) is None:
            return
        del self._live[turn.run_id]
        if ending.failure is not None:
            self._snapshot_s = float("-inf")  # Its node may have gone with it: look before the next attempt.
        for _ in range(_START_RECORDED_LOOKS):
            try:
                wait_out(lambda: self._write_ending(live, ending), "a run's end")
                return
            except _StartNotRecorded:
                # The database was unavailable, and the recorder has not yet brought what it kept.
                time.sleep(RETRY_S)
        lost = Ending("failed", failure=(FailureClass.lost, "no report of its start came"))
        wait_out(lambda: self._write_ending(live, lost), "a run's end")

    def final_state(self) -> tuple[ExperimentState, tuple[FailureClass, str] | None]:
        """Where the experiment goes, now that nothing is live and nothing will be handed out."""
        if self.stopping is StopReason.pause:
            return ExperimentState.paused, None
        if self.stopping is StopReason.cancel:
            return ExperimentState.cancelled, None
        if self.budget_reached is not None and self._spec.budget.when_reached == "hold":
            return ExperimentState.paused, None
        ended = [run for run in self._runs() if run.state is not RunState.queued]
        if any(run.state in RUN_STATES_WITH_RESULT for run in ended):
            return ExperimentState.succeeded, None
        if ended and all(run.state is RunState.cancelled for run in ended):
            return ExperimentState.cancelled, None
        if self.budget_reached is not None:
            return ExperimentState.failed, (FailureClass.bad_spec, self.budget_reached)
        failed = [run for run in ended if run.state is RunState.failed]
        last = failed[-1] if failed else None
        return ExperimentState.failed, (
            (last.failure_class if last else None) or FailureClass.lost,
            (last.failure_message if last else None) or "no run has a result",
        )

    # -- Choosing --------------------------------------------------------------------------------

    def _list(self, now: float) -> None:
        queued = self._runs("state = 'queued'")
        still = {run.id for run in queued}
        for id, live in list(self._live.items()):
            if live.assignment is None and id not in still:
                del self._live[id]  # Cancelled while it waited for room: its trial is taken back.
        queued = [run for run in queued if run.id not in self._live]
        self._queued = sorted(queued, key=lambda run: self._places[run.index])
        self._listed_s = now

    def _suggest(self, run: Run) -> bool:
        """Give a run, and its other seeds, their axis values; False = not before others end."""
        self._capacity(self._clock())
        if self._live and not any(map(self._fits, self._shapes_of(run)[0])):
            return False
        reason = self._suggestions.give(run, self._runs())
        self._list(self._clock())
        if reason is not None:
            seeds = len(self._spec.seeds)
            for one in [other for other in self._queued if other.index // seeds == run.index // seeds]:
                self._fail(one, reason)
        return True

    def _runs(self, filter: str | None = None) -> list[Run]:
        return self._store.all_runs(self._experiment_id, filter)

    def _shapes_of(self, run: Run) -> tuple[tuple[Shape, ...], ExperimentSpec]:
        """The run's shapes, the widest first; runs that agree in what decides share the computation."""
        key = tuple(sorted((name, run.point[name]) for name in run.point if name.startswith(_SHAPING)))
        if key not in self._shapes:
            spec = ExperimentSpec.model_validate_json(self._store.run_config(run.id))
            self._shapes[key] = shapes_of(spec, self._catalogue), spec
        shapes, spec = self._shapes[key]
        if spec.measure == "exclusive":  # Which node is whole and idle changes from moment to moment.
            shapes = shapes_of(spec, self._catalogue, self._capacity(self._clock()).nodes)
        return shapes, spec

    def _capacity(self, now: float) -> ClusterSnapshot:
        if self._snapshot is None or now - self._snapshot_s >= CAPACITY_EVERY_S:
            self._snapshot, self._snapshot_s = self._look(), now
        return self._snapshot

    def _fits(self, shape: Shape) -> bool:
        """Whether the cluster could hold it next to this experiment's own live runs.

        What other experiments hold is not counted: Ray places the run once they have released it.
        """
        assert self._snapshot is not None
        shapes = [*(live.turn.shape for live in self._live.values()), shape]
        return fits(
            [(dict(one.resources), dict(one.labels), one.workers) for one in shapes], self._snapshot.nodes
        )

    def _over_budget(self) -> str | None:
        budget = self._spec.budget
        if budget == Budget(when_reached=budget.when_reached):
            return None
        totals = self._store.experiment_totals(self._experiment_id)
        counts = self._store.run_counts(self._experiment_id)
        started = sum(counts.values()) - counts.get(RunState.queued, 0)
        started -= self._store.reused_count(self._experiment_id)
        for name, unit, limit, used in (
            ("cost_usd", "USD", budget.cost_usd, totals.cost_usd),
            ("energy_kwh", "kWh", budget.energy_kwh, totals.energy_kwh),
            ("hours", "device hours", budget.hours, totals.device_hours),
            ("runs", "runs", budget.runs, started),
        ):
            if limit is not None and used >= limit * self._allowance:
                return f"budget.{name} is reached: {used:.4g} of {limit * self._allowance:g} {unit}"
        return None

    def _models(self, run: Run) -> Mapping[str, Path] | None:
        """Checkpoints of the runs that a run starts from; None when it cannot be started now.

        A run whose source has no model fails: trying it again would not help before its source is.
        """
        models: dict[str, Path] = {}
        for text in (run.student, run.teacher):
            number = reference(text)
            if number is None or text is None:
                continue
            if text not in self._sources:
                try:
                    source = self._store.run(number)
                except NotFound:
                    source = None
                standing = Reference(
                    number,
                    source.state if source else None,
                    source.failure_class if source else None,
                    source.failure_message if source else None,
                )
                if standing.pending:
                    return None  # It had ended when the experiment was claimed, and is tried again.
                self._sources[text] = self._checkpoint(source, standing)
            found = self._sources[text]
            if isinstance(found, str):
                self._fail(run, found)
                return None
            models[text] = found
        return models

    def _checkpoint(self, source: Run | None, standing: Reference) -> Path | str:
        """The verified best checkpoint of a run, or why there is none."""
        if source is None or standing.hopeless is not None:
            return standing.hopeless or ""
        try:
            path = checkpoint_of(self._settings, self._store.source_of(source), "best")
        except NoModel as error:
            return str(error)
        problem = verify(path)
        return path if problem is None else f"run {source.id}: its checkpoint {path} is damaged ({problem})"

    def _give_turn(self, run: Run, shape: Shape, models: Mapping[str, Path]) -> Turn:
        spec = ExperimentSpec.model_validate_json(self._store.run_config(run.id))
        config = run_config(
            spec,
            experiment_id=self._experiment_id,
            run_id=run.id,
            first_attempt=run.first_attempt,
            seed=run.seed,
            workers=shape.workers,
            cpus_held=shape.cpus if shape.exclusive else None,
            settings=self._settings,
            catalogue=self._catalogue,
            models=models,
        )
        self._queued.remove(run)
        self._turns += 1
        turn = Turn(self._turns, run.id, run.attempt + 1, config, shape, self._spec.isolation == "process")
        self._live[run.id] = _Live(turn, run, self._clock())
        self._rates.setdefault(shape, config.rates)
        return turn

    def _open(self, turn: Turn, ready: Ready) -> Assignment | None:
        live = self._live_of(turn)
        if live is None:
            return None
        if self.stopping is not None or self._budget_used():
            self.drop(turn)
            return None
        opened_s = self._clock()
        try:
            number = self._store.open_attempt(
                turn.run_id, self._attempt, workers=turn.shape.workers, placement=ready.placement
            )
        except (Conflict, NotFound):
            self.drop(turn)
            return None  # Cancelled since it was listed, or the whole experiment is.
        clock = Clock(opened_s=opened_s, submitted_s=self._submitted_s)
        live.assignment = Assignment(turn, number, clock)
        self._waiting.pop(turn.run_id, None)
        return live.assignment

    def _cannot_run(self, run: Run, spec: ExperimentSpec, missing: str) -> None:
        """Say it; and unless the run waits for nodes, fail it instead of waiting silently.

        Where hardware is an axis, cells whose hardware is absent wait while the others go on. An
        elastic run, and one that had room once, waits for nodes that have gone or for others.
        """
        waits = spec.queue.wait_for_capacity or spec.parallel.min_workers is not None
        if waits or "hardware" in run.point or run.started_s is not None:
            if missing not in self._noted:
                self._noted.add(missing)
                self._note(f"runs wait for capacity: {missing}", EventKind.experiment_note)
            return
        self._fail(run, missing)

    def _infeasible(self, run: Run) -> str | None:
        """Why the run's hardware cannot compute it, whatever the cluster has."""
        hardware = find(run.hardware, self._catalogue)
        return hardware.lacks(Precision(run.precision)) if hardware is not None else None

    def _prune(self, failed: Run) -> None:
        """Runs that need at least as much memory as one that ran out of it need not be tried."""
        spec = ExperimentSpec.model_validate_json(self._store.run_config(failed.id))
        self._list(self._clock())
        for run in list(self._queued):
            other = ExperimentSpec.model_validate_json(self._store.run_config(run.id))
            if (reason := does_not_fit(other, spec)) is not None:
                self._fail(run, reason, FailureClass.out_of_memory)

    def _fail(self, run: Run, why: str, kind: FailureClass = FailureClass.bad_spec) -> None:
        self._queued.remove(run)
        try:
            number = self._store.open_attempt(run.id, self._attempt)
            self._store.finish_run(run.id, number, RunState.failed, failure=(kind, why))
        except Conflict:
            self._listed_s = float("-inf")

    # -- Ending ----------------------------------------------------------------------------------

    def _write_ending(self, live: _Live, ending: Ending) -> None:
        assert live.assignment is not None
        run_id, attempt = live.assignment.run_id, live.assignment.attempt
        try:
            if ending.failure is not None:
                went = self._write_failure(live, ending.failure)
            else:
                state = RunState.succeeded
                if ending.kind == "stopped":
                    state = _STOPPED_AS.get(ending.stop_reason, RunState.stopped)
                retry_delay_s = 0.0 if ending.stop_reason is StopReason.preempted else None
                went = self._store.finish_run(
                    run_id,
                    attempt,
                    RunState.failed if retry_delay_s is not None else state,
                    summary=ending.summary,
                    failure=(FailureClass.preempted, "the worker was taken back")
                    if retry_delay_s is not None
                    else None,
                    retry_delay_s=retry_delay_s,
                )
        except Conflict as error:
            run = self._store.run(run_id)
            if run.attempt == attempt and run.state is RunState.starting:
                raise _StartNotRecorded from error
            logger.info("run %d had ended already: %s", run_id, error)
            return
        if went is RunState.queued:
            self._listed_s = float("-inf")
        elif ending.failure is not None and ending.failure[0] is FailureClass.out_of_memory:
            self._prune(live.run)

    def _write_failure(self, live: _Live, failure: tuple[FailureClass, str]) -> RunState:
        assert live.assignment is not None
        run_id, attempt = live.assignment.run_id, live.assignment.attempt
        run = self._store.run(run_id)
        machine = failure[0] in FAILURES_OF_MACHINES
        own = not machine and failure[0] is not FailureClass.preempted
        decision = decide_retry(
            failure[0],
            FailureCounts(own=run.own_failures + own, infrastructure=run.infrastructure_failures + machine),
            max_restarts=self._spec.max_restarts,
            progressed=(run.checkpoint_step or 0) > (live.run.checkpoint_step or 0),
        )
        return self._store.finish_run(
            run_id,
            attempt,
            RunState.failed,
            failure=failure,
            retry_delay_s=decision.delay_s if decision.retry else None,
        )


def _holds(store: Store, experiment_id: int) -> int:
    """How often the experiment was held because its budget was reached, and came to rest.

    A driver that died between saying so and pausing has not asked anybody: that grants nothing.
    """
    holds, after, said = 0, 0, False
    while events := store.events(experiment_id, after=after):
        for event in events:
            said = said or event.kind == EventKind.experiment_held
            if said and event.kind == EventKind.experiment_paused:
                holds, said = holds + 1, False
        after = events[-1].number
    return holds


def waits_for(shape: Shape, others: Sequence[Held]) -> str:
    """What a run waits for, and behind whom.

    Args:
        shape: of the run.
        others: what other experiments hold.
    """
    what = in_words(dict(shape.resources))
    if shape.workers > 1:
        what = f"{shape.workers} x {what}"
    if shape.exclusive:
        what += (
            ", a whole node (measure: exclusive)"
            if shape.kind.counted_in_cpus
            else ", the devices and their share of the node's CPUs (measure: exclusive)"
        )
    holders = ", ".join(
        f"experiment {held.experiment_id} holds {held.devices} {held.hardware}" for held in others
    )
    return f"{what}; {holders or 'no other experiment holds devices'}"


class _StartNotRecorded(Exception):
    """The run has ended, and the database has not heard yet that it had begun."""


_STOPPED_AS: Mapping[StopReason | None, RunState] = {
    StopReason.cancel: RunState.cancelled,
    StopReason.pause: RunState.paused,
    StopReason.early_stop: RunState.stopped,
}
