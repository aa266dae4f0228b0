"""The runs of one experiment, from a turn to an ending; without Ray.

`next_turn` gives a turn to the first queued run that the cluster could hold; placing it may take as long as
others hold the devices. `open` opens its attempt once its workers are ready, and `ended` writes its ending.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from service.domain.events import EventKind
from service.domain.records import Run
from service.domain.shares import DeviceAllowance
from service.domain.states import RUN_STATES_WITH_RESULT, TERMINAL_RUN_STATES, ExperimentState, RunState
from service.driving.choosing import Choice, RunChooser, Wait
from service.driving.endings import FAILURES_OF_NODES, Endings, experiment_outcome, without_node
from service.driving.limits import Allowances, BudgetLimit, ClusterRoom
from service.driving.pruning import data_key, data_vary
from service.driving.sweep_context import LiveTurn, LiveTurns, SweepContext
from service.recording.mailbox import Assignment, Ending, Ready, Turn
from service.recording.outages import wait_out
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, NodesToCome, in_words
from service.scheduling.run_plan import Shape, run_config
from service.specs.experiment import ExperimentSpec
from service.store import Conflict, Held, NotFound, StaleAttempt, StoreOutage
from trainers.config import DevicePricing
from trainers.errors import FailureClass
from trainers.reporting import RunHistory, StopReason

logger = logging.getLogger(__name__)

ROOM_S = 2.0  # Time after which a run that is not placed is stored as waiting for room


def _waits_for(shape: Shape, others: Sequence[Held], starts: NodesToCome | None) -> str:
    what = in_words(dict(shape.resources))
    if shape.workers > 1:
        what = f"{shape.workers} x {what}"
    if shape.exclusive:
        what += (
            ", a whole node (measure: exclusive)"
            if shape.kind.counted_in_cpus
            else ", the devices and their share of the node's CPUs (measure: exclusive)"
        )
    if starts is not None:
        return f"{what}; {starts.words}"
    holders = ", ".join(
        f"experiment {held.experiment_id} holds {held.devices:g} {held.hardware}" for held in others
    )
    return f"{what}; {holders or 'no other experiment holds devices'}"


class Sweep:
    """The runs of one attempt at an experiment, which fences everything written here (`StaleAttempt`).

    Waits while the database is unavailable, unless a method says otherwise.
    """

    def __init__(
        self,
        context: SweepContext,
        capacity: Callable[[], ClusterSnapshot],
        answers: Callable[[str], bool] = lambda node: True,
    ) -> None:
        self._context = context
        self._clock, self._monotonic = context.store.clock, context.store.monotonic
        self._submitted_s = context.store.experiments.get(context.experiment_id).queued_s
        self._live = LiveTurns()
        self._look, self._answers = capacity, answers
        self._room = ClusterRoom(context, capacity)
        self._budget = BudgetLimit(context)
        self._allowances = Allowances(self._live, self._monotonic)
        self._chooser = RunChooser(context, self._live, self._room, self._budget, self._allowances)
        self._endings = Endings(context)
        self._reasons: dict[int, str] = {}  # What runs wait for, as stored, by id
        self._pricing: dict[Shape, DevicePricing] = {}
        self._turns = 0
        self._kinds: set[tuple[str, Shape]] = set()
        self._yields = self._explained = False
        self._unusable: str | None = None
        self._spared: frozenset[int] = frozenset()
        self.stopping: StopReason | None = None
        """Set when the whole experiment is asked to stop: nothing is handed out any more."""

    @property
    def spec(self) -> ExperimentSpec:
        return self._context.spec

    @property
    def live(self) -> tuple[Assignment, ...]:
        return tuple(live.assignment for live in self._live if live.assignment is not None)

    @property
    def preempted(self) -> frozenset[tuple[int, int]]:
        """Attempts, as (run, number), that have to give their devices back at the next step boundary."""
        draining = (
            live
            for live in self._live
            if (node := self._live.leaving_node(live.nodes)) is not None and node.alive
        )
        return frozenset(
            (live.assignment.run_id, live.assignment.attempt)
            for live in (*self._allowances.in_excess(), *draining)
            if live.assignment is not None
        )

    @property
    def may_start_more(self) -> bool:
        """Whether runs are left without a turn, and the allowance covers one in any shape that had one."""
        return self._chooser.has_queued and all(
            self._allowances.fits(hardware, shape) for hardware, shape in tuple(self._kinds)
        )

    @property
    def pricing(self) -> tuple[tuple[Shape, DevicePricing], ...]:
        """Price and power of a worker's devices, for each shape that had a turn."""
        return tuple(self._pricing.items())

    @property
    def _closed(self) -> bool:
        return self.stopping is not None or self._ends_early

    @property
    def _ends_early(self) -> bool:
        """Whether the experiment ends with runs that have not begun."""
        return self._budget.reached is not None or self._unusable is not None

    def allow(self, allowances: Mapping[str, DeviceAllowance]) -> None:
        """Sets what the experiment may hold from now on, by hardware; other hardware is not limited."""
        self._allowances.set(allowances)

    def see_nodes(self, suspects: Iterable[str | None] = ()) -> None:
        """Looks which nodes are gone or about to go: their runs stop, and none starts there.

        A worker on `suspects` has died: whether they answer is known before Ray counts them as dead.
        """
        before = self._live.leaving
        leaving: dict[str | None, ClusterNode] = {}
        silent = {id for id in suspects if id is not None and not self._answers(id)}
        for node in self._look().nodes:
            known = before.get(node.id, node)
            # Of a node that was draining, Ray may say after its death only that it is dead.
            alive = node.alive and known.alive and node.id not in silent
            now = replace(node, alive=alive, draining=node.draining or (known.draining and not alive))
            if not now.stays:
                leaving[node.id] = now
        self._live.leaving = leaving

    def leaves(self, ready: Ready) -> bool:
        """Returns whether workers are ready on a node that is gone or about to go."""
        return self._live.leaving_node(ready.nodes) is not None

    def recover(self) -> None:
        """Takes back every turn after all trials have ended; runs with an open attempt are queued again."""
        context = self._context
        self._live.clear()
        self._yields = False
        self._chooser.relist()
        wait_out(
            lambda: context.store.attempts.reset_runs_without_worker(
                context.experiment_id, context.attempt, alive=()
            ),
            "the sweep",
        )

    def next_turn(self) -> Turn | Wait:
        """Gives the next run that the cluster could hold a turn; `Wait.later` during a database outage."""
        if self._closed and not self._data_may_be_fixed():
            # A pause may be withdrawn while runs still stop for it.
            return Wait.over if self._ends_early or not self._live else Wait.later
        limit = self._context.spec.queue.max_concurrent_runs
        if limit is not None and len(self._live) >= limit:
            return Wait.later
        try:
            choice = self._chooser.choose()
            if choice is Wait.later and not self._live and self._allowances.nothing is not None:
                # Ending the sweep gives back the devices of idle processes, and the driver's place.
                self._yields = True
                return Wait.over
            return choice if isinstance(choice, Wait) else self._give_turn(choice)
        except StoreOutage as error:
            logger.warning("the database is unavailable; not starting any run: %s", error)
            self._chooser.relist()  # The run that was chosen is still the next.
            return Wait.later

    def open(self, turn: Turn, ready: Ready) -> Assignment | None:
        """Opens the attempt of a run whose workers are ready; None = it is no longer wanted.

        It was cancelled, everything stops, or a budget was used up while it waited for room.
        """
        return wait_out(lambda: self._open(turn, ready), "a run's attempt")

    def wanted(self, turn: Turn) -> bool:
        """Returns whether a run that is not placed yet should still run in the shape of its turn."""
        live = self._live.of(turn)
        if self._closed or live is None or self._in_excess(live):
            return False
        waited = turn.shape.exclusive and self._monotonic() - live.since_s >= ROOM_S
        return not (waited and self._room.misplaced(live.run, turn.shape))

    def drop(self, turn: Turn) -> None:
        """Takes back a turn without an attempt; the run stays as it is."""
        live = self._live.of(turn)
        if live is not None and live.assignment is None:
            self._live.remove(turn)
            self._chooser.relist()

    def tell_waiting(self, starting: Iterable[Shape]) -> None:
        """Stores what runs without room wait for, and behind whom; not during an outage.

        `starting` are placed, not ready.
        """
        store, id, now = self._context.store, self._context.experiment_id, self._monotonic()
        waiting = {
            live.run.id: live.turn.shape
            for live in self._live.without_room(starting)
            if now - live.since_s >= ROOM_S
        }
        try:
            if waiting:
                self._chooser.list_when_due()
            others = store.drivers.held_by_others(id) if waiting else []
            reasons = {run_id: f"capacity: {lacks}" for run_id, lacks in self._chooser.lacking().items()}
            reasons |= {
                run_id: _waits_for(shape, others, self._room.to_start(shape))
                for run_id, shape in waiting.items()
            }
            changed: dict[int, str | None] = dict.fromkeys(self._reasons.keys() - reasons.keys())
            changed |= {id: text for id, text in reasons.items() if self._reasons.get(id) != text}
            store.drivers.set_waiting(id, self._context.attempt, changed)
            self._reasons = reasons
        except StoreOutage as error:
            logger.warning("the database is unavailable; cannot store what runs are waiting for: %s", error)

    def tell_slow_start(self) -> None:
        """Explains, once, why runs that have their devices are still queued."""
        if not self._explained:
            self._explained = True
            self._context.note(
                "runs have their devices, and their processes are still starting: the first on a node "
                "compiles the kernels, which takes a minute, or several on a busy node",
                EventKind.experiment_note,
            )

    def ended(self, turn: Turn, ending: Ending) -> None:
        """Writes the ending of a turn.

        Workers that fail before they are ready get an attempt that ends at once: failures are counted there.
        """
        live = self._live.of(turn)
        if live is None:
            return  # Already ended: this report is a duplicate.
        if live.assignment is None and self.open(turn, Ready(None, self._clock())) is None:
            return
        self._live.remove(turn)
        if ending.failure is not None:
            self._room.forget()  # Its node may have gone with it: look before the next attempt.
            if ending.failure[0] in FAILURES_OF_NODES:
                self.see_nodes(live.nodes)
        node = self._live.leaving_node(live.nodes)
        if node is not None:
            ending = without_node(ending, node)
        went = self._endings.write(live, ending, self._allowances.reason(live.run.hardware))
        if went is RunState.queued:
            self._chooser.relist()
        elif ending.failure and ending.failure[0] is FailureClass.out_of_memory:
            wait_out(lambda: self._chooser.prune(live.run), "what does not fit into memory")
        elif ending.failure and ending.failure[0] is FailureClass.bad_data:
            mistake = ending.failure[1]
            wait_out(lambda: self._judge_data(live.run, mistake), "what shares a mistake in data")

    def final_state(self) -> tuple[ExperimentState, tuple[FailureClass, str] | None]:
        """Returns the experiment's final state, once nothing is live and nothing will start."""
        if self.stopping is StopReason.pause:
            return ExperimentState.paused, None
        if self.stopping is StopReason.cancel:
            return ExperimentState.cancelled, None
        if self._budget.held:
            return ExperimentState.paused, None
        refused = self._context.store.runs.refusals(self._context.experiment_id)
        return experiment_outcome(self._context.runs(), self._budget.reached, self._unusable, refused)

    def conclude(self) -> ExperimentState | None:
        """Ends the experiment; None = people asked for more since: carry on. Raises `StoreOutage`.

        An experiment that may hold no devices is queued again, which frees its driver's place meanwhile.
        """
        context = self._context
        if self._data_may_be_fixed():
            return None
        yields = self._yields and not self._closed
        if yields and self._allowances.nothing is None:
            return None
        state, failure = (ExperimentState.queued, None) if yields else self.final_state()
        try:
            if yields:
                return context.store.drivers.release_experiment(
                    context.experiment_id, context.attempt, delay_s=0.0, yielded=self._allowances.nothing
                )
            return context.store.drivers.finish_experiment(
                context.experiment_id,
                context.attempt,
                state,
                failure=failure,
                all_ended=not self._closed,
                on_request=self.stopping is StopReason.pause,
            )
        except Conflict as refused:
            logger.info("carrying on: %s", refused)
            return None
        except StaleAttempt:
            ended = context.store.experiments.get(context.experiment_id)
            if (ended.attempt, ended.state) != (context.attempt, state):
                raise
            return state  # The answer of an earlier try was lost.

    def _in_excess(self, live: LiveTurn) -> bool:
        return any(each is live for each in self._allowances.in_excess())

    def _data_may_be_fixed(self) -> bool:
        """Whether a failed run was queued again since all were found to share a mistake in data."""
        if self._unusable is None or self._spared.issuperset(self._unfinished()):
            return False
        self._unusable = None
        self._chooser.relist()
        return not self._closed

    def _unfinished(self) -> list[int]:
        return [run.id for run in self._context.runs() if run.state not in TERMINAL_RUN_STATES]

    def _judge_data(self, failed: Run, mistake: str) -> None:
        """Fails the runs that share a mistake in data, unless a run with that data has trained somewhere."""
        key = data_key(self._context.spec_of(failed))
        usable = {
            data_key(self._context.spec_of(run))
            for run in self._context.runs()
            if run.step or run.state in RUN_STATES_WITH_RESULT
        }
        if key in usable:
            return
        if data_vary(self._context.spec):
            self._chooser.prune_data(failed, mistake)
        else:
            self._unusable = mistake
            self._spared = frozenset(self._unfinished())

    def _give_turn(self, choice: Choice) -> Turn:
        context, run, shape = self._context, choice.run, choice.shape
        config = run_config(
            context.spec_of(run),
            experiment_id=context.experiment_id,
            run_id=run.id,
            first_attempt=run.first_attempt,
            seed=run.seed,
            workers=shape.workers,
            cpus_held=shape.cpus if shape.exclusive else None,
            settings=context.settings,
            catalogue=context.catalogue,
            models=choice.models,
        )
        self._turns += 1
        self._kinds.add((run.hardware, shape))
        isolated = context.spec.isolation == "process"
        starts = self._room.to_start(shape) is not None
        turn = Turn(self._turns, run.id, run.attempt + 1, config, shape, isolated, starts)
        self._live.add(LiveTurn(turn, run, self._monotonic()))
        self._pricing.setdefault(shape, config.rates)
        return turn

    def _open(self, turn: Turn, ready: Ready) -> Assignment | None:
        live = self._live.of(turn)
        if live is None:
            return None
        closed = self.stopping is not None or self._unusable is not None
        if closed or self._in_excess(live) or self.leaves(ready) or self._budget.used_up():
            self.drop(turn)
            return None
        opened_s = self._clock()
        try:
            number = self._context.store.attempts.open(
                turn.run_id,
                self._context.attempt,
                workers=turn.shape.workers,
                placement=ready.placement,
                number=turn.attempt,
            )
        except (Conflict, NotFound):
            self.drop(turn)
            return None  # Cancelled since it was listed, or the whole experiment is.
        run = live.run
        lives = self._context.store.runs.lives(run.id, run.first_attempt, number) if run.attempt else ()
        history = RunHistory(opened_s, self._submitted_s, run.checkpoint_step, lives)
        live.nodes = ready.nodes
        live.assignment = Assignment(turn, number, history)
        self._reasons.pop(turn.run_id, None)  # Opening its attempt has removed it.
        return live.assignment
